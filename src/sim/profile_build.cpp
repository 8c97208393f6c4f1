#include "sim/profile_build.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <optional>

namespace kindred::sim {
namespace {

constexpr double kMega = 1e6;

// Vendor figures. FLOPS are dense, 16 bits.
struct Gpu {
  const char* name;
  const char* rows;  // as moe_kernels calls it
  double hbm_bytes, hbm_bytes_per_us, flops_per_us, nvlink_bytes_per_us;
  uint32_t least_rows;  // of a block of the kernels that vLLM uses there
};
constexpr auto kGpus = std::to_array<Gpu>({
    {"H100", "h100", 80e9, 3.35e6, 989e6, 450e3, 16},
    {"H200", "h200", 141e9, 4.8e6, 989e6, 450e3, 16},
    {"B200", "b200", 180e9, 7.7e6, 2250e6, 900e3, 8},
});
constexpr const Gpu& kMeasuredGpu = kGpus[1];  // attention, dense products and all-to-all

struct Latent {  // DeepSeek's latent attention
  uint32_t query_rank, kv_rank, rope, nope, value;
};
struct Model {
  const char* name;
  ModelDims dims;
  uint32_t expert_hidden;
  double expert_bytes_per_weight, dense_bytes_per_weight;
  const char* dtype;
  bool tiled;
  const char* fit_to;
  std::optional<Latent> latent;
  uint32_t dense_hidden, shared_hidden;  // feed-forward blocks that are not routed; 0: none
};

// 4-bit values with one 8-bit scale for 32 of them.
constexpr double kMxfp4Bytes = (4 + 8.0 / 32) / 8;

constexpr auto kModels = std::to_array<Model>({
    {"Qwen3-30B-A3B",
     {48, 48, 2048, 128, 8, 32, 4, 128, 151936, 0, 0},
     768,
     2,
     2,
     "bfloat16",
     false,
     "balanced",
     std::nullopt,
     0,
     0},
    {"Qwen3-235B-A22B",
     {94, 94, 4096, 128, 8, 64, 4, 128, 151936, 0, 0},
     1536,
     2,
     2,
     "bfloat16",
     false,
     "balanced",
     std::nullopt,
     0,
     0},
    {"GPT-OSS-120B",
     {36, 36, 2880, 128, 4, 64, 8, 64, 201088, 18, 128},
     2880,
     kMxfp4Bytes,
     2,
     "w4a16_mxfp4",
     true,
     "balanced",
     std::nullopt,
     0,
     0},
    {"GPT-OSS-20B",
     {24, 24, 2880, 32, 4, 64, 8, 64, 201088, 12, 128},
     2880,
     kMxfp4Bytes,
     2,
     "w4a16_mxfp4",
     true,
     "balanced",
     std::nullopt,
     0,
     0},
    // Its KV is one latent vector of 512 + 64 values for all heads.
    {"DeepSeek-V3",
     {61, 58, 7168, 256, 8, 128, 1, 576, 129280, 0, 0},
     2048,
     1,
     1,
     "fp8_block",
     false,
     "power_law_1.01",
     Latent{1536, 512, 64, 128, 128},
     18432,
     2048},
});

constexpr const char* kAic = "AIConfigurator's performance data (ai-dynamo/aiconfigurator, Apache-2.0)";
constexpr double kPrefillShare = 0.5;       // of peak, by attention over long prompts
constexpr double kLatentDecodeShare = 0.6;  // of peak, by latent attention in decode
constexpr double kLatentReadShare = 0.9;    // of HBM bandwidth

std::vector<Projection> projections_of(const Model& model) {
  const ModelDims& d = model.dims;
  const double bytes = model.dense_bytes_per_weight;
  std::vector<Projection> list;
  if (model.latent) {
    const Latent& l = *model.latent;
    list = {{"query down", l.query_rank, d.hidden, 1.0 * d.layers, bytes},
            {"query up", d.heads * (l.nope + l.rope), l.query_rank, 1.0 * d.layers, bytes},
            {"kv down", l.kv_rank + l.rope, d.hidden, 1.0 * d.layers, bytes},
            {"kv up", d.heads * (l.nope + l.value), l.kv_rank, 1.0 * d.layers, bytes},
            {"output", d.hidden, d.heads * l.value, 1.0 * d.layers, bytes}};
  } else {
    list = {{"query, key, value", (d.heads + 2 * d.kv_heads) * d.head_dim, d.hidden, 1.0 * d.layers, bytes},
            {"output", d.hidden, d.heads * d.head_dim, 1.0 * d.layers, bytes}};
  }
  list.push_back({"gate", d.experts, d.hidden, 1.0 * d.moe_layers, 2});
  if (model.shared_hidden > 0) {
    list.push_back({"shared expert up", 2 * model.shared_hidden, d.hidden, 1.0 * d.moe_layers, bytes});
    list.push_back({"shared expert down", d.hidden, model.shared_hidden, 1.0 * d.moe_layers, bytes});
  }
  if (model.dense_hidden > 0) {
    const double dense = d.layers - d.moe_layers;
    list.push_back({"dense up", 2 * model.dense_hidden, d.hidden, dense, bytes});
    list.push_back({"dense down", d.hidden, model.dense_hidden, dense, bytes});
  }
  list.push_back({"head", d.vocab, d.hidden, 1, 2});
  return list;
}

MemoryFigures memory_of(const Model& model, const Gpu& gpu, const std::vector<Projection>& projections) {
  const ModelDims& d = model.dims;
  MemoryFigures memory;
  memory.hbm_bytes = gpu.hbm_bytes;
  memory.dense_weight_bytes = 2.0 * d.vocab * d.hidden;  // embedding
  for (const Projection& p : projections) memory.dense_weight_bytes += 1.0 * p.n * p.k * p.count * p.weight_bytes;
  memory.expert_weight_bytes =
      3.0 * d.hidden * model.expert_hidden * d.experts * d.moe_layers * model.expert_bytes_per_weight;
  const double values = model.latent ? d.head_dim : 2.0 * d.kv_heads * d.head_dim;
  memory.kv_bytes_per_token = 2 * values * d.layers;
  memory.source =
      "HBM: vendor; weights and KV: from the model's dimensions, KV in 16 bits, window layers keep all "
      "tokens; 0.9 of HBM usable: vLLM's default";
  return memory;
}

Status attention_of(const KernelData& data, const Model& model, const Gpu& gpu, AttentionFit& fit,
                    AttentionFigures& figures) {
  const ModelDims& d = model.dims;
  // DeepSeek's launch and request times are those of the widest grouped-query shape.
  Result<AttentionFit> full = model.latent ? fit_attention(data.attention, 64, 4, 128, 0)
                                           : fit_attention(data.attention, d.heads, d.kv_heads, d.head_dim, 0);
  if (!full) return std::move(full).error();
  const double slower = kMeasuredGpu.hbm_bytes_per_us / gpu.hbm_bytes_per_us;
  figures.decode = full->law;
  figures.decode.token_us *= slower;
  figures.source = fmt::format("decode: {}, vLLM FlashAttention 3 on H200{}", kAic,
                               &gpu == &kMeasuredGpu ? "" : ", time per cached token scaled by HBM bandwidth");
  double flops_per_context = 4.0 * d.heads * d.head_dim;
  if (model.latent) {
    const Latent& l = *model.latent;
    const double read_us = 2.0 * d.head_dim / (kLatentReadShare * gpu.hbm_bytes_per_us);
    const double flops = 2.0 * d.heads * (d.head_dim + l.kv_rank);
    figures.decode.token_us = std::max(read_us, flops / (kLatentDecodeShare * gpu.flops_per_us));
    flops_per_context = 2.0 * d.heads * (l.nope + l.rope + l.value);
    figures.source = fmt::format(
        "decode: not measured; launch and request of grouped-query attention on H200 ({}), "
        "per cached token the longer of reading 576 values at {} of HBM bandwidth and "
        "arithmetic at {} of peak (assumed)",
        kAic, kLatentReadShare, kLatentDecodeShare);
  } else {
    fit = *full;
  }
  if (d.window_layers > 0) {
    Result<AttentionFit> window = fit_attention(data.attention, d.heads, d.kv_heads, d.head_dim, d.window_tokens);
    if (!window) return std::move(window).error();
    figures.decode_window = window->law;
    figures.decode_window.token_us *= slower;
  }
  figures.prefill_us_per_context = flops_per_context / (kPrefillShare * gpu.flops_per_us);
  figures.source += fmt::format("; prefill: not measured, {} of the GPU's peak (assumed)", kPrefillShare);
  return {};
}

GemmFigures gemm_of(const GemmFit& fit, const Gpu& gpu) {
  GemmFigures figures = fit.figures;
  figures.source = fmt::format("{}, bfloat16 on H200", kAic);
  if (&gpu != &kMeasuredGpu) {
    figures.bytes_per_us *= gpu.hbm_bytes_per_us / kMeasuredGpu.hbm_bytes_per_us;
    figures.flops_per_us *= gpu.flops_per_us / kMeasuredGpu.flops_per_us;
    figures.source += ", scaled by HBM bandwidth and peak arithmetic";
  }
  figures.source += "; 8-bit weights assumed to multiply twice as fast";
  return figures;
}

AllToAllFigures all_to_all_of(const AllToAllFit& fit, const Model& model, const Gpu& gpu) {
  AllToAllFigures figures = fit.figures;
  figures.ranks = 8;
  figures.source = fmt::format("{}, DeepEP low-latency kernels within one node of H200, taken to have 8 ranks", kAic);
  if (fit.hidden != model.dims.hidden) {
    figures.source += fmt::format("; rows of hidden size {}, by bytes", fit.hidden);
  }
  if (gpu.nvlink_bytes_per_us != kMeasuredGpu.nvlink_bytes_per_us) {
    const double faster = gpu.nvlink_bytes_per_us / kMeasuredGpu.nvlink_bytes_per_us;
    figures.dispatch_bytes_per_us *= faster;
    figures.combine_bytes_per_us *= faster;
    figures.source += "; scaled by NVLink bandwidth";
  }
  return figures;
}

void moe_source(const MoeSelection& selection, MoeFit& fit) {
  fit.figures.source =
      fmt::format("{}, {} {}, {} rows of one rank fitted; mean error on the rows held out {:.1f} %", kAic,
                  selection.framework, selection.version, selection.fit_to, 100 * fit.held_out.mean);
}

// What vLLM captures by default: 1, 2, 4, then every 8 up to 256, every 16 up to 512.
std::vector<uint32_t> captured_sizes() {
  std::vector<uint32_t> sizes = {1, 2, 4};
  for (uint32_t size = 8; size <= 256; size += 8) sizes.push_back(size);
  for (uint32_t size = 272; size <= 512; size += 16) sizes.push_back(size);
  return sizes;
}

std::string file_name(const Gpu& gpu, const Model& model) {
  std::string name = fmt::format("{}-{}", gpu.name, model.name);
  for (char& c : name) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return name;
}

Result<BuiltProfile> build_one(const KernelData& data, const GemmFit& gemm, const Model& model, const Gpu& gpu) {
  MoeSelection selection{.gpu = gpu.rows,
                         .framework = "vllm",
                         .version = "0.24.0",
                         .model = model.name,
                         .dtype = model.dtype,
                         .fit_to = model.fit_to,
                         .tiled = model.tiled,
                         .least_rows = gpu.least_rows};
  // TensorRT-LLM's generated kernels for 4-bit weights: the balanced rows alone leave open whether time doubles from
  // 8 to 10 assignments an expert for a second tile or for a larger one. The 16-bit rows of the same kernels
  // say: a second one.
  if (model.tiled && gpu.least_rows == 8) selection.block_factors = {0.5};
  Result<MoeFit> moe = fit_moe(data.moe, selection);
  if (!moe) return std::move(moe).error();
  Result<AllToAllFit> exchange = fit_all_to_all(data.all_to_all, model.dims.hidden, model.dims.top_k);
  if (!exchange) return std::move(exchange).error();
  BuiltProfile built{.profile = {}, .moe = *std::move(moe), .attention = {}, .all_to_all = *std::move(exchange)};
  moe_source(selection, built.moe);
  Profile& profile = built.profile;
  profile.name = file_name(gpu, model);
  profile.gpu = gpu.name;
  profile.model = model.name;
  profile.dtype = model.dtype;
  profile.kernel = built.moe.kernel;
  profile.dims = model.dims;
  profile.moe = built.moe.figures;
  if (Status made = attention_of(data, model, gpu, built.attention, profile.attention); !made) {
    return std::move(made).error();
  }
  profile.gemm = gemm_of(gemm, gpu);
  profile.projections = projections_of(model);
  profile.all_to_all = all_to_all_of(built.all_to_all, model, gpu);
  profile.memory = memory_of(model, gpu, profile.projections);
  profile.kv_link = {.bytes_per_us = 87e9 / kMega,
                     .latency_us = 200,
                     .source = "bandwidth: Mooncake reports 87 GB/s over 4 x 200 Gbit/s; latency assumed"};
  profile.host = {.step_us = 400,
                  .layer_us = 10,
                  .source =
                      "assumed: asynchronous scheduling hides the rest of a step; five small kernels of 2 us a "
                      "layer within a captured graph"};
  profile.graph_sizes = captured_sizes();
  if (Status good = profile.check(); !good) return std::move(good).error();
  return built;
}

}  // namespace

Result<BuiltProfiles> build_profiles(const KernelData& data, const std::function<void(size_t, size_t)>& progress) {
  BuiltProfiles all;
  Result<GemmFit> gemm = fit_gemm(data.gemm);
  if (!gemm) return std::move(gemm).error();
  all.gemm = *std::move(gemm);
  for (const Model& model : kModels) {
    for (const Gpu& gpu : kGpus) {
      progress(all.profiles.size(), kModels.size() * kGpus.size());
      Result<BuiltProfile> built = build_one(data, all.gemm, model, gpu);
      if (!built) return std::move(built).error();
      all.profiles.push_back(*std::move(built));
    }
  }
  return all;
}

}  // namespace kindred::sim

// FFNs of other models than the bundled one, as llama.cpp builds them, on the ranks and on the CPU backend alone:
// merged gate and up, biases, scales, other activations, no gate; whole and cut after every operation.
#include <ggml-alloc.h>
#include <ggml-backend.h>
#include <ggml-cpu.h>
#include <ggml.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "base/rng.h"
#include "engine/expert_ranks.h"
#include "engine/test_support.h"

namespace kindred::engine::test {
namespace {

constexpr int64_t kWidth = 64, kFfn = 96, kTopK = 3;

// Tensors by role, in one ggml context and one buffer each.
struct Tensors {
  std::unique_ptr<ggml_context, decltype(&ggml_free)> context{
      ggml_init({.mem_size = 1U << 20, .mem_buffer = nullptr, .no_alloc = true}), ggml_free};
  std::unique_ptr<ggml_backend_buffer, decltype(&ggml_backend_buffer_free)> buffer{nullptr, ggml_backend_buffer_free};

  ggml_tensor* add(const char* name, ggml_type type, int64_t a, int64_t b, int64_t c) {
    ggml_tensor* t = ggml_new_tensor_3d(context.get(), type, a, b, c);
    ggml_set_name(t, (std::string("blk.0.") + name).c_str());
    return t;
  }
  void allocate(ggml_backend_buffer_type_t type) {
    buffer.reset(ggml_backend_alloc_ctx_tensors_from_buft(context.get(), type));
    ASSERT_NE(buffer, nullptr);
    ggml_backend_buffer_set_usage(buffer.get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
    Rng rng(17);
    for (ggml_tensor* t = ggml_get_first_tensor(context.get()); t != nullptr;
         t = ggml_get_next_tensor(context.get(), t)) {
      std::vector<float> values(static_cast<size_t>(ggml_nelements(t)));
      for (float& v : values) v = static_cast<float>(rng.uniform() - 0.5);
      std::vector<std::byte> bytes(ggml_nbytes(t));
      ggml_quantize_chunk(t->type, values.data(), bytes.data(), 0, ggml_nelements(t) / t->ne[0], t->ne[0], nullptr);
      if (t->type == GGML_TYPE_F32) std::memcpy(bytes.data(), values.data(), bytes.size());
      ggml_backend_tensor_set(t, bytes.data(), 0, bytes.size());
    }
  }
};

struct Weights {
  Tensors experts, rest;
  ggml_tensor *gate, *up, *down, *gate_up, *gate_bias, *up_bias, *down_bias, *scale;

  Weights(ggml_type type, int64_t count, ggml_backend_buffer_type_t buffer_type) {
    gate = experts.add("ffn_gate_exps.weight", type, kWidth, kFfn, count);
    up = experts.add("ffn_up_exps.weight", type, kWidth, kFfn, count);
    down = experts.add("ffn_down_exps.weight", type, kFfn, kWidth, count);
    gate_up = experts.add("ffn_gate_up_exps.weight", type, kWidth, 2 * kFfn, count);
    gate_bias = rest.add("ffn_gate_exps.bias", GGML_TYPE_F32, kFfn, count, 1);
    up_bias = rest.add("ffn_up_exps.bias", GGML_TYPE_F32, kFfn, count, 1);
    down_bias = rest.add("ffn_down_exps.bias", GGML_TYPE_F32, kWidth, count, 1);
    scale = rest.add("ffn_up_exps.scale", GGML_TYPE_F32, count, 1, 1);
    experts.allocate(buffer_type);
    rest.allocate(ggml_backend_cpu_buffer_type());
  }
};

struct Inputs {
  ggml_tensor *cur, *ids, *weights;  // [n, 1, T], [k, T], [1, k, T]
};

using Build = ggml_tensor* (*)(ggml_context*, const Weights&, const Inputs&);

ggml_tensor* product(ggml_context* c, ggml_tensor* w, ggml_tensor* x, const Inputs& in) {
  return ggml_mul_mat_id(c, w, x, in.ids);
}
ggml_tensor* weighted(ggml_context* c, ggml_tensor* out, const Inputs& in) { return ggml_mul(c, out, in.weights); }

ggml_tensor* swiglu(ggml_context* c, const Weights& w, const Inputs& in) {
  ggml_tensor* up = product(c, w.up, in.cur, in);
  ggml_tensor* gate = product(c, w.gate, in.cur, in);
  return weighted(c, product(c, w.down, ggml_swiglu_split(c, gate, up), in), in);
}
ggml_tensor* merged(ggml_context* c, const Weights& w, const Inputs& in) {
  ggml_tensor* both = product(c, w.gate_up, in.cur, in);
  ggml_tensor* gate = ggml_view_3d(c, both, kFfn, both->ne[1], both->ne[2], both->nb[1], both->nb[2], 0);
  ggml_tensor* up = ggml_view_3d(c, both, kFfn, both->ne[1], both->ne[2], both->nb[1], both->nb[2], kFfn * both->nb[0]);
  return weighted(c, product(c, w.down, ggml_geglu_split(c, gate, up), in), in);
}
ggml_tensor* biased(ggml_context* c, const Weights& w, const Inputs& in) {  // gpt-oss
  ggml_tensor* up = ggml_add_id(c, product(c, w.up, in.cur, in), w.up_bias, in.ids);
  ggml_tensor* gate = ggml_add_id(c, product(c, w.gate, in.cur, in), w.gate_bias, in.ids);
  ggml_tensor* out = product(c, w.down, ggml_swiglu_oai(c, gate, up, 1.702F, 7.0F), in);
  return weighted(c, ggml_add_id(c, out, w.down_bias, in.ids), in);
}
ggml_tensor* without_gate(ggml_context* c, const Weights& w, const Inputs& in) {
  ggml_tensor* up = product(c, w.up, in.cur, in);
  return weighted(c, product(c, w.down, ggml_sqr(c, ggml_relu(c, up)), in), in);
}
ggml_tensor* clamped(ggml_context* c, const Weights& w, const Inputs& in) {
  ggml_tensor* up = ggml_clamp(c, product(c, w.up, in.cur, in), -0.5F, 0.5F);
  ggml_tensor* gate = ggml_clamp(c, ggml_silu(c, product(c, w.gate, in.cur, in)), -INFINITY, 0.5F);
  return weighted(c, product(c, w.down, ggml_mul(c, gate, up), in), in);
}
ggml_tensor* scaled(ggml_context* c, const Weights& w, const Inputs& in) {  // a scale per expert: not the ranks'
  const int64_t count = w.up->ne[2];
  ggml_tensor* s = ggml_repeat_4d(c, ggml_reshape_3d(c, w.scale, 1, count, 1), 1, count, in.cur->ne[2], 1);
  ggml_tensor* up = ggml_mul(c, product(c, w.up, in.cur, in), ggml_get_rows(c, s, in.ids));
  return weighted(c, product(c, w.down, ggml_swiglu_split(c, product(c, w.gate, in.cur, in), up), in), in);
}
ggml_tensor* weighted_before(ggml_context* c, const Weights& w, const Inputs& in) {  // llama 4
  ggml_tensor* cur = ggml_mul(c, ggml_repeat_4d(c, in.cur, kWidth, kTopK, in.cur->ne[2], 1), in.weights);
  ggml_tensor* gate = product(c, w.gate, cur, in);
  ggml_tensor* out = product(c, w.down, ggml_swiglu_split(c, gate, product(c, w.up, cur, in)), in);
  ggml_tensor* sum = nullptr;
  for (int64_t k = 0; k < kTopK; ++k) {
    ggml_tensor* one = ggml_view_2d(c, out, kWidth, in.cur->ne[2], out->nb[2], static_cast<size_t>(k) * out->nb[1]);
    sum = sum == nullptr ? one : ggml_add(c, sum, one);
  }
  return sum;
}

struct GraphCase {
  const char* name;
  Build build;
};

class RankGraph : public testing::TestWithParam<GraphCase> {
 protected:
  static std::vector<float> compute(Build build, const Weights& weights, ggml_backend_dev_t device, int64_t tokens,
                                    bool cut) {
    using Backend = std::unique_ptr<ggml_backend, decltype(&ggml_backend_free)>;
    const Backend cpu(ggml_backend_init_by_type(GGML_BACKEND_DEVICE_TYPE_CPU, nullptr), ggml_backend_free);
    const Backend own(device == nullptr ? nullptr : ggml_backend_dev_init(device, nullptr), [](ggml_backend_t b) {
      if (b != nullptr) ggml_backend_free(b);
    });
    std::vector<ggml_backend_t> backends;
    if (own) backends.push_back(own.get());
    backends.push_back(cpu.get());
    const std::unique_ptr<ggml_backend_sched, decltype(&ggml_backend_sched_free)> sched(
        ggml_backend_sched_new(backends.data(), nullptr, static_cast<int>(backends.size()), 256, false, false),
        ggml_backend_sched_free);
    if (cut) {
      ggml_backend_sched_set_eval_callback(sched.get(), [](ggml_tensor*, bool, void*) { return true; }, nullptr);
    }
    const std::unique_ptr<ggml_context, decltype(&ggml_free)> context(
        ggml_init({.mem_size = 1U << 20, .mem_buffer = nullptr, .no_alloc = true}), ggml_free);
    ggml_context* c = context.get();
    const Inputs in = {ggml_new_tensor_3d(c, GGML_TYPE_F32, kWidth, 1, tokens),
                       ggml_new_tensor_2d(c, GGML_TYPE_I32, kTopK, tokens),
                       ggml_new_tensor_3d(c, GGML_TYPE_F32, 1, kTopK, tokens)};
    for (ggml_tensor* t : {in.cur, in.ids, in.weights}) ggml_set_input(t);
    ggml_tensor* out = build(c, weights, in);
    ggml_set_output(out);
    ggml_cgraph* graph = ggml_new_graph_custom(c, 256, false);
    ggml_build_forward_expand(graph, out);
    EXPECT_TRUE(ggml_backend_sched_alloc_graph(sched.get(), graph));
    fill(in, weights.up->ne[2]);
    EXPECT_EQ(ggml_backend_sched_graph_compute(sched.get(), graph), GGML_STATUS_SUCCESS);
    std::vector<float> values(static_cast<size_t>(ggml_nelements(out)));
    ggml_backend_tensor_get(out, values.data(), 0, ggml_nbytes(out));
    return values;
  }

  static void fill(const Inputs& in, int64_t experts) {
    Rng rng(23);
    for (ggml_tensor* t : {in.cur, in.weights}) {
      std::vector<float> values(static_cast<size_t>(ggml_nelements(t)));
      for (float& v : values) v = static_cast<float>(rng.uniform() * 2 - 1);
      ggml_backend_tensor_set(t, values.data(), 0, ggml_nbytes(t));
    }
    std::vector<int32_t> ids;
    while (ids.size() < static_cast<size_t>(ggml_nelements(in.ids))) {  // different ones for each token
      const auto first = static_cast<int32_t>(rng.below(static_cast<uint64_t>(experts)));
      for (int32_t k = 0; k < kTopK; ++k) ids.push_back((first + k * 5) % static_cast<int32_t>(experts));
    }
    ggml_backend_tensor_set(in.ids, ids.data(), 0, ggml_nbytes(in.ids));
  }
};

TEST_P(RankGraph, SameBitsAsTheCpuBackend) {
  auto ranks = ExpertRanks::prepare(model_path(), {.ranks = 3, .threads = 3});
  ASSERT_TRUE(ranks.ok()) << ranks.error().message;
  const int64_t experts = (*ranks)->shape().experts;
  ggml_backend_dev_t device = ggml_backend_dev_by_name("kindred expert ranks");
  ASSERT_NE(device, nullptr);
  uint64_t dispatches = 0;
  for (const ggml_type type : {GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_Q8_0}) {
    const Weights on_cpu(type, experts, ggml_backend_cpu_buffer_type());
    const Weights on_ranks(type, experts, (*ranks)->buffer_type());
    for (const int64_t tokens : {1, 7, 40}) {
      const auto expected = compute(GetParam().build, on_cpu, nullptr, tokens, false);
      for (const bool cut : {false, true}) {
        const auto got = compute(GetParam().build, on_ranks, device, tokens, cut);
        ASSERT_EQ(expected.size(), got.size());
        EXPECT_EQ(std::memcmp(expected.data(), got.data(), expected.size() * sizeof(float)), 0)
            << ggml_type_name(type) << ", " << tokens << " tokens" << (cut ? ", cut" : "");
        EXPECT_EQ((*ranks)->traffic().dispatches[0], ++dispatches);
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Patterns, RankGraph,
                         testing::Values(GraphCase{"swiglu", swiglu}, GraphCase{"merged", merged},
                                         GraphCase{"biased", biased}, GraphCase{"without_gate", without_gate},
                                         GraphCase{"clamped", clamped}, GraphCase{"scaled", scaled},
                                         GraphCase{"weighted_before", weighted_before}),
                         [](const auto& named) { return named.param.name; });

}  // namespace
}  // namespace kindred::engine::test

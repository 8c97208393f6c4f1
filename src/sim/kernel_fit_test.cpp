#include "sim/kernel_fit.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <filesystem>

#include "base/config.h"
#include "sim/profile_build.h"
#include "sim/step_time.h"
#include "sim/text_file.h"

namespace kindred::sim {
namespace {

const std::string kKernels = KINDRED_SOURCE_DIR "/tests/data/kernels";

const KernelData& measured() {
  static const KernelData kData = [] {
    Result<KernelData> data = load_kernels(kKernels);
    EXPECT_TRUE(data.ok()) << data.error().message;
    return *std::move(data);
  }();
  return kData;
}

MoeFit fit_of(const std::string& gpu, const std::string& model, const std::string& dtype) {
  MoeSelection selection{.gpu = gpu, .framework = "vllm", .version = "0.24.0", .model = model, .dtype = dtype};
  selection.tiled = dtype == "w4a16_mxfp4";
  if (dtype == "fp8_block") selection.fit_to = "power_law_1.01";
  Result<MoeFit> fit = fit_moe(measured().moe, selection);
  EXPECT_TRUE(fit.ok()) << fit.error().message;
  return *std::move(fit);
}

// Published beside the rows: a = 23.8 us, b = 2.22 us, r2 >= 0.995 (and 38.3, 4.87).
TEST(MoeFit, FindsEldrsLine) {
  const MoeFit qwen = fit_of("h200", "Qwen3-30B-A3B", "bfloat16");
  EXPECT_NEAR(qwen.a_us, 23.8, 0.05);
  EXPECT_NEAR(qwen.b_us, 2.22, 0.005);
  EXPECT_GE(qwen.r2, 0.995);
  const MoeFit gpt = fit_of("h200", "GPT-OSS-120B", "w4a16_mxfp4");
  EXPECT_NEAR(gpt.a_us, 38.3, 0.05);
  EXPECT_NEAR(gpt.b_us, 4.87, 0.005);
}

TEST(MoeFit, ForetellsRowsOfAnotherDistribution) {
  for (const MoeFit& fit : {fit_of("h200", "Qwen3-30B-A3B", "bfloat16"), fit_of("h200", "GPT-OSS-120B", "w4a16_mxfp4"),
                            fit_of("h200", "DeepSeek-V3", "fp8_block")}) {
    EXPECT_LE(fit.held_out.mean, 0.051) << fit.kernel;
    EXPECT_LE(fit.held_out_decode.mean, 0.045) << fit.kernel;
    EXPECT_LE(fit.fitted.mean, 0.025) << fit.kernel;
    EXPECT_GE(fit.held_out.rows, 27);
  }
}

// Rows made by the law itself give it back.
TEST(MoeFit, RecoversItsOwnLaw) {
  const MoeFigures law{.a_us = 20,
                       .b_us = 2,
                       .token_us = 0.05,
                       .power = 3,
                       .block_factor = 1,
                       .blocks = {{16, 0.8}, {32, 1.1}, {64, 1.7}, {128, 2.9}},
                       .source = "made up"};
  std::vector<MoeRow> rows;
  for (const uint32_t tokens : {1U, 2U, 4U, 8U, 16U, 32U, 64U, 128U, 256U, 512U, 1024U, 2048U, 4096U, 8192U}) {
    MoeRow row{.gpu = "g",
               .framework = "f",
               .version = "v",
               .model = "m",
               .dtype = "d",
               .kernel = "k",
               .distribution = "balanced",
               .top_k = 8,
               .experts = 128,
               .ranks = 1,
               .tokens = tokens};
    row.us = moe_kernel_us(law, tokens * 8.0, std::min(128.0, tokens * 8.0), 128, 8, false);
    rows.push_back(row);
    row.distribution = "power_law_1.2";
    row.us = moe_kernel_us(law, tokens * 8.0, power_law_union(tokens, 128, 8, 1.2), 128, 8, true);
    rows.push_back(row);
  }
  const Result<MoeFit> fit = fit_moe(rows, {.gpu = "g", .framework = "f", .version = "v", .model = "m", .dtype = "d"});
  ASSERT_TRUE(fit.ok()) << fit.error().message;
  EXPECT_LT(fit->fitted.mean, 0.01);
  EXPECT_LT(fit->held_out.mean, 0.02);
  EXPECT_EQ(fit->fitted.rows, 14);
  EXPECT_EQ(fit->held_out.rows, 14);
}

TEST(MoeFit, SaysWhatIsMissing) {
  const Result<MoeFit> none =
      fit_moe(measured().moe,
              {.gpu = "h100", .framework = "vllm", .version = "0.24.0", .model = "Qwen3-30B-A3B", .dtype = "bfloat16"});
  ASSERT_FALSE(none.ok());
  EXPECT_NE(none.error().message.find("Qwen3-30B-A3B on h100"), std::string::npos) << none.error().message;
  // Another model's rows are missing from the reduced folder.
  const Result<BuiltProfiles> all = build_profiles(measured(), [](size_t, size_t) {});
  ASSERT_FALSE(all.ok());
  EXPECT_NE(all.error().message.find("moe_kernels"), std::string::npos) << all.error().message;
}

TEST(PowerLawUnion, Bounds) {
  EXPECT_DOUBLE_EQ(power_law_union(1, 128, 8, 1.2), 8);  // a token never takes an expert twice
  EXPECT_NEAR(power_law_union(4096, 128, 8, 1.01), 128, 0.1);
  const double balanced = 128, skewed = power_law_union(16, 128, 8, 1.2);
  EXPECT_LT(skewed, 0.6 * balanced);
  EXPECT_GT(skewed, 0.3 * balanced);
  EXPECT_DOUBLE_EQ(skewed, power_law_union(16, 128, 8, 1.2));
}

TEST(KernelFit, AttentionDenseProductsAndAllToAll) {
  const Result<AttentionFit> attention = fit_attention(measured().attention, 32, 4, 128, 0);
  ASSERT_TRUE(attention.ok()) << attention.error().message;
  EXPECT_LT(attention->held_out.mean, 0.08);
  // Reading a token's keys and values at no more than the H200's 4.8 TB/s.
  EXPECT_GT(attention->law.token_us, 2 * 4 * 128 * 2 / 4.8e6);
  EXPECT_FALSE(fit_attention(measured().attention, 64, 8, 64, 0).ok());

  const Result<GemmFit> gemm = fit_gemm(measured().gemm);
  ASSERT_TRUE(gemm.ok()) << gemm.error().message;
  EXPECT_LT(gemm->held_out.mean, 0.1);
  EXPECT_GT(gemm->held_out.rows, 30);
  EXPECT_LT(gemm->figures.bytes_per_us, 4.8e6);
  EXPECT_LT(gemm->figures.flops_per_us, 989e6);

  const Result<AllToAllFit> exchange = fit_all_to_all(measured().all_to_all, 7168, 8);
  ASSERT_TRUE(exchange.ok()) << exchange.error().message;
  EXPECT_EQ(exchange->hidden, 7168);
  EXPECT_LT(exchange->held_out.mean, 0.05);
  EXPECT_EQ(fit_all_to_all(measured().all_to_all, 2880, 4)->hidden, 2048);
  EXPECT_FALSE(fit_all_to_all({}, 7168, 8).ok());
}

TEST(KernelData, NamesFileLineAndColumn) {
  const std::string folder = testing::TempDir() + "kindred-kernels_" + std::to_string(getpid());
  std::filesystem::create_directories(folder);
  std::filesystem::copy(kKernels, folder,
                        std::filesystem::copy_options::recursive | std::filesystem::copy_options::overwrite_existing);
  EXPECT_TRUE(load_kernels(folder).ok());
  ASSERT_TRUE(write_file(folder + "/h200_gemm_bf16.csv", "m,n,k,latency_us\n1,2,3,4\n1,2,3,-4\n").ok());
  const Result<KernelData> negative = load_kernels(folder);
  ASSERT_FALSE(negative.ok());
  EXPECT_EQ(negative.error().field, "latency_us");
  EXPECT_NE(negative.error().message.find("line 3"), std::string::npos) << negative.error().message;
  std::filesystem::remove(folder + "/h200_gemm_bf16.csv");
  const Result<KernelData> missing = load_kernels(folder);
  ASSERT_FALSE(missing.ok());
  EXPECT_EQ(missing.error().code, ErrorCode::kNotFound);
  EXPECT_NE(missing.error().message.find("h200_gemm_bf16"), std::string::npos) << missing.error().message;
  std::filesystem::remove_all(folder);
}

TEST(TextFile, UnpacksXz) {
  // printf 'hello, hello, hello\n' | xz --check=crc32
  const unsigned char packed[] = {
      0xfd, 0x37, 0x7a, 0x58, 0x5a, 0x00, 0x00, 0x01, 0x69, 0x22, 0xde, 0x36, 0x02, 0x00, 0x21, 0x01, 0x16, 0x00,
      0x00, 0x00, 0x74, 0x2f, 0xe5, 0xa3, 0xe0, 0x00, 0x13, 0x00, 0x0e, 0x5d, 0x00, 0x34, 0x19, 0x49, 0xee, 0x8d,
      0xef, 0x8c, 0x87, 0x31, 0xf5, 0x2f, 0x64, 0x00, 0x00, 0x00, 0x00, 0x00, 0xe7, 0x42, 0x6e, 0x52, 0x00, 0x01,
      0x26, 0x14, 0x72, 0xe2, 0x82, 0xf9, 0x90, 0x42, 0x99, 0x0d, 0x01, 0x00, 0x00, 0x00, 0x00, 0x01, 0x59, 0x5a};
  const std::string_view bytes(reinterpret_cast<const char*>(packed), sizeof(packed));
  const Result<std::string> text = unpack_xz(bytes);
  ASSERT_TRUE(text.ok()) << text.error().message;
  EXPECT_EQ(*text, "hello, hello, hello\n");
  EXPECT_EQ(unpack_xz(bytes.substr(0, bytes.size() - 4)).error().code, ErrorCode::kCorrupt);
  EXPECT_EQ(unpack_xz("no xz at all").error().code, ErrorCode::kCorrupt);
  EXPECT_EQ(unpack_xz(bytes, 10).error().code, ErrorCode::kTooLarge);
}

}  // namespace
}  // namespace kindred::sim

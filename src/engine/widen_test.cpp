#include "engine/widen.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <filesystem>
#include <fstream>

#include "engine/gguf_file.h"
#include "engine/llama_session.h"
#include "engine/test_support.h"

namespace kindred::engine {
namespace {

using test::bundled_model;
using test::model_path;

class Widened : public testing::Test {
 protected:
  void SetUp() override {
    folder_ = std::filesystem::temp_directory_path() / ("kindred-widen-" + std::to_string(getpid()));
    std::filesystem::create_directories(folder_);
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  std::string path(const std::string& name) const { return (folder_ / name).string(); }

  std::unique_ptr<Model> widen(const std::string& from, uint32_t factor, const std::string& type) {
    const std::string to = path(type + "-" + std::to_string(factor) + ".gguf");
    auto report = widen_gguf(from, to, {.factor = factor, .type = type});
    if (!report) {
      ADD_FAILURE() << report.error().message;
      return nullptr;
    }
    report_ = *report;
    auto model = Model::load(to);
    if (!model) ADD_FAILURE() << model.error().message;
    return model ? std::move(model).value() : nullptr;
  }

  WidenReport report_;

 private:
  std::filesystem::path folder_;
};

std::vector<std::vector<Token>> prompts() {
  std::vector<std::vector<Token>> tokens;
  for (const char* text : {"def add(a, b):\n    return a", "The court held that the contract was void because",
                           "Der Vertrag ist nichtig, da"}) {
    tokens.push_back(bundled_model().tokenize(text, false));
  }
  return tokens;
}

struct Evaluated {
  std::vector<float> logits;  // of the last token
  std::vector<uint16_t> experts;
};

Evaluated evaluate(const Model& model, const std::vector<Token>& prompt) {
  Evaluated out;
  auto session = LlamaSession::open(model, {.kv_tokens = 128, .batch_tokens = 64, .sequences = 1});
  if (!session) {
    ADD_FAILURE() << session.error().message;
    return out;
  }
  LlamaSession& llama = **session;
  llama.begin();
  for (uint32_t i = 0; i < prompt.size(); ++i) llama.add(prompt[i], i, 0, i + 1 == prompt.size());
  const Status done = llama.evaluate();
  EXPECT_TRUE(done.ok());
  const auto logits = llama.logits(static_cast<uint32_t>(prompt.size()) - 1);
  out.logits.assign(logits.begin(), logits.end());
  for (size_t l = 0; l < llama.experts()->shape().layers.size(); ++l) {
    for (uint32_t t = 0; t < prompt.size(); ++t) {
      const auto selected = llama.experts()->selected(l, t);
      out.experts.insert(out.experts.end(), selected.begin(), selected.end());
    }
  }
  return out;
}

// The same function but for the order in which f32 numbers are added: errors of 2^-24 in each of six layers
// leave far less than 1e-3 of logits up to 10. (Here the difference is mostly 0: the output matrix is Q8_0,
// whose kernel quantises its input and so rounds them away.)
void expect_same_function(const Model& narrow, const Model& wide) {
  constexpr float kBound = 1e-3F;
  for (const auto& prompt : prompts()) {
    const Evaluated of_narrow = evaluate(narrow, prompt), of_wide = evaluate(wide, prompt);
    ASSERT_EQ(of_narrow.logits.size(), of_wide.logits.size());
    float worst = 0;
    for (size_t i = 0; i < of_wide.logits.size(); ++i)
      worst = std::max(worst, std::fabs(of_wide.logits[i] - of_narrow.logits[i]));
    EXPECT_LT(worst, kBound);
    EXPECT_EQ(of_narrow.experts, of_wide.experts);
  }
  test::TestEngine narrow_engine(test::TestEngine::small(), narrow), wide_engine(test::TestEngine::small(), wide);
  for (const auto& prompt : prompts()) {
    const auto of_narrow = test::run(*narrow_engine, test::make_job(prompt, 12));
    const auto of_wide = test::run(*wide_engine, test::make_job(prompt, 12));
    EXPECT_EQ(of_narrow.tokens, of_wide.tokens);
    EXPECT_EQ(of_narrow.prefill->counts->data, of_wide.prefill->counts->data);
  }
}

TEST_F(Widened, F16ComputesTheSame) {
  const auto narrow = widen(model_path(), 1, "f16");
  const auto wide = widen(model_path(), 4, "f16");
  ASSERT_TRUE(narrow && wide);
  EXPECT_EQ(report_.from_width, 64U);
  EXPECT_EQ(report_.to_width, 256U);
  EXPECT_EQ(report_.expert_bytes, 3U * 192 * 256 * 2);
  EXPECT_EQ(wide->info().experts, bundled_model().info().experts);
  EXPECT_NE(wide->info().fingerprint, narrow->info().fingerprint);
  EXPECT_EQ(wide->info().name, "kindred-tiny-moe widened x4");
  expect_same_function(*narrow, *wide);
}

TEST_F(Widened, F32ComputesTheSame) {
  const auto narrow = widen(model_path(), 1, "f32");
  const auto wide = widen(model_path(), 2, "f32");
  ASSERT_TRUE(narrow && wide);
  EXPECT_EQ(report_.inexact, 0U);
  expect_same_function(*narrow, *wide);
}

TEST_F(Widened, Q8ComputesTheSameAsItsSource) {
  const auto wide = widen(model_path(), 8, "q8_0");
  ASSERT_TRUE(wide);
  // Blocks whose scale becomes subnormal lose bits: tiny weights, 3 % of the blocks here.
  EXPECT_GT(report_.inexact, 0U);
  EXPECT_LT(report_.inexact, uint64_t{6} * 64 * 192 * 2 / 20);
  expect_same_function(bundled_model(), *wide);
}

TEST_F(Widened, FactorOneInTheSameTypeCopiesTheWeights) {
  const auto same = widen(model_path(), 1, "q8_0");
  ASSERT_TRUE(same);
  for (const auto& prompt : prompts()) {
    EXPECT_EQ(evaluate(*same, prompt).logits, evaluate(bundled_model(), prompt).logits);
  }
}

TEST_F(Widened, F16IsCloseToItsQ8Source) {
  const auto f16 = widen(model_path(), 1, "f16");
  ASSERT_TRUE(f16);
  for (const auto& prompt : prompts()) {
    const Evaluated source = evaluate(bundled_model(), prompt), converted = evaluate(*f16, prompt);
    double worst = 0;
    for (size_t i = 0; i < source.logits.size(); ++i)
      worst = std::max(worst, std::fabs(double{source.logits[i]} - double{converted.logits[i]}));
    EXPECT_GT(worst, 0);
    EXPECT_LT(worst, 1);  // not another model; the kernels for Q8_0 quantise activations
  }
}

TEST_F(Widened, BadInputIsRefusedByName) {
  const auto refused = [&](const std::string& from, const std::string& to, const WidenOptions& options, ErrorCode code,
                           const std::string& word) {
    const auto report = widen_gguf(from, to, options);
    ASSERT_FALSE(report.ok()) << word;
    EXPECT_EQ(report.error().code, code) << report.error().message;
    EXPECT_NE(report.error().message.find(word), std::string::npos) << report.error().message;
    EXPECT_FALSE(std::filesystem::exists(path("out.gguf")));
    EXPECT_FALSE(std::filesystem::exists(path("out.gguf.tmp")));
  };
  const std::string out = path("out.gguf");
  for (const uint32_t factor : {0U, 3U, 65U, 128U})
    refused(model_path(), out, {.factor = factor}, ErrorCode::kInvalid, "powers of two");
  refused(model_path(), out, {.factor = 2, .type = "q4_0"}, ErrorCode::kInvalid, "accepted: f16, f32, q8_0");
  refused(path("missing.gguf"), out, {}, ErrorCode::kNotFound, "missing.gguf");
  refused(model_path(), "/no/such/folder/x.gguf", {}, ErrorCode::kIo, "/no/such/folder");

  const std::string copy = path("copy.gguf"), link = path("link.gguf");
  std::filesystem::copy_file(model_path(), copy);
  std::filesystem::create_symlink(copy, link);
  refused(copy, copy, {}, ErrorCode::kInvalid, "is the file to read");
  refused(copy, link, {}, ErrorCode::kInvalid, "is the file to read");
  std::filesystem::resize_file(copy, std::filesystem::file_size(copy) / 2);
  refused(copy, out, {}, ErrorCode::kCorrupt, "truncated");
  test::write_dense_model(path("dense.gguf"));
  refused(path("dense.gguf"), out, {}, ErrorCode::kInvalid, "no experts");
}

}  // namespace
}  // namespace kindred::engine

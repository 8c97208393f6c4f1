#include "engine/model.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>

#include "base/rng.h"
#include "engine/gguf_file.h"
#include "engine/quantize.h"
#include "engine/test_support.h"

namespace kindred::engine {
namespace {

using test::bundled_model;
using test::model_path;

class ModelFiles : public testing::Test {
 protected:
  void SetUp() override {
    const auto* info = testing::UnitTest::GetInstance()->current_test_info();
    folder_ = std::filesystem::temp_directory_path() / ("kindred-" + std::to_string(getpid()) + info->name());
    std::filesystem::create_directories(folder_);
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  std::string path(const std::string& name) const { return (folder_ / name).string(); }
  std::string write(const std::string& name, std::string_view bytes) const {
    std::ofstream(path(name), std::ios::binary) << bytes;
    return path(name);
  }
  static std::string read(const std::string& from) {
    std::string bytes(std::filesystem::file_size(from), '\0');
    std::ifstream(from, std::ios::binary).read(bytes.data(), static_cast<std::streamsize>(bytes.size()));
    return bytes;
  }

 private:
  std::filesystem::path folder_;
};

ErrorCode load_error(const std::string& path) {
  auto model = Model::load(path);
  if (model) {
    ADD_FAILURE() << path << " loaded";
    return ErrorCode::kInternal;
  }
  EXPECT_NE(model.error().message.find(path), std::string::npos) << model.error().message;
  return model.error().code;
}

TEST_F(ModelFiles, ThatAreNotModelsAreRefused) {
  EXPECT_EQ(load_error(path("missing.gguf")), ErrorCode::kNotFound);
  EXPECT_EQ(load_error(std::filesystem::temp_directory_path().string()), ErrorCode::kInvalid);
  EXPECT_EQ(load_error(write("empty.gguf", "")), ErrorCode::kCorrupt);
  EXPECT_EQ(load_error(write("text.gguf", "not a model at all, just words")), ErrorCode::kCorrupt);
  std::string lies = "GGUF";
  lies += std::string("\3\0\0\0", 4) + std::string(16, '\xff');
  EXPECT_EQ(load_error(write("lies.gguf", lies)), ErrorCode::kCorrupt);
}

TEST_F(ModelFiles, ThatAreTruncatedAreRefused) {
  const std::string whole = read(model_path());
  for (const size_t size : {size_t{3}, size_t{24}, size_t{5000}, whole.size() / 2, whole.size() - 1}) {
    EXPECT_EQ(load_error(write("cut.gguf", std::string_view(whole).substr(0, size))), ErrorCode::kCorrupt) << size;
  }
  const auto half = Model::load(write("cut.gguf", std::string_view(whole).substr(0, whole.size() / 2)));
  EXPECT_NE(half.error().message.find("truncated"), std::string::npos) << half.error().message;
}

TEST_F(ModelFiles, ThatAreDamagedDoNotCrashTheInspection) {
  std::string bytes = read(model_path()).substr(0, 400'000);
  Rng rng(3);
  for (int round = 0; round < 60; ++round) {
    std::string damaged = bytes;
    for (int i = 0; i < 4; ++i)
      damaged[rng.below(round % 2 == 0 ? 2000 : damaged.size())] = static_cast<char>(rng.next());
    EXPECT_FALSE(inspect_gguf(write("damaged.gguf", damaged)).ok());
  }
}

TEST(Model, SaysWhatItIs) {
  const ModelInfo& info = bundled_model().info();
  EXPECT_EQ(info.name, "kindred-tiny-moe");
  EXPECT_EQ(info.architecture, "qwen3moe");
  EXPECT_EQ(info.layers, 6U);
  EXPECT_EQ(info.vocabulary, 8192U);
  EXPECT_EQ(info.context_tokens, 4096U);
  EXPECT_EQ(info.experts.layers, (std::vector<uint32_t>{0, 1, 2, 3, 4}));  // not the last
  EXPECT_EQ(info.experts.experts, 64U);
  EXPECT_EQ(info.experts.top_k, 4U);
  EXPECT_EQ(info.fingerprint.size(), 16U);
  EXPECT_TRUE(info.partial_removal);
}

TEST(Model, TokensAndText) {
  const Model& model = bundled_model();
  for (const std::string text : {"def f(x):\n    return x + 1\n", "Straße, 漢字, 😀", "", " "}) {
    EXPECT_EQ(model.detokenize(model.tokenize(text, false)), text);
  }
  const auto plain = model.tokenize("<|im_end|>", false);
  const auto control = model.tokenize("<|im_end|>", true);
  EXPECT_GT(plain.size(), 1U);
  ASSERT_EQ(control.size(), 1U);
  EXPECT_TRUE(model.is_end(control[0]));
  EXPECT_EQ(model.piece(control[0]), "");
  EXPECT_EQ(model.piece(control[0], true), "<|im_end|>");
  EXPECT_EQ(model.piece(-1), "");
  EXPECT_EQ(model.piece(1 << 20), "");
  EXPECT_NE(model.chat_template().find("im_start"), std::string::npos);
}

TEST_F(ModelFiles, FingerprintsTellWeightsApart) {
  std::string bytes = read(model_path());
  const auto same = inspect_gguf(write("same.gguf", bytes));
  EXPECT_EQ(same->fingerprint, bundled_model().info().fingerprint);
  for (size_t i = bytes.size() / 2; i < bytes.size(); ++i) bytes[i] = static_cast<char>(bytes[i] ^ 1);
  EXPECT_NE(inspect_gguf(write("other.gguf", bytes))->fingerprint, same->fingerprint);
}

TEST_F(ModelFiles, AreQuantised) {
  const auto done = quantize_gguf(model_path(), path("f16.gguf"), {.type = "zz", .name = {}, .threads = 1});
  EXPECT_EQ(done.error().code, ErrorCode::kInvalid);
  EXPECT_NE(done.error().message.find("q8_0"), std::string::npos);
  EXPECT_EQ(quantize_gguf(path("missing.gguf"), path("x.gguf"), {}).error().code, ErrorCode::kNotFound);
  EXPECT_EQ(quantize_gguf(model_path(), "/no/such/folder/x.gguf", {}).ok(), false);
}

TEST_F(ModelFiles, WithoutExpertsServeWithoutCounts) {
  const auto model = Model::load(test::write_dense_model(path("dense.gguf")));
  ASSERT_TRUE(model.ok()) << model.error().message;
  EXPECT_EQ((*model)->info().experts.experts, 0U);
  EXPECT_TRUE((*model)->info().experts.layers.empty());
  EXPECT_NE((*model)->info().fingerprint, bundled_model().info().fingerprint);

  test::TestEngine engine(test::TestEngine::small(), **model);
  EXPECT_EQ(engine->options().context_tokens, 256U);  // the model's
  const auto job = [] { return test::make_job(std::vector<Token>(40, 100), 8, 1.0); };
  const auto first = test::run(*engine, job());
  ASSERT_FALSE(first.error) << first.error->message;
  EXPECT_FALSE(first.prefill->counts);
  EXPECT_FALSE(first.prefill->suffix);
  const auto again = test::run(*engine, job());  // the prefix cache works without counts
  EXPECT_EQ(again.prefill->usage.cached_tokens, 32U);
  EXPECT_EQ(again.tokens, first.tokens);
  test::TestEngine other(test::TestEngine::small(), **model);
  EXPECT_EQ(test::run_handoff(*engine, *other, job()).tokens, first.tokens);
}

}  // namespace
}  // namespace kindred::engine

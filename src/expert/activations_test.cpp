#include "expert/activations.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <functional>
#include <limits>

#include "base/config.h"
#include "base/safetensors.h"
#include "expert/testing.h"

namespace kindred::expert {
namespace {

class TemporaryFile {
 public:
  TemporaryFile()
      : path_(std::filesystem::temp_directory_path() / ("kindred-activations-" + std::to_string(::getpid()))) {}
  ~TemporaryFile() {
    std::error_code ignored;
    std::filesystem::remove(path_, ignored);
  }
  std::string path() const { return path_.string(); }

 private:
  std::filesystem::path path_;
};

// What a file says, so that tests can bend one thing at a time.
struct Parts {
  std::map<std::string, std::string> metadata = {{"format", "kindred.activations.v1"},
                                                 {"model", "m"},
                                                 {"model_fingerprint", "f"},
                                                 {"layers", "[0,2]"},
                                                 {"top_k", "1"},
                                                 {"domains", R"(["a","b"])"}};
  std::vector<uint64_t> dims = {2, 2, 3};
  std::vector<uint32_t> prefill = {4, 0, 0, 1, 2, 1, /**/ 0, 0, 2, 2, 0, 0};
  std::vector<uint32_t> decode = {1, 0, 0, 0, 1, 0, /**/ 0, 0, 0, 0, 0, 0};
  std::vector<uint32_t> prompt_tokens = {4, 2};
  std::vector<uint32_t> decode_tokens = {1, 0};
  std::vector<float> gate = {};
  std::vector<uint64_t> gate_dims = {2, 2, 3};

  std::string bytes() const {
    SafetensorsWriter writer;
    for (const auto& [key, value] : metadata) writer.metadata(key, value);
    writer.tensor<uint32_t>("prefill_counts", dims, prefill);
    if (!decode.empty()) writer.tensor<uint32_t>("decode_counts", dims, decode);
    if (!gate.empty()) writer.tensor<float>("prefill_gate", gate_dims, gate);
    writer.tensor<uint32_t>("prompt_tokens", {prompt_tokens.size()}, prompt_tokens);
    writer.tensor<uint32_t>("decode_tokens", {decode_tokens.size()}, decode_tokens);
    return writer.finish();
  }
};

TEST(Activations, ReadsTheDocumentedFile) {
  const auto got = activations_from_bytes(Parts().bytes());
  ASSERT_TRUE(got.ok()) << got.error().message;
  EXPECT_EQ(got->requests(), 2U);
  EXPECT_EQ(got->shape, (ExpertShape{.layers = {0, 2}, .experts = 3, .top_k = 1}));
  EXPECT_EQ(got->model_fingerprint, "f");
  EXPECT_EQ(got->domains, (std::vector<std::string>{"a", "b"}));
  EXPECT_EQ(got->prefill(1)[2], 2U);
  EXPECT_EQ(got->decode(0)[4], 1U);
}

TEST(Activations, DecodeCountsAndLabelsAreOptional) {
  Parts parts;
  parts.decode.clear();
  parts.metadata.erase("domains");
  const auto got = activations_from_bytes(parts.bytes());
  ASSERT_TRUE(got.ok()) << got.error().message;
  EXPECT_FALSE(got->has_decode());
  EXPECT_FALSE(got->has_domains());
}

TEST(Activations, RefusesWhatDoesNotFitTogether) {
  const std::vector<std::pair<const char*, std::function<void(Parts&)>>> changes = {
      {"not ours", [](Parts& p) { p.metadata["format"] = "other"; }},
      {"no format", [](Parts& p) { p.metadata.erase("format"); }},
      {"no layers", [](Parts& p) { p.metadata.erase("layers"); }},
      {"one layer", [](Parts& p) { p.metadata["layers"] = "[0]"; }},
      {"descending", [](Parts& p) { p.metadata["layers"] = "[2,0]"; }},
      {"no JSON", [](Parts& p) { p.metadata["layers"] = "0,2"; }},
      {"fractions", [](Parts& p) { p.metadata["layers"] = "[0,1.5]"; }},
      {"no top_k", [](Parts& p) { p.metadata.erase("top_k"); }},
      {"top_k 0", [](Parts& p) { p.metadata["top_k"] = "0"; }},
      {"top_k 2", [](Parts& p) { p.metadata["top_k"] = "2"; }},
      {"top_k 9", [](Parts& p) { p.metadata["top_k"] = "9"; }},
      {"one label", [](Parts& p) { p.metadata["domains"] = R"(["a"])"; }},
      {"labels of numbers", [](Parts& p) { p.metadata["domains"] = "[1,2]"; }},
      {"prefill row", [](Parts& p) { p.prefill[0] = 3; }},
      {"decode row", [](Parts& p) { p.decode[0] = 2; }},
      {"tokens", [](Parts& p) { p.prompt_tokens[1] = 3; }},
      {"no prompt", [](Parts& p) { p.prompt_tokens[1] = 0; }},
      {"another N", [](Parts& p) { p.prompt_tokens.push_back(1); }},
      {"another N in decode", [](Parts& p) { p.decode_tokens.pop_back(); }},
      {"other dimensions", [](Parts& p) { p.dims = {2, 3, 2}; }},
      {"two dimensions", [](Parts& p) { p.dims = {4, 3}; }},
      {"no requests",
       [](Parts& p) {
         p.dims = {0, 2, 3};
         p.prefill.clear();
         p.decode.clear();
         p.prompt_tokens.clear();
         p.decode_tokens.clear();
         p.metadata["domains"] = "[]";
       }},
  };
  for (const auto& [what, change] : changes) {
    Parts parts;
    change(parts);
    const auto got = activations_from_bytes(parts.bytes());
    ASSERT_FALSE(got.ok()) << what;
    EXPECT_EQ(got.error().code, ErrorCode::kInvalid) << what;
    EXPECT_FALSE(got.error().message.empty());
  }
}

TEST(Activations, RowErrorNamesRequestAndLayer) {
  Parts parts;
  parts.prefill[9] = 1;
  parts.prefill[10] = 0;
  const auto got = activations_from_bytes(parts.bytes());
  ASSERT_FALSE(got.ok());
  EXPECT_NE(got.error().message.find("request 1, layer 2"), std::string::npos) << got.error().message;
}

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

TEST(Activations, GateSumsAreReadAndChecked) {
  Parts parts;
  parts.gate = {2.5F, 1, 0.5F, 1, 2, 1, /**/ 0.25F, 0.25F, 1.5F, 2, 0, 0};
  const auto got = activations_from_bytes(parts.bytes());
  ASSERT_TRUE(got.ok()) << got.error().message;
  EXPECT_TRUE(got->has_gates());
  EXPECT_EQ(got->gate(1)[2], 1.5F);
  EXPECT_EQ(got->profile(1).gate[2], 1.5F);
  const auto without = activations_from_bytes(Parts().bytes());
  EXPECT_FALSE(without->has_gates());
  EXPECT_TRUE(without->profile(0).gate.empty());

  for (const float bad : {kNan, -0.1F, std::numeric_limits<float>::infinity(), 2.1F}) {
    Parts bent = parts;
    bent.gate[9] = bad;
    const auto refused = activations_from_bytes(bent.bytes());
    ASSERT_FALSE(refused.ok()) << bad;
    EXPECT_EQ(refused.error().field, "prefill_gate");
    EXPECT_NE(refused.error().message.find("request 1, layer 2"), std::string::npos) << refused.error().message;
    EXPECT_NE(refused.error().message.find("0 to 2"), std::string::npos) << refused.error().message;
  }
  parts.gate_dims = {2, 3, 2};
  const auto shape = activations_from_bytes(parts.bytes());
  ASSERT_FALSE(shape.ok());
  EXPECT_NE(shape.error().message.find("[2, 3, 2]"), std::string::npos) << shape.error().message;
}

TEST(Activations, AllCountsZeroInALayerNamesIt) {
  Parts parts;
  std::fill_n(parts.prefill.begin() + 9, 3, 0U);
  const auto got = activations_from_bytes(parts.bytes());
  ASSERT_FALSE(got.ok());
  EXPECT_NE(got.error().message.find("request 1, layer 2: the counts sum to 0"), std::string::npos)
      << got.error().message;
}

TEST(Activations, SavesAndLoads) {
  const TemporaryFile file;
  const Activations made = made_up_activations(9, 3, 1, true);
  ASSERT_TRUE(save_activations(made, file.path()).ok());
  const auto back = load_activations(file.path());
  ASSERT_TRUE(back.ok()) << back.error().message;
  EXPECT_EQ(back->prefill_counts, made.prefill_counts);
  EXPECT_EQ(back->decode_counts, made.decode_counts);
  EXPECT_EQ(back->prefill_gate, made.prefill_gate);
  EXPECT_EQ(back->prompt_tokens, made.prompt_tokens);
  EXPECT_EQ(back->decode_tokens, made.decode_tokens);
  EXPECT_EQ(back->domains, made.domains);
  EXPECT_EQ(back->shape, made.shape);
  EXPECT_EQ(back->model, made.model);
}

TEST(Activations, ErrorsNameTheFile) {
  const TemporaryFile file;
  ASSERT_TRUE(write_file(file.path(), "not a file of ours").ok());
  const auto got = load_activations(file.path());
  ASSERT_FALSE(got.ok());
  EXPECT_TRUE(got.error().message.starts_with(file.path())) << got.error().message;
  EXPECT_FALSE(save_activations(Activations{}, file.path()).ok());
}

TEST(Activations, AppendRefusesWhatDiffersAndKeepsWhatWas) {
  Rng rng(1);
  const ExpertShape shape{.layers = {0, 1}, .experts = 8, .top_k = 2};
  const ExpertCounts counts = made_up_counts(shape, 0, 12, rng);
  Activations out;
  ASSERT_TRUE(out.append(counts, nullptr, "code").ok());
  EXPECT_FALSE(out.append(counts, &counts, "code").ok());  // decode counts only for some
  EXPECT_FALSE(out.append(counts, nullptr, "").ok());      // labels only for some
  ExpertShape other = shape;
  other.layers = {0, 2};
  EXPECT_FALSE(out.append(made_up_counts(other, 0, 12, rng), nullptr, "code").ok());
  ExpertCounts bent = counts;
  ++bent.tokens;
  EXPECT_FALSE(out.append(bent, nullptr, "code").ok());
  EXPECT_FALSE(out.append(ExpertCounts(shape), nullptr, "code").ok());  // no tokens
  const std::vector<float> gate(shape.cells(), 1.0F);
  EXPECT_FALSE(out.append(counts, nullptr, "code", gate).ok());  // gates only for some
  ASSERT_TRUE(out.append(counts, nullptr, "math").ok());
  EXPECT_EQ(out.requests(), 2U);
  EXPECT_TRUE(out.check().ok());
}

TEST(Activations, AppendTakesGatesForAllOrNone) {
  Rng rng(1);
  const ExpertShape shape{.layers = {0, 1}, .experts = 8, .top_k = 2};
  const ExpertCounts counts = made_up_counts(shape, 0, 12, rng);
  std::vector<float> gate(shape.cells(), 1.5F);
  Activations out;
  ASSERT_TRUE(out.append(counts, nullptr, "code", gate).ok());
  EXPECT_FALSE(out.append(counts, nullptr, "code").ok());
  EXPECT_FALSE(out.append(counts, nullptr, "code", std::span(gate).first(8)).ok());
  gate[11] = kNan;
  const Status refused = out.append(counts, nullptr, "code", gate);
  ASSERT_FALSE(refused.ok());
  EXPECT_NE(refused.error().message.find("request 1, layer 1"), std::string::npos) << refused.error().message;
  gate[11] = 12;
  ASSERT_TRUE(out.append(counts, nullptr, "math", gate).ok());
  EXPECT_EQ(out.prefill_gate.size(), 2 * shape.cells());
  EXPECT_TRUE(out.check().ok());
  out.prefill_gate.pop_back();
  EXPECT_FALSE(out.check().ok());
}

}  // namespace
}  // namespace kindred::expert

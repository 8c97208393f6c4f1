// Test only: models with expert ranks, and a scripted schedule of batches whose logits can be compared bit by bit.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "engine/expert_ranks.h"
#include "engine/llama_session.h"
#include "engine/model.h"
#include "engine/test_support.h"
#include "engine/widen.h"

namespace kindred::engine::test {

inline std::string rank_temp_path(const std::string& name) {
  return (std::filesystem::temp_directory_path() / (name + "-" + std::to_string(getpid()))).string();
}

// The bundled model with experts in F16.
inline const std::string& f16_model_path() {
  struct TempModel {
    std::string path = rank_temp_path("kindred-ranks-f16.gguf");
    TempModel() {
      const auto made = widen_gguf(model_path(), path, {.factor = 1, .type = "f16"});
      if (!made) ADD_FAILURE() << made.error().message;
    }
    ~TempModel() { std::filesystem::remove(path); }
  };
  static const TempModel model;
  return model.path;
}

inline std::unique_ptr<Model> load_with_ranks(const std::string& path, uint32_t ranks, uint32_t threads = 1) {
  auto model = Model::load(path, {}, {.ranks = ranks, .threads = threads * ranks});
  if (!model) {
    ADD_FAILURE() << model.error().message;
    return nullptr;
  }
  return std::move(*model);
}

inline std::unique_ptr<LlamaSession> rank_session(const Model& model, bool capture = false, uint32_t threads = 1) {
  auto session = LlamaSession::open(
      model, {.kv_tokens = 1024, .batch_tokens = 64, .sequences = 8, .threads = threads, .capture_experts = capture});
  if (!session) {
    ADD_FAILURE() << session.error().message;
    return nullptr;
  }
  return std::move(*session);
}

// Three prompts in chunks, then `steps` decode steps of all three with fixed tokens. Returns all logits.
// `between` is called before each batch with its number, `after` when it has been evaluated.
inline std::vector<float> run_schedule(LlamaSession& session, uint32_t steps,
                                       const std::function<void(uint32_t)>& between = {}, uint64_t seed = 5,
                                       const std::function<void()>& after = {}) {
  constexpr uint32_t kSequences = 3, kPrompt = 40, kChunk = 24;
  std::vector<float> out;
  Rng rng(seed);
  uint32_t batch = 0;
  const auto token = [&] { return static_cast<Token>(rng.below(4000) + 10); };
  const auto evaluate = [&](const std::vector<uint32_t>& wanted) {
    if (between) between(batch);
    ++batch;
    const Status done = session.evaluate();
    EXPECT_TRUE(done.ok()) << done.error().message;
    if (after) after();
    for (const uint32_t index : wanted) {
      const auto logits = session.logits(index);
      out.insert(out.end(), logits.begin(), logits.end());
    }
  };
  for (uint32_t s = 0; s < kSequences; ++s) {
    for (uint32_t begin = 0; begin < kPrompt; begin += kChunk) {
      session.begin();
      std::vector<uint32_t> wanted;
      for (uint32_t i = begin; i < std::min(begin + kChunk, kPrompt); ++i) {
        const uint32_t index = session.add(token(), i, static_cast<SequenceId>(s), i + 1 == kPrompt);
        if (i + 1 == kPrompt) wanted.push_back(index);
      }
      evaluate(wanted);
    }
  }
  for (uint32_t step = 0; step < steps; ++step) {
    session.begin();
    std::vector<uint32_t> wanted;
    for (uint32_t s = 0; s < kSequences; ++s) {
      wanted.push_back(session.add(token(), kPrompt + step, static_cast<SequenceId>(s), true));
    }
    evaluate(wanted);
  }
  for (uint32_t s = 0; s < kSequences; ++s) session.remove(static_cast<SequenceId>(s), 0);
  return out;
}

inline bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

}  // namespace kindred::engine::test

// llama.cpp's own batched loop, as its batched bench has it: llama_decode over one token of each sequence,
// logits for all, no sampling, no capture. The tokens are given, so that it does the same work as what it
// is compared with.
//
// Thread-safety: none.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/result.h"
#include "cli/bench.h"
#include "engine/model.h"

struct llama_context;

namespace kindred::cli {

// Each has what the ones above it have, so that a difference can be attributed.
enum class LlamaSettings {
  kStock,      // llama.cpp's defaults: K and V in f16, flash attention where it chooses, a stream per sequence
  kOneStream,  // one stream for all sequences, without which prefixes cannot be shared
  kManyIds,    // 256 sequence ids, as cached prefixes need: llama.cpp compares all pairs of ids in each step
  kKindred,    // K f16, V bf16 (CPU), flash attention: as engine/llama_session.cpp
};

class LlamaLoop {
 public:
  struct Options {
    LlamaSettings settings = LlamaSettings::kStock;
    uint32_t kv_tokens = 0;  // of all sequences together
    uint32_t sequences = 1;
    uint32_t threads = 1;
    TimeBy time = TimeBy::kWall;
  };

  // `model` must outlive it. Error: kExhausted.
  static Result<std::unique_ptr<LlamaLoop>> open(const engine::Model& model, const Options& options);

  // Occupies `tokens` cells with sequences that no run uses (ids from options.sequences on), as a full
  // prefix cache does. kKindred only.
  Status fill(uint32_t tokens);

  // Evaluates the prompts, then `steps` batches of one token each: tokens[i][0], tokens[i][1], … Returns the
  // seconds of the latter. `agreed`, if not null, gets the share of steps whose most likely next token is
  // the one given (computing it is part of the time, so leave it out when timing).
  Result<double> run(std::span<const std::vector<engine::Token>> prompts,
                     std::span<const std::vector<engine::Token>> tokens, uint32_t steps, double* agreed = nullptr);

 private:
  LlamaLoop(const engine::Model& model, const Options& options) : model_(model), options_(options) {}
  Status decode();
  void add(engine::Token token, uint32_t position, int32_t sequence, bool logits);

  const engine::Model& model_;
  Options options_;
  struct FreeContext {
    void operator()(llama_context* context) const;
  };
  std::unique_ptr<llama_context, FreeContext> context_;
  std::vector<engine::Token> tokens_;
  std::vector<int32_t> positions_, sequences_;
  std::vector<int8_t> logits_;
};

// Processor features that llama.cpp was built for and found: "AVX2 = 1 | …".
std::string llama_features();

}  // namespace kindred::cli

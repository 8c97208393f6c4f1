// A GGUF model: weights, vocabulary, chat template, and what it says about its experts.
//
// Thread-safety: immutable after load, but for where experts are (ranks()); all methods may be called from any thread.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "engine/expert_ranks_options.h"
#include "engine/types.h"
#include "expert/counts.h"

struct llama_model;

namespace kindred::engine {

class ExpertRanks;

struct ModelInfo {
  std::string path;
  std::string name;          // general.name, or the file's stem
  std::string architecture;  // "qwen3moe"
  std::string description;   // llama.cpp's: type, size, quantisation
  // What must agree between the two ends of a handoff: architecture, quantisation, KV geometry, size,
  // and a hash of the GGUF's metadata and tensor table. 16 hex digits.
  std::string fingerprint;
  uint32_t context_tokens = 0;  // trained
  uint32_t layers = 0;
  uint32_t vocabulary = 0;
  uint64_t size_bytes = 0;
  // The layers whose experts are captured: all MoE layers but the model's last one, whose rows exist
  // only for tokens with logits. Empty shape (experts == 0): not an MoE model.
  expert::ExpertShape experts;
  bool partial_removal = true;  // false for recurrent and hybrid models: no prefix cache
};

class Model {
 public:
  // Errors: kNotFound (no such file), kCorrupt (not a GGUF, truncated, tensors missing), kInvalid; with expert
  // ranks also those of ExpertRanks::prepare. `progress` is called with 0..1.
  static Result<std::unique_ptr<Model>> load(const std::string& path, const std::function<void(float)>& progress = {},
                                             const ExpertRanksOptions& ranks = {});
  ~Model();

  const ModelInfo& info() const { return info_; }
  llama_model* handle() const { return handle_; }
  ExpertRanks* ranks() const { return ranks_.get(); }  // null: the experts are llama.cpp's

  // `special`: whether text such as <|im_end|> becomes one control token (true only for template output).
  std::vector<Token> tokenize(std::string_view text, bool special) const;
  // The token's bytes; control tokens give none unless `special`.
  std::string piece(Token token, bool special = false) const;
  std::string detokenize(std::span<const Token> tokens, bool special = false) const;
  bool is_end(Token token) const;  // end of generation

  // The chat template's source, from the GGUF; ChatML if it has none.
  std::string chat_template() const;
  std::string bos_text() const;
  std::string eos_text() const;

 private:
  Model();
  std::unique_ptr<ExpertRanks> ranks_;  // outlives the handle
  llama_model* handle_ = nullptr;
  ModelInfo info_;
};

}  // namespace kindred::engine

// One llama.cpp context behind an interface without exceptions: batches, logits, KV of sequences.
//
// Thread-safety: none; belongs to the engine's thread after open().
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "base/result.h"
#include "engine/expert_capture.h"
#include "engine/kv_blob.h"
#include "engine/llama_backend.h"
#include "engine/model.h"
#include "engine/prefix_cache.h"
#include "engine/types.h"

struct llama_context;

namespace kindred::engine {

class LlamaSession final : public KvStore {
 public:
  struct Options {
    uint32_t kv_tokens = 0;
    uint32_t batch_tokens = 0;
    uint32_t sequences = 0;  // ids 0..sequences-1; at most 256
    uint32_t threads = 1;
    bool capture_experts = true;
  };

  // `model` must outlive the session. Errors: kInvalid, kExhausted (no memory).
  static Result<std::unique_ptr<LlamaSession>> open(const Model& model, const Options& options);
  ~LlamaSession() override;

  // A batch: begin, add up to batch_tokens, evaluate. add returns the token's index in the batch.
  void begin();
  uint32_t add(Token token, uint32_t position, SequenceId sequence, bool logits);
  uint32_t batch_size() const { return static_cast<uint32_t>(tokens_.size()); }
  // kExhausted: no free cells, nothing happened. Other errors: the batch's sequences are in an unknown
  // state and must be removed.
  // `gates`: the capture takes the gates' probabilities too.
  Status evaluate(bool gates = false);
  // Valid until the next evaluate. `index`: of a token added with logits.
  std::span<const float> logits(uint32_t index) const;
  // The experts of the last batch; null if not captured or damaged.
  const ExpertCapture* experts() const;
  bool captures() const { return capture_.has_value(); }

  void copy(SequenceId from, SequenceId to, uint32_t begin, uint32_t end) override;
  void remove(SequenceId sequence, uint32_t begin) override;
  void copy_all(SequenceId from, SequenceId to);

  Result<Bytes> save(SequenceId sequence) const;
  // Untrusted bytes. On error (kCorrupt, kExhausted) the sequence is empty.
  Status restore(SequenceId sequence, std::span<const uint8_t> bytes, uint32_t tokens);

  const KvLayout& layout() const { return layout_; }

 private:
  LlamaSession(const Model& model, const Options& options);
  Status learn_layout();

  const Model& model_;
  Options options_;
  std::optional<ExpertCapture> capture_;
  ComputePool pool_;  // with expert ranks, which cut a graph in parts; outlives the context
  struct FreeContext {
    void operator()(llama_context* context) const;
  };
  std::unique_ptr<llama_context, FreeContext> context_;
  KvLayout layout_;
  // The batch, as llama.cpp's struct of arrays.
  std::vector<Token> tokens_;
  std::vector<int32_t> positions_;
  std::vector<SequenceId> sequences_;
  std::vector<SequenceId*> sequence_lists_;
  std::vector<int32_t> sequence_counts_;
  std::vector<int8_t> wants_logits_;
};

}  // namespace kindred::engine

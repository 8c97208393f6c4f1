#include "engine/llama_session.h"

#include <fmt/format.h>
#include <llama.h>

#include <exception>

#include "engine/expert_ranks.h"
#include "engine/llama_backend.h"

namespace kindred::engine {
namespace {

// What KV must have in common on both ends of a handoff (see kv_class).
//
// With flash attention llama.cpp's CPU kernel goes through the cells of a sequence one by one and skips all
// others. With values in bf16 it accumulates in f32 and never switches to its tiled variant (which f16 gets
// from 64 tokens on, and f32 too, being cast to f16 first). Then logits do not depend, to the last bit, on
// what else is in the cache, in the batch, or how a prompt is cut into chunks; only on the order of the
// sequence's own cells. GPU kernels want keys and values of one type and accumulate in f32 anyway.
void set_kv_class(llama_context_params& params) {
  params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;
  params.type_k = GGML_TYPE_F16;
  params.type_v = has_gpu() ? GGML_TYPE_F16 : GGML_TYPE_BF16;
  params.kv_unified = true;  // cells of a prefix can be shared only within one stream
  params.swa_full = true;    // prefixes of sliding-window models stay whole
}

}  // namespace

void LlamaSession::FreeContext::operator()(llama_context* context) const { llama_free(context); }

LlamaSession::LlamaSession(const Model& model, const Options& options) : model_(model), options_(options) {
  if (options.capture_experts && model.info().experts.experts > 0) {
    capture_.emplace(model.info().experts, options.batch_tokens);
  }
}

LlamaSession::~LlamaSession() = default;

Result<std::unique_ptr<LlamaSession>> LlamaSession::open(const Model& model, const Options& options) {
  init_llama();
  if (options.sequences > llama_max_parallel_sequences()) {
    return invalid(
        fmt::format("{} sequences; llama.cpp has at most {}", options.sequences, llama_max_parallel_sequences()),
        "sequences");
  }
  auto session = std::unique_ptr<LlamaSession>(new LlamaSession(model, options));
  llama_context_params params = llama_context_default_params();
  params.n_ctx = options.kv_tokens;
  params.n_batch = options.batch_tokens;
  params.n_ubatch = options.batch_tokens;
  params.n_seq_max = options.sequences;
  params.n_outputs_max = options.sequences;  // one per sequence; the default reserves batch x vocabulary
  params.n_outputs_max_per_seq = 1;
  params.n_threads = static_cast<int32_t>(options.threads);
  params.n_threads_batch = static_cast<int32_t>(options.threads);  // any batch of two tokens uses this one
  params.no_perf = true;
  set_kv_class(params);
  if (session->capture_) {
    params.cb_eval = ExpertCapture::on_tensor;
    params.cb_eval_user_data = &*session->capture_;
  }
  const LlamaErrors errors;
  try {
    session->context_.reset(llama_init_from_model(model.handle(), params));
  } catch (const std::exception& e) {
    return Error{ErrorCode::kExhausted, fmt::format("llama.cpp: {}", e.what())};
  }
  if (!session->context_) {
    return Error{ErrorCode::kExhausted,
                 fmt::format("no context of {} KV tokens: {}", options.kv_tokens, errors.text())};
  }
  if (model.ranks() != nullptr) {
    session->pool_ = make_compute_pool(options.threads);
    llama_attach_threadpool(session->context_.get(), session->pool_.get(), session->pool_.get());
  }
  if (auto learned = session->learn_layout(); !learned) return std::move(learned).error();
  return session;
}

Status LlamaSession::learn_layout() {
  constexpr uint32_t kTokens = 2;
  begin();
  for (uint32_t i = 0; i < kTokens; ++i) add(0, i, 0, i + 1 == kTokens);
  if (auto done = evaluate(); !done) return done;
  auto blob = save(0);
  if (!blob) return std::move(blob).error();
  layout_ = learn_kv_layout(*blob, kTokens);
  remove(0, 0);
  return {};
}

void LlamaSession::begin() {
  tokens_.clear();
  positions_.clear();
  sequences_.clear();
  wants_logits_.clear();
}

uint32_t LlamaSession::add(Token token, uint32_t position, SequenceId sequence, bool logits) {
  tokens_.push_back(token);
  positions_.push_back(static_cast<int32_t>(position));
  sequences_.push_back(sequence);
  wants_logits_.push_back(logits ? 1 : 0);
  return static_cast<uint32_t>(tokens_.size() - 1);
}

Status LlamaSession::evaluate(bool gates) {
  KINDRED_CHECK(!tokens_.empty() && tokens_.size() <= options_.batch_tokens);
  sequence_counts_.assign(tokens_.size(), 1);
  sequence_lists_.resize(tokens_.size());
  for (size_t i = 0; i < tokens_.size(); ++i) sequence_lists_[i] = &sequences_[i];
  llama_batch batch{};
  batch.n_tokens = static_cast<int32_t>(tokens_.size());
  batch.token = tokens_.data();
  batch.pos = positions_.data();
  batch.n_seq_id = sequence_counts_.data();
  batch.seq_id = sequence_lists_.data();
  batch.logits = wants_logits_.data();
  if (capture_) capture_->begin(batch_size(), gates);
  const ExpertRanks::Step step(model_.ranks());
  int32_t result = 0;
  try {
    result = llama_decode(context_.get(), batch);
  } catch (const std::exception& e) {
    return Error{ErrorCode::kInternal, fmt::format("llama.cpp: {}", e.what())};
  }
  if (result == 0) return {};
  if (result == 1) return Error{ErrorCode::kExhausted, "no free KV cells for the batch"};
  return Error{ErrorCode::kInternal, fmt::format("llama.cpp could not evaluate the batch (status {})", result)};
}

std::span<const float> LlamaSession::logits(uint32_t index) const {
  const float* values = llama_get_logits_ith(context_.get(), static_cast<int32_t>(index));
  if (values == nullptr) return {};
  return {values, model_.info().vocabulary};
}

const ExpertCapture* LlamaSession::experts() const { return capture_ && capture_->complete() ? &*capture_ : nullptr; }

void LlamaSession::copy(SequenceId from, SequenceId to, uint32_t begin, uint32_t end) {
  llama_memory_seq_cp(llama_get_memory(context_.get()), from, to, static_cast<int32_t>(begin),
                      static_cast<int32_t>(end));
}

void LlamaSession::remove(SequenceId sequence, uint32_t begin) {
  // From 0: all of it, which recurrent models can do too.
  const int32_t from = begin == 0 ? -1 : static_cast<int32_t>(begin);
  llama_memory_seq_rm(llama_get_memory(context_.get()), sequence, from, -1);
}

void LlamaSession::copy_all(SequenceId from, SequenceId to) {
  llama_memory_seq_cp(llama_get_memory(context_.get()), from, to, -1, -1);
}

Result<Bytes> LlamaSession::save(SequenceId sequence) const {
  const size_t size = llama_state_seq_get_size(context_.get(), sequence);
  Bytes bytes(size);
  const size_t written = llama_state_seq_get_data(context_.get(), bytes.data(), bytes.size(), sequence);
  if (size == 0 || written != size) return Error{ErrorCode::kInternal, "llama.cpp could not serialise KV"};
  return bytes;
}

Status LlamaSession::restore(SequenceId sequence, std::span<const uint8_t> bytes, uint32_t tokens) {
  if (auto checked = check_kv_blob(bytes, layout_, tokens); !checked) return checked;
  const llama_memory_t memory = llama_get_memory(context_.get());
  size_t read = 0;
  try {
    read = llama_state_seq_set_data(context_.get(), bytes.data(), bytes.size(), sequence);
  } catch (const std::exception&) {
    read = 0;
  }
  // Of a sliding window only the last positions travel.
  const bool from_start = !layout_.known || llama_memory_seq_pos_min(memory, sequence) == 0;
  const bool whole = read == bytes.size() && from_start &&
                     llama_memory_seq_pos_max(memory, sequence) == static_cast<int32_t>(tokens) - 1;
  if (whole) return {};
  remove(sequence, 0);
  return Error{ErrorCode::kCorrupt, "KV blob: llama.cpp refused it"};
}

}  // namespace kindred::engine

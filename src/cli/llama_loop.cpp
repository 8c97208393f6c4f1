#include "cli/llama_loop.h"

#include <fmt/format.h>
#include <llama.h>

#include <algorithm>
#include <exception>

#include "engine/llama_backend.h"

namespace kindred::cli {
namespace {

constexpr uint32_t kFillerTokens = 480;  // of one filling sequence
constexpr uint32_t kMostSequences = 256;

}  // namespace

void LlamaLoop::FreeContext::operator()(llama_context* context) const { llama_free(context); }

Result<std::unique_ptr<LlamaLoop>> LlamaLoop::open(const engine::Model& model, const Options& options) {
  engine::init_llama();
  auto loop = std::unique_ptr<LlamaLoop>(new LlamaLoop(model, options));
  llama_context_params params = llama_context_default_params();
  params.n_ctx = options.kv_tokens;
  params.n_seq_max = options.sequences;
  params.n_threads = static_cast<int32_t>(options.threads);
  params.n_threads_batch = static_cast<int32_t>(options.threads);
  params.kv_unified = options.settings != LlamaSettings::kStock;
  if (options.settings >= LlamaSettings::kManyIds) params.n_seq_max = kMostSequences;
  if (options.settings == LlamaSettings::kKindred) {
    params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;
    params.type_k = GGML_TYPE_F16;
    params.type_v = engine::has_gpu() ? GGML_TYPE_F16 : GGML_TYPE_BF16;
  }
  try {
    loop->context_.reset(llama_init_from_model(model.handle(), params));
  } catch (const std::exception& e) {
    return Error{ErrorCode::kExhausted, fmt::format("llama.cpp: {}", e.what())};
  }
  if (!loop->context_) return Error{ErrorCode::kExhausted, "llama.cpp made no context"};
  return loop;
}

void LlamaLoop::add(engine::Token token, uint32_t position, int32_t sequence, bool logits) {
  tokens_.push_back(token);
  positions_.push_back(static_cast<int32_t>(position));
  sequences_.push_back(sequence);
  logits_.push_back(logits ? 1 : 0);
}

Status LlamaLoop::decode() {
  std::vector<int32_t> counts(tokens_.size(), 1);
  std::vector<int32_t*> lists(tokens_.size());
  for (size_t i = 0; i < lists.size(); ++i) lists[i] = &sequences_[i];
  llama_batch batch{};
  batch.n_tokens = static_cast<int32_t>(tokens_.size());
  batch.token = tokens_.data();
  batch.pos = positions_.data();
  batch.n_seq_id = counts.data();
  batch.seq_id = lists.data();
  batch.logits = logits_.data();
  int32_t result = 0;
  try {
    result = llama_decode(context_.get(), batch);
  } catch (const std::exception& e) {
    return Error{ErrorCode::kInternal, fmt::format("llama.cpp: {}", e.what())};
  }
  tokens_.clear();
  positions_.clear();
  sequences_.clear();
  logits_.clear();
  if (result == 0) return {};
  return Error{ErrorCode::kInternal, fmt::format("llama.cpp could not evaluate the batch (status {})", result)};
}

Status LlamaLoop::fill(uint32_t tokens) {
  for (auto sequence = static_cast<int32_t>(options_.sequences); tokens > 0; ++sequence) {
    if (sequence >= static_cast<int32_t>(kMostSequences)) return invalid("too many tokens to fill", "kv_tokens");
    const uint32_t length = std::min(tokens, kFillerTokens);
    for (uint32_t i = 0; i < length; ++i) {
      const auto token = (static_cast<uint32_t>(sequence) * 7919 + i * 31) % model_.info().vocabulary;
      add(static_cast<engine::Token>(token), i, sequence, i + 1 == length);
    }
    if (Status done = decode(); !done) return done;
    tokens -= length;
  }
  return {};
}

Result<double> LlamaLoop::run(std::span<const std::vector<engine::Token>> prompts,
                              std::span<const std::vector<engine::Token>> tokens, uint32_t steps, double* agreed) {
  for (size_t s = 0; s < prompts.size(); ++s) {
    for (uint32_t i = 0; i < prompts[s].size(); ++i) {
      add(prompts[s][i], i, static_cast<int32_t>(s), i + 1 == prompts[s].size());
    }
    if (Status done = decode(); !done) return std::move(done).error();
  }
  llama_synchronize(context_.get());
  size_t agree = 0;
  Status failed;
  const double begin_s = time_now_s(options_.time);
  for (uint32_t k = 0; k < steps && failed.ok(); ++k) {
    for (size_t s = 0; s < prompts.size(); ++s) {
      add(tokens[s][k], static_cast<uint32_t>(prompts[s].size()) + k, static_cast<int32_t>(s), true);
    }
    failed = decode();
    if (!failed.ok()) break;
    llama_synchronize(context_.get());
    for (size_t s = 0; agreed != nullptr && s < prompts.size(); ++s) {
      const float* logits = llama_get_logits_ith(context_.get(), static_cast<int32_t>(s));
      const auto best = std::max_element(logits, logits + model_.info().vocabulary) - logits;
      agree += best == tokens[s][k + 1] ? 1 : 0;
    }
  }
  const double took_s = time_now_s(options_.time) - begin_s;
  for (size_t s = 0; s < prompts.size(); ++s) {
    llama_memory_seq_rm(llama_get_memory(context_.get()), static_cast<int32_t>(s), -1, -1);
  }
  if (!failed.ok()) return std::move(failed).error();
  if (agreed != nullptr) *agreed = static_cast<double>(agree) / static_cast<double>(steps * prompts.size());
  return took_s;
}

std::string llama_features() { return llama_print_system_info(); }

}  // namespace kindred::cli

#include "engine/model.h"

#include <fmt/format.h>
#include <llama.h>

#include <array>
#include <exception>

#include "engine/expert_ranks.h"
#include "engine/gguf_file.h"
#include "engine/llama_backend.h"

namespace kindred::engine {
namespace {

constexpr std::string_view kChatMl =
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + "
    "'\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";

bool report_progress(float progress, void* callback) {
  const auto& report = *static_cast<const std::function<void(float)>*>(callback);
  if (report) report(progress);
  return true;
}

std::string describe(const llama_model* model) {
  std::array<char, 256> text{};
  llama_model_desc(model, text.data(), text.size());
  return text.data();
}

std::string special_text(const llama_model* model, llama_token token) {
  if (token == LLAMA_TOKEN_NULL) return {};
  const char* text = llama_vocab_get_text(llama_model_get_vocab(model), token);
  return text == nullptr ? std::string() : std::string(text);
}

}  // namespace

Result<std::unique_ptr<Model>> Model::load(const std::string& path, const std::function<void(float)>& progress,
                                           const ExpertRanksOptions& ranks) {
  auto summary = inspect_gguf(path);
  if (!summary) return std::move(summary).error();

  llama_model_params params = llama_model_default_params();
  std::function<void(float)> report = progress;
  params.progress_callback = report_progress;
  params.progress_callback_user_data = &report;
  auto model = std::unique_ptr<Model>(new Model());
  std::array<llama_model_tensor_buft_override, 2> overrides{};  // the last one is empty
  if (ranks.ranks > 0) {
    auto prepared = ExpertRanks::prepare(path, ranks);
    if (!prepared) return std::move(prepared).error();
    model->ranks_ = std::move(*prepared);
    overrides[0] = {ExpertRanks::kWeightsPattern, model->ranks_->buffer_type()};
    params.tensor_buft_overrides = overrides.data();
  }
  const LlamaErrors errors;
  try {
    model->handle_ = llama_model_load_from_file(path.c_str(), params);
  } catch (const std::exception& e) {
    return Error{ErrorCode::kCorrupt, fmt::format("{}: {}", path, e.what())};
  }
  if (model->handle_ == nullptr) {
    return Error{ErrorCode::kCorrupt, fmt::format("{}: llama.cpp cannot load it: {}", path, errors.text())};
  }
  if (model->ranks_) {
    if (Status loaded = model->ranks_->finish_load(); !loaded) return loaded.error();
  }
  if (llama_model_has_encoder(model->handle_) || !llama_model_has_decoder(model->handle_) ||
      llama_model_is_diffusion(model->handle_)) {
    return invalid(
        fmt::format("{}: only decoder-only models can be served, this is '{}'", path, summary->architecture));
  }
  const llama_vocab* vocab = llama_model_get_vocab(model->handle_);
  if (llama_vocab_n_tokens(vocab) <= 0 || llama_vocab_type(vocab) == LLAMA_VOCAB_TYPE_NONE) {
    return invalid(fmt::format("{}: the model has no vocabulary", path));
  }

  ModelInfo& info = model->info_;
  info.path = path;
  info.name = std::move(summary->name);
  info.architecture = std::move(summary->architecture);
  info.description = describe(model->handle_);
  info.fingerprint = std::move(summary->fingerprint);
  info.context_tokens = static_cast<uint32_t>(llama_model_n_ctx_train(model->handle_));
  info.layers = static_cast<uint32_t>(llama_model_n_layer(model->handle_));
  info.vocabulary = static_cast<uint32_t>(llama_vocab_n_tokens(vocab));
  info.size_bytes = llama_model_size(model->handle_);
  info.partial_removal = !llama_model_is_recurrent(model->handle_) && !llama_model_is_hybrid(model->handle_);
  // llama.cpp reorders the tokens of a batch for recurrent models, so captured rows could not be told apart.
  if (info.partial_removal) info.experts = std::move(summary->experts);
  return model;
}

Model::Model() = default;

Model::~Model() {
  if (handle_ != nullptr) llama_model_free(handle_);
}

std::vector<Token> Model::tokenize(std::string_view text, bool special) const {
  const llama_vocab* vocab = llama_model_get_vocab(handle_);
  // llama.cpp takes an int32 length. No tokeniser gives more tokens than bytes (and what it adds itself).
  const auto length = static_cast<int32_t>(std::min<size_t>(text.size(), INT32_MAX - 16));
  std::vector<Token> tokens(static_cast<size_t>(length) + 16);
  // A template that writes the BOS token itself must not get a second one.
  const std::string bos = bos_text();
  const bool add_special = !(special && !bos.empty() && text.starts_with(bos));
  const auto run = [&] {
    return llama_tokenize(vocab, text.data(), length, tokens.data(), static_cast<int32_t>(tokens.size()), add_special,
                          special);
  };
  int32_t count = run();
  if (count < 0 && count != INT32_MIN) {
    tokens.resize(static_cast<size_t>(-static_cast<int64_t>(count)));
    count = run();
  }
  tokens.resize(count < 0 ? 0 : static_cast<size_t>(count));
  return tokens;
}

std::string Model::piece(Token token, bool special) const {
  if (token < 0 || static_cast<uint32_t>(token) >= info_.vocabulary) return {};
  const llama_vocab* vocab = llama_model_get_vocab(handle_);
  std::string text(64, '\0');
  int32_t length = llama_token_to_piece(vocab, token, text.data(), static_cast<int32_t>(text.size()), 0, special);
  if (length < 0) {
    text.resize(static_cast<size_t>(-length));
    length = llama_token_to_piece(vocab, token, text.data(), static_cast<int32_t>(text.size()), 0, special);
  }
  text.resize(length < 0 ? 0 : static_cast<size_t>(length));
  return text;
}

std::string Model::detokenize(std::span<const Token> tokens, bool special) const {
  std::string text;
  for (const Token token : tokens) text += piece(token, special);
  return text;
}

bool Model::is_end(Token token) const { return llama_vocab_is_eog(llama_model_get_vocab(handle_), token); }

std::string Model::chat_template() const {
  const char* source = llama_model_chat_template(handle_, nullptr);
  return source == nullptr ? std::string(kChatMl) : std::string(source);
}

std::string Model::bos_text() const { return special_text(handle_, llama_vocab_bos(llama_model_get_vocab(handle_))); }

std::string Model::eos_text() const { return special_text(handle_, llama_vocab_eos(llama_model_get_vocab(handle_))); }

}  // namespace kindred::engine

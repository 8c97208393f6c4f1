#include "engine/openai_render.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <iterator>

#include "base/bytes.h"

namespace kindred::engine {
namespace {

void append_ids(std::span<const Token> ids, std::string& out) {
  out += '[';
  for (size_t i = 0; i < ids.size(); ++i) fmt::format_to(std::back_inserter(out), "{}{}", i ? "," : "", ids[i]);
  out += ']';
}

void append_token_ids(std::span<const TokenRecord> tokens, std::string& out) {
  out += '[';
  for (size_t i = 0; i < tokens.size(); ++i)
    fmt::format_to(std::back_inserter(out), "{}{}", i ? "," : "", tokens[i].token);
  out += ']';
}

// Characters, as OpenAI counts text_offset. Every byte that begins one counts.
size_t characters(std::string_view text) {
  return static_cast<size_t>(
      std::count_if(text.begin(), text.end(), [](char c) { return (static_cast<uint8_t>(c) & 0xC0) != 0x80; }));
}

std::string_view finish_text(FinishReason reason) {
  switch (reason) {
    case FinishReason::kStop: return "\"stop\"";
    case FinishReason::kLength: return "\"length\"";
    // A cancelled response ends as an error, never as a finish reason.
    case FinishReason::kNone:
    case FinishReason::kCancelled: break;
  }
  return "null";
}

void append_chat_token(std::string_view piece, float logprob, std::string& out) {
  out += R"({"token":)";
  append_json_string(out, piece);
  out += R"(,"logprob":)" + logprob_text(logprob) + R"(,"bytes":[)";
  for (size_t i = 0; i < piece.size(); ++i)
    fmt::format_to(std::back_inserter(out), "{}{}", i ? "," : "", static_cast<uint8_t>(piece[i]));
  out += ']';
}

}  // namespace

std::string logprob_text(float logprob) { return fmt::format("{}", std::isfinite(logprob) ? logprob : kLeastLogprob); }

std::string usage_json(const Usage& usage) {
  return fmt::format(R"({{"prompt_tokens":{},"completion_tokens":{},"total_tokens":{},)"
                     R"("prompt_tokens_details":{{"cached_tokens":{}}}}})",
                     usage.prompt_tokens, usage.completion_tokens,
                     uint64_t{usage.prompt_tokens} + usage.completion_tokens, usage.cached_tokens);
}

std::string error_event(std::string_view error_json) { return fmt::format("data: {}\n\n", error_json); }

ResponseRenderer::ResponseRenderer(const GenerationRequest& request, ResponseMeta meta, PieceOf piece_of,
                                   std::span<const Token> prompt)
    : api_(request.api),
      stream_(request.stream),
      include_usage_(request.include_usage),
      token_ids_(request.return_token_ids),
      counts_(request.return_expert_counts),
      gates_(request.return_expert_gates),
      logprobs_(request.sampling.logprobs),
      meta_(std::move(meta)),
      piece_of_(std::move(piece_of)),
      choices_(request.n),
      text_offsets_(request.n, 0),
      prompt_sent_(request.n, false) {
  if (token_ids_) prompt_.assign(prompt.begin(), prompt.end());
}

std::string_view ResponseRenderer::content_type() const { return stream_ ? "text/event-stream" : "application/json"; }

bool ResponseRenderer::all_finished() const {
  return std::all_of(choices_.begin(), choices_.end(),
                     [](const ChoiceProgress& choice) { return choice.finish != FinishReason::kNone; });
}

uint32_t ResponseRenderer::completion_tokens() const {
  size_t sum = 0;
  for (const ChoiceProgress& choice : choices_) sum += choice.tokens.size();
  return static_cast<uint32_t>(sum);
}

void ResponseRenderer::resume(std::vector<ChoiceProgress> progress) {
  KINDRED_CHECK(progress.size() == choices_.size());
  choices_ = std::move(progress);
  begun_ = true;
  prompt_sent_.assign(choices_.size(), true);
  if (!wants_logprobs()) return;
  for (size_t i = 0; i < choices_.size(); ++i) {
    for (const TokenRecord& token : choices_[i].tokens) text_offsets_[i] += characters(piece_of_(token.token));
  }
}

void ResponseRenderer::open_event(std::string& out) const {
  if (stream_) out += "data: ";
  const std::string_view object = api_ == Api::kCompletions ? "text_completion"
                                  : stream_                 ? "chat.completion.chunk"
                                                            : "chat.completion";
  out += R"({"id":)";
  append_json_string(out, meta_.id);
  fmt::format_to(std::back_inserter(out), R"(,"object":"{}","created":{},"model":)", object, meta_.created);
  append_json_string(out, meta_.model);
  out += R"(,"system_fingerprint":)";
  append_json_string(out, meta_.fingerprint);
}

void ResponseRenderer::close_event(std::string& out) const { out += stream_ ? "}\n\n" : "}"; }

// Chat streams begin with an event per choice that holds the role.
void ResponseRenderer::begin(std::string& out) {
  if (std::exchange(begun_, true) || !stream_ || api_ != Api::kChat) return;
  for (size_t i = 0; i < choices_.size(); ++i) {
    open_event(out);
    if (token_ids_ && i == 0) {
      out += R"(,"prompt_token_ids":)";
      append_ids(prompt_, out);
    }
    fmt::format_to(std::back_inserter(out),
                   R"(,"choices":[{{"index":{},"delta":{{"role":"assistant","content":""}},"logprobs":null,)"
                   R"("finish_reason":null}}])",
                   i);
    if (include_usage_) out += R"(,"usage":null)";
    close_event(out);
  }
}

void ResponseRenderer::delta(uint32_t choice, std::string_view text, const TokenRecord* token, FinishReason finish,
                             std::string& out) {
  open_event(out);
  fmt::format_to(std::back_inserter(out), R"(,"choices":[{{"index":{})", choice);
  if (api_ == Api::kChat) {
    out += R"(,"delta":{)";
    // The closing event of a chat has an empty delta, unless held-back text comes with it.
    if (finish == FinishReason::kNone || !text.empty()) {
      out += R"("content":)";
      append_json_string(out, text);
    }
    out += '}';
  } else {
    out += R"(,"text":)";
    append_json_string(out, text);
  }
  out += R"(,"logprobs":)";
  if (token && wants_logprobs()) {
    append_logprobs({token, 1}, text_offsets_[choice], out);
    text_offsets_[choice] += characters(piece_of_(token->token));
  } else {
    out += "null";
  }
  fmt::format_to(std::back_inserter(out), R"(,"finish_reason":{})", finish_text(finish));
  if (token_ids_) {
    out += R"(,"token_ids":)";
    append_token_ids({token, token ? 1U : 0U}, out);
    if (api_ == Api::kCompletions && !prompt_sent_[choice]) {
      prompt_sent_[choice] = true;
      out += R"(,"prompt_token_ids":)";
      append_ids(prompt_, out);
    }
  }
  out += "}]";
  if (include_usage_) out += R"(,"usage":null)";
  close_event(out);
}

void ResponseRenderer::output(const Output& output, std::string& out) {
  KINDRED_CHECK(output.choice < choices_.size());
  begin(out);
  ChoiceProgress& choice = choices_[output.choice];
  choice.tokens.push_back({output.token, output.logprob, output.top});
  if (!stream_) {
    choice.text += output.text;
    return;
  }
  if (!output.text.empty() || wants_logprobs() || token_ids_)
    delta(output.choice, output.text, &choice.tokens.back(), FinishReason::kNone, out);
}

void ResponseRenderer::choice_end(uint32_t index, FinishReason reason, std::string_view text, std::string& out) {
  KINDRED_CHECK(index < choices_.size());
  begin(out);
  ChoiceProgress& choice = choices_[index];
  if (choice.finish != FinishReason::kNone) return;
  choice.finish = reason;
  if (stream_) {
    delta(index, text, nullptr, reason, out);
  } else {
    choice.text += text;
  }
}

void ResponseRenderer::append_chat_logprobs(std::span<const TokenRecord> tokens, std::string& out) const {
  out += R"({"content":[)";
  for (size_t i = 0; i < tokens.size(); ++i) {
    if (i > 0) out += ',';
    append_chat_token(piece_of_(tokens[i].token), tokens[i].logprob, out);
    out += R"(,"top_logprobs":[)";
    for (size_t t = 0; t < tokens[i].top.size(); ++t) {
      if (t > 0) out += ',';
      append_chat_token(piece_of_(tokens[i].top[t].token), tokens[i].top[t].logprob, out);
      out += '}';
    }
    out += "]}";
  }
  out += "]}";
}

void ResponseRenderer::append_logprobs(std::span<const TokenRecord> tokens, size_t text_offset,
                                       std::string& out) const {
  if (api_ == Api::kChat) return append_chat_logprobs(tokens, out);
  std::string texts, logprobs, tops, offsets;
  for (const TokenRecord& token : tokens) {
    const std::string_view comma = texts.empty() ? "" : ",";
    const std::string piece = piece_of_(token.token);
    texts += comma;
    append_json_string(texts, piece);
    logprobs += fmt::format("{}{}", comma, logprob_text(token.logprob));
    offsets += fmt::format("{}{}", comma, text_offset);
    text_offset += characters(piece);
    tops += comma;
    if (logprobs_ == 0) {
      tops += "null";
      continue;
    }
    tops += '{';
    for (size_t t = 0; t < token.top.size(); ++t) {
      if (t > 0) tops += ',';
      append_json_string(tops, piece_of_(token.top[t].token));
      tops += ':' + logprob_text(token.top[t].logprob);
    }
    tops += '}';
  }
  fmt::format_to(std::back_inserter(out),
                 R"({{"tokens":[{}],"token_logprobs":[{}],"top_logprobs":[{}],"text_offset":[{}]}})", texts, logprobs,
                 tops, offsets);
}

void ResponseRenderer::body_choice(uint32_t index, std::string& out) const {
  const ChoiceProgress& choice = choices_[index];
  fmt::format_to(std::back_inserter(out), R"({{"index":{})", index);
  if (api_ == Api::kChat) {
    out += R"(,"message":{"role":"assistant","content":)";
    append_json_string(out, choice.text);
    out += '}';
  } else {
    out += R"(,"text":)";
    append_json_string(out, choice.text);
  }
  out += R"(,"logprobs":)";
  if (wants_logprobs()) {
    append_logprobs(choice.tokens, 0, out);
  } else {
    out += "null";
  }
  fmt::format_to(std::back_inserter(out), R"(,"finish_reason":{})", finish_text(choice.finish));
  if (token_ids_) {
    out += R"(,"token_ids":)";
    append_token_ids(choice.tokens, out);
    if (api_ == Api::kCompletions) {
      out += R"(,"prompt_token_ids":)";
      append_ids(prompt_, out);
    }
  }
  out += '}';
}

void ResponseRenderer::append_tail(const ResponseTail& tail, std::string& out) const {
  if (!stream_ || include_usage_) out += R"(,"usage":)" + usage_json(tail.usage);
  if (gates_ && tail.gates) out += R"(,"expert_gates":)" + expert::gates_to_json(*tail.gates);
  if (!counts_) return;
  if (tail.counts)
    out += R"(,"expert_counts":)" + expert::counts_to_json(*tail.counts, tail.suffix ? &*tail.suffix : nullptr);
  if (tail.decode_counts) out += R"(,"decode_expert_counts":)" + expert::counts_to_json(*tail.decode_counts);
}

void ResponseRenderer::finish(const ResponseTail& tail, std::string& out) {
  if (!stream_) {
    open_event(out);
    if (token_ids_ && api_ == Api::kChat) {
      out += R"(,"prompt_token_ids":)";
      append_ids(prompt_, out);
    }
    out += R"(,"choices":[)";
    for (uint32_t i = 0; i < choices_.size(); ++i) {
      if (i > 0) out += ',';
      body_choice(i, out);
    }
    out += ']';
    append_tail(tail, out);
    close_event(out);
    return;
  }
  begin(out);
  if (include_usage_ || (counts_ && (tail.counts || tail.decode_counts)) || (gates_ && tail.gates)) {
    open_event(out);
    out += R"(,"choices":[])";
    append_tail(tail, out);
    close_event(out);
  }
  out += "data: [DONE]\n\n";
}

}  // namespace kindred::engine

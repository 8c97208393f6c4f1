#include "live/render.h"

#include <fmt/format.h>

#include "base/bytes.h"
#include "live/prompt.h"

namespace kindred::live {

Renderer::Renderer(const LiveRequest& request, AnswerMeta meta) : request_(request), meta_(std::move(meta)) {
  begin_ = fmt::format("data: {{\"id\":{},\"object\":\"{}\",\"created\":{},\"model\":{},\"choices\":[",
                       json_string(meta_.id), request.chat ? "chat.completion.chunk" : "text_completion", meta_.created,
                       json_string(meta_.model));
}

// `delta`: the choice's text or delta as a JSON member; `finish`: JSON.
void Renderer::event(std::string_view delta, std::string_view finish, std::string& out) const {
  out += begin_;
  out += R"({"index":0,)";
  out += delta;
  out += R"(,"logprobs":null,"finish_reason":)";
  out += finish;
  out += "}]}\n\n";
}

void Renderer::token(uint32_t position, std::string& out) const {
  if (position == 0 && request_.chat) event(R"("delta":{"role":"assistant","content":""})", "null", out);
  const std::string text = json_string(answer_word(request_.hash, position));
  event(request_.chat ? fmt::format(R"("delta":{{"content":{}}})", text) : fmt::format(R"("text":{})", text), "null",
        out);
}

Json Renderer::usage(const AnswerEnd& end) const {
  return {{"prompt_tokens", request_.prompt_tokens()},
          {"completion_tokens", request_.output_tokens},
          {"total_tokens", request_.prompt_tokens() + request_.output_tokens},
          {"prompt_tokens_details", {{"cached_tokens", end.cached_tokens}}}};
}

void Renderer::end(const AnswerEnd& end, std::string& out) const {
  event(request_.chat ? R"("delta":{})" : R"("text":"")", json_string(finish_reason()), out);
  if (request_.include_usage || !end.counts.empty()) {
    out += begin_;
    out += "]";
    if (request_.include_usage) out += ",\"usage\":" + dump_json(usage(end));
    if (!end.counts.empty()) out += ",\"expert_counts\":" + end.counts;
    out += "}\n\n";
  }
  out += "data: [DONE]\n\n";
}

std::string Renderer::whole(const AnswerEnd& end) const {
  std::string text;
  for (uint32_t i = 0; i < request_.output_tokens; ++i) text += answer_word(request_.hash, i);
  Json choice = {{"index", 0}, {"logprobs", nullptr}, {"finish_reason", finish_reason()}};
  if (request_.chat) choice["message"] = {{"role", "assistant"}, {"content", std::move(text)}};
  else choice["text"] = std::move(text);
  Json body = {{"id", meta_.id},
               {"object", request_.chat ? "chat.completion" : "text_completion"},
               {"created", meta_.created},
               {"model", meta_.model},
               {"choices", {std::move(choice)}},
               {"usage", usage(end)}};
  if (!end.transfer.is_null()) body["kv_transfer_params"] = end.transfer;
  if (!end.counts.empty()) body["expert_counts"] = parse_json(end.counts);
  return dump_json(body);
}

std::string Renderer::error_event(const ApiFailure& failure) { return "data: " + failure_body(failure) + "\n\n"; }

}  // namespace kindred::live

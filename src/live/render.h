// Answers in OpenAI's form: server-sent events or one body.
//
// Thread-safety: none; one per request.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "live/request.h"

namespace kindred::live {

struct AnswerMeta {
  std::string id;
  int64_t created = 0;
  std::string model;
};

struct AnswerEnd {
  uint32_t cached_tokens = 0;
  Json transfer = {};       // kv_transfer_params of a prefill leg (vLLM), or null
  std::string counts = {};  // expert_counts, JSON, or empty
};

class Renderer {
 public:
  Renderer(const LiveRequest& request, AnswerMeta meta);

  std::string_view content_type() const { return request_.stream ? "text/event-stream" : "application/json"; }
  const AnswerMeta& meta() const { return meta_; }
  // Streaming. `position` 0 brings the event with the role, too.
  void token(uint32_t position, std::string& out) const;
  void end(const AnswerEnd& end, std::string& out) const;  // up to data: [DONE]
  // Not streaming.
  std::string whole(const AnswerEnd& end) const;

  static std::string error_event(const ApiFailure& failure);

 private:
  void event(std::string_view delta, std::string_view finish, std::string& out) const;
  Json usage(const AnswerEnd& end) const;
  std::string_view finish_reason() const { return request_.limited ? "length" : "stop"; }

  const LiveRequest& request_;  // outlives this
  AnswerMeta meta_;
  std::string begin_;  // of each event
};

}  // namespace kindred::live

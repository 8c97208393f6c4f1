#include "picker/conversation.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <utility>

namespace kindred::picker {
namespace {

ToProxy plain(Part part) { return {.part = part}; }

int status_in(const net::Headers& headers) {
  int status = 0;
  const std::string_view* text = headers.find(":status");
  if (text != nullptr) std::from_chars(text->data(), text->data() + text->size(), status);
  return status;
}

void add_pieces(std::string_view body, bool ends, std::vector<ToProxy>& out) {
  do {
    ToProxy piece = {.part = Part::kRequestBody, .streamed = true};
    piece.body = body.substr(0, kPieceBytes);
    body.remove_prefix(piece.body.size());
    piece.end_of_stream = ends && body.empty();
    out.push_back(std::move(piece));
  } while (!body.empty());
}

}  // namespace

Conversation::Step Conversation::on(FromProxy message) {
  if (message.observing) return {.event = Event::kLetGo};
  switch (message.part) {
    case Part::kRequestHeaders: return request_headers(std::move(message));
    case Part::kRequestBody: return request_body(std::move(message));
    case Part::kRequestTrailers:
      if (state_ == State::kSent) return {.replies = {plain(Part::kRequestTrailers)}};
      if (state_ == State::kRefused) return {};
      if (state_ != State::kBody) return {.event = Event::kBroken};
      has_trailers_ = true;
      state_ = State::kChoosing;
      return {.event = Event::kChoose};
    case Part::kResponseHeaders: return response_headers(message);
    case Part::kResponseBody: return response_body(std::move(message));
    case Part::kResponseTrailers: {
      Step step = {.replies = {plain(Part::kResponseTrailers)}};
      if (!std::exchange(ended_, true)) step.event = Event::kEnded;
      return step;
    }
    case Part::kImmediate: break;
  }
  return {.event = Event::kBroken};
}

Conversation::Step Conversation::request_headers(FromProxy message) {
  if (state_ != State::kFresh) return {.event = Event::kBroken};
  headers_ = std::move(message.headers);
  subset_ = std::move(message.subset);
  request_mode_ = message.request_mode.value_or(BodyMode::kFullDuplex);
  response_mode_ = message.response_mode.value_or(BodyMode::kFullDuplex);
  has_body_ = !message.end_of_stream;
  state_ = State::kBody;
  if (has_body_ && holds_back()) return {};
  if (has_body_ && request_mode_ == BodyMode::kBuffered) return {.replies = {plain(Part::kRequestHeaders)}};
  state_ = State::kChoosing;
  return {.event = Event::kChoose};
}

Conversation::Step Conversation::too_long() {
  const Error error{ErrorCode::kTooLarge, fmt::format("the body has more than {} bytes", body_bytes_)};
  return {.replies = refuse(router::api_error(error))};
}

Conversation::Step Conversation::request_body(FromProxy message) {
  if (state_ == State::kRefused) return {};
  // Of the modes in which the choice came first.
  if (state_ == State::kSent) return {.replies = {plain(Part::kRequestBody)}};
  if (state_ != State::kBody) return {.event = Event::kBroken};
  if (message.body.size() > body_bytes_ - body_.size()) return too_long();
  if (body_.empty()) body_ = std::move(message.body);
  else body_ += message.body;
  if (!message.end_of_stream && holds_back()) return {};
  state_ = State::kChoosing;
  return {.event = Event::kChoose};
}

std::vector<ToProxy> Conversation::chosen(Picked picked) {
  state_ = State::kSent;
  const bool buffered = has_body_ && request_mode_ == BodyMode::kBuffered;
  ToProxy head = {.part = buffered ? Part::kRequestBody : Part::kRequestHeaders,
                  .set = std::move(picked.set),
                  .remove = std::move(picked.remove),
                  .endpoint = picked.endpoint};
  head.set.add(kEndpointHeader, picked.endpoint);
  if (buffered && picked.changed) {
    head.replaced = true;
    head.body = std::move(picked.body);
    head.set.add("content-length", fmt::to_string(head.body.size()));
  }
  std::vector<ToProxy> out;
  if (!has_body_ || !holds_back()) {
    out.push_back(std::move(head));
    return out;
  }
  // The proxy has dropped what the client said; a worker is better off with a length than with chunks.
  head.set.add("content-length", fmt::to_string(picked.body.size()));
  out.push_back(std::move(head));
  add_pieces(picked.body, !has_trailers_, out);
  if (has_trailers_) out.push_back(plain(Part::kRequestTrailers));
  return out;
}

std::vector<ToProxy> Conversation::refuse(const router::ApiError& error) {
  state_ = State::kRefused;
  ToProxy out = {.part = Part::kImmediate, .status = error.shed ? 429 : error.status};
  out.set.add("content-type", "application/json");
  if (error.retry_after_s > 0) out.set.add("retry-after", fmt::to_string(error.retry_after_s));
  out.body = router::error_json(error);
  out.details = fmt::format("kindred_{}", error.code);
  body_ = {};
  std::vector<ToProxy> list;
  list.push_back(std::move(out));
  return list;
}

Conversation::Step Conversation::response_headers(const FromProxy& message) {
  // May come while the request is still being sent: a proxy can answer by itself.
  if (status_ != 0 || ended_) return {.event = Event::kBroken};
  status_ = std::max(status_in(message.headers), 1);
  served_ = message.served;
  ended_ = message.end_of_stream;
  Step step = {.event = ended_ ? Event::kEnded : Event::kAnswered};
  step.replies.push_back(plain(Part::kResponseHeaders));
  return step;
}

Conversation::Step Conversation::response_body(FromProxy message) {
  if (ended_) return {.event = Event::kBroken};
  ended_ = message.end_of_stream;
  Step step = {.event = ended_ ? Event::kEnded : Event::kProgress};
  ToProxy piece = {.part = Part::kResponseBody};
  if (response_mode_ == BodyMode::kFullDuplex) {
    piece.streamed = true;
    piece.body = std::move(message.body);
    piece.end_of_stream = message.end_of_stream;
  }
  step.replies.push_back(std::move(piece));
  return step;
}

}  // namespace kindred::picker

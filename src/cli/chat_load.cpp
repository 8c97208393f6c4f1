#include "cli/chat_load.h"

#include <fmt/format.h>

#include <algorithm>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/steady_timer.hpp>
#include <charconv>
#include <chrono>
#include <cmath>
#include <exception>

#include "base/bytes.h"
#include "base/clock.h"
#include "base/json.h"
#include "net/http_client.h"
#include "net/sse.h"

namespace kindred::cli {
namespace {

constexpr size_t kErrorBodyBytes = 64 * 1024;

std::string chat_body(const ChatCall& call, const std::string& model) {
  Json body = {{"messages", Json::array({{{"role", "user"}, {"content", call.prompt}}})},
               {"max_tokens", call.max_tokens},
               {"temperature", call.temperature},
               {"seed", call.seed},
               {"stream", true},
               {"stream_options", {{"include_usage", true}}}};
  if (!model.empty()) body["model"] = model;
  if (call.ignore_eos) body["ignore_eos"] = true;
  if (!call.prefix_cache) body["cache_prompt"] = false;
  if (call.expert_counts) body["return_expert_counts"] = true;
  if (call.expert_gates) body["return_expert_gates"] = true;
  return dump_json(body);
}

std::string error_message(const Json& object) {
  const auto error = object.find("error");
  if (error != object.end() && error->is_object()) return error->value("message", dump_json(*error));
  return dump_json(object);
}

Status read_counts(const Json& event, const char* key, std::optional<expert::ExpertCounts>& into) {
  const auto found = event.find(key);
  if (found == event.end() || !found->is_object()) return {};
  Result<expert::ExpertCounts> counts = expert::counts_from_json(dump_json(*found));
  if (!counts) return std::move(counts).error();
  into = std::move(*counts);
  return {};
}

// One event of the stream. The status is an error for an error event or one that makes no sense.
Status read_event(const std::string& data, ChatAnswer& answer) {
  const Json event = parse_json(data);
  if (!event.is_object()) return Error{ErrorCode::kCorrupt, "an event is not a JSON object"};
  if (event.contains("error")) return Error{ErrorCode::kUnavailable, error_message(event)};
  if (const auto choices = event.find("choices"); choices != event.end() && choices->is_array() && !choices->empty()) {
    const Json& choice = (*choices)[0];
    if (const auto delta = choice.find("delta"); delta != choice.end() && delta->is_object()) {
      if (const auto content = delta->find("content"); content != delta->end() && content->is_string()) {
        answer.text += content->get_ref<const std::string&>();
      }
    }
    if (const auto reason = choice.find("finish_reason"); reason != choice.end() && reason->is_string()) {
      answer.finish_reason = reason->get<std::string>();
    }
  }
  if (const auto usage = event.find("usage"); usage != event.end() && usage->is_object()) {
    answer.prompt_tokens = usage->value("prompt_tokens", 0U);
    answer.completion_tokens = usage->value("completion_tokens", 0U);
  }
  if (const auto found = event.find("expert_gates"); found != event.end() && found->is_object()) {
    Result<expert::ExpertGates> gates = expert::gates_from_json(dump_json(*found));
    if (!gates) return std::move(gates).error();
    answer.gates = std::move(*gates);
  }
  if (Status read = read_counts(event, "expert_counts", answer.prompt_counts); !read) return read;
  return read_counts(event, "decode_expert_counts", answer.decode_counts);
}

net::Task<Status> read_stream(net::ClientResponse& response, const Clock& clock, MonotonicTime sent,
                              ChatAnswer& answer) {
  net::SseSplitter splitter;
  for (;;) {
    Result<std::string_view> bytes = co_await response.read_some();
    if (!bytes) co_return std::move(bytes).error();
    if (bytes->empty()) co_return Error{ErrorCode::kCorrupt, "the stream ended without [DONE]"};
    if (!splitter.feed(*bytes)) co_return Error{ErrorCode::kTooLarge, "an event of the stream is too large"};
    while (const std::optional<std::string> data = splitter.next()) {
      if (*data == "[DONE]") co_return Status{};
      answer.total_s = seconds_between(sent, clock.now());
      if (answer.ttft_s == 0) answer.ttft_s = answer.total_s;
      if (Status read = read_event(*data, answer); !read) co_return read;
    }
  }
}

net::Task<void> run_one(net::HttpClient& client, const net::Endpoint& server, const ChatCall& call,
                        const std::string& model, ChatAnswer& answer) {
  const SystemClock clock;
  net::RequestHead head;
  head.method = "POST";
  head.target = "/v1/chat/completions";
  head.headers.add("Content-Type", "application/json");
  if (!call.id.empty()) head.headers.add("X-Request-Id", call.id);
  if (!call.domain.empty()) head.headers.add("X-Kindred-Domain", call.domain);
  const std::string body = chat_body(call, model);
  const std::string_view parts[] = {body};
  const MonotonicTime sent = clock.now();

  auto response = co_await client.send(server, std::move(head), parts, net::CancelToken{});
  if (!response) {
    answer.status = std::move(response).error();
    co_return;
  }
  if ((*response)->head().status != 200) {
    const Result<std::string> text = co_await (*response)->read_all(kErrorBodyBytes);
    const Json object = text ? parse_json(*text) : Json();
    const std::string why = object.is_object() ? error_message(object) : text ? *text : text.error().message;
    answer.status = Error{ErrorCode::kUnavailable, fmt::format("HTTP {}: {}", (*response)->head().status, why)};
    co_return;
  }
  answer.status = co_await read_stream(**response, clock, sent, answer);
  // The last chunk, so that the connection can be used again.
  if (answer.status.ok()) (void)co_await (*response)->read_all(kErrorBodyBytes);
}

struct Load {
  net::asio::io_context& io;
  net::HttpClient& client;
  const net::Endpoint& server;
  std::span<const ChatCall> calls;
  const LoadOptions& options;
  std::vector<ChatAnswer> answers;
  size_t next = 0;
};

net::Task<void> run_lane(Load& load) {
  while (load.next < load.calls.size()) {
    const size_t index = load.next++;
    co_await run_one(load.client, load.server, load.calls[index], load.options.model, load.answers[index]);
    if (load.options.on_answer) load.options.on_answer(index, load.answers[index]);
  }
}

net::Task<void> run_arrival(Load& load, size_t index) {
  net::asio::steady_timer timer(load.io.get_executor());
  timer.expires_after(std::chrono::duration_cast<std::chrono::steady_clock::duration>(
      std::chrono::duration<double>(load.options.arrivals_s[index])));
  co_await timer.async_wait(net::kNoThrow);
  co_await run_one(load.client, load.server, load.calls[index], load.options.model, load.answers[index]);
  if (load.options.on_answer) load.options.on_answer(index, load.answers[index]);
}

net::Task<void> fetch_one(net::HttpClient& client, const net::Endpoint& server, const std::string& target,
                          const std::string& post_body, Result<std::string>& result) {
  net::RequestHead head;
  head.method = post_body.empty() ? "GET" : "POST";
  head.target = target;
  if (!post_body.empty()) head.headers.add("Content-Type", "application/json");
  const std::string_view parts[] = {post_body};
  net::RequestDeadlines deadlines;
  deadlines.head_ms = deadlines.read_ms = std::chrono::seconds(10);
  auto response = co_await client.send(server, std::move(head), parts, net::CancelToken{}, deadlines);
  if (!response) {
    result = std::move(response).error();
    co_return;
  }
  result = co_await (*response)->read_all(16 * 1024 * 1024);
  const int status = (*response)->head().status;
  if (result && (status < 200 || status > 299)) {
    result = Error{ErrorCode::kUnavailable, fmt::format("{}{}: HTTP {}", server.url(), target, status)};
  }
}

}  // namespace

std::vector<ChatAnswer> run_chats(const net::Endpoint& server, std::span<const ChatCall> calls,
                                  const LoadOptions& options) {
  if (calls.empty()) return {};
  const bool open = !options.arrivals_s.empty();
  KINDRED_CHECK(!open || options.arrivals_s.size() == calls.size());
  net::asio::io_context io(1);
  net::HttpClient client(io.get_executor());
  Load load{io, client, server, calls, options, std::vector<ChatAnswer>(calls.size())};
  size_t lanes = open ? calls.size() : std::max<size_t>(options.concurrency, 1);
  const auto lane_done = [&io, &lanes](const std::exception_ptr&) {
    if (--lanes == 0) io.stop();  // the client's idle connections would keep it running
  };
  const size_t all = lanes;
  for (size_t i = 0; i < all; ++i) {
    net::asio::co_spawn(io, open ? run_arrival(load, i) : run_lane(load), lane_done);
  }
  io.run();
  return std::move(load.answers);
}

Result<std::string> fetch(const net::Endpoint& server, const std::string& target, const std::string& post_body) {
  net::asio::io_context io(1);
  net::HttpClient client(io.get_executor());
  Result<std::string> result = Error{};
  net::asio::co_spawn(io, fetch_one(client, server, target, post_body, result),
                      [&io](const std::exception_ptr&) { io.stop(); });
  io.run();
  return result;
}

double quantile(std::vector<double> values, double q) {
  if (values.empty()) return 0;
  const auto rank = static_cast<size_t>(std::ceil(q * static_cast<double>(values.size())));
  const size_t at = std::min(values.size() - 1, rank == 0 ? 0 : rank - 1);
  std::nth_element(values.begin(), values.begin() + static_cast<ptrdiff_t>(at), values.end());
  return values[at];
}

namespace {

// Calls `visit(labels, value)` for every series named exactly `name`; `labels` is what stands in braces.
void for_each_series(const std::string& metrics, const std::string& name,
                     const std::function<void(std::string_view labels, double value)>& visit) {
  for (size_t at = 0; at < metrics.size();) {
    const size_t end = std::min(metrics.find('\n', at), metrics.size());
    const std::string_view line(metrics.data() + at, end - at);
    at = end + 1;
    if (!line.starts_with(name) || line.size() <= name.size()) continue;
    if (line[name.size()] != ' ' && line[name.size()] != '{') continue;
    const size_t space = line.rfind(' ');
    double value = 0;
    std::from_chars(line.data() + space + 1, line.data() + line.size(), value);
    visit(line.substr(name.size(), space - name.size()), value);
  }
}

}  // namespace

double metric_sum(const std::string& metrics, const std::string& name) {
  double sum = 0;
  for_each_series(metrics, name, [&](std::string_view, double value) { sum += value; });
  return sum;
}

std::map<std::string, double> metric_by_label(const std::string& metrics, const std::string& name,
                                              const std::string& label) {
  std::map<std::string, double> out;
  const std::string key = label + "=\"";
  for_each_series(metrics, name, [&](std::string_view labels, double value) {
    const size_t at = labels.find(key);
    if (at == std::string_view::npos || (labels[at - 1] != '{' && labels[at - 1] != ',')) return;
    const size_t begin = at + key.size();
    out[std::string(labels.substr(begin, labels.find('"', begin) - begin))] += value;
  });
  return out;
}

}  // namespace kindred::cli

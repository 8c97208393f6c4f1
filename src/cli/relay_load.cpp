#include "cli/relay_load.h"

#include <fmt/format.h>

#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/write.hpp>
#include <charconv>
#include <chrono>
#include <span>
#include <string_view>

#include "net/task.h"

namespace kindred::cli {
namespace {

namespace asio = net::asio;
using asio::ip::tcp;
using Clock = std::chrono::steady_clock;

constexpr std::string_view kLastChunk = "\r\n0\r\n\r\n";

double seconds_since(Clock::time_point began) { return std::chrono::duration<double>(Clock::now() - began).count(); }

// Whether the answer is whole. Bodies here never contain what ends a chunked one.
class AnswerEnd {
 public:
  // False: not a 200. Sets `done` at the end.
  bool feed(std::string_view bytes, bool& done) {
    if (!head_done_) {
      head_ += bytes;
      const size_t end = head_.find("\r\n\r\n");
      if (end == std::string::npos) return head_.size() < 65'536;
      if (!head_.starts_with("HTTP/1.1 200")) return false;
      head_done_ = true;
      const std::string body = head_.substr(end + 4);
      head_.resize(end + 2);
      length_left_ = content_length();
      return feed_body(body, done);
    }
    return feed_body(bytes, done);
  }

 private:
  int64_t content_length() const {
    for (const std::string_view name : {"\r\nContent-Length: ", "\r\ncontent-length: "}) {
      const size_t at = head_.find(name);
      if (at == std::string::npos) continue;
      int64_t length = 0;
      std::from_chars(head_.data() + at + name.size(), head_.data() + head_.size(), length);
      return length;
    }
    return -1;  // chunked
  }

  bool feed_body(std::string_view bytes, bool& done) {
    if (length_left_ >= 0) {
      length_left_ -= static_cast<int64_t>(bytes.size());
      done = length_left_ == 0;
      return length_left_ >= 0;
    }
    tail_.append(bytes.substr(bytes.size() - std::min(bytes.size(), kLastChunk.size())));
    if (tail_.size() > kLastChunk.size()) tail_.erase(0, tail_.size() - kLastChunk.size());
    done = tail_ == kLastChunk;
    return true;
  }

  std::string head_, tail_;
  bool head_done_ = false;
  int64_t length_left_ = -1;
};

struct Run {
  const RelayLoad& load;
  uint16_t port;
  asio::io_context context{1};
  asio::steady_timer hold{context};
  size_t sent = 0, streaming = 0;
  bool over = false;
  RelayResult result = {};
  Status status = {};

  void fail(Error error) {
    if (status) status = std::move(error);
    over = true;
    context.stop();
  }

  void first_bytes() {
    if (!load.when_all_stream || ++streaming != load.connections) return;
    load.when_all_stream();
    hold.expires_after(std::chrono::microseconds(static_cast<int64_t>(load.hold_s * 1e6)));
    hold.async_wait([this](const boost::system::error_code&) {
      over = true;
      context.stop();
    });
  }

  net::Task<bool> one(tcp::socket& socket, std::span<char> buffer) {
    const auto began = Clock::now();
    const auto [write_error, written] = co_await asio::async_write(socket, asio::buffer(load.request), net::kNoThrow);
    AnswerEnd end;
    bool done = false, first = true;
    while (!write_error && !done) {
      const auto [error, got] =
          co_await socket.async_read_some(asio::buffer(buffer.data(), buffer.size()), net::kNoThrow);
      if (error || !end.feed({buffer.data(), got}, done)) break;
      result.bytes += got;
      if (first) first_bytes();
      first = false;
    }
    if (over) co_return false;
    if (!done) {
      fail({ErrorCode::kCorrupt, fmt::format("port {}: an answer was cut, or is no 200", port)});
      co_return false;
    }
    result.latency_us.push_back(1e6 * seconds_since(began));
    co_return true;
  }

  net::Task<void> client(tcp::socket socket) {
    std::vector<char> buffer(load.connections > 1024 ? 2048 : 65'536);
    while (!over && sent < load.requests) {
      ++sent;
      const bool go_on = co_await one(socket, buffer);
      if (!go_on) break;
    }
  }

  // One after the other, so that thousands do not overrun the backlog of a listener.
  net::Task<void> connect_all() {
    for (size_t i = 0; i < load.connections && !over; ++i) {
      tcp::socket socket(context);
      const auto [error] = co_await socket.async_connect({asio::ip::address_v4::loopback(), port}, net::kNoThrow);
      if (error) {
        fail({ErrorCode::kUnavailable, fmt::format("cannot connect to port {}: {}", port, error.message())});
        co_return;
      }
      boost::system::error_code ignored;
      socket.set_option(tcp::no_delay(true), ignored);
      asio::co_spawn(context, client(std::move(socket)), asio::detached);
    }
  }
};

}  // namespace

Result<RelayResult> run_relay_load(uint16_t port, const RelayLoad& load) {
  Run run{.load = load, .port = port};
  run.result.latency_us.reserve(load.requests);
  const auto began = Clock::now();
  asio::co_spawn(run.context, run.connect_all(), asio::detached);
  run.context.run();
  if (!run.status) return std::move(run.status).error();
  run.result.wall_s = seconds_since(began);
  return std::move(run.result);
}

std::string chat_request(size_t prompt_bytes, bool stream) {
  constexpr std::string_view kWords = "the quick brown fox jumps over the lazy dog and ";
  std::string prompt;
  while (prompt.size() < prompt_bytes) prompt += kWords;
  prompt.resize(prompt_bytes);
  const std::string body = fmt::format(
      R"({{"model":"m","messages":[{{"role":"user","content":"{}"}}],"max_tokens":256,"temperature":0.7,"stream":{}}})",
      prompt, stream);
  return fmt::format(
      "POST /v1/chat/completions HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\nUser-Agent: bench\r\n"
      "Accept: */*\r\nContent-Length: {}\r\n\r\n{}",
      body.size(), body);
}

}  // namespace kindred::cli

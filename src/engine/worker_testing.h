// Test only: workers on the bundled model in this process, and a client to speak to them.
#pragma once

#include <gtest/gtest.h>

#include <boost/asio/co_spawn.hpp>
#include <boost/asio/executor_work_guard.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/use_future.hpp>
#include <chrono>
#include <future>
#include <map>
#include <memory>
#include <optional>
#include <regex>
#include <string>
#include <thread>

#include "base/clock.h"
#include "base/json.h"
#include "base/metrics.h"
#include "engine/engine_set.h"
#include "engine/memory.h"
#include "engine/model.h"
#include "engine/worker.h"
#include "net/http_client.h"
#include "net/http_server.h"

namespace kindred::engine::testing {

using json = Json;

inline const Model& bundled_model() {
  static const std::unique_ptr<Model> model = [] {
    auto loaded = Model::load(KINDRED_SOURCE_DIR "/models/kindred-tiny-moe-q8_0.gguf");
    if (!loaded) {
      ADD_FAILURE() << loaded.error().message;
      std::abort();
    }
    return std::move(*loaded);
  }();
  return *model;
}

// A thread that runs an io_context.
class Loop {
 public:
  Loop() : guard_(context_.get_executor()), thread_([this] { context_.run(); }) {}
  ~Loop() {
    guard_.reset();
    thread_.join();
  }
  net::asio::any_io_executor executor() { return context_.get_executor(); }

  template <class T>
  T run(net::Task<T> task) {
    auto future = net::asio::co_spawn(context_, std::move(task), net::asio::use_future);
    if (future.wait_for(std::chrono::seconds(120)) != std::future_status::ready) {
      ADD_FAILURE() << "timed out";
      std::abort();
    }
    return future.get();
  }
  void post(std::function<void()> work) {
    run([](std::function<void()> w) -> net::Task<void> {
      w();
      co_return;
    }(std::move(work)));
  }

 private:
  net::asio::io_context context_;
  net::asio::executor_work_guard<net::asio::io_context::executor_type> guard_;
  std::thread thread_;
};

struct Reply {
  int status = 0;
  net::Headers headers;
  std::string body;
  bool cut = false;  // the body broke off

  json parsed() const { return json::parse(body); }
  std::string code() const {
    const json error = json::parse(body)["error"];
    return error["code"].is_null() ? "" : error["code"].get<std::string>();
  }
};

using HeaderList = std::vector<std::pair<std::string, std::string>>;

inline net::Task<Reply> call(net::HttpClient* client, net::Endpoint to, std::string method, std::string target,
                             std::string body, HeaderList headers) {
  net::RequestHead head;
  head.method = std::move(method);
  head.target = std::move(target);
  for (const auto& [name, value] : headers) head.headers.add(name, value);
  const std::string_view view = body;
  const std::span<const std::string_view> parts(&view, 1);
  net::CancelToken never;
  Reply out;
  auto response = co_await client->send(to, std::move(head), parts, never);
  if (!response) {
    ADD_FAILURE() << response.error().message;
    co_return out;
  }
  out.status = (*response)->head().status;
  out.headers = (*response)->head().headers;
  for (;;) {
    const auto piece = co_await (*response)->read_some();
    out.cut = !piece.ok();
    if (!piece || piece->empty()) co_return out;
    out.body += *piece;
  }
}

// One worker with its engine.
class Node {
 public:
  Node(Loop& loop, WorkerOptions options, EngineOptions engine_options = small(), uint32_t engines = 1,
       const Model& model = bundled_model())
      : loop_(loop) {
    options.served_model = "tiny";
    auto started = EngineSet::start(model, engine_options, engines, clock_, metrics_, available_memory_bytes);
    EXPECT_TRUE(started.ok()) << (started.ok() ? "" : started.error().message);
    engines_ = std::move(*started);
    loop_.post([&] {
      client_ = std::make_unique<net::HttpClient>(loop_.executor());
      worker_ = std::make_unique<Worker>(loop_.executor(), std::move(options), clock_, metrics_);
      const auto port = worker_->listen("127.0.0.1", 0);
      EXPECT_TRUE(port.ok());
      endpoint_ = {"127.0.0.1", *port};
      EXPECT_TRUE(worker_->serve(model, engines_.engines()).ok());
    });
  }
  ~Node() {
    loop_.post([&] { client_.reset(); });
    loop_.run(worker_->drain(std::chrono::milliseconds(2000)));
    loop_.post([&] { worker_.reset(); });
  }

  static EngineOptions small() {
    EngineOptions options;
    options.context_tokens = 512;
    options.kv_tokens = 4096;
    options.sequences = 16;
#ifdef __SANITIZE_THREAD__
    // OpenMP is off there, and the threads of ggml that take its place spin at barriers: minutes a test.
    options.threads = 1;
#else
    options.threads = 2;
#endif
    return options;
  }

  Reply request(std::string method, std::string target, std::string body = {}, HeaderList headers = {}) {
    return loop_.run(
        call(client_.get(), endpoint_, std::move(method), std::move(target), std::move(body), std::move(headers)));
  }
  Reply post(std::string target, const json& body, HeaderList headers = {}) {
    return request("POST", std::move(target), body.dump(), std::move(headers));
  }
  Reply get(std::string target) { return request("GET", std::move(target)); }

  // The value of a series of /metrics, by its beginning; NaN if there is none.
  double metric(const std::string& series) {
    const std::string page = get("/metrics").body;
    const size_t at = page.find("\n" + series);
    if (at == std::string::npos) return std::nan("");
    const size_t end = page.find('\n', at + 1);
    const std::string line = page.substr(at + 1, end - at - 1);
    return std::stod(line.substr(line.rfind(' ') + 1));
  }
  // Whether the series has that value within 5 s.
  bool becomes(const std::string& series, double value) {
    for (int i = 0; i < 250; ++i) {
      if (metric(series) == value) return true;
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
    return false;
  }

  const net::Endpoint& endpoint() const { return endpoint_; }
  Loop& loop() { return loop_; }
  net::HttpClient& client() { return *client_; }

 private:
  Loop& loop_;
  SystemClock clock_;
  Registry metrics_;
  EngineSet engines_;
  std::unique_ptr<net::HttpClient> client_;
  std::unique_ptr<Worker> worker_;
  net::Endpoint endpoint_;
};

inline WorkerOptions role(Role role) {
  WorkerOptions options;
  options.role = role;
  return options;
}

// The events of an SSE body, [DONE] left out but required.
inline std::vector<json> events_of(const std::string& body) {
  std::vector<json> out;
  EXPECT_TRUE(body.ends_with("data: [DONE]\n\n")) << body;
  for (size_t at = 0; at < body.size();) {
    const size_t end = body.find("\n\n", at);
    const std::string data = body.substr(at + 6, end - at - 6);
    at = end + 2;
    if (data != "[DONE]") out.push_back(json::parse(data));
  }
  return out;
}

// What may differ between two runs of one request.
inline std::string without_identity(std::string body) {
  body = std::regex_replace(body, std::regex(R"("id":"(chatcmpl|cmpl)-[0-9a-f]{32}")"), R"("id":"-")");
  return std::regex_replace(body, std::regex(R"("created":\d+)"), R"("created":0)");
}

}  // namespace kindred::engine::testing

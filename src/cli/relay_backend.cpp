#include "cli/relay_backend.h"

#include <fmt/format.h>

#include <array>
#include <atomic>
#include <boost/asio/executor_work_guard.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/this_coro.hpp>
#include <future>
#include <mutex>
#include <thread>

#include "base/json.h"
#include "base/role.h"
#include "net/http_server.h"

namespace kindred::cli {
namespace {

namespace asio = net::asio;

constexpr std::string_view kModel = "m";
constexpr std::string_view kFingerprint = "f0";
constexpr uint64_t kPromptTokens = 200;
// As large as a real server's: ids, usage, and the text of a short answer.
constexpr std::string_view kAnswer =
    R"({"id":"chatcmpl-1","object":"chat.completion","created":1,"model":"m","choices":[{"index":0,"message":)"
    R"({"role":"assistant","content":"The answer is forty-two, as everybody who has read the book knows."},)"
    R"("finish_reason":"stop"}],"usage":{"prompt_tokens":200,"completion_tokens":16,"total_tokens":216}})";
constexpr std::string_view kEvent =
    "data: {\"id\":\"chatcmpl-1\",\"object\":\"chat.completion.chunk\",\"created\":1,\"model\":\"m\",\"choices\":"
    "[{\"index\":0,\"delta\":{\"content\":\" token\"},\"finish_reason\":null}]}\n\n";
constexpr std::string_view kDone = "data: [DONE]\n\n";

net::Headers typed(std::string_view type) {
  net::Headers headers;
  headers.add("Content-Type", type);
  return headers;
}

bool wants_stream(std::string_view body) { return body.find("\"stream\":true") != std::string_view::npos; }

// Each row sums to tokens * top_k, as it must.
expert::ExpertCounts spread_counts(const expert::ExpertShape& shape) {
  expert::ExpertCounts counts(shape);
  counts.tokens = kPromptTokens;
  for (size_t l = 0; l < shape.layers.size(); ++l) {
    for (uint64_t i = 0; i < kPromptTokens * shape.top_k; ++i) {
      counts.data[l * shape.experts + (i * 7 + l) % shape.experts] += 1;
    }
  }
  return counts;
}

std::string models_json(const expert::ExpertShape* shape, Role role) {
  Json entry = {{"id", kModel}, {"object", "model"}, {"created", 0}, {"owned_by", "bench"}};
  if (shape != nullptr) {
    entry["kindred"] = {{"v", 1},
                        {"role", to_string(role)},
                        {"fingerprint", kFingerprint},
                        {"layers", shape->layers},
                        {"experts", shape->experts},
                        {"top_k", shape->top_k}};
  }
  return dump_json(Json{{"object", "list"}, {"data", {entry}}});
}

std::string prefill_json(const expert::ExpertShape& shape, bool stream) {
  Json reply = {{"v", 1},
                {"finished", false},
                {"content_type", stream ? "text/event-stream" : "application/json"},
                {"usage", {{"prompt_tokens", kPromptTokens}, {"cached_tokens", 0}, {"completion_tokens", 1}}},
                {"n", 1},
                {"max_tokens", 256},
                {"fingerprint", kFingerprint},
                {"first", stream ? std::string(kEvent) : std::string()},
                {"releases", 256},
                {"lease", {{"id", "l1"}, {"bytes", 1 << 20}, {"hash", "00"}, {"ttl_ms", 30'000}}},
                {"state", {{"seed", 1}}}};
  reply["expert_counts"] = parse_json(expert::counts_to_json(spread_counts(shape)));
  return dump_json(reply);
}

}  // namespace

struct RelayBackend::Impl {
  using Guard = asio::executor_work_guard<asio::io_context::executor_type>;

  Result<uint16_t> serve(Role role, bool kindred) {
    models.push_back(models_json(kindred ? &shape : nullptr, role));
    const size_t at = models.size() - 1;
    net::ServerOptions options;
    options.connections = 65'536;
    servers.push_back(std::make_unique<net::HttpServer>(
        context.get_executor(), options,
        [this, at](net::Request& request, net::ResponseWriter& writer) { return handle(at, request, writer); }));
    return servers.back()->listen("127.0.0.1", 0);
  }

  net::Task<void> handle(size_t at, net::Request& request, net::ResponseWriter& writer) {
    const std::string_view path = request.head.path();
    if (request.head.method == "POST" && path.starts_with("/v1/chat")) {
      const std::string_view* leg = request.head.headers.find("X-Kindred-Leg");
      const bool stream = wants_stream(request.body);
      if (leg != nullptr && *leg == "prefill") {
        co_await writer.send(200, typed("application/vnd.kindred.prefill+json"), prefill[stream ? 1 : 0]);
      } else if (stream) {
        co_await send_stream(writer);
      } else {
        co_await writer.send(200, typed("application/json"), kAnswer);
      }
      co_return;
    }
    if (path == "/v1/models") co_await writer.send(200, typed("application/json"), models[at]);
    else co_await writer.send(path == "/metrics" ? 404 : 200, typed("application/json"), "{}");
  }

  net::Task<void> send_stream(net::ResponseWriter& writer) {
    const BackendOptions now = options();
    bool taken = co_await writer.start(200, typed("text/event-stream"));
    asio::steady_timer timer(co_await asio::this_coro::executor, std::chrono::steady_clock::now());
    for (uint32_t i = 0; taken && i < now.events; ++i) {
      if (now.interval_ms.count() > 0) {
        timer.expires_at(timer.expiry() + now.interval_ms);
        co_await timer.async_wait(net::kNoThrow);
      }
      taken = co_await writer.write(kEvent);
    }
    if (taken) taken = co_await writer.write(kDone);
    if (taken) co_await writer.finish();
  }

  BackendOptions options() {
    const std::lock_guard lock(mutex);
    return options_;
  }

  expert::ExpertShape shape;
  asio::io_context context{1};
  Guard guard{context.get_executor()};
  std::vector<std::unique_ptr<net::HttpServer>> servers;
  std::vector<std::string> models;  // by server
  std::array<std::string, 2> prefill;
  std::vector<uint16_t> ports;
  std::mutex mutex;  // guards options_
  BackendOptions options_;
  std::thread thread;
};

RelayBackend::RelayBackend(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

Result<std::unique_ptr<RelayBackend>> RelayBackend::start(const expert::ExpertShape& shape) {
  auto impl = std::make_unique<Impl>();
  impl->shape = shape;
  impl->prefill = {prefill_json(shape, false), prefill_json(shape, true)};
  for (const auto& [role, kindred] : {std::pair{Role::kBoth, false}, std::pair{Role::kPrefill, true},
                                      std::pair{Role::kDecode, true}, std::pair{Role::kDecode, true}}) {
    Result<uint16_t> port = impl->serve(role, kindred);
    if (!port) return std::move(port).error();
    impl->ports.push_back(*port);
  }
  impl->thread = std::thread([context = &impl->context] { context->run(); });
  return std::unique_ptr<RelayBackend>(new RelayBackend(std::move(impl)));  // the constructor is private
}

RelayBackend::~RelayBackend() {
  impl_->context.stop();
  impl_->thread.join();
}

uint16_t RelayBackend::plain_port() const { return impl_->ports[0]; }
uint16_t RelayBackend::prefill_port() const { return impl_->ports[1]; }
uint16_t RelayBackend::decode_port(size_t index) const { return impl_->ports.at(2 + index); }

void RelayBackend::set(BackendOptions options) {
  const std::lock_guard lock(impl_->mutex);
  impl_->options_ = options;
}

}  // namespace kindred::cli

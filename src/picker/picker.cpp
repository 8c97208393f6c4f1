#include "picker/picker.h"

#include <fmt/format.h>
#include <grpcpp/grpcpp.h>

#include <atomic>
#include <boost/asio/post.hpp>
#include <deque>
#include <mutex>
#include <utility>

#include "base/config.h"
#include "ext_proc.grpc.pb.h"
#include "health.grpc.pb.h"
#include "net/http_message.h"
#include "picker/stream.h"
#include "picker/wire.h"
#include "router/health.h"

namespace kindred::picker {
namespace {

namespace ext_proc = envoy::service::ext_proc::v3;
namespace health = grpc::health::v1;
using ext_proc::ProcessingRequest;
using ext_proc::ProcessingResponse;

constexpr int kPingMs = 30'000, kPingTimeoutMs = 10'000, kLeastPingMs = 5'000;  // of idle connections
constexpr size_t kMessageRoom = 1 << 20;                                        // beside the body: headers, metadata

// A stream's transport. gRPC's callbacks only hand over to the loop. What is started under the mutex is started
// before the end or not at all, so that whoever ends the stream need not be on the loop: it may have stopped.
class Reactor final : public grpc::ServerBidiReactor<ProcessingRequest, ProcessingResponse>,
                      public Transport,
                      public std::enable_shared_from_this<Reactor> {
 public:
  Reactor(router::Loop& loop, std::shared_ptr<std::atomic<size_t>> open) : loop_(loop), open_(std::move(open)) {}

  // gRPC has the pointer until OnDone().
  static Reactor* start(router::CorePtr core, router::Loop& loop, std::shared_ptr<std::atomic<size_t>> open,
                        const StreamLimits& limits) {
    const auto reactor = std::make_shared<Reactor>(loop, std::move(open));
    reactor->self_ = reactor;
    reactor->stream_ = std::make_shared<Stream>(std::move(core), loop, reactor, limits);
    reactor->read();
    return reactor.get();
  }

  void reply(std::vector<ToProxy> replies) override {
    for (ToProxy& one : replies) queue_.push_back(std::move(one));
    next();
  }
  void finish() override { finish_with(grpc::Status::OK); }
  void fail(std::string_view why) override { finish_with({grpc::StatusCode::ABORTED, std::string(why)}); }

  void OnReadDone(bool ok) override {
    on_loop([ok](Reactor& self) {
      if (!ok) return self.leave();
      auto message = read_message(self.in_);
      self.in_.Clear();
      if (message) self.stream_->receive(*std::move(message));
      else self.reply({});
    });
  }
  void OnWriteDone(bool ok) override {
    on_loop([ok](Reactor& self) {
      if (ok) self.next();
      else self.leave();
    });
  }
  void OnCancel() override {
    finish_with(grpc::Status::CANCELLED);
    on_loop([](Reactor& self) { self.stream_->closed(); });
  }
  void OnDone() override {
    --*open_;
    const std::shared_ptr<Reactor> self = std::move(self_);
    // The last of it ends where the rest of it ran.
    net::asio::post(loop_.executor, [self] { self->stream_->closed(); });
  }

 private:
  template <class Work>
  void on_loop(Work work) {
    net::asio::post(loop_.executor, [self = shared_from_this(), work = std::move(work)] { work(*self); });
  }

  void leave() {
    stream_->closed();
    finish();
  }
  void next() {
    if (queue_.empty()) return read();
    const std::lock_guard lock(mutex_);
    if (finished_) return;
    out_ = write_message(std::move(queue_.front()));
    queue_.pop_front();
    StartWrite(&out_);
  }
  void read() {
    const std::lock_guard lock(mutex_);
    if (!finished_) StartRead(&in_);
  }
  void finish_with(grpc::Status status) {
    const std::lock_guard lock(mutex_);
    if (!std::exchange(finished_, true)) Finish(std::move(status));
  }

  router::Loop& loop_;
  const std::shared_ptr<std::atomic<size_t>> open_;
  std::shared_ptr<Reactor> self_;
  std::shared_ptr<Stream> stream_;  // its messages and its queue: the loop's
  std::deque<ToProxy> queue_;
  ProcessingRequest in_;
  ProcessingResponse out_;
  std::mutex mutex_;
  bool finished_ = false;
};

class Processor final : public ext_proc::ExternalProcessor::CallbackService {
 public:
  Processor(router::CorePtr core, size_t streams, StreamLimits limits)
      : core_(std::move(core)), streams_(streams), limits_(limits) {}

  grpc::ServerBidiReactor<ProcessingRequest, ProcessingResponse>* Process(grpc::CallbackServerContext*) override {
    StreamLimits limits = limits_;
    limits.full = open_->fetch_add(1) >= streams_;
    router::Loop& loop = core_->loops[turn_.fetch_add(1) % core_->loops.size()];
    return Reactor::start(core_, loop, open_, limits);
  }

 private:
  const router::CorePtr core_;
  const size_t streams_;
  const StreamLimits limits_;
  const std::shared_ptr<std::atomic<size_t>> open_ = std::make_shared<std::atomic<size_t>>(0);
  std::atomic<size_t> turn_{0};
};

class Health final : public health::Health::CallbackService {
 public:
  explicit Health(router::CorePtr core) : core_(std::move(core)) {}

  grpc::ServerUnaryReactor* Check(grpc::CallbackServerContext* context, const health::HealthCheckRequest* request,
                                  health::HealthCheckResponse* response) override {
    grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
    const std::string& service = request->service();
    const bool lives = service.empty() || service == "liveness";
    if (!lives && service != "readiness" && service != ext_proc::ExternalProcessor::service_full_name()) {
      reactor->Finish({grpc::StatusCode::NOT_FOUND, "no such service"});
      return reactor;
    }
    const bool good = lives || router::unserved_reason(*core_, {}).empty();
    response->set_status(good ? health::HealthCheckResponse::SERVING : health::HealthCheckResponse::NOT_SERVING);
    reactor->Finish(grpc::Status::OK);
    return reactor;
  }

 private:
  const router::CorePtr core_;
};

Result<std::shared_ptr<grpc::ServerCredentials>> credentials(const PickerOptions& options) {
  if (options.tls_cert.empty() != options.tls_key.empty()) {
    const std::string field = options.tls_cert.empty() ? "picker_tls_cert" : "picker_tls_key";
    return invalid(fmt::format("{}: a certificate and its key belong together", field), field);
  }
  if (options.tls_cert.empty()) return grpc::InsecureServerCredentials();
  auto cert = read_file(options.tls_cert), key = read_file(options.tls_key);
  if (!cert) return std::move(cert).error();
  if (!key) return std::move(key).error();
  grpc::SslServerCredentialsOptions ssl;
  ssl.pem_key_cert_pairs.push_back({*std::move(key), *std::move(cert)});
  return grpc::SslServerCredentials(ssl);
}

}  // namespace

struct Picker::Impl {
  Impl(const router::CorePtr& core, size_t streams, StreamLimits limits)
      : processor(core, streams, limits), health(core) {}

  Processor processor;
  Health health;
  std::unique_ptr<grpc::Server> server;
  int port = 0;
};

Picker::Picker(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

Picker::~Picker() { drain(std::chrono::milliseconds(0)); }

Result<std::unique_ptr<Picker>> Picker::listen(router::CorePtr core, const PickerOptions& options) {
  if (core->experiment) {
    return invalid("experiment: not with the picker, past which the answers go that it would measure", "experiment");
  }
  auto secured = credentials(options);
  if (!secured) return std::move(secured).error();
  const router::SettingsPtr settings = core->settings();
  StreamLimits limits;
  limits.request_ms = settings->options.edge.server.body_timeout_ms;
  limits.stream_ms = options.stream_ms;
  auto impl = std::make_unique<Impl>(core, options.streams, limits);
  grpc::ServerBuilder builder;
  const std::string address = net::Endpoint{options.host, options.port}.text();
  builder.AddListeningPort(address, *secured, &impl->port);
  builder.RegisterService(&impl->processor);
  builder.RegisterService(&impl->health);
  builder.SetMaxReceiveMessageSize(static_cast<int>(settings->options.body_bytes + kMessageRoom));
  builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);  // a second picker on the port is a mistake
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, kPingMs);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, kPingTimeoutMs);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, kLeastPingMs);
  impl->server = builder.BuildAndStart();
  if (!impl->server || impl->port == 0) {
    return Error{ErrorCode::kIo,
                 fmt::format("cannot listen for gRPC on {}: in use, or not an address of this machine", address)};
  }
  return std::unique_ptr<Picker>(new Picker(std::move(impl)));  // the constructor is private
}

uint16_t Picker::port() const { return static_cast<uint16_t>(impl_->port); }

void Picker::drain(std::chrono::milliseconds deadline_ms) {
  impl_->server->Shutdown(std::chrono::system_clock::now() + deadline_ms);
  impl_->server->Wait();
}

}  // namespace kindred::picker

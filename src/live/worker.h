// The HTTP face of one mock worker.
//
// Thread-safety: confined to the fleet's thread.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/rng.h"
#include "live/kv_publisher.h"
#include "live/leases.h"
#include "live/options.h"
#include "live/render.h"
#include "live/request.h"
#include "live/rooms.h"
#include "net/http_server.h"
#include "sim/expert_process.h"

namespace kindred::live {

// What the workers of a fleet share. Outlives them all.
struct Site {
  Site(LiveOptions of, std::unique_ptr<sim::ExpertProcess> experts, const Clock& with)
      : options(std::move(of)),
        process(std::move(experts)),
        clock(with),
        leases(with, options.lease_ttl_ms, mix64(options.seed)),
        ids(mix64(options.seed + 1)) {}

  const LiveOptions options;
  const std::unique_ptr<sim::ExpertProcess> process;
  const Clock& clock;
  LeaseBook leases;
  Rooms rooms;
  Rng ids;
  std::vector<uint16_t> ports;  // by worker, once they listen
  net::ZmqContext zmq;          // before the sockets of workers
};

class LiveWorker : public std::enable_shared_from_this<LiveWorker> {
 public:
  LiveWorker(net::asio::any_io_executor executor, std::shared_ptr<Site> site, uint32_t number);

  // On options.port + number, or a free one; later always on the same. Error: kIo, or that of KvPublisher::bind.
  Result<uint16_t> listen();
  net::Task<void> kill();
  Status revive();  // Error: kIo: somebody has taken its port
  net::Task<void> drain(std::chrono::milliseconds deadline);
  void wrong_counts(bool on) { wrong_counts_ = on; }

  WorkerLoop& loop() { return *loop_; }
  KvPublisher* publisher() { return publisher_.get(); }  // null: publishes nothing
  const WorkerSpec& spec() const { return site_->options.workers[number_]; }
  bool up() const { return server_ != nullptr; }

 private:
  // One request for tokens. Its parts refer to each other.
  struct Call {
    Call(LiveRequest of, AnswerMeta meta, net::Request& with, net::ResponseWriter& to)
        : request(std::move(of)), renderer(request, std::move(meta)), http(with), writer(to) {}
    Call(const Call&) = delete;
    Call& operator=(const Call&) = delete;

    LiveRequest request;
    Renderer renderer;
    net::Request& http;
    net::ResponseWriter& writer;
    sim::RequestExperts experts = {};
  };

  static net::Task<void> serve(std::shared_ptr<LiveWorker> self, net::Request& request, net::ResponseWriter& writer);
  net::Task<void> get(net::Request& request, net::ResponseWriter& writer);
  net::Task<void> post(net::Request& request, net::ResponseWriter& writer);
  net::Task<void> tokenize(net::Request& request, net::ResponseWriter& writer);
  net::Task<void> release_lease(net::Request& request, net::ResponseWriter& writer);
  std::string models_page() const;
  std::string server_info_page() const;
  std::string metrics_page() const;

  // legs.cpp
  net::Task<void> generate(net::Request& request, net::ResponseWriter& writer, bool chat);
  net::Task<void> whole(Call& call);
  net::Task<void> answer(Call& call, TicketPtr ticket, uint32_t shown);
  net::Task<bool> run_prefill(Call& call, TicketPtr& ticket);
  net::Task<bool> fetch(Call& call, TicketPtr& ticket, std::string lease, uint32_t generated);
  // The failure is rendered before this returns its task.
  net::Task<void> fail(net::ResponseWriter& writer, const ApiFailure& failure) const;
  Job job_of(const Call& call) const;
  std::string counts_json(const Call& call) const;
  std::string put_lease(const Call& call, const Ticket& ticket);

  // dialects.cpp
  net::Task<void> kindred_prefill(Call& call);
  net::Task<void> kindred_decode(Call& call, std::string handoff);
  net::Task<void> vllm_prefill(Call& call);
  net::Task<void> vllm_decode(Call& call);
  net::Task<void> sglang_prefill(Call& call);
  net::Task<void> sglang_decode(Call& call);

  net::asio::any_io_executor executor_;
  std::shared_ptr<Site> site_;
  const uint32_t number_;
  std::shared_ptr<WorkerLoop> loop_;
  std::unique_ptr<KvPublisher> publisher_;
  std::unique_ptr<net::HttpServer> server_;
  uint16_t port_ = 0;
  bool wrong_counts_ = false;
};

}  // namespace kindred::live

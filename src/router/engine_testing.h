// Test only: a router before workers with several engines, which publish traces.
#pragma once

#include <fmt/format.h>

#include <array>
#include <memory>
#include <string>
#include <vector>

#include "base/json.h"
#include "fleet/engine_trace.h"
#include "net/zmq.h"
#include "router/testing.h"

namespace kindred::router::testing {

using fleet::EngineTrace;

inline std::string header_of(const SeenLeg& leg, std::string_view name) {
  const std::string_view* found = leg.headers.find(name);
  return found == nullptr ? std::string() : std::string(*found);
}

// Where a worker's engines publish.
class TracePublisher {
 public:
  TracePublisher() : socket_(*net::ZmqSocket::bind(context_, net::ZmqKind::kPublisher, "tcp://127.0.0.1:*")) {}

  void publish(const EngineTrace& trace) { send(fleet::encode_trace(trace)); }
  void send(const std::string& payload) {
    const std::string number(8, '\0');
    (void)socket_.send(std::array<std::string_view, 3>{fleet::kTraceTopic, number, payload});
  }
  std::string endpoint() const { return socket_.endpoint(); }

 private:
  net::ZmqContext context_;
  net::ZmqSocket socket_;
};

class EngineFlow : public RouterTest {
 protected:
  void SetUp() override {
    options_.engines.on = true;
    options_.engines.policy.tie_break = "lowest-index";
    options_.engines.vllm_priority = PriorityMode::kOff;
    options_.load_interval_ms = 20ms;
  }
  // A kindred worker for whole requests, with `engines` that publish at its publisher.
  FakeWorker& kindred(uint32_t engines) {
    FakeWorker& worker = add(Role::kBoth, "f0");
    publishers_.push_back(std::make_unique<TracePublisher>());
    const Json said = {
        {"v", 1},       {"role", "both"}, {"fingerprint", "f0"},           {"layers", {0}},
        {"experts", 4}, {"top_k", 1},     {"data_parallel_size", engines}, {"traces", publishers_.back()->endpoint()}};
    worker.set_page("/v1/models", Json{{"data", {{{"id", "m"}, {"owned_by", "kindred"}, {"kindred", said}}}}}.dump());
    return worker;
  }
  FakeWorker& other(Role role, const std::string& owner) {
    FakeWorker& worker = add(role, "");
    worker.set_page("/v1/models",
                    fmt::format(R"({{"data":[{{"id":"m","owned_by":"{}","max_model_len":4096}}]}})", owner));
    worker.set_page("/version", R"({"version":"0.11.0"})");
    if (owner == "sglang") {
      const char* mode = role == Role::kPrefill ? "prefill" : role == Role::kDecode ? "decode" : "null";
      worker.set_page("/get_server_info", fmt::format(R"({{"version":"0.5.10","disaggregation_mode":"{}",)"
                                                      R"("disaggregation_bootstrap_port":8998}})",
                                                      mode));
    }
    return worker;
  }

  EngineTrace trace(uint32_t rank, uint64_t waiting_tokens = 0) {
    EngineTrace out;
    out.rank = rank;
    out.epoch = epoch_;
    out.sequence = ++sequence_;
    out.time_s = static_cast<double>(clock_.unix_seconds());
    out.waiting = waiting_tokens > 0 ? 1 : 0;
    out.waiting_prefill_tokens = waiting_tokens;
    return out;
  }
  fleet::EngineStatus engine(size_t worker, uint32_t rank) {
    return router_->core().fleet.status()[worker].engines.at(rank);
  }
  // Publishes until the router has it: a subscriber may be late to join.
  void tell(size_t worker, EngineTrace wanted) {
    ASSERT_TRUE(eventually([&] {
      wanted.sequence = ++sequence_;
      publishers_[worker]->publish(wanted);
      std::this_thread::sleep_for(2ms);
      const auto engines = router_->core().fleet.status()[worker].engines;
      return engines.size() > wanted.rank && engines[wanted.rank].trace == policy::TraceState::kFresh &&
             engines[wanted.rank].sequence == wanted.sequence;
    }));
  }
  std::vector<std::string> ranks(const FakeWorker& worker) {
    std::vector<std::string> out;
    for (const SeenLeg& leg : worker.legs()) out.push_back(header_of(leg, "X-data-parallel-rank"));
    return out;
  }
  double compensation() {
    double sum = 0;
    for (const fleet::WorkerStatus& worker : router_->core().fleet.status()) {
      for (const fleet::EngineStatus& engine : worker.engines) sum += engine.view.compensation_tokens;
    }
    return sum;
  }
  Json status() { return Json::parse(call("GET", "/status").body); }

  std::vector<std::unique_ptr<TracePublisher>> publishers_;
  uint64_t epoch_ = 7, sequence_ = 0;
};

}  // namespace kindred::router::testing

// The simulator and the router decide alike: one sequence of events goes to a running router, over sockets, and to
// the simulator's dispatcher, and every decision is compared.

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <optional>

#include "base/json.h"
#include "base/rng.h"
#include "router/leg_load.h"
#include "router/request_scan.h"
#include "router/testing.h"
#include "sim/dispatch.h"
#include "sim/sim_clock.h"

namespace kindred::router::testing {
namespace {

constexpr uint32_t kPrefillWorkers = 3, kDecodeWorkers = 4;

class SimParity : public RouterTest {
 protected:
  struct Traveller {
    std::string id, body;
    uint32_t expert = 0;
    ConnectionPtr client;
    std::unique_ptr<Gate> prefill = std::make_unique<Gate>(), decode = std::make_unique<Gate>();
    sim::Routed routed;
    bool handed = false, ended = false;
  };

  // `engine`: the policy that chooses for prompts instead of `prefill`, or null.
  void prepare(const char* prefill, const char* decode, const char* engine) {
    options_.prefill_policy.name = prefill;
    options_.decode_policy.name = decode;
    options_.engines.on = engine != nullptr;
    if (engine != nullptr) options_.engines.policy.name = engine;
    options_.engines.trace_max_age_ms = 1h;  // neither clock is the other's
    options_.slow_start_ms = 0ms;            // it depends on the time, which is not the same in both
    options_.cohorts = cohort_file({0, 1, 2, 3});
    for (uint32_t i = 0; i < kPrefillWorkers; ++i) hold(add(Role::kPrefill));
    for (uint32_t i = 0; i < kDecodeWorkers; ++i) hold(add(Role::kDecode));
    start();
    Result<expert::CohortModel> cohorts = expert::CohortModel::load(options_.cohorts);
    ASSERT_TRUE(cohorts);
    sim::DispatchOptions with;
    with.fleet = fleet_options(options_);
    with.prefill = options_.prefill_policy;
    with.decode = options_.decode_policy;
    if (options_.engines.on) with.engine = options_.engines.policy;
    with.cohorts = std::make_shared<const expert::CohortModel>(*std::move(cohorts));
    auto made = sim::Dispatcher::make(sim_clock_, with);
    ASSERT_TRUE(made) << made.error().message;
    simulated_ = *std::move(made);
    for (size_t i = 0; i < fakes_.size(); ++i) {
      simulated_->add(i < kPrefillWorkers ? Role::kPrefill : Role::kDecode, fakes_[i]->url());
      simulated_->up(static_cast<fleet::WorkerId>(i));
    }
    simulated_->assign_cohorts();
  }

  // Each leg of a request waits for its gate.
  void hold(FakeWorker& worker) {
    worker.play([this, &worker](const SeenLeg& leg, net::Request&, net::ResponseWriter& writer) -> net::Task<void> {
      Traveller& traveller = *travellers_[std::stoul(leg.request_id.substr(1))];
      if (leg.leg == "prefill") {
        co_await traveller.prefill->wait();
        worker.set_counts(counts_on(traveller.expert));
        co_await worker.answer_prefill(leg, writer);
      } else {
        co_await traveller.decode->wait();
        co_await worker.answer_decode(leg, writer);
      }
    });
  }

  // Where the router has sent this leg; waits for it.
  std::optional<size_t> seen(const Traveller& traveller, const std::string& leg) {
    std::optional<size_t> at;
    eventually([&] {
      for (size_t w = 0; w < fakes_.size() && !at; ++w) {
        for (const SeenLeg& one : fakes_[w]->legs()) {
          if (one.request_id == traveller.id && one.leg == leg) at = w;
        }
      }
      return at.has_value();
    });
    return at;
  }

  void begin(uint32_t prompt, uint32_t expert) {
    auto made = std::make_unique<Traveller>();
    Traveller& traveller = *made;
    traveller.id = "r" + std::to_string(travellers_.size());
    traveller.expert = expert;
    traveller.body = R"({"model":"m","stream":true,"messages":[{"role":"user","content":"prompt )" +
                     std::to_string(prompt) + R"("}]})";
    travellers_.push_back(std::move(made));
    traveller.body.insert(traveller.body.find("prompt"), std::string(prompt * 800, 'x'));  // they differ in length
    const std::string label = "domain-" + std::to_string(expert);
    traveller.client = open("POST", "/v1/chat/completions", traveller.body,
                            "X-Request-Id: " + traveller.id + "\r\nX-Kindred-Domain: " + label + "\r\n");
    const Result<RequestScan> scan = scan_request(traveller.body, traveller.body.size());
    ASSERT_TRUE(scan);
    traveller.routed.key = std::string(scan->prompt);
    traveller.routed.label = label;
    traveller.routed.prompt_tokens = static_cast<uint32_t>(prefill_load(*scan).tokens);
    const std::optional<sim::Destination> chosen = simulated_->prefill(traveller.routed);
    ASSERT_TRUE(chosen);
    ASSERT_EQ(seen(traveller, "prefill"), chosen->worker) << traveller.id;
    ++compared_;
  }

  void end_prefill(Traveller& traveller) {
    traveller.handed = true;
    traveller.prefill->open();
    const Result<expert::ExpertCounts> counts = expert::counts_from_json(counts_on(traveller.expert));
    const std::optional<fleet::WorkerId> chosen = simulated_->decode(traveller.routed, &*counts);
    ASSERT_TRUE(chosen);
    ASSERT_EQ(seen(traveller, "decode"), *chosen) << traveller.id;
    const Json status = Json::parse(call("GET", "/status?decisions=1").body);
    const Json& last = status["decisions"][0];
    EXPECT_EQ(last["reason"], policy::to_string(simulated_->last().reason));
    EXPECT_EQ(last["fallback"], policy::to_string(simulated_->last().fallback));
    ++compared_;
  }

  void end_decode(Traveller& traveller) {
    traveller.ended = true;
    traveller.decode->open();
    EXPECT_TRUE(parse_answer(traveller.client->read_to_end()).complete);
    traveller.routed = {};
    ASSERT_TRUE(eventually([&] { return in_flight() == under_way(); }));
  }

  // The same trace of a prefill worker's engine to both.
  void trace(uint32_t worker, uint64_t waiting_tokens, double kv_usage) {
    fleet::EngineTrace trace;
    trace.sequence = ++sequence_;
    trace.waiting = 1;
    trace.waiting_prefill_tokens = waiting_tokens;
    trace.kv_usage = kv_usage;
    EXPECT_TRUE(router_->core().fleet.report_trace(worker, trace));
    EXPECT_TRUE(simulated_->fleet().report_trace(worker, trace));
  }

  // A decode worker that has nothing to do dies, is missed, and comes back.
  void outage(size_t worker, uint32_t meanwhile) {
    fakes_[worker]->kill();
    const auto health = [&] {
      return router_->core().fleet.worker_status(static_cast<fleet::WorkerId>(worker)).health;
    };
    ASSERT_TRUE(eventually([&] { return health() == fleet::Health::kDown; }));
    fleet::Fleet& fleet = simulated_->fleet();
    const auto id = static_cast<fleet::WorkerId>(worker);
    fleet.report_out(id, "died");
    for (uint32_t i = 0; i < meanwhile; ++i) {
      begin(50 + i, i % 4);
      end_prefill(*travellers_.back());
    }
    fakes_[worker]->revive();
    ASSERT_TRUE(eventually([&] { return health() == fleet::Health::kUp; }));
    simulated_->up(id);
  }

  int64_t under_way() const {
    return std::ranges::count_if(travellers_, [](const auto& traveller) { return !traveller->ended; });
  }

  // The same events to both, drawn at random; every decision is the same.
  void compare(const char* prefill, const char* decode, const char* engine = nullptr);

  sim::SimClock sim_clock_;
  std::unique_ptr<sim::Dispatcher> simulated_;
  std::vector<std::unique_ptr<Traveller>> travellers_;
  size_t compared_ = 0;
  uint64_t sequence_ = 0;
};

void SimParity::compare(const char* prefill, const char* decode, const char* engine) {
  prepare(prefill, decode, engine);
  ASSERT_FALSE(HasFatalFailure());
  Rng rng(11);
  travellers_.reserve(256);
  for (int step = 0; step < 150 && !HasFatalFailure(); ++step) {
    std::vector<Traveller*> prefilling, decoding;
    for (const auto& traveller : travellers_) {
      if (traveller->ended) continue;
      (traveller->handed ? decoding : prefilling).push_back(traveller.get());
    }
    if (engine != nullptr && step % 3 == 0) {
      trace(static_cast<uint32_t>(rng.below(kPrefillWorkers)), rng.below(8'000), 0.8 + 0.2 * rng.uniform());
    }
    const uint64_t what = rng.below(3);
    if (what == 1 && !prefilling.empty()) {
      end_prefill(*prefilling[rng.below(prefilling.size())]);
    } else if (what == 2 && !decoding.empty()) {
      end_decode(*decoding[rng.below(decoding.size())]);
    } else if (prefilling.size() + decoding.size() < 24) {
      begin(static_cast<uint32_t>(rng.below(12)), static_cast<uint32_t>(rng.below(4)));
    }
    if (step != 75) continue;
    for (Traveller* traveller : prefilling) {
      if (!traveller->ended && !traveller->handed) end_prefill(*traveller);
    }
    for (const auto& traveller : travellers_) {
      if (!traveller->ended && traveller->handed) end_decode(*traveller);
    }
    outage(kPrefillWorkers + 1, /*meanwhile=*/4);
  }
  EXPECT_GT(compared_, 70U);
  for (const auto& traveller : travellers_) {
    if (!traveller->handed) end_prefill(*traveller);
    if (!traveller->ended) end_decode(*traveller);
  }
}

TEST_F(SimParity, LocalityBand) { compare("prefix-hash", "locality-band"); }
TEST_F(SimParity, LeastLoaded) { compare("least-loaded", "least-loaded"); }
TEST_F(SimParity, RoundRobin) { compare("round-robin", "round-robin"); }
TEST_F(SimParity, PowerOfTwo) { compare("prefix-hash", "power-of-two"); }
TEST_F(SimParity, Random) { compare("least-loaded", "random"); }
TEST_F(SimParity, Domain) { compare("round-robin", "domain"); }
TEST_F(SimParity, Pressure) { compare("prefix-hash", "least-loaded", "pressure"); }
TEST_F(SimParity, RequestCount) { compare("prefix-hash", "least-loaded", "request-count"); }
TEST_F(SimParity, Vllm) { compare("prefix-hash", "least-loaded", "vllm-0.27"); }
TEST_F(SimParity, MarginalCost) { compare("prefix-hash", "marginal-cost"); }

}  // namespace
}  // namespace kindred::router::testing

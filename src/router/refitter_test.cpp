// When cohorts are fitted anew and who gets them, on a clock that the test drives and with fits that it
// holds back.

#include "router/refitter.h"

#include <gtest/gtest.h>

#include <boost/asio/io_context.hpp>
#include <future>

#include "base/json.h"
#include "router/testing.h"

namespace kindred::router::testing {
namespace {

std::shared_ptr<const expert::ExpertCounts> on_expert(uint32_t expert) {
  expert::ExpertCounts counts(test_shape());
  counts.tokens = 10;
  counts.data[expert] = 10;
  return std::make_shared<const expert::ExpertCounts>(std::move(counts));
}

fleet::Description serving_worker(Role role) {
  fleet::Description out;
  out.dialect = fleet::Dialect::kKindred;
  out.models = {"m"};
  out.role = role;
  out.fingerprint = "f0";
  out.shape = test_shape();
  return out;
}

class RefitterTest : public ::testing::Test {
 protected:
  RefitterTest() {
    options_.prefill = {"http://127.0.0.1:1"};
    options_.refit = {.on = true, .interval_ms = 5s, .window_ms = 5s, .grace_ms = 30s, .min_requests = 4};
  }
  ~RefitterTest() override {
    if (core_ && core_->refitter) core_->refitter->stop();
    core_.reset();
  }

  Result<CorePtr> make_core() {
    const net::asio::any_io_executor executor = io_.get_executor();
    return Core::make(std::span(&executor, 1), options_, clock_);
  }

  // Decode workers 1, 2, ... are up; `cohorts`: the expert that each one's cohort is about.
  void make(size_t decode, const std::vector<uint32_t>& cohorts, Refitter::Fit fit = expert::refit) {
    for (size_t i = 0; i < decode; ++i) options_.decode.push_back("http://127.0.0.1:" + std::to_string(10 + i));
    if (!cohorts.empty()) options_.cohorts = cohort_file(cohorts);
    auto made = make_core();
    ASSERT_TRUE(made.ok()) << made.error().message;
    core_ = *std::move(made);
    core_->refitter = std::make_shared<Refitter>(*core_, std::move(fit));
    for (fleet::WorkerId id = 1; id <= decode; ++id) core_->fleet.report_up(id, serving_worker(Role::kDecode));
  }
  void observe(const std::vector<uint32_t>& experts, size_t each) {
    for (size_t i = 0; i < each; ++i) {
      for (const uint32_t expert : experts) core_->refitter->observe("f0", on_expert(expert));
    }
  }
  bool tick() { return core_->refitter->tick(); }
  // Lets a running fit end and its result arrive.
  void settle() {
    const auto settled = [&] {
      io_.restart();
      io_.poll();
      return !core_->refitter->running();
    };
    ASSERT_TRUE(eventually(settled));
  }
  const RefitStatus& status() { return core_->refitter->status(); }
  int32_t cohort_of(fleet::WorkerId id) { return core_->fleet.worker_status(id).cohort; }
  float similarity(fleet::WorkerId id, uint32_t expert) {
    return core_->cohorts()->centroid(static_cast<size_t>(cohort_of(id)))[expert];
  }

  net::asio::io_context io_;
  ManualClock clock_;
  RouterOptions options_;
  CorePtr core_;
};

TEST_F(RefitterTest, FitsOncePerIntervalAndWorkersKeepTheNearestCohort) {
  make(2, {0, 1});
  observe({1, 2}, 4);
  EXPECT_FALSE(tick());  // not due yet
  clock_.advance(5s);
  observe({1, 2}, 2);  // also so that the window is not empty: what came first is 5 s old
  ASSERT_TRUE(tick());
  settle();
  EXPECT_EQ(status().fits, 1U);
  ASSERT_TRUE(status().last.has_value());
  EXPECT_EQ(status().last->requests, 12U);
  EXPECT_NEAR(status().last->shift, 0.5, 1e-3);  // one cohort stayed, one turned around
  EXPECT_NEAR(similarity(1, 2), 1, 1e-6);
  EXPECT_NEAR(similarity(2, 1), 1, 1e-6);
  EXPECT_FALSE(tick());
  clock_.advance(4s);
  EXPECT_FALSE(tick());
}

TEST_F(RefitterTest, OneFitAtATimeAndDecisionsGoOn) {
  std::promise<void> release;
  auto released = release.get_future().share();
  std::atomic<int> running{0}, most{0};
  make(2, {0, 1}, [&](const expert::RefitTask& task) {
    most = std::max(most.load(), ++running);
    released.wait();
    --running;
    return expert::refit(task);
  });
  clock_.advance(5s);
  observe({1, 2}, 4);
  ASSERT_TRUE(tick());
  EXPECT_TRUE(eventually([&] { return running == 1; }));
  EXPECT_TRUE(core_->refitter->running());
  const auto before = core_->cohorts();
  for (int i = 0; i < 5; ++i) {
    clock_.advance(5s);
    observe({1, 2}, 4);
    EXPECT_FALSE(tick());
  }
  EXPECT_EQ(core_->cohorts(), before);  // nothing changes until it is done
  release.set_value();
  settle();
  EXPECT_NE(core_->cohorts(), before);
  EXPECT_EQ(before->centroid(0)[0], 1);  // who holds the old ones still may
  EXPECT_EQ(status().fits, 1U);
  ASSERT_TRUE(tick());  // the next one was due long ago
  settle();
  EXPECT_EQ(status().fits, 2U);
  EXPECT_EQ(most, 1);
}

TEST_F(RefitterTest, TooFewRequestsAreNoFitAndSaySo) {
  make(3, {0, 1, 2});
  clock_.advance(5s);
  observe({1, 2}, 1);
  ASSERT_TRUE(tick());
  settle();
  EXPECT_EQ(status().fits, 0U);
  EXPECT_EQ(status().skipped, 1U);
  EXPECT_NE(status().last_skip.find("2 requests"), std::string::npos) << status().last_skip;
  EXPECT_NE(status().last_skip.find("4 needed for 3 cohorts"), std::string::npos) << status().last_skip;
  EXPECT_EQ(core_->metrics.refit_skipped.value(), 1);
  clock_.advance(5s);
  observe({1, 2}, 4);
  ASSERT_TRUE(tick());
  settle();
  EXPECT_EQ(status().fits, 1U);
  EXPECT_EQ(status().last_skip, "");
}

TEST_F(RefitterTest, AFailedFitLeavesTheOldCohorts) {
  make(2, {0, 1});
  const auto before = core_->cohorts();
  clock_.advance(5s);
  for (int i = 0; i < 8; ++i) {
    core_->refitter->observe("f0", std::make_shared<const expert::ExpertCounts>(test_shape()));
  }
  ASSERT_TRUE(tick());
  settle();
  EXPECT_EQ(status().failures, 1U);
  EXPECT_NE(status().last_error.find("none of the 8 requests"), std::string::npos) << status().last_error;
  EXPECT_EQ(core_->cohorts(), before);
}

TEST_F(RefitterTest, ANewcomerTakesHalfOfTheLargestAtOnceAndOthersStay) {
  options_.refit.interval_ms = 60s;
  make(2, {0, 1});
  observe({0}, 4);
  for (int i = 0; i < 4; ++i) {
    // Cohort 1 has twice the requests, of two kinds.
    core_->refitter->observe("f0", on_expert(1));
    expert::ExpertCounts mixed(test_shape());
    mixed.tokens = 10;
    mixed.data = {0, 6, 0, 4};
    core_->refitter->observe("f0", std::make_shared<const expert::ExpertCounts>(std::move(mixed)));
  }
  EXPECT_FALSE(tick());
  const auto id = core_->add_worker("http://127.0.0.1:99", Role::kDecode, "url");
  ASSERT_TRUE(id.ok());
  EXPECT_FALSE(tick());  // not up yet
  core_->fleet.report_up(*id, serving_worker(Role::kDecode));
  ASSERT_TRUE(tick());
  settle();
  EXPECT_EQ(cohort_of(1), 0);
  EXPECT_EQ(cohort_of(2), 1);
  EXPECT_EQ(cohort_of(*id), 2);
  EXPECT_EQ(status().splits, 1U);
  EXPECT_EQ(status().fits, 0U);
  EXPECT_EQ(similarity(1, 0), 1);
  EXPECT_NEAR(similarity(2, 1), 1, 1e-6);
  EXPECT_GT(similarity(*id, 3), 0.5);
}

TEST_F(RefitterTest, ANewcomerWaitsForRequestsAndIsTriedAgain) {
  options_.refit.interval_ms = 3600s;
  make(1, {0});
  const auto id = core_->add_worker("http://127.0.0.1:99", Role::kDecode, "url");
  core_->fleet.report_up(*id, serving_worker(Role::kDecode));
  ASSERT_TRUE(tick());
  settle();
  EXPECT_EQ(status().skipped, 1U);
  EXPECT_EQ(cohort_of(*id), -1);
  EXPECT_FALSE(tick());  // nothing has changed
  clock_.advance(5s);
  observe({0, 1}, 4);
  ASSERT_TRUE(tick());
  settle();
  EXPECT_EQ(cohort_of(*id), 1);
}

TEST_F(RefitterTest, AWorkerThatIsGoneKeepsItsCohortForTheGracePeriod) {
  make(3, {0, 1, 2});
  core_->fleet.report_out(2, "refused");
  clock_.advance(29s);
  tick();
  EXPECT_EQ(cohort_of(2), 1);
  core_->fleet.report_up(2, serving_worker(Role::kDecode));
  core_->fleet.report_out(2, "refused again");
  ASSERT_TRUE(core_->remove_worker("http://127.0.0.1:12").ok());
  clock_.advance(29s);
  tick();
  EXPECT_EQ(cohort_of(2), 1);
  EXPECT_EQ(cohort_of(3), 2);
  clock_.advance(1s);
  tick();
  EXPECT_EQ(cohort_of(1), 0);
  EXPECT_EQ(cohort_of(2), -1);
  EXPECT_EQ(cohort_of(3), -1);
  EXPECT_EQ(status().merges, 2U);
  // Whoever comes back is a newcomer, and reuses a row.
  settle();
  core_->fleet.report_up(2, serving_worker(Role::kDecode));
  observe({0, 3}, 4);
  ASSERT_TRUE(tick());
  settle();
  EXPECT_EQ(cohort_of(2), 1);
  EXPECT_EQ(core_->cohorts()->cohorts(), 3U);
}

TEST_F(RefitterTest, AFailureOfTheWholeFleetCostsNoCohort) {
  make(2, {0, 1});
  for (const fleet::WorkerId id : {1U, 2U}) core_->fleet.report_out(id, "refused");
  clock_.advance(3600s);
  tick();
  EXPECT_EQ(cohort_of(1), 0);
  EXPECT_EQ(cohort_of(2), 1);
  EXPECT_EQ(status().merges, 0U);
}

TEST_F(RefitterTest, WorkersThatDieOrLeaveDuringAFit) {
  std::promise<void> release;
  auto released = release.get_future().share();
  options_.refit.interval_ms = 10s;
  make(2, {0, 1}, [released](const expert::RefitTask& task) {
    released.wait();
    return expert::refit(task);
  });
  const auto id = core_->add_worker("http://127.0.0.1:99", Role::kDecode, "url");
  core_->fleet.report_up(*id, serving_worker(Role::kDecode));
  clock_.advance(10s);
  observe({0, 1, 2}, 4);
  ASSERT_TRUE(tick());
  core_->fleet.report_out(2, "died");
  ASSERT_TRUE(core_->remove_worker("http://127.0.0.1:99").ok());
  release.set_value();
  settle();
  EXPECT_EQ(status().fits, 1U);
  EXPECT_EQ(cohort_of(1), 0);
  EXPECT_EQ(cohort_of(2), 1);     // until the grace period is over
  EXPECT_EQ(cohort_of(*id), -1);  // it left before it had one
  clock_.advance(30s);
  observe({0, 1}, 4);
  ASSERT_TRUE(tick());
  settle();
  EXPECT_EQ(cohort_of(2), -1);
  EXPECT_EQ(status().fits, 2U);
  // All that is left is one cohort, in the middle of the two kinds of requests.
  EXPECT_NEAR(similarity(1, 0), similarity(1, 1), 1e-6);
}

TEST_F(RefitterTest, WithoutAFileTheFirstFitGivesEveryoneACohort) {
  make(2, {});
  EXPECT_EQ(core_->cohorts(), nullptr);
  core_->fleet.report_out(2, "late");
  clock_.advance(5s);
  observe({0, 3}, 4);
  ASSERT_TRUE(tick());
  settle();
  ASSERT_NE(core_->cohorts(), nullptr);
  EXPECT_EQ(cohort_of(1), 0);
  EXPECT_EQ(cohort_of(2), -1);
  core_->fleet.report_up(2, serving_worker(Role::kDecode));
  ASSERT_TRUE(tick());
  settle();
  EXPECT_EQ(cohort_of(2), 1);
  EXPECT_NEAR(std::max(similarity(2, 0), similarity(2, 3)), 1, 1e-6);
  EXPECT_EQ(core_->cohorts()->data().model_fingerprint, "f0");
}

TEST_F(RefitterTest, StopWaitsAndDropsTheResult) {
  make(2, {0, 1});
  const auto before = core_->cohorts();
  clock_.advance(5s);
  observe({1, 2}, 4);
  ASSERT_TRUE(tick());
  core_->refitter->stop();
  settle();
  EXPECT_EQ(core_->cohorts(), before);
  clock_.advance(5s);
  EXPECT_FALSE(tick());
}

TEST_F(RefitterTest, NeedsAPolicyThatUsesCohorts) {
  options_.decode = {"http://127.0.0.1:2"};
  options_.decode_policy.name = "round-robin";
  const auto made = make_core();
  ASSERT_FALSE(made.ok());
  EXPECT_EQ(made.error().field, "refit");
  EXPECT_NE(made.error().message.find("locality-band"), std::string::npos);
}

TEST_F(RefitterTest, RefusesCohortsOfGateSums) {
  options_.decode = {"http://127.0.0.1:2"};
  options_.cohorts = cohort_file({0});
  expert::CohortData data = expert::CohortModel::load(options_.cohorts)->data();
  data.transform = expert::Transform::kGateIdf;
  ASSERT_TRUE(expert::CohortModel::make(std::move(data))->save(options_.cohorts).ok());
  const auto made = make_core();
  ASSERT_FALSE(made.ok());
  EXPECT_EQ(made.error().field, "refit");
  EXPECT_NE(made.error().message.find("gate sums"), std::string::npos);
}

// ------------------------------------------------------------------------ through the router, on real time

class RefitFlowTest : public PdFlowTest {
 protected:
  void SetUp() override {
    options_.refit = {.on = true, .interval_ms = 30ms, .window_ms = 60s, .min_requests = 4};
    options_.decode_policy.tau = 0;
    options_.decode_policy.load_cap = 0;
  }
  // Alternately, so that the window is balanced whenever a fit looks at it.
  void send(FakeWorker& p, const std::vector<uint32_t>& experts, int each) {
    for (int i = 0; i < each; ++i) {
      for (const uint32_t expert : experts) {
        p.set_counts(counts_on(expert));
        EXPECT_EQ(chat(true).body, kWholeStream);
      }
    }
  }
  uint64_t fits() {
    return loop_.call([this] { return router_->core().refitter->status().fits; });
  }
};

TEST_F(RefitFlowTest, DecisionsFollowTheNewCentroids) {
  FakeWorker& p = prefill();
  FakeWorker& d0 = decode();
  FakeWorker& d1 = decode();
  options_.cohorts = cohort_file({0, 1});
  start();
  send(p, {1, 2}, 4);
  const uint64_t before = fits();
  ASSERT_TRUE(eventually([&] { return fits() >= before + 2; }));  // one that began when all were in
  const size_t seen0 = d0.leg_count(), seen1 = d1.leg_count();
  send(p, {1, 2}, 2);
  EXPECT_EQ(d0.leg_count(), seen0 + 2);
  EXPECT_EQ(d1.leg_count(), seen1 + 2);
  const Json status = Json::parse(call("GET", "/status?decisions=2").body);
  for (const Json& decision : status["decisions"]) EXPECT_NEAR(decision["similarity"].get<double>(), 1, 1e-6);
  EXPECT_EQ(status["decisions"][0]["decode_worker"], d0.url());  // expert 2
  EXPECT_EQ(status["decisions"][1]["decode_worker"], d1.url());  // expert 1 stayed where it was
  EXPECT_EQ(status["refit"]["window_requests"], 12);
  EXPECT_GE(status["refit"]["fits"], 2);
  EXPECT_TRUE(status["refit"]["last"]["duration_ms"].is_number());
  EXPECT_TRUE(status["refit"]["last_error"].is_null());
  EXPECT_NE(metrics().find("kindred_refit_fits_total "), std::string::npos);
}

TEST_F(RefitFlowTest, RequestsInFlightAreUnharmed) {
  FakeWorker& p = prefill();
  FakeWorker& d0 = decode();
  FakeWorker& d1 = decode();
  options_.cohorts = cohort_file({0, 1});
  Gate gate;
  for (FakeWorker* d : {&d0, &d1}) {
    d->play([&gate, d](const SeenLeg& leg, net::Request&, net::ResponseWriter& writer) -> net::Task<void> {
      co_await gate.wait();
      co_await d->answer_decode(leg, writer);
    });
  }
  start();
  std::vector<ConnectionPtr> clients;
  for (const uint32_t expert : {2, 1, 2, 1, 2, 1, 2, 1}) {
    p.set_counts(counts_on(expert));
    clients.push_back(open("POST", "/v1/chat/completions", chat_body(true)));
    ASSERT_TRUE(eventually([&] { return d0.leg_count() + d1.leg_count() == clients.size(); }));
  }
  const uint64_t before = fits();
  ASSERT_TRUE(eventually([&] { return fits() >= before + 2; }));
  gate.open();
  for (auto& client : clients) EXPECT_EQ(parse_answer(client->read_to_end()).body, kWholeStream);
  EXPECT_TRUE(eventually([&] { return in_flight() == 0; }));
}

TEST_F(RefitFlowTest, AWorkersDeathAndReturnStopNothing) {
  FakeWorker& p = prefill();
  FakeWorker& d0 = decode();
  FakeWorker& d1 = decode();
  options_.cohorts = cohort_file({0, 1});
  options_.refit.grace_ms = 100ms;
  start();
  send(p, {0, 1}, 4);
  d1.kill();
  send(p, {0, 1}, 2);  // retried where it was refused
  const auto cohort = [&](size_t worker) {
    return Json::parse(call("GET", "/status").body)["workers"][worker]["cohort"];
  };
  EXPECT_TRUE(eventually([&] { return cohort(2).is_null(); }));
  EXPECT_EQ(cohort(1), 0);
  send(p, {0, 1}, 2);
  d1.revive();
  EXPECT_TRUE(eventually([&] { return cohort(2) == 1; }));
  const size_t seen = d1.leg_count();
  send(p, {0, 1}, 4);
  EXPECT_EQ(d1.leg_count(), seen + 4);  // one of the two kinds is its own again
  EXPECT_EQ(cohort(1), 0);
  EXPECT_EQ(d0.cancelled(), 0U);
}

}  // namespace
}  // namespace kindred::router::testing

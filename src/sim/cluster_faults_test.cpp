// Workers that fail, leave and join.

#include <gtest/gtest.h>

#include <algorithm>
#include <array>

#include "sim/cluster_testing.h"

namespace kindred::sim {
namespace {

using testing::TestModel;

class ClusterFaults : public ::testing::Test {
 protected:
  static LinearCost cost() {
    LinearCost out;
    out.host_s = 0.005;
    out.prefill_token_s = 2e-5;
    out.kv_token_s = 1e-5;
    return out;
  }
  static size_t count(const SimResult& run, Ended how) {
    return static_cast<size_t>(
        std::ranges::count_if(run.requests, [&](const RequestRecord& r) { return r.ended == how; }));
  }
  static void expect_nothing_left(const SimResult& run) {
    for (const WorkerReport& worker : run.workers) EXPECT_EQ(worker.kv_left_blocks, 0U) << worker.name;
    EXPECT_EQ(run.ledger_left, 0);
  }

  TestModel model_;
};

TEST_F(ClusterFaults, ADecodeWorkersStreamsAreLostAndOthersGoOn) {
  ClusterOptions options = testing::pd(2, 3, cost());
  options.script = {{.at_s = 2, .kind = ScriptKind::kFail, .worker = 3}};
  const auto requests = testing::poisson_load(model_, 30, 300, 100, 60, 3);
  const Result<SimResult> run = run_cluster(options, requests);
  ASSERT_TRUE(run) << run.error().message;
  EXPECT_GT(count(*run, Ended::kWorkerLost), 0U);
  EXPECT_LT(count(*run, Ended::kWorkerLost), 20U);  // what it had in flight, no more
  EXPECT_EQ(count(*run, Ended::kOk) + count(*run, Ended::kWorkerLost), 300U);
  for (const RequestRecord& record : run->requests) {
    if (record.arrival_ns > 2'000'000'000) {
      EXPECT_EQ(record.ended, Ended::kOk);
      EXPECT_NE(record.decode_worker, 3U);
    }
  }
  expect_nothing_left(*run);
}

TEST_F(ClusterFaults, APrefillIsDoneAgainElsewhere) {
  LinearCost slow = cost();
  slow.prefill_token_s = 1e-3;
  ClusterOptions options = testing::pd(2, 1, slow);
  options.router.prefill.name = "round-robin";
  options.script = {{.at_s = 0.05, .kind = ScriptKind::kFail, .worker = 0}};
  const std::vector<SimRequest> requests = {model_.request(0, 100, 5), model_.request(0, 100, 5)};
  const Result<SimResult> run = run_cluster(options, requests);
  ASSERT_TRUE(run) << run.error().message;
  EXPECT_EQ(count(*run, Ended::kOk), 2U);
  EXPECT_EQ(run->requests[0].retries + run->requests[1].retries, 1U);
  for (const RequestRecord& record : run->requests) EXPECT_EQ(record.prefill_worker, 1U);
  expect_nothing_left(*run);
}

// The KV is still at the prefill worker: the handoff goes to another decode worker.
TEST_F(ClusterFaults, AHandoffIsRepeatedWhileItsKvIsThere) {
  LinearCost slow = cost();
  slow.kv_token_s = 1e-3;
  ClusterOptions options = testing::pd(1, 2, slow);
  options.router.decode.tie_break = "lowest-index";
  options.script = {{.at_s = 0.05, .kind = ScriptKind::kFail, .worker = 1}};  // in the middle of the transfer
  const std::vector<SimRequest> requests = {model_.request(0, 100, 5)};
  const Result<SimResult> run = run_cluster(options, requests);
  ASSERT_TRUE(run) << run.error().message;
  EXPECT_EQ(run->requests[0].ended, Ended::kOk);
  EXPECT_EQ(run->requests[0].decode_worker, 2U);
  EXPECT_EQ(run->requests[0].retries, 1U);
  expect_nothing_left(*run);
}

TEST_F(ClusterFaults, KvThatIsGoneEndsTheRequest) {
  LinearCost slow = cost();
  slow.kv_token_s = 1e-3;
  ClusterOptions options = testing::pd(1, 1, slow);
  options.script = {{.at_s = 0.05, .kind = ScriptKind::kFail, .worker = 0}};
  const std::vector<SimRequest> requests = {model_.request(0, 100, 5), model_.request(1, 100, 5)};
  const Result<SimResult> run = run_cluster(options, requests);
  ASSERT_TRUE(run) << run.error().message;
  EXPECT_EQ(run->requests[0].ended, Ended::kWorkerLost);
  EXPECT_EQ(run->requests[0].generated, 1U);
  EXPECT_EQ(run->requests[1].ended, Ended::kWorkerLost);  // sent to who was not known to be gone
  expect_nothing_left(*run);
}

TEST_F(ClusterFaults, AWorkerThatIsKnownToBeGoneIsNotTried) {
  ClusterOptions options = testing::pd(1, 1, cost());
  options.script = {{.at_s = 0.05, .kind = ScriptKind::kFail, .worker = 0}};
  options.router.fleet.failures_until_out = 1;
  const std::vector<SimRequest> requests = {model_.request(0, 100, 2), model_.request(3, 100, 5)};
  const Result<SimResult> run = run_cluster(options, requests);
  ASSERT_TRUE(run) << run.error().message;
  EXPECT_EQ(run->requests[1].ended, Ended::kNoWorker);
}

TEST_F(ClusterFaults, WhoComesBackIsUsedAgain) {
  ClusterOptions options = testing::pd(1, 1, cost());
  options.script = {{.at_s = 0.5, .kind = ScriptKind::kFail, .worker = 1},
                    {.at_s = 2, .kind = ScriptKind::kJoin, .worker = 1}};
  const std::vector<SimRequest> requests = {model_.request(0, 100, 5), model_.request(1.7, 100, 5),
                                            model_.request(4, 100, 5)};
  const Result<SimResult> run = run_cluster(options, requests);
  ASSERT_TRUE(run) << run.error().message;
  EXPECT_EQ(run->requests[0].ended, Ended::kOk);
  EXPECT_NE(run->requests[1].ended, Ended::kOk);
  EXPECT_EQ(run->requests[2].ended, Ended::kOk);
  EXPECT_NEAR(run->workers[1].here_s, run->end_s - 1.5, 1e-6);
  expect_nothing_left(*run);
}

TEST_F(ClusterFaults, WhoLeavesFinishesWhatItHas) {
  ClusterOptions options = testing::pd(2, 3, cost());
  options.script = {{.at_s = 2, .kind = ScriptKind::kLeave, .worker = 3}};
  const auto requests = testing::poisson_load(model_, 30, 300, 100, 60, 3);
  const Result<SimResult> run = run_cluster(options, requests);
  ASSERT_TRUE(run) << run.error().message;
  EXPECT_EQ(count(*run, Ended::kOk), 300U);
  for (const RequestRecord& record : run->requests) {
    if (record.arrival_ns > 2'000'000'000) {
      EXPECT_NE(record.decode_worker, 3U);
    }
  }
  expect_nothing_left(*run);
}

TEST_F(ClusterFaults, WhoJoinsGetsRequests) {
  ClusterOptions options = testing::pd(2, 3, cost());
  options.script = {{.at_s = 2, .kind = ScriptKind::kJoin, .worker = 4}};
  const auto requests = testing::poisson_load(model_, 30, 300, 100, 60, 3);
  const Result<SimResult> run = run_cluster(options, requests);
  ASSERT_TRUE(run) << run.error().message;
  size_t at_newcomer = 0;
  for (const RequestRecord& record : run->requests) {
    if (record.handed_ns < 2'000'000'000) {
      EXPECT_NE(record.decode_worker, 4U);
    } else {
      at_newcomer += record.decode_worker == 4 ? 1 : 0;
    }
  }
  EXPECT_GT(at_newcomer, 20U);
  EXPECT_EQ(count(*run, Ended::kOk), 300U);
}

// The default and marginal-cost, without cohorts and calibration, while workers fail, leave, come back and join.
TEST_F(ClusterFaults, ExpertPoliciesNeedNothingAndFollowTheFleet) {
  for (const char* policy : {"locality-band", "marginal-cost"}) {
    ClusterOptions options = testing::pd(2, 4, cost());
    options.router.decode = {};
    EXPECT_EQ(options.router.decode.name, "locality-band");  // the default
    options.router.decode.name = policy;
    options.script = {{.at_s = 1, .kind = ScriptKind::kFail, .worker = 2},
                      {.at_s = 2, .kind = ScriptKind::kLeave, .worker = 3},
                      {.at_s = 3, .kind = ScriptKind::kJoin, .worker = 2},
                      {.at_s = 4, .kind = ScriptKind::kJoin, .worker = 5}};
    const auto requests = testing::poisson_load(model_, 30, 300, 100, 60, 3);
    const Result<SimResult> run = run_cluster(options, requests);
    ASSERT_TRUE(run) << run.error().message;
    EXPECT_EQ(count(*run, Ended::kOk) + count(*run, Ended::kWorkerLost), 300U) << policy;
    std::array<size_t, 6> late{};
    for (const RequestRecord& record : run->requests) {
      if (record.handed_ns > 6'000'000'000) ++late.at(record.decode_worker);
      if (record.arrival_ns < 2'000'000'000) continue;
      EXPECT_EQ(record.ended, Ended::kOk) << policy;
    }
    EXPECT_EQ(late[3], 0U) << policy;
    for (const size_t worker : {2U, 4U, 5U}) EXPECT_GT(late.at(worker), 10U) << policy << worker;
    expect_nothing_left(*run);
  }
}

TEST_F(ClusterFaults, APlainWorkersRequestsGoElsewhereUntilTheyHaveBegun) {
  ClusterOptions options;
  options.groups = {testing::group(Role::kBoth, 2, cost())};
  options.router.decode.name = "round-robin";
  options.script = {{.at_s = 0.05, .kind = ScriptKind::kFail, .worker = 0}};
  const std::vector<SimRequest> requests = {model_.request(0, 100, 100), model_.request(0, 100, 100),
                                            model_.request(0.0499, 100, 5), model_.request(0.0499, 100, 5)};
  const Result<SimResult> run = run_cluster(options, requests);
  ASSERT_TRUE(run) << run.error().message;
  EXPECT_EQ(count(*run, Ended::kWorkerLost), 1U);
  EXPECT_EQ(count(*run, Ended::kOk), 3U);
  expect_nothing_left(*run);
}

}  // namespace
}  // namespace kindred::sim

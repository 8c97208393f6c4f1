#include "fleet/breaker.h"

#include <gtest/gtest.h>

#include "fleet/fleet.h"

namespace kindred::fleet {
namespace {

using namespace std::chrono_literals;

constexpr BreakerOptions kOptions{.faults_until_open = 3, .open_ms = 1000ms, .probes = 2, .slow_start_ms = 10'000ms};

class BreakerTest : public ::testing::Test {
 protected:
  BreakerState state() const { return breaker_.state(kOptions, clock_.now()); }
  bool admits(int64_t probes = 0) const { return breaker_.admits(kOptions, clock_.now(), probes); }
  bool fault(int64_t probes = 0) { return breaker_.fault(kOptions, clock_.now(), probes); }
  bool success() { return breaker_.completed(kOptions, clock_.now()); }
  double share() const { return breaker_.share(kOptions, clock_.now()); }
  void open() {
    for (int i = 0; i < 3; ++i) fault();
  }

  ManualClock clock_;
  Breaker breaker_;
};

TEST_F(BreakerTest, OpensAfterFaultsInARowOnly) {
  EXPECT_FALSE(fault());
  EXPECT_FALSE(fault());
  EXPECT_FALSE(success());
  EXPECT_FALSE(fault());
  EXPECT_FALSE(fault());
  EXPECT_TRUE(admits());
  EXPECT_TRUE(fault());
  EXPECT_EQ(state(), BreakerState::kOpen);
  EXPECT_FALSE(admits());
}

TEST_F(BreakerTest, HalfOpensInTimeAndLetsABoundedNumberThrough) {
  open();
  clock_.advance(999ms);
  EXPECT_FALSE(admits());
  clock_.advance(1ms);
  EXPECT_EQ(state(), BreakerState::kHalfOpen);
  EXPECT_TRUE(admits(0));
  EXPECT_TRUE(admits(1));
  EXPECT_FALSE(admits(2));
  EXPECT_TRUE(success());
  EXPECT_EQ(state(), BreakerState::kClosed);
  EXPECT_TRUE(admits(2));
}

TEST_F(BreakerTest, AProbesFaultOpensItAgainButAnOldRequestsDoesNot) {
  open();
  clock_.advance(1s);
  EXPECT_FALSE(fault(/*probes=*/0));  // sent before it opened, timed out now
  EXPECT_EQ(state(), BreakerState::kHalfOpen);
  EXPECT_FALSE(fault(/*probes=*/1));
  EXPECT_EQ(state(), BreakerState::kOpen);
  clock_.advance(1s);
  EXPECT_TRUE(admits());
}

TEST_F(BreakerTest, AnAnswerThatBeginsClosesItButForgetsNoFaults) {
  fault();
  fault();
  EXPECT_FALSE(breaker_.answered(kOptions, clock_.now()));
  EXPECT_TRUE(fault());  // each broke off
  clock_.advance(1s);
  EXPECT_TRUE(breaker_.answered(kOptions, clock_.now()));
  EXPECT_EQ(state(), BreakerState::kClosed);
}

TEST_F(BreakerTest, AnOldAnswerDoesNotCloseIt) {
  open();
  EXPECT_FALSE(success());
  EXPECT_EQ(state(), BreakerState::kOpen);
}

TEST_F(BreakerTest, StartsSlowlyOnceBack) {
  EXPECT_EQ(share(), 1);
  open();
  clock_.advance(1s);
  EXPECT_TRUE(success());
  EXPECT_DOUBLE_EQ(share(), 0.1);
  clock_.advance(5s);
  EXPECT_DOUBLE_EQ(share(), 0.5);
  clock_.advance(5s);
  EXPECT_EQ(share(), 1);
  EXPECT_EQ(breaker_.share({.slow_start_ms = 0ms}, clock_.now()), 1);
}

Description decode_worker() {
  Description out;
  out.dialect = Dialect::kKindred;
  out.models = {"m"};
  out.role = Role::kDecode;
  out.fingerprint = "f0";
  return out;
}

class BreakerFleetTest : public ::testing::Test {
 protected:
  BreakerFleetTest() : fleet_(clock_, {.failures_until_out = 3, .breaker = kOptions}) {
    for (const char* url : {"http://a", "http://b"})
      fleet_.report_up(fleet_.add({url, Role::kDecode}), decode_worker());
  }
  policy::WorkerView view(WorkerId id) { return fleet_.snapshot({.role = Role::kDecode, .model = "m"}).views[id]; }
  void checks_succeed() { EXPECT_FALSE(fleet_.report_up(0, decode_worker())); }

  ManualClock clock_;
  Fleet fleet_;
};

TEST_F(BreakerFleetTest, ChecksThatSucceedDoNotHideRequestsThatFail) {
  for (int i = 0; i < 3; ++i) {
    EXPECT_TRUE(view(0).available);
    EXPECT_EQ(fleet_.report_fault(0, Fault::kTransport), i == 2);
    checks_succeed();
  }
  EXPECT_FALSE(view(0).available);
  EXPECT_EQ(fleet_.health(0), Health::kUp);
  EXPECT_EQ(fleet_.worker_status(0).breaker, BreakerState::kOpen);
  EXPECT_EQ(fleet_.serving("m").decode_up, 1U);
}

TEST_F(BreakerFleetTest, ProbesAreBoundedAndGivenBackHoweverTheyEnd) {
  for (int i = 0; i < 3; ++i) fleet_.report_fault(0, Fault::kTransport);
  clock_.advance(1s);
  LoadGuard one = fleet_.take(0, 1);
  EXPECT_TRUE(view(0).available);
  LoadGuard two = fleet_.take(0, 1);
  EXPECT_FALSE(view(0).available);
  two.release();  // its client left: no verdict
  EXPECT_TRUE(view(0).available);
  EXPECT_TRUE(fleet_.report_completed(0));
  LoadGuard three = fleet_.take(0, 1), four = fleet_.take(0, 1);
  EXPECT_TRUE(view(0).available);
}

TEST_F(BreakerFleetTest, LoadSurvivesWhateverHealthSays) {
  LoadGuard guard = fleet_.take(0, 3);
  for (int i = 0; i < 5; ++i) fleet_.report_failure(0, "timeout");
  fleet_.report_refused(0, "refused");
  fleet_.report_out(0, "draining");
  fleet_.report_up(0, decode_worker());
  for (int i = 0; i < 3; ++i) fleet_.report_fault(0, Fault::kTransport);
  clock_.advance(1s);
  fleet_.report_completed(0);
  EXPECT_EQ(fleet_.worker_status(0).in_flight, 3);
  guard.release();
  EXPECT_EQ(fleet_.worker_status(0).in_flight, 0);
}

TEST_F(BreakerFleetTest, BackAfterAnOutageAtTheNextCheckWithASmallShare) {
  for (int i = 0; i < 3; ++i) fleet_.report_refused(0, "refused");
  fleet_.report_failure(0, "refused");  // the check agrees
  EXPECT_FALSE(view(0).available);
  EXPECT_TRUE(fleet_.report_up(0, decode_worker()));
  EXPECT_TRUE(view(0).available);
  EXPECT_DOUBLE_EQ(view(0).share, 0.1);
  EXPECT_DOUBLE_EQ(view(0).load, 9);  // as if it had nine requests, until it has shown itself
  EXPECT_DOUBLE_EQ(view(1).load, 0);
  clock_.advance(5s);
  EXPECT_DOUBLE_EQ(view(0).load, 1);
  clock_.advance(5s);
  EXPECT_DOUBLE_EQ(view(0).load, 0);
}

TEST_F(BreakerFleetTest, WhoHangsUpOnRequestsIsNotBackBecauseItsChecksSucceed) {
  for (int i = 0; i < 3; ++i) {
    fleet_.report_refused(0, "closed before the head");
    EXPECT_TRUE(fleet_.report_up(0, decode_worker()));
  }
  EXPECT_FALSE(view(0).available);
  clock_.advance(1s);
  EXPECT_TRUE(view(0).available);
  EXPECT_EQ(fleet_.worker_status(0).breaker, BreakerState::kHalfOpen);
}

TEST_F(BreakerFleetTest, AnswersNeverTakeOutTheLastWorker) {
  for (int i = 0; i < 9; ++i) fleet_.report_fault(0, Fault::kAnswer);
  EXPECT_FALSE(view(0).available);
  for (int i = 0; i < 9; ++i) EXPECT_FALSE(fleet_.report_fault(1, Fault::kAnswer));
  EXPECT_TRUE(view(1).available);
  EXPECT_TRUE(fleet_.report_fault(1, Fault::kTransport));
}

}  // namespace
}  // namespace kindred::fleet

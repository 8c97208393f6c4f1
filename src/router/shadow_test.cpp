#include "policy/shadow.h"

#include <gtest/gtest.h>

#include "base/json.h"
#include "router/testing.h"

namespace kindred::router {
namespace {

using namespace testing;

class ShadowTest : public PdFlowTest {
 protected:
  Json last() { return parse_json(call("GET", "/status?decisions=1").body)["decisions"][0]; }
};

// The acting policy takes turns; its shadow would send everything by experts to the second worker.
TEST_F(ShadowTest, DecidesAndIsLoggedButDoesNotAct) {
  FakeWorker& p = prefill();
  FakeWorker& d0 = decode();
  FakeWorker& d1 = decode();
  p.set_counts(counts_on(1));
  options_.decode_policy.name = "round-robin";
  options_.shadow_policy = options_.decode_policy;
  options_.shadow_policy->name = "locality-band";
  options_.shadow_policy->tau = 0;
  options_.cohorts = cohort_file({0, 1});
  start();
  for (int i = 0; i < 8; ++i) {
    const Answer answer = chat(true);
    EXPECT_EQ(answer.body, kWholeStream);
    const Json decision = last();
    EXPECT_EQ(decision["policy"], "round-robin");
    EXPECT_EQ(decision["shadow_worker"], d1.url());
  }
  EXPECT_EQ(d0.leg_count(), 4U);
  EXPECT_EQ(d1.leg_count(), 4U);
  EXPECT_TRUE(has_metric(R"(kindred_router_shadow_decisions_total{agreed="yes"} 4)"));
  EXPECT_TRUE(has_metric(R"(kindred_router_shadow_decisions_total{agreed="no"} 4)"));
  EXPECT_TRUE(has_metric("kindred_router_shadow_decision_seconds_count 8"));
  EXPECT_EQ(in_flight(), 0);
  EXPECT_EQ(parse_json(call("GET", "/status").body)["policy"]["shadow"], "locality-band");
}

TEST_F(ShadowTest, WithoutOneNothingIsSaidOfIt) {
  prefill();
  decode();
  start();
  EXPECT_EQ(chat(true).status, 200);
  EXPECT_FALSE(last().contains("shadow_worker"));
  EXPECT_TRUE(parse_json(call("GET", "/status").body)["policy"]["shadow"].is_null());
}

TEST_F(ShadowTest, AnExperimentHasNone) {
  options_.worker = {"http://127.0.0.1:1"};
  options_.shadow_policy = options_.decode_policy;
  options_.experiment.arms.resize(2);
  options_.experiment.arms[0].name = "a";
  options_.experiment.arms[1].name = "b";
  const auto made = Router::make(loop_.executor(), options_, clock_);
  ASSERT_FALSE(made.ok());
  EXPECT_EQ(made.error().field, "shadow_policy");
}

}  // namespace
}  // namespace kindred::router

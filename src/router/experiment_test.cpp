#include "router/experiment.h"

#include <gtest/gtest.h>

#include <set>

#include "router/testing.h"

namespace kindred::router {
namespace {

using namespace testing;

ExperimentPlan plan() { return {.arms = {"a", "b"}, .slice_s = 10, .seam_s = 2, .seed = 3, .level = 0.95}; }

uint64_t arm_of(const ExperimentLedger& ledger, uint64_t slice) {
  return ledger.arm_at(static_cast<double>(slice) * 10);
}

TEST(ExperimentLedger, SeamsAndSlicesThatAreNotOverDoNotCount) {
  ExperimentLedger ledger(plan());
  ledger.request(1.9, 3, 1.0, 0.1);   // in the seam
  ledger.request(2.0, 3, 1.0, 0.1);   // counts
  ledger.request(9.9, 11, 3.0, 0.3);  // counts, where it began
  ledger.request(12.5, 13, 9.0, 0.9);
  const Json report = ledger.report(15);
  const Json& arm = report["arms"][arm_of(ledger, 0)];
  EXPECT_EQ(arm["requests"], 2);
  EXPECT_EQ(arm["ended_in_a_later_slice"], 1);
  EXPECT_DOUBLE_EQ(arm["means"]["ttft_s"], 2.0);
  EXPECT_EQ(report["arms"][arm_of(ledger, 1)]["requests"], 0);  // its slice goes on
  EXPECT_EQ(report["requests_in_seams"], 1);
  EXPECT_EQ(report["slices_over"], 1);
}

TEST(ExperimentLedger, TheSliceIsTheUnit) {
  ExperimentLedger ledger(plan());
  // Slices of one arm are worth 1 and 3; that one of them had a hundred requests makes it no weightier.
  std::vector<double> values = {1, 3};
  size_t next = 0;
  for (uint64_t slice = 0; slice < 4; ++slice) {
    if (arm_of(ledger, slice) != 0) continue;
    for (int i = 0; i < (next == 0 ? 100 : 1); ++i)
      ledger.request(static_cast<double>(slice) * 10 + 5, 0, values[next], {});
    ++next;
  }
  EXPECT_DOUBLE_EQ(ledger.report(40)["arms"][0]["means"]["ttft_s"], 2.0);
}

TEST(ExperimentLedger, ReportsTheDifferenceOfWholeBlocks) {
  ExperimentLedger ledger(plan());
  for (uint64_t slice = 0; slice < 20; ++slice) {
    const bool b = arm_of(ledger, slice) == 1;
    const double drift = static_cast<double>(slice / 2);
    ledger.window(slice, 100 + drift + (b ? 5.0 + 0.1 * static_cast<double>(slice % 3) : 0), {});
    const double ttft_s = 1.0 + drift + (b ? (slice / 2 % 2 == 0 ? 0.01 : -0.01) : 0);  // no difference on the whole
    ledger.request(static_cast<double>(slice) * 10 + 5, 0, ttft_s, {});
  }
  ledger.window(20, 1e9, {});  // of a block that is not over
  const Json report = ledger.report(210);
  const Json& against = report["arms"][1]["against_control"];
  EXPECT_EQ(against["tokens_per_s"]["blocks"], 10);
  EXPECT_NEAR(against["tokens_per_s"]["difference"].get<double>(), 5.1, 0.1);
  EXPECT_TRUE(against["tokens_per_s"]["claimed"]);
  EXPECT_FALSE(against["ttft_s"]["claimed"]);
  EXPECT_TRUE(against["tpot_s"].is_null());
  EXPECT_TRUE(report["arms"][0]["against_control"].is_null());
}

TEST(ExperimentLedger, ABlockWithAGapIsLeftOut) {
  ExperimentLedger ledger(plan());
  for (uint64_t slice = 0; slice < 8; ++slice) {
    if (slice != 2) ledger.window(slice, 1, {});
  }
  EXPECT_EQ(ledger.report(80)["arms"][1]["against_control"]["tokens_per_s"]["blocks"], 3);
}

TEST(ExperimentLedger, OldSlicesGo) {
  ExperimentLedger ledger(plan());
  for (uint64_t slice = 0; slice < ExperimentLedger::kMaxSlices + 100; ++slice) ledger.window(slice, 1, {});
  const Json report = ledger.report(10.0 * (ExperimentLedger::kMaxSlices + 100));
  EXPECT_LE(report["arms"][1]["against_control"]["tokens_per_s"]["blocks"], ExperimentLedger::kMaxSlices / 2);
}

ExperimentOptions two_arms() {
  ExperimentOptions options;
  options.arms.resize(2);
  options.arms[0].name = "even";
  options.arms[0].decode.name = "round-robin";
  options.arms[1].name = "loads";
  options.arms[1].decode.name = "least-loaded";
  return options;
}

TEST(ExperimentOptions, WrongOnesAreRefused) {
  const SystemClock clock;
  const auto message = [&](const ExperimentOptions& options) {
    const auto made = Experiment::make(options, clock);
    return made.ok() ? std::string() : made.error().message;
  };
  EXPECT_EQ(message(two_arms()), "");
  ExperimentOptions options = two_arms();
  options.arms.resize(1);
  EXPECT_NE(message(options).find("2 to 8"), std::string::npos);
  options = two_arms();
  options.seam_ms = options.slice_ms;
  EXPECT_NE(message(options).find("seam"), std::string::npos);
  options = two_arms();
  options.arms[1].name = "even";
  EXPECT_NE(message(options).find("'even'"), std::string::npos);
  options = two_arms();
  options.arms[1].decode.name = "fastest";
  EXPECT_NE(message(options).find("fastest"), std::string::npos);
}

class ExperimentTest : public PdFlowTest {};

TEST_F(ExperimentTest, ArmsTakeTurnsAndAreReported) {
  prefill();
  decode();
  decode();
  options_.experiment = two_arms();
  options_.experiment.slice_ms = 150ms;
  options_.experiment.seam_ms = 30ms;
  start();
  const auto report = [&] { return parse_json(call("GET", "/experiment").body); };
  const auto measured = [](const Json& arm) { return arm["means"]["tokens_per_s"].is_number(); };
  EXPECT_TRUE(eventually(
      [&] {
        for (int i = 0; i < 5; ++i) EXPECT_EQ(chat(true).status, 200);
        const Json arms = report()["arms"];
        return arms[1]["against_control"]["ttft_s"].is_object() && measured(arms[0]) && measured(arms[1]);
      },
      30s));
  const Json now = report();
  std::set<std::string> policies;
  const Json status = parse_json(call("GET", "/status?decisions=1000").body);
  for (const Json& decision : status["decisions"]) {
    policies.insert(decision["policy"].get<std::string>());
  }
  EXPECT_EQ(policies, (std::set<std::string>{"least-loaded", "round-robin"}));
  for (const Json& arm : now["arms"]) {
    EXPECT_GT(arm["requests"], 0);
    EXPECT_GT(arm["means"]["tpot_s"], 0);
    EXPECT_GT(arm["means"]["tokens_per_s"], 0);
  }
  EXPECT_EQ(now["arms"][0]["name"], "even");
}

TEST_F(ExperimentTest, WithoutOneThereIsNoReport) {
  prefill();
  decode();
  start();
  EXPECT_EQ(call("GET", "/experiment").status, 404);
}

}  // namespace
}  // namespace kindred::router

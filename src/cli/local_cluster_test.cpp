#include "cli/local_cluster.h"

#include <gtest/gtest.h>

#include <cmath>

#include "cli/chat_load.h"

namespace kindred::cli {
namespace {

DecodeWork work(std::map<uint32_t, DecodeWork::Steps> by_batch) {
  DecodeWork out;
  out.by_batch = std::move(by_batch);
  return out;
}

TEST(DecodeWork, ChangesAreOfEqualBatchSizes) {
  // At every size 10 % fewer experts, though the mean over all steps is higher: larger batches.
  const DecodeWork base = work({{1, {90, 90 * 4.0}}, {8, {10, 10 * 20.0}}});
  const DecodeWork other = work({{1, {10, 10 * 3.6}}, {8, {90, 90 * 18.0}}});
  EXPECT_GT(other.active_per_step(), base.active_per_step());
  EXPECT_NEAR(active_change(base, other), -0.1, 1e-12);
}

TEST(DecodeWork, SizesThatOneSideLacksDoNotCount) {
  const DecodeWork base = work({{1, {10, 40}}, {2, {10, 70}}});
  const DecodeWork other = work({{2, {5, 30}}, {3, {50, 1000}}});
  EXPECT_NEAR(active_change(base, other), 6.0 / 7.0 - 1, 1e-12);
  EXPECT_TRUE(std::isnan(active_change(base, work({{3, {1, 1}}}))));
  EXPECT_TRUE(std::isnan(active_change(work({}), work({}))));
}

TEST(DecodeWork, IsADifferenceOfTotals) {
  DecodeWork before = work({{1, {10, 40}}}), after = work({{1, {12, 50}}, {2, {1, 7}}});
  before.sequences = 10, after.sequences = 14;
  const DecodeWork between = after - before;
  EXPECT_EQ(between.all().steps, 3);
  EXPECT_EQ(between.all().active_experts, 17);
  EXPECT_NEAR(between.batch(), 4.0 / 3, 1e-12);
}

TEST(Metrics, AreReadByLabel) {
  const std::string text =
      "# HELP a_total x\na_total{model=\"m\",n=\"1\"} 2\na_total{model=\"m\",n=\"2\"} 3\na_total{xn=\"9\"} "
      "5\na_total_b{n=\"1\"} 7\n";
  EXPECT_EQ(metric_sum(text, "a_total"), 10);
  const auto by = metric_by_label(text, "a_total", "n");
  EXPECT_EQ(by, (std::map<std::string, double>{{"1", 2}, {"2", 3}}));
}

}  // namespace
}  // namespace kindred::cli

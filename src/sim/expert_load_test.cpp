#include "sim/expert_load.h"

#include <gtest/gtest.h>

#include "sim/cluster_testing.h"

namespace kindred::sim {
namespace {

constexpr int64_t kSecond_ns = 1'000'000'000;

// Two layers of 16 experts over 4 ranks; prompts use experts 3 and 4: ranks 0 and 1. Generated tokens use 0 and 1 in
// one layer, 0 and 15 in the other: three quarters on rank 0, one on rank 3.
class ExpertLoadTest : public ::testing::Test {
 protected:
  ExpertLoadTest() {
    auto tape = std::make_shared<ExpertTape>(model_.shape, 40);
    for (uint32_t t = 0; t < 40; ++t) {
      for (const uint32_t e : {0U, 1U}) tape->set(t, 0, e);
      for (const uint32_t e : {0U, 15U}) tape->set(t, 1, e);
    }
    experts_ = {.prompt = testing::flat_counts(model_.shape, 64, 3), .decode = tape};
  }

  testing::TestModel model_;
  RequestExperts experts_;
  ExpertLoad load_{std::make_shared<ExpertRanks>(ExpertRanks::linear(2, 16, 4))};
};

TEST_F(ExpertLoadTest, TokensAreDividedAsTheirExpertsAre) {
  EXPECT_DOUBLE_EQ(load_.prompt_share(experts_, 0, 1), 0.5);
  EXPECT_DOUBLE_EQ(load_.prompt_share(experts_, 0, 2), 1);
  EXPECT_DOUBLE_EQ(load_.generated_share(experts_, 0, 1), 0.75);
  EXPECT_DOUBLE_EQ(load_.generated_share(experts_, 3, 4), 0.25);
  load_.add(experts_, 100, 4, 0);
  EXPECT_DOUBLE_EQ(load_.recent_tokens(0, 1, 0), 53);
  EXPECT_DOUBLE_EQ(load_.recent_tokens(2, 4, 0), 1);
  EXPECT_DOUBLE_EQ(load_.recent_tokens(0, 4, 0), 104);
}

TEST_F(ExpertLoadTest, TheWindowSlides) {
  load_.add(experts_, 100, 0, 0);
  EXPECT_DOUBLE_EQ(load_.recent_tokens(0, 1, kSecond_ns - 1), 50);
  EXPECT_DOUBLE_EQ(load_.recent_tokens(0, 1, kSecond_ns + kSecond_ns / 4), 37.5);
  load_.add(experts_, 10, 0, kSecond_ns + kSecond_ns / 2);
  EXPECT_DOUBLE_EQ(load_.recent_tokens(0, 1, kSecond_ns + kSecond_ns / 2), 30);
  EXPECT_DOUBLE_EQ(load_.recent_tokens(0, 1, 2 * kSecond_ns), 5);
  EXPECT_DOUBLE_EQ(load_.recent_tokens(0, 1, 9 * kSecond_ns), 0);
}

}  // namespace
}  // namespace kindred::sim

#include "fleet/other_routers.h"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <vector>

#include "base/rng.h"

namespace kindred::fleet {
namespace {

std::shared_ptr<const ExpertState> state_of(std::vector<float> unused) {
  auto out = std::make_shared<ExpertState>();
  for (const float q : unused) out->used += 1 - static_cast<double>(q);
  out->unused = std::move(unused);
  return out;
}

TEST(OtherRouters, KnownRequestsStandForTheUnknown) {
  const auto half = state_of({0.5F, 1.0F});
  std::array<PartlyKnown, 4> workers = {{{.state = half, .known = 2, .requests = 6},
                                         {.state = half, .known = 5, .requests = 6},
                                         {.state = nullptr, .known = 0, .requests = 3},
                                         {.state = nullptr, .known = 0, .requests = 0}}};
  add_unknown(workers);
  EXPECT_EQ(workers[0].state->unused, (std::vector<float>{0.125F, 1.0F}));
  EXPECT_NEAR(workers[0].state->used, 0.875, 1e-6);
  EXPECT_EQ(workers[1].state, half);  // little is unknown there
  ASSERT_TRUE(workers[2].state);      // the mean of the others
  EXPECT_EQ(workers[2].state->unused, (std::vector<float>{0.3125F, 1.0F}));
  EXPECT_FALSE(workers[3].state);
}

TEST(OtherRouters, TheBusiestRankOfEach) {
  const auto map = std::make_shared<const expert::RankMap>(*expert::RankMap::linear(1, 2, 2));
  auto known = std::make_shared<ExpertState>();
  known->unused = {0.5F, 0.8F};
  known->used = 0.5;
  known->ranks = map;
  std::array<PartlyKnown, 2> workers = {{{.state = known, .known = 2, .requests = 4, .ranks = map},
                                         {.state = nullptr, .known = 0, .requests = 3, .ranks = map}}};
  add_unknown(workers);
  EXPECT_NEAR(workers[0].state->used, 0.75, 1e-6);
  ASSERT_TRUE(workers[1].state);
  EXPECT_NEAR(workers[1].state->used, 0.75, 1e-6);
  EXPECT_EQ(workers[1].state->ranks, map);
}

TEST(OtherRouters, OldLoadsAndOwnBooksAreAveraged) {
  std::array<PartlyKnown, 3> workers = {{{.state = nullptr, .known = 1, .requests = 8},
                                         {.state = nullptr, .known = 3, .requests = 8},
                                         {.state = nullptr, .known = 0, .requests = 0}}};
  estimate_requests(workers);  // four are known of sixteen
  EXPECT_DOUBLE_EQ(workers[0].requests, 6);
  EXPECT_DOUBLE_EQ(workers[1].requests, 10);
  EXPECT_DOUBLE_EQ(workers[2].requests, 0);
  std::array<PartlyKnown, 1> nothing = {{{.state = nullptr, .known = 0, .requests = 3}}};
  estimate_requests(nothing);
  EXPECT_DOUBLE_EQ(nothing[0].requests, 3);
}

// Whatever the figures: the sum stays, and one router that knows everything changes nothing.
TEST(OtherRouters, EstimatesKeepTheSum) {
  Rng rng(2);
  for (int round = 0; round < 100; ++round) {
    std::vector<PartlyKnown> workers(1 + rng.below(8));
    double before = 0, after = 0;
    for (PartlyKnown& worker : workers) {
      worker.requests = static_cast<double>(rng.below(30));
      worker.known = round % 2 == 0 ? worker.requests : std::floor(worker.requests * rng.uniform());
      before += worker.requests;
    }
    const std::vector<PartlyKnown> given = workers;
    estimate_requests(workers);
    for (size_t i = 0; i < workers.size(); ++i) {
      after += workers[i].requests;
      if (round % 2 == 0) {
        EXPECT_DOUBLE_EQ(workers[i].requests, given[i].requests);
      }
    }
    EXPECT_NEAR(after, before, 1e-9);
  }
}

TEST(OtherRouters, NothingKnownStaysUnknown) {
  std::array<PartlyKnown, 1> workers = {{{.state = nullptr, .known = 0, .requests = 3}}};
  add_unknown(workers);
  EXPECT_FALSE(workers[0].state);
}

}  // namespace
}  // namespace kindred::fleet

#include "fleet/expert_load.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <thread>
#include <vector>

#include "base/rng.h"
#include "fleet/fleet.h"

namespace kindred::fleet {
namespace {

const expert::ExpertShape kShape = {.layers = {0, 1, 2}, .experts = 16, .top_k = 2};

std::shared_ptr<const expert::Inclusion> random_inclusion(Rng& rng) {
  expert::ExpertCounts counts(kShape);
  counts.tokens = 100;
  for (uint32_t& count : counts.data) count = static_cast<uint32_t>(rng.below(101));
  return std::make_shared<const expert::Inclusion>(expert::pack_inclusion(counts));
}

TEST(ExpertLoad, IsThatOfWhoIsThereWhoeverWasBefore) {
  ManualClock clock;
  Rng rng(1);
  ExpertLoad load(clock);
  std::vector<std::pair<std::shared_ptr<const expert::Inclusion>, int32_t>> there;
  for (int step = 0; step < 2000; ++step) {
    if (there.empty() || rng.below(2) == 0) {
      there.emplace_back(random_inclusion(rng), static_cast<int32_t>(1 + rng.below(3)));
      ASSERT_TRUE(load.join(*there.back().first, there.back().second));
    } else {
      std::swap(there[rng.below(there.size())], there.back());
      load.leave(*there.back().first, there.back().second);
      there.pop_back();
    }
    ExpertLoad fresh(clock);
    for (const auto& [inclusion, choices] : there) fresh.join(*inclusion, choices);
    const auto state = load.state(), wanted = fresh.state();
    ASSERT_EQ(state == nullptr, there.empty());
    if (state == nullptr) continue;
    ASSERT_EQ(state->unused, wanted->unused);
    ASSERT_EQ(state->used, wanted->used);
  }
}

// Under whatever order of joins, leaves and moves of experts, it is the busiest rank under the last placement.
TEST(ExpertLoad, FollowsThePlacement) {
  ManualClock clock;
  Rng rng(6);
  ExpertLoad load(clock);
  std::vector<std::shared_ptr<const expert::Inclusion>> there;
  std::vector<uint32_t> rank(kShape.cells(), 0);
  for (int step = 0; step < 500; ++step) {
    const uint64_t what = rng.below(3);
    if (what == 0 || there.empty()) {
      there.push_back(random_inclusion(rng));
      load.join(*there.back(), 1);
    } else if (what == 1) {
      load.leave(*there.back(), 1);
      there.pop_back();
    } else {
      for (uint32_t& one : rank) one = static_cast<uint32_t>(rng.below(4));
      load.set_ranks(std::make_shared<const expert::RankMap>(*expert::RankMap::make(3, 16, 4, rank)));
    }
    const auto state = load.state();
    if (!state || !load.ranks()) continue;
    double wanted = 0;
    for (size_t l = 0; l < 3; ++l) {
      std::array<double, 4> used{};
      for (size_t e = 0; e < 16; ++e) used.at(rank[l * 16 + e]) += 1 - static_cast<double>(state->unused[l * 16 + e]);
      wanted += std::ranges::max(used);
    }
    ASSERT_NEAR(state->used, wanted, 1e-9);
    ASSERT_EQ(state->ranks, load.ranks());
  }
  load.set_ranks(std::make_shared<const expert::RankMap>(*expert::RankMap::linear(2, 16, 4)));  // of another model
  load.join(*random_inclusion(rng), 1);
  EXPECT_FALSE(load.state()->ranks);
}

TEST(ExpertLoad, KeepsNoOtherShape) {
  ManualClock clock;
  Rng rng(2);
  ExpertLoad load(clock);
  const auto one = random_inclusion(rng);
  expert::Inclusion other = *one;
  other.shape.layers = {0, 1, 3};
  ASSERT_TRUE(load.join(*one, 1));
  EXPECT_FALSE(load.join(other, 1));
  load.leave(*one, 1);
  EXPECT_TRUE(load.join(other, 1));  // once nobody else is there
}

TEST(ExpertLoad, SumsAreIntegralsOverTime) {
  ManualClock clock;
  Rng rng(4);
  ExpertLoad load(clock);
  const auto one = random_inclusion(rng);
  load.join(*one, 2);
  const double used = load.state()->used / 3;
  const ExpertSums before = load.sums();
  clock.advance(std::chrono::seconds(2));
  load.leave(*one, 2);
  clock.advance(std::chrono::seconds(3));
  const ExpertSums after = load.sums();
  EXPECT_NEAR(after.seconds - before.seconds, 5, 1e-9);
  EXPECT_NEAR(after.requests_s - before.requests_s, 4, 1e-9);
  EXPECT_NEAR(after.used_s - before.used_s, 2 * used, 1e-9);
}

class FleetExpertLoad : public ::testing::Test {
 protected:
  FleetExpertLoad() : fleet_(clock_) {
    worker_ = fleet_.add({.url = "http://d", .role = Role::kDecode, .dialect = Dialect::kKindred});
    Description said;
    said.dialect = Dialect::kKindred;
    said.role = Role::kDecode;
    fleet_.report_up(worker_, said);
  }
  Snapshot snapshot() const { return fleet_.snapshot({.role = Role::kDecode, .experts = true}); }

  SystemClock clock_;
  Fleet fleet_;
  WorkerId worker_ = 0;
};

TEST_F(FleetExpertLoad, ViewsShowWhatGuardsHold) {
  Rng rng(3);
  const auto one = random_inclusion(rng);
  EXPECT_TRUE(snapshot().views[0].unused.empty());
  LoadGuard guard = fleet_.take(worker_, LegLoad{.requests = 2}, one);
  const Snapshot seen = snapshot();
  EXPECT_EQ(seen.views[0].requests, 2);
  ASSERT_EQ(seen.views[0].unused.size(), kShape.cells());
  EXPECT_GT(seen.views[0].used, 0);
  LoadGuard moved = std::move(guard);
  guard.release();  // NOLINT(bugprone-use-after-move): holds nothing any more
  EXPECT_FALSE(snapshot().views[0].unused.empty());
  moved.release();
  moved.release();
  EXPECT_TRUE(snapshot().views[0].unused.empty());
  EXPECT_EQ(seen.views[0].unused.size(), kShape.cells());  // what was seen stays
  const LoadGuard unknown = fleet_.take(worker_, LegLoad{}, nullptr);
  EXPECT_TRUE(snapshot().views[0].unused.empty());
  EXPECT_EQ(snapshot().views[0].requests, 1);
}

TEST_F(FleetExpertLoad, ViewsShowWhereExpertsAre) {
  Rng rng(7);
  EXPECT_EQ(snapshot().views[0].ranks, nullptr);
  const auto map = std::make_shared<const expert::RankMap>(*expert::RankMap::linear(3, 16, 4));
  fleet_.report_ranks(worker_, map);
  EXPECT_EQ(snapshot().views[0].ranks, map.get());  // of an idle worker, too
  const LoadGuard guard = fleet_.take(worker_, LegLoad{}, random_inclusion(rng));
  const Snapshot seen = snapshot();
  EXPECT_EQ(seen.views[0].used, expert::busiest_rank_used(*map, seen.views[0].unused));
  fleet_.report_ranks(worker_, nullptr);
  EXPECT_EQ(snapshot().views[0].ranks, nullptr);
  EXPECT_GT(snapshot().views[0].used, seen.views[0].used);
  EXPECT_EQ(seen.views[0].ranks, map.get());  // what was seen stays
}

TEST_F(FleetExpertLoad, ManyThreadsLeaveNothing) {
  std::vector<std::jthread> threads;
  for (uint64_t t = 0; t < 4; ++t) {
    threads.emplace_back([this, t] {
      Rng rng(t);
      std::vector<LoadGuard> held(8);
      for (int i = 0; i < 300; ++i) {
        held[rng.below(held.size())] = fleet_.take(worker_, LegLoad{}, random_inclusion(rng));
        const Snapshot seen = snapshot();
        ASSERT_TRUE(std::ranges::all_of(seen.views[0].unused, [](float q) { return q >= 0 && q <= 1; }));
      }
    });
  }
  threads.clear();
  EXPECT_TRUE(snapshot().views[0].unused.empty());
  EXPECT_EQ(snapshot().views[0].requests, 0);
}

}  // namespace
}  // namespace kindred::fleet

#include "policy/marginal_cost.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <limits>
#include <vector>

#include "base/rng.h"

namespace kindred::policy {
namespace {

constexpr uint32_t kExperts = 8;
const expert::ExpertShape kShape = {.layers = {0, 1}, .experts = kExperts, .top_k = 2};

// All tokens of the prompt use experts `first` and `first` + 1 of both layers.
expert::ExpertCounts uses(uint32_t first, uint32_t tokens = 100) {
  expert::ExpertCounts out(kShape);
  out.tokens = tokens;
  for (uint32_t l = 0; l < 2; ++l) {
    for (uint32_t e = first; e < first + 2; ++e) out.data[l * kExperts + e] = tokens;
  }
  return out;
}

// A worker as the fleet would show it.
struct Busy {
  std::vector<uint32_t> sums = std::vector<uint32_t>(kShape.cells(), 0);
  std::vector<float> unused = std::vector<float>(kShape.cells(), 1.0F);
  double used = 0, requests = 0;

  void join(const expert::ExpertCounts& counts) {
    expert::add_inclusion(expert::pack_inclusion(counts).codes, 1, sums);
    used = expert::unused_shares(sums, unused);
    ++requests;
  }
  WorkerView view() const {
    WorkerView out;
    out.load = out.requests = requests;
    if (requests > 0) out.unused = unused;
    out.used = used;
    return out;
  }
};

class MarginalCostTest : public ::testing::Test {
 protected:
  std::optional<Decision> choose(const std::vector<WorkerView>& workers, const expert::ExpertCounts* counts,
                                 const MarginalOptions& options = {}, double prompt_tokens = 0) {
    DecodePolicyOptions with;
    with.held_weight = held_weight_;
    with.name = "marginal-cost";
    with.tie_break = "lowest-index";
    with.load_cap = load_cap_;
    with.marginal = options;
    policy_ = *make_decode_policy(with);
    DecodeRequest request;
    request.counts = counts;
    request.prompt_tokens = prompt_tokens;
    return policy_->choose({.workers = workers}, request);
  }

  double load_cap_ = 0, held_weight_ = 0;
  std::unique_ptr<DecodePolicy> policy_;
};

TEST_F(MarginalCostTest, GoesWhereItsExpertsAreReadAnyway) {
  std::array<Busy, 3> workers;
  workers[0].join(uses(0));
  workers[1].join(uses(2));
  workers[2].join(uses(4));
  for (uint32_t w = 0; w < 3; ++w) {
    const expert::ExpertCounts counts = uses(2 * w);
    const auto decision = choose({workers[0].view(), workers[1].view(), workers[2].view()}, &counts);
    ASSERT_TRUE(decision);
    EXPECT_EQ(decision->worker, w);
    EXPECT_EQ(decision->reason, Reason::kMarginal);
    EXPECT_EQ(decision->fallback, FallbackReason::kNone);
    ASSERT_TRUE(decision->inclusion);
    EXPECT_EQ(decision->inclusion->shape, kShape);
  }
}

// Costs by hand, from the definition, against the policy's choice: B, U and delta of random workers.
TEST_F(MarginalCostTest, IsTheLeastOfTheFormula) {
  Rng rng(5);
  for (int round = 0; round < 200; ++round) {
    std::vector<Busy> busy(5);
    std::vector<WorkerView> workers;
    for (Busy& worker : busy) {
      for (uint64_t n = 1 + rng.below(6); n > 0; --n) worker.join(uses(static_cast<uint32_t>(rng.below(7)), 10));
      workers.push_back(worker.view());
      workers.back().slowness = 0.5 + rng.uniform();
    }
    const expert::ExpertCounts counts = uses(static_cast<uint32_t>(rng.below(7)), 10);
    std::vector<float> p(kShape.cells());
    expert::unpack_inclusion(expert::pack_inclusion(counts).codes, p);
    size_t best = 0;
    double least = std::numeric_limits<double>::infinity();
    for (size_t w = 0; w < workers.size(); ++w) {
      double more = 0;
      for (size_t i = 0; i < p.size(); ++i) more += static_cast<double>(p[i]) * busy[w].unused[i];
      const double batch = busy[w].requests, experts = busy[w].used / 2;
      const auto step = [](double u, double b) { return 30 + u + 0.2 * b; };
      const double cost =
          workers[w].slowness * ((batch + 1) * step(experts + more / 2, batch + 1) - batch * step(experts, batch));
      if (cost >= least) continue;
      least = cost;
      best = w;
    }
    const auto decision = choose(workers, &counts);
    ASSERT_TRUE(decision);
    EXPECT_EQ(decision->worker, best) << round;
  }
}

// With ranks, by whole tables from the definition: a layer costs its busiest rank's expected experts.
TEST_F(MarginalCostTest, WithRanksItIsTheLeastOfTheFormula) {
  Rng rng(8);
  const auto step = [](double u, double b) { return 30 + u + 0.2 * b; };
  for (int round = 0; round < 200; ++round) {
    std::vector<Busy> busy(4);
    std::vector<WorkerView> workers;
    std::vector<expert::RankMap> maps;
    std::vector<std::vector<uint32_t>> ranks(busy.size());
    for (auto& of : ranks) {
      for (size_t i = 0; i < kShape.cells(); ++i) of.push_back(static_cast<uint32_t>(rng.below(3)));
      maps.push_back(*expert::RankMap::make(2, kExperts, 3, of));
    }
    const expert::ExpertCounts counts = uses(static_cast<uint32_t>(rng.below(7)), 10);
    std::vector<float> p(kShape.cells());
    expert::unpack_inclusion(expert::pack_inclusion(counts).codes, p);
    size_t best = 0;
    double least = std::numeric_limits<double>::infinity();
    for (size_t w = 0; w < busy.size(); ++w) {
      for (uint64_t n = rng.below(5); n > 0; --n) busy[w].join(uses(static_cast<uint32_t>(rng.below(7)), 10));
      double before = 0, after = 0;
      for (uint32_t l = 0; l < 2; ++l) {
        std::array<double, 3> now{}, then{};
        for (uint32_t e = 0; e < kExperts; ++e) {
          const size_t i = l * kExperts + e;
          now.at(ranks[w][i]) += 1 - busy[w].unused[i];
          then.at(ranks[w][i]) += 1 - busy[w].unused[i] * (1 - p[i]);
        }
        before += std::ranges::max(now) / 2;
        after += std::ranges::max(then) / 2;
      }
      workers.push_back(busy[w].view());
      workers.back().ranks = &maps[w];
      workers.back().used = 2 * before;
      const double batch = busy[w].requests;
      const double cost = (batch + 1) * step(after, batch + 1) - batch * step(before, batch);
      if (cost >= least - 1e-3) continue;
      least = cost;
      best = w;
    }
    const auto decision = choose(workers, &counts);
    ASSERT_TRUE(decision);
    // Costs within rounding of each other may fall either way.
    const auto again = std::ranges::find(decision->candidates, static_cast<uint32_t>(best));
    EXPECT_NE(again, decision->candidates.end()) << round;
  }
}

TEST_F(MarginalCostTest, ARankThatIsBusyAnywayTakesNoMore) {
  // Worker 0 has both experts of the request on a rank that has little to read, worker 1 on the busiest one.
  std::array<Busy, 2> workers;
  for (Busy& worker : workers) {
    worker.join(uses(4));
    worker.join(uses(6));
  }
  const auto map = [](uint32_t of_requests) {
    std::vector<uint32_t> rank(kShape.cells(), 1 - of_requests);
    for (uint32_t l = 0; l < 2; ++l) {
      for (uint32_t e = 0; e < 2; ++e) rank[l * kExperts + e] = of_requests;
      for (uint32_t e = 2; e < kExperts; ++e) rank[l * kExperts + e] = 0;
    }
    return *expert::RankMap::make(2, kExperts, 2, rank);
  };
  const expert::RankMap apart = map(1), together = map(0);
  const expert::ExpertCounts counts = uses(0);
  std::vector<WorkerView> views = {workers[0].view(), workers[1].view()};
  views[0].ranks = &together;
  views[1].ranks = &apart;
  for (WorkerView& view : views) view.used = expert::busiest_rank_used(*view.ranks, view.unused);
  EXPECT_EQ(choose(views, &counts)->worker, 1U);
  std::swap(views[0].ranks, views[1].ranks);
  EXPECT_EQ(choose(views, &counts)->worker, 0U);
}

// What a worker holds of the conversation is one more term of the sum: by hand.
TEST_F(MarginalCostTest, HeldTokensAreWeighedAgainstExperts) {
  Rng rng(9);
  const auto step = [](double u, double b) { return 30 + u + 0.2 * b; };
  constexpr double kPrompt = 400;
  for (int round = 0; round < 200; ++round) {
    held_weight_ = 2 * rng.uniform();
    std::vector<Busy> busy(4);
    std::vector<WorkerView> workers;
    const expert::ExpertCounts counts = uses(static_cast<uint32_t>(rng.below(7)), 10);
    std::vector<float> p(kShape.cells());
    expert::unpack_inclusion(expert::pack_inclusion(counts).codes, p);
    std::vector<double> costs;
    double mean = 0;
    for (Busy& worker : busy) {
      for (uint64_t n = 1 + rng.below(5); n > 0; --n) worker.join(uses(static_cast<uint32_t>(rng.below(7)), 10));
      workers.push_back(worker.view());
      workers.back().held_tokens =
          rng.below(2) == 0 ? 0 : kPrompt * 1.2 * rng.uniform();  // of more than the prompt, too
      double more = 0;
      for (size_t i = 0; i < p.size(); ++i) more += static_cast<double>(p[i]) * worker.unused[i];
      const double batch = worker.requests, used = worker.used / 2;
      costs.push_back((batch + 1) * step(used + more / 2, batch + 1) - batch * step(used, batch));
      mean += costs.back() / static_cast<double>(busy.size());
    }
    for (size_t w = 0; w < costs.size(); ++w) {
      costs[w] += held_weight_ * mean * (1 - std::min(1.0, workers[w].held_tokens / kPrompt));
    }
    const auto decision = choose(workers, &counts, {}, kPrompt);
    ASSERT_TRUE(decision);
    const double least = *std::ranges::min_element(costs);
    EXPECT_NEAR(costs[decision->worker], least, 1e-3 * least) << round;
  }
}

TEST_F(MarginalCostTest, WithoutCountsHeldTokensAreWorthRequests) {
  held_weight_ = 1.5;
  std::array<Busy, 2> workers;
  workers[0].join(uses(0));
  std::vector<WorkerView> views = {workers[0].view(), workers[1].view()};
  views[0].held_tokens = 100;
  EXPECT_EQ(choose(views, nullptr, {}, 100)->worker, 0U);
  held_weight_ = 0.5;
  EXPECT_EQ(choose(views, nullptr, {}, 100)->worker, 1U);
}

TEST_F(MarginalCostTest, SlowWorkersGetLess) {
  std::array<Busy, 2> workers;
  workers[0].join(uses(0));
  workers[1].join(uses(0));
  const expert::ExpertCounts counts = uses(0);
  std::vector<WorkerView> views = {workers[0].view(), workers[1].view()};
  views[0].slowness = 1.5;
  EXPECT_EQ(choose(views, &counts)->worker, 1U);
}

TEST_F(MarginalCostTest, WithoutCountsItIsLeastLoaded) {
  std::array<Busy, 2> workers;
  workers[0].join(uses(0));
  const auto decision = choose({workers[0].view(), workers[1].view()}, nullptr);
  EXPECT_EQ(decision->worker, 1U);
  EXPECT_EQ(decision->fallback, FallbackReason::kNoCounts);
  EXPECT_EQ(decision->reason, Reason::kLeastLoaded);
  EXPECT_FALSE(decision->inclusion);
  EXPECT_FALSE(choose({}, nullptr));
}

TEST_F(MarginalCostTest, CountsOfAnotherModelFallBack) {
  Busy worker;
  worker.join(uses(0));
  expert::ExpertCounts other(expert::ExpertShape{.layers = {0}, .experts = 4, .top_k = 1});
  other.tokens = 1;
  other.data[0] = 1;
  const auto decision = choose({worker.view(), Busy().view()}, &other);
  EXPECT_EQ(decision->fallback, FallbackReason::kShapeMismatch);
  EXPECT_EQ(decision->worker, 1U);
}

TEST_F(MarginalCostTest, TheCapLeavesOutTheBusiest) {
  load_cap_ = 1.25;
  std::array<Busy, 2> workers;
  for (int i = 0; i < 8; ++i) workers[0].join(uses(0));
  workers[1].join(uses(4));
  const expert::ExpertCounts counts = uses(0);
  const auto decision = choose({workers[0].view(), workers[1].view()}, &counts);
  EXPECT_EQ(decision->worker, 1U);
  EXPECT_EQ(decision->capped, 1U);
}

TEST_F(MarginalCostTest, AmongEqualsLoadThenTieBreak) {
  const expert::ExpertCounts counts = uses(0);
  std::vector<WorkerView> idle(3);
  idle[0].load = 1;  // not in requests
  EXPECT_EQ(choose(idle, &counts)->worker, 1U);
  EXPECT_EQ(choose(idle, &counts)->candidates.size(), 3U);
}

TEST_F(MarginalCostTest, WrongOptionsAreNamed) {
  DecodePolicyOptions options;
  options.name = "marginal-cost";
  options.marginal.sharpen = 0;
  EXPECT_EQ(make_decode_policy(options).error().field, "sharpen");
  options.marginal = {.cohort_weight = -1};
  EXPECT_EQ(make_decode_policy(options).error().field, "cohort_weight");
}

}  // namespace
}  // namespace kindred::policy

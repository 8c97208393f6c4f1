#include "place/problem.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "place/generate.h"

namespace kindred::place {
namespace {

std::string field_at_fault(const Status& status) { return status ? "" : status.error().field; }

TEST(problem, ranks_of_sources) {
  EXPECT_EQ(ranks_of_source(0, 2, 8).end, 4U);
  EXPECT_EQ(ranks_of_source(1, 2, 8).begin, 4U);
  EXPECT_EQ(ranks_of_source(2, 3, 8).begin, 5U);
  EXPECT_EQ(ranks_of_source(2, 3, 8).end, 8U);
  EXPECT_EQ(ranks_of_source(5, 8, 2).begin, 1U);  // several sources on a rank
  EXPECT_EQ(ranks_of_source(5, 8, 2).end, 2U);
}

TEST(problem, tiers) {
  const Result<Topology> topology =
      tiered_topology(2, 8, {.ranks_per_node = 2, .nodes_per_rack = 2, .same_node = 1, .same_rack = 3, .far = 7});
  ASSERT_TRUE(topology.ok());
  // Source 0 owns ranks 0 to 3, which are a rack; source 1 the other.
  EXPECT_EQ(topology->distance, (std::vector<double>{0, 0, 0, 0, 7, 7, 7, 7, 7, 7, 7, 7, 0, 0, 0, 0}));
  const Result<Topology> four = tiered_topology(4, 4, {.ranks_per_node = 2, .same_node = 1, .same_rack = 5});
  ASSERT_TRUE(four.ok());
  EXPECT_EQ(four->at(0, 1), 1);
  EXPECT_EQ(four->at(0, 2), 5);
  EXPECT_FALSE(tiered_topology(2, 2, {.same_node = -1}).ok());
  EXPECT_FALSE(tiered_topology(0, 2).ok());
}

TEST(problem, numa_distances) {
  const std::vector<double> numactl = {10, 21, 31, 21, 10, 21, 31, 21, 10};
  const Result<Topology> topology = topology_from_rank_distances(3, 3, numactl);
  ASSERT_TRUE(topology.ok());
  EXPECT_EQ(topology->at(0, 0), 0);
  EXPECT_EQ(topology->at(0, 1), 1);
  EXPECT_DOUBLE_EQ(topology->at(0, 2), 21.0 / 11);
  EXPECT_FALSE(topology_from_rank_distances(3, 3, std::vector<double>(8, 10)).ok());
  EXPECT_FALSE(topology_from_rank_distances(2, 2, std::vector<double>{10, 5, 20, 10}).ok());
}

// Two experts on two ranks, a source on each; by hand.
TEST(problem, objective_by_hand) {
  Problem problem = generate_problem(TrafficKind::kAffinity, {.experts = 4}, 2, 1);
  problem.traffic.tokens = {10, 0, 5, 7,   // source 0
                            1,  8, 0, 9};  // source 1
  problem.weights = {.alpha = 2, .beta = 0.5, .gamma = 3};
  Placement placement = problem.old;  // 0 0 1 1
  placement.rank = {0, 1, 0, 1};
  const Cost cost = total(evaluate(problem, placement));
  EXPECT_DOUBLE_EQ(cost.tokens, 40);
  EXPECT_DOUBLE_EQ(cost.remote_tokens, 1 + 7);
  EXPECT_DOUBLE_EQ(cost.communication, 8);
  EXPECT_DOUBLE_EQ(cost.imbalance, 2 * (24 - 20));  // loads 16 and 24
  EXPECT_DOUBLE_EQ(cost.moves, 2);
  EXPECT_DOUBLE_EQ(cost.objective, 2 * 8 + 0.5 * 8 + 3 * 2);
  EXPECT_DOUBLE_EQ(cost.max_over_mean(), 1.2);
}

TEST(problem, copies_are_served_by_the_nearest) {
  Problem problem = generate_problem(TrafficKind::kAffinity, {.experts = 4}, 2, 1);
  problem.traffic.tokens = {10, 0, 5, 7, 1, 8, 0, 9};
  problem.redundant = 2;
  problem.old = {};
  Placement placement{.layers = 1, .experts = 4, .ranks = 2, .rank = {0, 1, 0, 1}};
  placement.copies = {{.layer = 0, .expert = 0, .rank = 1}, {.layer = 0, .expert = 3, .rank = 0}};
  ASSERT_TRUE(placement.check(3).ok());
  const Cost cost = total(evaluate(problem, placement));
  EXPECT_EQ(cost.remote_tokens, 0);
  EXPECT_EQ(rank_loads(problem, placement), (std::vector<double>{22, 18}));
  // Equally near copies share.
  Problem one = problem;
  one.traffic = {.layers = 1, .sources = 1, .experts = 4, .tokens = {10, 2, 4, 6}};
  one.topology = *tiered_topology(1, 2);
  EXPECT_EQ(rank_loads(one, placement), (std::vector<double>{5 + 4 + 3, 5 + 2 + 3}));
}

TEST(problem, bad_traffic) {
  const Problem good = generate_problem(TrafficKind::kAffinity, {.layers = 2, .experts = 8}, 4, 1);
  EXPECT_TRUE(good.check().ok());
  Problem bad = good;
  bad.traffic.tokens.pop_back();
  EXPECT_EQ(field_at_fault(bad.check()), "A");
  for (const double value : {-1.0, std::nan(""), std::numeric_limits<double>::infinity(), 0x1p54}) {
    bad = good;
    bad.traffic.tokens[17] = value;
    EXPECT_EQ(field_at_fault(bad.check()), "A") << value;
  }
  bad = good;
  std::fill(bad.traffic.tokens.begin(), bad.traffic.tokens.end(), 0.0);
  EXPECT_EQ(field_at_fault(bad.check()), "A");
  bad.traffic = {};
  EXPECT_EQ(field_at_fault(bad.check()), "layers");
  bad = good;  // sizes whose product overflows 32 bits
  bad.traffic.layers = 1024;
  bad.traffic.sources = 4096;
  bad.traffic.experts = 65'536;
  EXPECT_EQ(field_at_fault(bad.check()), "A");
}

TEST(problem, bad_ranks_and_slots) {
  const Problem good = generate_problem(TrafficKind::kAffinity, {.layers = 2, .sources = 1, .experts = 8}, 4, 1);
  Problem bad = good;
  bad.topology = *tiered_topology(1, 16);
  EXPECT_EQ(field_at_fault(bad.check()), "ranks");  // more than experts
  bad.topology = *tiered_topology(1, 3);
  EXPECT_EQ(field_at_fault(bad.check()), "redundant");  // 8 experts do not divide
  bad.redundant = 1;
  bad.old = {};
  EXPECT_TRUE(bad.check().ok());
  bad.redundant = 28;  // 12 slots a rank for 8 experts
  EXPECT_EQ(field_at_fault(bad.check()), "redundant");
  bad = good;
  bad.load_cap = 0.9;
  EXPECT_EQ(field_at_fault(bad.check()), "load_cap");
  bad = good;
  for (const double beta : {-1.0, 1e13, std::nan("")}) {
    bad.weights.beta = beta;
    EXPECT_EQ(field_at_fault(bad.check()), "weights");
  }
  bad = good;
  bad.topology.distance[2] = -1;
  EXPECT_EQ(field_at_fault(bad.check()), "distance");
  bad = good;
  bad.transitions.assign(3, 0.0F);
  EXPECT_EQ(field_at_fault(bad.check()), "transitions");
}

TEST(problem, bad_placements) {
  const Problem good = generate_problem(TrafficKind::kAffinity, {.layers = 2, .experts = 8}, 4, 1);
  Problem bad = good;
  bad.old.rank[5] = 0;  // a rank with three experts, another with one
  EXPECT_EQ(field_at_fault(bad.check()), "placement");
  bad.old.rank[5] = 9;
  EXPECT_EQ(field_at_fault(bad.check()), "placement");
  bad = good;
  bad.old.rank.pop_back();
  EXPECT_EQ(field_at_fault(bad.check()), "placement");
  bad = good;
  bad.old.copies = {{.layer = 0, .expert = 1, .rank = 2}};  // without a redundant slot
  EXPECT_EQ(field_at_fault(bad.check()), "placement");
  bad = good;
  bad.old.layers = 1;
  EXPECT_EQ(field_at_fault(bad.check()), "placement");
}

}  // namespace
}  // namespace kindred::place

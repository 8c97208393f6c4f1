#include "policy/band.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace kindred::policy {
namespace {

std::vector<WorkerView> with_loads(const std::vector<double>& loads) {
  std::vector<WorkerView> workers;
  for (const double load : loads) workers.push_back({.load = load});
  return workers;
}

TEST(LocalityBand, LeavesOutWhoIsNotEligible) {
  const std::vector<float> scores = {0.9F, 0.5F, 0.85F, 0.2F};
  EXPECT_EQ(locality_band(scores, std::vector<uint32_t>{0, 1, 2, 3}, 0.1F), (std::vector<uint32_t>{0, 2}));
  EXPECT_EQ(locality_band(scores, std::vector<uint32_t>{1, 3}, 0.1F), (std::vector<uint32_t>{1, 3}));  // nearest joins
  EXPECT_EQ(locality_band(scores, std::vector<uint32_t>{3}, 0.1F), (std::vector<uint32_t>{3}));
  EXPECT_EQ(locality_band(scores, std::vector<uint32_t>{1, 2, 3}, 0.0F), (std::vector<uint32_t>{2}));
  EXPECT_TRUE(locality_band(scores, std::vector<uint32_t>{}, 0.1F).empty());
}

TEST(LoadLimit, NeverExcludesTheLeastLoaded) {
  for (const std::vector<double>& loads :
       {std::vector<double>{0, 0, 0}, {1, 1, 1}, {5, 5, 5}, {0.1, 0.2}, {1000, 3000}, {7}}) {
    const double least = *std::min_element(loads.begin(), loads.end());
    EXPECT_LE(least, load_limit(with_loads(loads), 1.0, 1)) << least;
  }
}

TEST(LoadLimit, GivesAnAlmostIdleFleetRoom) {
  EXPECT_EQ(load_limit(with_loads({0, 0, 0}), 1.25, 1), 1);
  EXPECT_EQ(load_limit(with_loads({1, 0, 0}), 1.25, 1), 1);
  EXPECT_EQ(load_limit(with_loads({2, 0, 0}), 1.25, 1), 2);
  EXPECT_EQ(load_limit(with_loads({3, 0, 0}), 1.25, 1), 2);       // 1.67
  EXPECT_EQ(load_limit(with_loads({20, 20, 20}), 1.25, 1), 26);   // 25.4
  EXPECT_EQ(load_limit(with_loads({400, 300}), 1.25, 100), 500);  // in tokens
}

TEST(LoadLimit, CountsOnlyAvailableWorkersAndCanBeOff) {
  std::vector<WorkerView> workers = with_loads({10, 10, 100});
  workers[2].available = false;
  EXPECT_EQ(load_limit(workers, 1.0, 1), 11);
  EXPECT_TRUE(std::isinf(load_limit(workers, 0, 1)));
  EXPECT_TRUE(std::isinf(load_limit(workers, std::numeric_limits<double>::infinity(), 1)));
  EXPECT_TRUE(std::isinf(load_limit({}, 1.25, 1)));
}

}  // namespace
}  // namespace kindred::policy

#include "fleet/other_routers.h"

#include <gtest/gtest.h>

#include <array>

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

TEST(OtherRouters, NothingKnownStaysUnknown) {
  std::array<PartlyKnown, 1> workers = {{{.state = nullptr, .known = 0, .requests = 3}}};
  add_unknown(workers);
  EXPECT_FALSE(workers[0].state);
}

}  // namespace
}  // namespace kindred::fleet

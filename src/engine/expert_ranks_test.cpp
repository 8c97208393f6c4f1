#include "engine/expert_ranks.h"

#include "engine/expert_ranks_testing.h"

namespace kindred::engine::test {
namespace {

struct RankCase {
  const char* type;
  uint32_t ranks, threads;
};

class ExpertRanksExact : public testing::TestWithParam<RankCase> {};

// Ranks on against off: not one bit of any logit differs.
TEST_P(ExpertRanksExact, SameLogitsAsWithoutRanks) {
  const RankCase& c = GetParam();
  const std::string path = std::string(c.type) == "f16" ? f16_model_path() : model_path();
  std::vector<float> off, on;
  {
    auto model = Model::load(path);
    ASSERT_TRUE(model.ok()) << model.error().message;
    off = run_schedule(*rank_session(**model), 6);
  }
  const auto model = load_with_ranks(path, c.ranks, c.threads);
  ASSERT_NE(model, nullptr);
  ASSERT_EQ(model->ranks()->ranks(), c.ranks);
  on = run_schedule(*rank_session(*model), 6);
  ASSERT_FALSE(off.empty());
  EXPECT_TRUE(same_bits(off, on));
}

INSTANTIATE_TEST_SUITE_P(Types, ExpertRanksExact,
                         testing::Values(RankCase{"q8_0", 1, 1}, RankCase{"q8_0", 2, 1}, RankCase{"q8_0", 3, 2},
                                         RankCase{"f16", 1, 1}, RankCase{"f16", 2, 1}, RankCase{"f16", 4, 1}));

}  // namespace
}  // namespace kindred::engine::test

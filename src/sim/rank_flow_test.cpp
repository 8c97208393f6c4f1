#include "sim/rank_flow.h"

#include <gtest/gtest.h>

#include "sim/cluster_testing.h"
#include "sim/tensor_parallel.h"

namespace kindred::sim {
namespace {

using testing::small_shape;

// 1 layer, 8 experts, 2 sources, 4 ranks: source 0 owns experts 0 to 3.
class RankFlows : public ::testing::Test {
 protected:
  ExpertTape tape_of(std::initializer_list<uint32_t> experts) const {
    ExpertTape tape(shape_, 1);
    for (const uint32_t expert : experts) tape.set(0, 0, expert);
    return tape;
  }
  void step(const ExpertTape& of_0, const ExpertTape& of_1) {
    flow_.begin();
    flow_.add_token(0, of_0.token(0));
    flow_.add_token(1, of_1.token(0));
    flow_.count();
  }

  expert::ExpertShape shape_ = small_shape(1, 8, 3);
  RankFlow flow_{1, 8, 2, 4};
};

TEST_F(RankFlows, CountsCopiesByRankAndBySource) {
  step(tape_of({0, 2, 6}), tape_of({6, 7, 1}));
  EXPECT_EQ(std::vector<float>(flow_.copies().begin(), flow_.copies().end()), (std::vector<float>{2, 1, 0, 3}));
  EXPECT_EQ(std::vector<uint32_t>(flow_.distinct().begin(), flow_.distinct().end()),
            (std::vector<uint32_t>{2, 1, 0, 2}));
  EXPECT_EQ(flow_.all_copies(), 6);
  EXPECT_EQ(flow_.remote_copies(), 2);  // 0's to 6, 1's to 1
  EXPECT_EQ(flow_.busiest_copies(), 3);
  EXPECT_EQ(flow_.link_copies()[0], 1);  // one received by ranks 0 and 3; two ranks share what is sent
  EXPECT_EQ(flow_.rank_copies(0, 2), 3);
  const place::Traffic traffic = flow_.take_window();
  EXPECT_EQ(traffic.tokens, (std::vector<double>{1, 0, 1, 0, 0, 0, 1, 0, 0, 1, 0, 0, 0, 0, 1, 1}));
  EXPECT_FALSE(flow_.take_window().check().ok());  // empty
}

TEST_F(RankFlows, ExpertsWhereTheirTrafficComesFromNeedNoLink) {
  flow_.place(std::vector<uint32_t>{0, 2, 0, 1, 1, 2, 3, 3});
  step(tape_of({0, 2, 3}), tape_of({6, 7, 1}));
  EXPECT_EQ(flow_.remote_copies(), 0);
  EXPECT_EQ(flow_.link_copies()[0], 0);
}

TEST_F(RankFlows, ChunksAreTheirShareOfThePrompt) {
  expert::ExpertCounts prompt(shape_);
  prompt.tokens = 100;
  prompt.data = {100, 100, 99, 1, 0, 0, 0, 0};
  flow_.begin();
  flow_.add_chunk(1, prompt, 50);
  flow_.count();
  EXPECT_FLOAT_EQ(static_cast<float>(flow_.all_copies()), 150);
  EXPECT_FLOAT_EQ(static_cast<float>(flow_.remote_copies()), 150);
  EXPECT_EQ(flow_.distinct()[0], 2U);
  EXPECT_EQ(flow_.distinct()[1], 1U);  // half a copy of expert 3 is expected: less likely than not
}

TEST(TensorParallel, DividesDenseWorkAndPaysForSums) {
  Profile profile;
  profile.dims = {.layers = 2, .moe_layers = 0, .hidden = 100, .experts = 8, .top_k = 2};
  profile.gemm = {.launch_us = 1, .bytes_per_us = 1000, .flops_per_us = 1e12, .power = kHardMax};
  profile.projections = {{.name = "query, key, value", .n = 4000, .k = 1000, .count = 2, .weight_bytes = 2}};
  profile.attention.decode = {.launch_us = 1, .request_us = 0, .token_us = 0.1};
  profile.moe.blocks = {{.rows = 16, .tile_us = 1}};
  const StepShape step{.decode_requests = 1, .decode_context_tokens = 100};
  const auto us = [&](uint32_t tensor) {
    return 1e6 * TensorParallelCost(profile, {.tensor = tensor, .all_reduce_us = 3, .all_reduce_bytes_per_us = 100})
                     .step_s(step);
  };
  EXPECT_NEAR(us(1), 2 * (1 + 10) + 2 * (1 + 8000 + 2 * (1 + 4)), 1e-6);
  EXPECT_NEAR(us(2), 2 * (1 + 5) + 2 * (1 + 4000 + 2 * (1 + 2)) + 4 * (3 + 2), 1e-6);
}

}  // namespace
}  // namespace kindred::sim

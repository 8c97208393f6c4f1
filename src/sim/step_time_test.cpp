#include "sim/step_time.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

namespace kindred::sim {
namespace {

// Round figures, so that times can be added up by hand.
Profile round_profile() {
  Profile p;
  p.name = p.gpu = p.model = p.dtype = p.kernel = "made up";
  p.dims = {.layers = 4,
            .moe_layers = 2,
            .hidden = 100,
            .experts = 16,
            .top_k = 2,
            .heads = 4,
            .kv_heads = 2,
            .head_dim = 8,
            .vocab = 1000,
            .window_layers = 1,
            .window_tokens = 10};
  p.moe = {.a_us = 10,
           .b_us = 3,
           .token_us = 0,
           .power = kHardMax,
           .block_factor = 1,
           .blocks = {{.rows = 4, .tile_us = 1}, {.rows = 8, .tile_us = 4}},
           .source = "made up"};
  p.attention = {.decode = {.launch_us = 5, .request_us = 1, .token_us = 0.1},
                 .decode_window = {.launch_us = 2, .request_us = 1, .token_us = 0.1},
                 .prefill_us_per_context = 0.01,
                 .source = "made up"};
  p.gemm = {
      .launch_us = 1, .bytes_per_us = 1000, .flops_per_us = 1e12, .power = kHardMax, .edge = 0, .source = "made up"};
  p.projections = {{.name = "output", .n = 100, .k = 100, .count = 4, .weight_bytes = 2},
                   {.name = "head", .n = 1000, .k = 100, .count = 1, .weight_bytes = 2}};
  p.all_to_all = {.dispatch_us = 7,
                  .dispatch_bytes_per_us = 100,
                  .combine_us = 8,
                  .combine_bytes_per_us = 100,
                  .ranks = 2,
                  .source = "made up"};
  p.memory = {.hbm_bytes = 1e9,
              .usable_share = 0.5,
              .dense_weight_bytes = 1e6,
              .expert_weight_bytes = 1e6,
              .kv_bytes_per_token = 1000,
              .source = "made up"};
  p.kv_link = {.bytes_per_us = 500, .latency_us = 30, .source = "made up"};
  p.host = {.step_us = 50, .layer_us = 2, .source = "made up"};
  return p;
}

TEST(StepTime, AddsUpADecodeStep) {
  const Profile profile = round_profile();
  ASSERT_TRUE(profile.check().ok()) << profile.check().error().message;
  const StepTime time(profile);
  const std::vector<uint32_t> experts = {4, 6};
  const StepShape step{.decode_requests = 3, .decode_context_tokens = 60, .experts = experts};
  const StepTime::Parts parts = time.parts(step);
  EXPECT_DOUBLE_EQ(parts.moe_us, 10 + 3 * 4 + 10 + 3 * 6);
  // Three layers see 60 tokens, one 3 x 10.
  EXPECT_DOUBLE_EQ(parts.attention_us, 3 * (5 + 3 + 6) + (2 + 3 + 3));
  // 100 x 100 weights of 2 bytes, 3 x 100 values in and out.
  EXPECT_DOUBLE_EQ(parts.projections_us, 4 * (1 + (20000 + 2 * 600) / 1000.0));
  EXPECT_DOUBLE_EQ(parts.head_us, 1 + (200000 + 2 * (300 + 3000)) / 1000.0);
  EXPECT_DOUBLE_EQ(parts.all_to_all_us, 0);
  EXPECT_DOUBLE_EQ(parts.host_us, 50 + 4 * 2);
  EXPECT_DOUBLE_EQ(time.seconds(step), parts.total_us() * 1e-6);
}

TEST(StepTime, FewerLayersOfExpertsStandForAll) {
  const StepTime time(round_profile());
  const std::vector<uint32_t> one = {5}, two = {4, 6};
  StepShape step{.decode_requests = 3, .decode_context_tokens = 60, .experts = one};
  const double of_one = time.seconds(step);
  step.experts = two;
  EXPECT_DOUBLE_EQ(of_one, time.seconds(step));
}

TEST(StepTime, PrefillPaysForContextsAndOneSample) {
  const StepTime time(round_profile());
  // Ten tokens from the beginning: contexts 1 to 10; none is beyond the window.
  StepShape step{.prefill_tokens = 10, .prefill_token_contexts = 55};
  EXPECT_DOUBLE_EQ(time.parts(step).attention_us, 4 * 5 + 0.01 * 4 * 55);
  EXPECT_DOUBLE_EQ(time.parts(step).head_us, 1 + (200000 + 2 * (100 + 1000)) / 1000.0);
  // The same ten tokens far into a long prompt: the layer with the window sees ten tokens each.
  step.prefill_token_contexts = 10'000;
  EXPECT_DOUBLE_EQ(time.parts(step).attention_us, 4 * 5 + 0.01 * (3 * 10'000 + 100));
}

TEST(StepTime, UnknownExpertsAreExpectedToBeEven) {
  const StepTime time(round_profile());
  const StepShape step{.decode_requests = 4, .decode_context_tokens = 4};
  const double distinct = 16 * (1 - std::pow(1 - 2.0 / 16, 4));
  EXPECT_NEAR(time.parts(step).moe_us, 2 * (10 + 3 * distinct), 1e-9);
}

TEST(StepTime, DecodeIsPaddedToCapturedGraphs) {
  Profile profile = round_profile();
  profile.graph_sizes = {4, 8};
  const StepTime time(profile);
  const std::vector<uint32_t> experts = {4};
  const auto projections = [&](uint32_t requests, uint32_t prefill) {
    return time.parts({.prefill_tokens = prefill, .decode_requests = requests, .experts = experts}).projections_us;
  };
  EXPECT_DOUBLE_EQ(projections(3, 0), projections(4, 0));
  EXPECT_GT(projections(5, 0), projections(4, 0));
  EXPECT_DOUBLE_EQ(projections(5, 0), projections(8, 0));
  EXPECT_GT(projections(9, 0), projections(8, 0));  // no graph is large enough
  EXPECT_LT(projections(3, 1), projections(4, 1));  // no graphs with prefill
}

TEST(StepTime, RanksExchangeWhatIsNotTheirs) {
  const StepTime time(round_profile());
  const std::vector<uint32_t> experts = {4};
  StepShape step{.decode_requests = 3, .decode_context_tokens = 60, .experts = experts, .ranks = 2};
  // 3 tokens x 2 copies x 100 values, one byte out and two back, as it was measured on 2 ranks.
  EXPECT_DOUBLE_EQ(time.parts(step).all_to_all_us, 2 * (7 + 6 + 8 + 12));
  step.remote_share = 0;
  EXPECT_DOUBLE_EQ(time.parts(step).all_to_all_us, 2 * (7 + 8));
}

TEST(StepTime, ManyAssignmentsTakeMoreTiles) {
  const StepTime time(round_profile());
  // 32 assignments to 16 experts: blocks of 4. Geometric: 16 / (1 - (1/2)^4) tiles of 1 us are less than fetching.
  EXPECT_DOUBLE_EQ(time.moe_layer_us(16, 16, 1), 10 + 48);
  // 640 assignments: blocks of 8, tiles of 4 us.
  EXPECT_NEAR(time.moe_layer_us(320, 16, 1), 10 + 4 * 16 / (1 - std::pow(1 - 1 / 40.0, 8)), 1e-9);
  EXPECT_DOUBLE_EQ(moe_tiles(640, 16, 8, false), 80);
  EXPECT_DOUBLE_EQ(moe_tiles(8, 8, 16, true), 8);
  // One expert that takes all fills its tiles.
  EXPECT_NEAR(moe_tiles(1e6, 1, 100, true), 1e4, 1);
}

TEST(StepTime, TransferSharesTheLink) {
  const StepTime time(round_profile());
  EXPECT_DOUBLE_EQ(time.kv_transfer_s(1000, 1), (30 + 1e6 / 500) * 1e-6);
  EXPECT_DOUBLE_EQ(time.kv_transfer_s(1000, 0.25), (30 + 4e6 / 500) * 1e-6);
}

TEST(StepTime, SoftMaximum) {
  EXPECT_DOUBLE_EQ(soft_max(3, 4, 2), 5);
  EXPECT_DOUBLE_EQ(soft_max(3, 4, 1), 7);
  EXPECT_DOUBLE_EQ(soft_max(3, 4, kHardMax), 4);
  EXPECT_DOUBLE_EQ(soft_max(0, 0, 2), 0);
}

}  // namespace
}  // namespace kindred::sim

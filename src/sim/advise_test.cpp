#include "sim/advise.h"

#include <gtest/gtest.h>

#include "expert/testing.h"
#include "expert/union_model.h"

namespace kindred::sim {
namespace {

// Of the shape of expert::made_up_activations: 16 experts, top 2. Fetching an expert takes all of the time.
Profile fetching() {
  Profile p;
  p.name = p.gpu = p.model = p.dtype = p.kernel = "made up";
  p.dims = {.layers = 4,
            .moe_layers = 4,
            .hidden = 64,
            .experts = 16,
            .top_k = 2,
            .heads = 4,
            .kv_heads = 2,
            .head_dim = 8,
            .vocab = 1000,
            .window_layers = 0,
            .window_tokens = 0};
  p.moe = {.a_us = 0,
           .b_us = 10,
           .token_us = 0,
           .power = kHardMax,
           .block_factor = 1,
           .blocks = {{64, 0}},
           .source = "made up"};
  p.attention.source = p.gemm.source = p.memory.source = p.kv_link.source = p.host.source = "made up";
  p.gemm = {.launch_us = 0, .bytes_per_us = 1e12, .flops_per_us = 1e12, .power = 2, .edge = 0, .source = "made up"};
  p.projections = {{.name = "head", .n = 1000, .k = 64, .count = 1, .weight_bytes = 2}};
  p.all_to_all = {.dispatch_us = 0,
                  .dispatch_bytes_per_us = 1e12,
                  .combine_us = 0,
                  .combine_bytes_per_us = 1e12,
                  .ranks = 2,
                  .source = "made up"};
  p.memory = {.hbm_bytes = 1e9,
              .usable_share = 1,
              .dense_weight_bytes = 1,
              .expert_weight_bytes = 1,
              .kv_bytes_per_token = 1,
              .source = "made up"};
  p.kv_link.bytes_per_us = 1e6;
  return p;
}

TEST(Advise, DomainsApartAreWorthIt) {
  const expert::Activations activations = expert::made_up_activations(400, 4);
  const Result<Advice> advice = advise(activations, fetching(), {.workers = 4, .batches = {4, 8}, .ranks = {1, 4, 3}});
  ASSERT_TRUE(advice.ok()) << advice.error().message;
  EXPECT_EQ(advice->requests, 200);
  EXPECT_EQ(advice->cohorts, 4);
  ASSERT_EQ(advice->rows.size(), 4);
  const AdviceRow& row = advice->rows[1];
  EXPECT_EQ(row.batch, 8);
  EXPECT_GT(row.experts_saved(), 0.2);
  // A step is nothing but 4 layers of fetching.
  EXPECT_NEAR(row.mixed_us, 4 * 10 * row.mixed, 0.01 * row.mixed_us);
  EXPECT_NEAR(row.time_saved(), row.experts_saved(), 0.01);
  // Each of the 4 ranks holds one domain's favourites: a cohort loads one rank with all of its four experts.
  EXPECT_GT(advice->rows[3].cohort, 3.9);
  ASSERT_EQ(advice->skipped.size(), 1);
  EXPECT_NE(advice->skipped[0].find("ranks"), std::string::npos);
  EXPECT_EQ(advice->best()->ranks, 1);
}

TEST(Advise, OneDomainIsNot) {
  const expert::Activations activations = expert::made_up_activations(400, 1);
  const Result<Advice> advice = advise(activations, fetching(), {.workers = 4, .batches = {8}, .ranks = {1}});
  ASSERT_TRUE(advice.ok()) << advice.error().message;
  ASSERT_EQ(advice->rows.size(), 1);
  EXPECT_NEAR(advice->best()->time_saved(), 0, 0.02);
}

// Batches of different requests: what expert::BatchUnion says of the half that is judged.
TEST(Advise, MixedBatchesAreExact) {
  const expert::Activations activations = expert::made_up_activations(80, 2);
  const Result<Advice> advice = advise(activations, fetching(), {.workers = 2, .batches = {8}, .ranks = {1}});
  ASSERT_TRUE(advice.ok()) << advice.error().message;
  ASSERT_FALSE(advice->rows[0].repeats);
  expert::BatchUnion expected(activations.shape.cells(), 8);
  EXPECT_EQ(advice->judged.size(), 40);
  for (const uint32_t i : advice->judged) {
    expected.add(expert::inclusion_probabilities(activations.decode(i), activations.decode_tokens[i]));
  }
  EXPECT_NEAR(advice->rows[0].mixed, expected.value() / 3, 1e-6);
}

TEST(Advise, ManyTokensUseAllExperts) {
  const expert::Activations activations = expert::made_up_activations(80, 2);
  const Result<Advice> advice = advise(activations, fetching(), {.workers = 2, .batches = {4096}, .ranks = {1}});
  ASSERT_TRUE(advice.ok()) << advice.error().message;
  EXPECT_TRUE(advice->rows[0].repeats);
  EXPECT_NEAR(advice->rows[0].mixed, 16, 1e-6);
  EXPECT_NEAR(advice->rows[0].time_saved(), 0, 1e-6);
}

TEST(Advise, SaysWhatIsWrong) {
  const expert::Activations activations = expert::made_up_activations(40, 2);
  Profile other = fetching();
  other.dims.experts = 32;
  EXPECT_EQ(advise(activations, other, {.workers = 2}).error().field, "experts");
  EXPECT_EQ(advise(activations, fetching(), {.workers = 11}).error().field, "activations");
  EXPECT_EQ(advise(activations, fetching(), {.workers = 2, .batches = {0}}).error().field, "batches");
  EXPECT_EQ(advise(activations, fetching(), {.workers = 2, .batches = {}}).error().field, "batches");
  expert::Activations blind = activations;
  blind.decode_counts.clear();
  EXPECT_EQ(advise(blind, fetching(), {.workers = 2}).error().field, "activations");
}

}  // namespace
}  // namespace kindred::sim

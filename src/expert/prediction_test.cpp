#include "expert/prediction.h"

#include <gtest/gtest.h>

#include <cmath>

#include "expert/testing.h"

namespace kindred::expert {
namespace {

TEST(Pearson, ByHand) {
  EXPECT_NEAR(pearson(std::vector<double>{1, 2, 3, 4}, std::vector<double>{2, 4, 6, 8}), 1, 1e-12);
  EXPECT_NEAR(pearson(std::vector<double>{1, 2, 3}, std::vector<double>{3, 2, 1}), -1, 1e-12);
  // Deviations -1, 0, 1 and -1, 2, -1: their products cancel out.
  EXPECT_NEAR(pearson(std::vector<double>{0, 1, 2}, std::vector<double>{0, 3, 0}), 0, 1e-12);
  EXPECT_NEAR(pearson(std::vector<double>{0, 0, 3}, std::vector<double>{0, 2, 1}), 0, 1e-12);
  EXPECT_NEAR(pearson(std::vector<double>{1, 0, 0, 1}, std::vector<double>{1, 0, 1, 2}), 1 / std::sqrt(2.0), 1e-12);
  EXPECT_TRUE(std::isnan(pearson(std::vector<double>{1, 1}, std::vector<double>{1, 2})));
  EXPECT_TRUE(std::isnan(pearson({}, {})));
}

// One layer of four experts, top 1.
void add(Activations& to, std::vector<uint32_t> prefill, std::vector<uint32_t> decode, const char* domain) {
  const auto counts = [](std::vector<uint32_t> data) {
    ExpertCounts out(ExpertShape{.layers = {0}, .experts = 4, .top_k = 1});
    for (const uint32_t c : data) out.tokens += c;
    out.data = std::move(data);
    return out;
  };
  const ExpertCounts of_decode = counts(std::move(decode));
  KINDRED_CHECK(to.append(counts(std::move(prefill)), &of_decode, domain).ok());
}

TEST(Prediction, ByHand) {
  Activations activations;
  add(activations, {2, 0, 0, 0}, {5, 0, 0, 0}, "same");
  add(activations, {1, 1, 0, 0}, {0, 0, 3, 3}, "opposite");
  add(activations, {1, 0, 0, 0}, {0, 0, 0, 0}, "same");      // generated nothing
  add(activations, {1, 1, 1, 1}, {0, 0, 0, 2}, "opposite");  // does not vary
  const auto got = predict_decode(activations);
  ASSERT_TRUE(got.ok()) << got.error().message;
  ASSERT_EQ(got->domains.size(), 2U);
  const DomainPrediction& opposite = got->domains[0];
  EXPECT_EQ(opposite.domain, "opposite");
  EXPECT_EQ(opposite.requests, 2U);
  EXPECT_NEAR(opposite.mean_correlation, -1, 1e-12);
  EXPECT_EQ(opposite.prefill, (std::vector<double>{0.375, 0.375, 0.125, 0.125}));
  EXPECT_EQ(opposite.decode, (std::vector<double>{0, 0, 0.25, 0.75}));
  EXPECT_EQ(got->domains[1].requests, 1U);
  EXPECT_NEAR(got->domains[1].mean_correlation, 1, 1e-12);
  EXPECT_NEAR(got->domains[1].pooled_correlation, 1, 1e-12);
  EXPECT_NEAR(got->mean_correlation, 0, 1e-12);
}

TEST(Prediction, MadeUpDomainsForetellDecode) {
  const auto got = predict_decode(made_up_activations(40, 4));
  ASSERT_TRUE(got.ok());
  for (const DomainPrediction& domain : got->domains) {
    EXPECT_GT(domain.mean_correlation, 0.8);
    EXPECT_GT(domain.pooled_correlation, domain.mean_correlation);
  }
}

TEST(Prediction, NeedsDecode) {
  Activations activations = made_up_activations(6, 2);
  activations.decode_counts.clear();
  const auto refused = predict_decode(activations);
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().field, "decode_counts");
  const std::vector<uint32_t> batches = {2};
  EXPECT_FALSE(compare_batches(activations, batches).ok());
}

TEST(Batches, ByHand) {
  // a: always expert 0; b: experts 1 and 2 alike. Pairs of a touch 1, of b 2 * 0.75 = 1.5, of both 1 + 1 = 2;
  // of the six pairs of four requests one is of a, one of b and four are mixed.
  Activations activations;
  for (int i = 0; i < 2; ++i) add(activations, {1, 0, 0, 0}, {4, 0, 0, 0}, "a");
  for (int i = 0; i < 2; ++i) add(activations, {1, 0, 0, 0}, {0, 3, 3, 0}, "b");
  add(activations, {1, 0, 0, 0}, {0, 0, 0, 9}, "alone");
  const std::vector<uint32_t> batches = {1, 2, 3};
  const auto got = compare_batches(activations, batches);
  ASSERT_TRUE(got.ok());
  EXPECT_EQ((*got)[0].domains, 3U);
  EXPECT_NEAR((*got)[0].saved(), 0, 1e-12);
  EXPECT_EQ((*got)[1].batch, 2U);
  EXPECT_EQ((*got)[1].domains, 2U);
  EXPECT_NEAR((*got)[1].same_domain, 1.25, 1e-6);
  EXPECT_NEAR((*got)[1].mixed, (1 + 1.5 + 4 * 2) / 6, 1e-6);
  EXPECT_NEAR((*got)[1].saved(), 1 - 1.25 / 1.75, 1e-6);
  EXPECT_EQ((*got)[2].domains, 0U);
  EXPECT_EQ((*got)[2].saved(), 0);
  const std::vector<uint32_t> none = {0};
  EXPECT_FALSE(compare_batches(activations, none).ok());
}

}  // namespace
}  // namespace kindred::expert

#include "expert/domains.h"

#include <gtest/gtest.h>

#include "expert/testing.h"

namespace kindred::expert {
namespace {

// Two layers of three experts, top 1. In layer 0 everybody does the same, in layer 1 domains differ, but for
// request 2, which is of "b" and half like "a".
Activations by_hand() {
  Activations out;
  const auto add = [&](std::vector<uint32_t> decode, const char* domain) {
    ExpertCounts prefill(ExpertShape{.layers = {0, 5}, .experts = 3, .top_k = 1});
    prefill.tokens = 2;
    prefill.data = {2, 0, 0, 0, 2, 0};
    ExpertCounts counts = prefill;
    counts.tokens = decode[0] + decode[1] + decode[2];
    counts.data = std::move(decode);
    KINDRED_CHECK(out.append(prefill, &counts, domain).ok());
  };
  add({2, 2, 0, 4, 0, 0}, "a");
  add({1, 1, 0, 0, 2, 0}, "b");
  add({1, 1, 0, 1, 1, 0}, "b");
  add({0, 0, 0, 0, 0, 0}, "c");  // generated nothing
  return out;
}

TEST(Domains, ProfilesByHand) {
  const auto profiles = profile_domains(by_hand());
  ASSERT_TRUE(profiles.ok());
  EXPECT_EQ(profiles->names, (std::vector<std::string>{"a", "b"}));
  EXPECT_EQ(profiles->requests, (std::vector<uint32_t>{1, 2}));
  EXPECT_EQ(profiles->domain_of, (std::vector<uint32_t>{0, 1, 1, kNoDomain}));
  EXPECT_EQ(profiles->frequency, (std::vector<double>{0.5, 0.5, 0, 1, 0, 0, /**/ 0.5, 0.5, 0, 0.25, 0.75, 0}));
  // Layer 5, expert 0: 1, 0, 0.5 about 0.5; between: 1 * 0.5^2 + 2 * 0.25^2 of 0.5. Expert 1 mirrors it.
  EXPECT_EQ(profiles->between_share[0], 0);
  EXPECT_NEAR(profiles->between_share[1], 0.375 / 0.5, 1e-12);
  EXPECT_EQ(profiles->most_discriminative_layer(), 1U);
  EXPECT_TRUE(profiles->from_decode);
}

TEST(Domains, HeatByHand) {
  const auto profiles = profile_domains(by_hand());
  ASSERT_TRUE(profiles.ok());
  const DomainHeat heat = domain_heat(*profiles, 1, 3);
  // Means of the domains: 0.625, 0.375, 0. Experts 0 and 2 stay in a's block (nobody uses 2), 1 is b's.
  EXPECT_EQ(heat.experts, (std::vector<uint32_t>{0, 2, 1}));
  EXPECT_NEAR(heat.excess[0][0], 1 / 0.625 - 1, 1e-12);
  EXPECT_EQ(heat.excess[0][2], 0);
  EXPECT_EQ(heat.excess[1][0], 0);
  EXPECT_NEAR(heat.excess[1][2], 1, 1e-12);
}

TEST(Domains, SingleDomainIsOneRowAgainstItsOwnExperts) {
  for (const bool labels : {true, false}) {
    Activations activations = made_up_activations(10, 1);
    if (!labels) activations.domains.clear();
    const auto profiles = profile_domains(activations);
    ASSERT_TRUE(profiles.ok());
    EXPECT_EQ(profiles->names, (std::vector<std::string>{labels ? "domain 0" : "all"}));
    EXPECT_EQ(profiles->most_discriminative_layer(), 0U);
    const DomainHeat heat = domain_heat(*profiles, 0, 16);
    ASSERT_EQ(heat.excess.size(), 1U);
    EXPECT_GT(heat.excess[0][0], 1);  // its favourite window of a quarter of the experts
    EXPECT_EQ(heat.excess[0][15], 0);
  }
}

TEST(Domains, PromptCountsStandInForDecode) {
  Activations activations = made_up_activations(12, 3);
  activations.decode_counts.clear();
  const auto profiles = profile_domains(activations);
  ASSERT_TRUE(profiles.ok());
  EXPECT_FALSE(profiles->from_decode);
  EXPECT_GT(profiles->between_share[profiles->most_discriminative_layer()], 0.5);
}

TEST(Domains, TooManyLabelsAreNone) {
  Activations activations = made_up_activations(kMostDomains + 1, 4);
  EXPECT_TRUE(profile_domains(activations).ok());
  for (size_t i = 0; i < activations.requests(); ++i) activations.domains[i] = "label " + std::to_string(i);
  const auto refused = profile_domains(activations);
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().field, "domains");
}

}  // namespace
}  // namespace kindred::expert

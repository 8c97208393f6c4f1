#include "fleet/step_fit.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "base/rng.h"

namespace kindred::fleet {
namespace {

constexpr policy::StepLaw kTrue = {.fixed = 4e-3, .per_expert = 2e-4, .per_request = 3e-5};

double drawn(Rng& rng, double from, double to) { return from + (to - from) * rng.uniform(); }

TEST(StepFit, WithoutObservationsItIsThePrior) {
  StepFit fit;
  EXPECT_EQ(fit.law(), policy::StepLaw());
  EXPECT_EQ(fit.slowness(3), 1);
}

TEST(StepFit, FindsALawNearThePriorFromNoisyRequests) {
  StepFit fit;
  Rng rng(1);
  for (int i = 0; i < 3000; ++i) {
    const double experts = drawn(rng, 20, 90), requests = drawn(rng, 2, 40);
    fit.observe(static_cast<uint32_t>(i % 4), experts, requests,
                kTrue.step(experts, requests) * drawn(rng, 0.97, 1.03));
  }
  const policy::StepLaw law = fit.law();
  EXPECT_NEAR(law.fixed / kTrue.fixed, 1, 0.15);
  EXPECT_NEAR(law.per_expert / kTrue.per_expert, 1, 0.15);
  EXPECT_NEAR(law.per_request / kTrue.per_request, 1, 0.5);
  for (uint32_t w = 0; w < 4; ++w) EXPECT_NEAR(fit.slowness(w), 1, 0.02);
}

TEST(StepFit, FindsWhoIsSlow) {
  StepFit fit;
  Rng rng(2);
  for (int i = 0; i < 3000; ++i) {
    const auto worker = static_cast<uint32_t>(i % 3);
    const double experts = drawn(rng, 40, 60), requests = drawn(rng, 10, 20);
    fit.observe(worker, experts, requests, (worker == 2 ? 2 : 1) * kTrue.step(experts, requests));
  }
  EXPECT_NEAR(fit.slowness(2) / fit.slowness(0), 2, 0.25);
  EXPECT_NEAR(fit.slowness(1) / fit.slowness(0), 1, 0.02);
}

// Whatever comes, the law stays a law.
TEST(StepFit, NonsenseIsBounded) {
  StepFit fit;
  const double none = std::numeric_limits<double>::quiet_NaN();
  fit.observe(0, 10, 10, none);
  fit.observe(0, 10, 10, 0);
  fit.observe(0, none, 10, 1);
  fit.observe(StepFit::kMostWorkers, 10, 10, 1);
  EXPECT_EQ(fit.law(), policy::StepLaw());
  Rng rng(3);
  for (int i = 0; i < 2000; ++i) fit.observe(1, drawn(rng, 0, 100), drawn(rng, 0, 100), std::exp(drawn(rng, -20, 5)));
  const policy::StepLaw law = fit.law();
  EXPECT_GT(law.fixed, 0);
  EXPECT_GT(law.per_expert, 0);
  EXPECT_GT(law.per_request, 0);
  EXPECT_LE(law.per_expert / law.fixed * 30, 9.01);
  EXPECT_GE(fit.slowness(1), 0.125);
  EXPECT_LE(fit.slowness(1), 8);
}

}  // namespace
}  // namespace kindred::fleet

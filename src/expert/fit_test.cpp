#include "expert/fit.h"

#include <gtest/gtest.h>

#include "expert/testing.h"

namespace kindred::expert {
namespace {

TEST(Fit, SeparatesDomainsAndSavesActiveExperts) {
  const Activations activations = made_up_activations(80, 4);
  const auto report = fit_cohorts(activations, {.workers = 4, .pairs = 2000, .batch = 4});
  ASSERT_TRUE(report.ok()) << report.error().message;
  EXPECT_EQ(report->model.cohorts(), 4U);
  EXPECT_EQ(report->purity, 1.0);
  EXPECT_EQ(report->batch, 4U);
  EXPECT_TRUE(report->active_from_decode);
  EXPECT_LT(report->active_experts, 0.95 * report->active_random);
  for (const CohortSummary& cohort : report->cohorts) {
    EXPECT_EQ(cohort.requests, 20U);
    ASSERT_EQ(cohort.domains.size(), 1U);
    EXPECT_EQ(cohort.domains[0].requests, 20U);
  }
  const CohortData& data = report->model.data();
  EXPECT_EQ(data.model_fingerprint, "f00d");
  EXPECT_EQ(data.samples, 80U);
  EXPECT_EQ(data.rho.size(), report->mask.kept);
  EXPECT_GT(report->mask.peak_rho(), 0.5);

  // A new request of a domain is closest to that domain's cohort.
  Rng rng(77);
  for (uint32_t domain = 0; domain < 4; ++domain) {
    Signature signature;
    ASSERT_EQ(report->model.signature(made_up_counts(activations.shape, domain, 40, rng), signature),
              SignatureProblem::kNone);
    const std::vector<float> s = report->model.similarities(signature);
    const auto best = static_cast<uint32_t>(std::max_element(s.begin(), s.end()) - s.begin());
    EXPECT_EQ(best, report->assignment[domain]);
  }
}

TEST(Fit, EveryTransformSeparatesDomains) {
  const Activations activations = made_up_activations(80, 4, 1, true);
  for (const Transform transform : kTransforms) {
    const auto report = fit_cohorts(activations, {.workers = 4, .pairs = 2000, .transform = transform});
    ASSERT_TRUE(report.ok()) << report.error().message;
    // With some 70 choices of 16 experts, one in four at random, nearly every expert is used at least once.
    if (transform == Transform::kBinary) EXPECT_LT(report->purity, 0.8);
    else EXPECT_EQ(report->purity, 1.0) << to_string(transform);
    EXPECT_EQ(report->model.data().transform, transform);
    EXPECT_EQ(report->signatures.size(), 80 * report->model.dims());
    // The model makes of a recorded request what the fit clustered.
    ExpertCounts counts(activations.shape);
    counts.data.assign(activations.prefill(7).begin(), activations.prefill(7).end());
    Signature signature;
    ASSERT_EQ(report->model.signature(counts, signature, activations.gate(7)), SignatureProblem::kNone);
    const auto row = std::span(report->signatures).subspan(7 * report->model.dims(), report->model.dims());
    EXPECT_TRUE(std::equal(row.begin(), row.end(), signature.begin()));
  }
}

TEST(Fit, GateTransformWithoutGatesSaysSo) {
  const auto refused = fit_cohorts(made_up_activations(20, 2), {.workers = 2, .transform = Transform::kGate});
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().field, "transform");
  EXPECT_NE(refused.error().message.find("prefill_gate"), std::string::npos);
}

TEST(Fit, CompareRanksWhatTheRecordingAllows) {
  size_t heard = 0;
  const auto with_gates =
      compare_transforms(made_up_activations(40, 4, 1, true), {.pairs = 1000}, [&](size_t done, size_t of) {
        ++heard;
        EXPECT_EQ(done, heard);
        EXPECT_EQ(of, 6U);
      });
  ASSERT_TRUE(with_gates.ok());
  EXPECT_EQ(with_gates->size(), 6U);
  EXPECT_EQ(heard, 6U);
  for (size_t i = 1; i < with_gates->size(); ++i) {
    EXPECT_GE((*with_gates)[i - 1].mask.peak_rho(), (*with_gates)[i].mask.peak_rho());
  }
  const auto without = compare_transforms(made_up_activations(40, 4), {.pairs = 1000});
  ASSERT_TRUE(without.ok());
  EXPECT_EQ(without->size(), 4U);
  // The same mask as a fit with that transform.
  const TransformScore& first = without->front();
  const auto fitted =
      fit_cohorts(made_up_activations(40, 4), {.workers = 4, .pairs = 1000, .transform = first.transform});
  EXPECT_EQ(fitted->mask.rho, first.mask.rho);
  Activations no_decode = made_up_activations(10, 2);
  no_decode.decode_counts.clear();
  EXPECT_FALSE(compare_transforms(no_decode, {}).ok());
}

// Domain 0 is most of the traffic; domain 1 decodes ten times as long.
Activations uneven() {
  Rng rng(9);
  const ExpertShape shape{.layers = {0, 1}, .experts = 16, .top_k = 2};
  Activations out;
  for (int i = 0; i < 60; ++i) {
    const uint32_t domain = i % 5 == 0 ? 1 : 0;
    const ExpertCounts prefill = made_up_counts(shape, domain, 40, rng);
    const ExpertCounts decode = made_up_counts(shape, domain, domain == 1 ? 100 : 10, rng);
    KINDRED_CHECK(out.append(prefill, &decode, domain == 1 ? "long" : "short").ok());
  }
  return out;
}

TEST(Fit, UnbalancedShowsItsImbalance) {
  const Activations activations = uneven();
  const auto vanilla = fit_cohorts(activations, {.workers = 2, .pairs = 2000, .balance = Balance::kNone});
  const auto balanced = fit_cohorts(activations, {.workers = 2, .pairs = 2000});
  ASSERT_TRUE(vanilla.ok() && balanced.ok());
  EXPECT_EQ(vanilla->purity, 1.0);
  EXPECT_NEAR(vanilla->most_requests, 48 / 30.0, 1e-9);
  EXPECT_NEAR(vanilla->most_work, 1200 / 840.0, 1e-9);
  EXPECT_NEAR(balanced->most_requests, 1, 1e-9);
  EXPECT_LT(vanilla->cost, balanced->cost);
}

TEST(Fit, BalancesWorkWithinTheTolerance) {
  const Activations activations = uneven();
  const auto by_count = fit_cohorts(activations, {.workers = 4, .pairs = 2000});
  const auto by_work =
      fit_cohorts(activations, {.workers = 4, .pairs = 2000, .balance = Balance::kWork, .tolerance = 0.1});
  ASSERT_TRUE(by_count.ok() && by_work.ok());
  EXPECT_LE(by_work->most_work, 1.1);
  EXPECT_GT(by_count->most_work, 1.3);
  uint64_t work = 0;
  for (const CohortSummary& cohort : by_work->cohorts) work += cohort.work;
  EXPECT_EQ(work, 1680U);
  EXPECT_FALSE(fit_cohorts(activations, {.workers = 4, .balance = Balance::kWork, .tolerance = -1}).ok());
}

TEST(Fit, SameSeedSameFile) {
  const Activations activations = made_up_activations(30, 3);
  const FitOptions options{.workers = 3, .pairs = 500, .seed = 5};
  EXPECT_EQ(fit_cohorts(activations, options)->model.to_bytes(), fit_cohorts(activations, options)->model.to_bytes());
}

TEST(Fit, SingleDomainAndOneWorker) {
  const auto report = fit_cohorts(made_up_activations(12, 1), {.workers = 3, .pairs = 300});
  ASSERT_TRUE(report.ok()) << report.error().message;
  EXPECT_EQ(report->purity, 1.0);
  EXPECT_EQ(report->batch, 4U);  // the smallest cohort
  EXPECT_TRUE(fit_cohorts(made_up_activations(12, 2), {.workers = 1, .pairs = 300}).ok());
}

TEST(Fit, MissingDecodeCountsSayWhatToDo) {
  Activations activations = made_up_activations(12, 2);
  activations.decode_counts.clear();
  const auto refused = fit_cohorts(activations, {.workers = 2});
  ASSERT_FALSE(refused.ok());
  EXPECT_NE(refused.error().message.find("--all-layers"), std::string::npos);
  const auto report = fit_cohorts(activations, {.workers = 2, .all_layers = true});
  ASSERT_TRUE(report.ok()) << report.error().message;
  EXPECT_FALSE(report->active_from_decode);
  EXPECT_EQ(report->model.data().layer_mask, (std::vector<uint8_t>{1, 1, 1}));
  EXPECT_TRUE(report->model.data().rho.empty());
}

TEST(Fit, RefusesTooFewRequestsAndBadOptions) {
  const Activations activations = made_up_activations(5, 2);
  EXPECT_FALSE(fit_cohorts(activations, {.workers = 6}).ok());
  EXPECT_FALSE(fit_cohorts(activations, {.workers = 0}).ok());
  EXPECT_FALSE(fit_cohorts(activations, {.workers = 2, .batch = 0}).ok());
  EXPECT_FALSE(fit_cohorts(activations, {.workers = 2, .pairs = 0}).ok());
  EXPECT_FALSE(fit_cohorts(Activations{}, {.workers = 1}).ok());
  EXPECT_TRUE(fit_cohorts(activations, {.workers = 5, .pairs = 1}).ok());
}

TEST(Fit, RequestsThatNobodyCanTellApart) {
  // Everybody uses the same experts: every idf is 0.
  Activations activations;
  ExpertCounts counts(ExpertShape{.layers = {0}, .experts = 2, .top_k = 2});
  counts.tokens = 3;
  counts.data = {3, 3};
  for (int i = 0; i < 5; ++i) ASSERT_TRUE(activations.append(counts, &counts, "").ok());
  const auto refused = fit_cohorts(activations, {.workers = 2});
  ASSERT_FALSE(refused.ok());
  EXPECT_NE(refused.error().message.find("told apart"), std::string::npos);
}

TEST(Fit, ZeroSignaturesBelongToNoCohort) {
  Activations activations;
  ExpertCounts common(ExpertShape{.layers = {0}, .experts = 3, .top_k = 1}), rare = common;
  common.tokens = rare.tokens = 4;
  common.data = {4, 0, 0};
  rare.data = {2, 2, 0};
  for (int i = 0; i < 6; ++i) ASSERT_TRUE(activations.append(i < 2 ? common : rare, &common, "d").ok());
  const auto report = fit_cohorts(activations, {.workers = 2});
  ASSERT_TRUE(report.ok()) << report.error().message;
  EXPECT_EQ(report->zero_signatures, 2U);
  EXPECT_EQ(report->assignment[0], kNoCohort);
  EXPECT_NE(report->assignment[5], kNoCohort);
}

TEST(Fit, LayerWithoutAnyCount) {
  // Not what a file may hold, but what an engine that leaves out a layer could hand over in memory.
  Activations activations = made_up_activations(20, 2);
  const size_t experts = activations.shape.experts;
  for (size_t i = 0; i < activations.requests(); ++i) {
    for (auto* counts : {&activations.prefill_counts, &activations.decode_counts}) {
      std::fill_n(counts->begin() + static_cast<ptrdiff_t>((i * 3 + 2) * experts), experts, 0U);
    }
  }
  const auto report = fit_cohorts(activations, {.workers = 2, .pairs = 500});
  ASSERT_TRUE(report.ok()) << report.error().message;
  EXPECT_EQ(report->purity, 1.0);
  EXPECT_TRUE(fit_cohorts(activations, {.workers = 2, .all_layers = true}).ok());
}

}  // namespace
}  // namespace kindred::expert

#include "sim/calibrate.h"

#include <gtest/gtest.h>

#include "sim/step_time.h"

namespace kindred::sim {
namespace {

SyntheticOptions small() {
  SyntheticOptions options = calibrated_synthetic({.layers = {0}, .experts = 32, .top_k = 4});
  options.domains = {"a", "b", "c"};
  options.tape_tokens = 128;
  return options;
}

TEST(Calibrate, EvenExpertsSaveNothing) {
  SyntheticOptions options = small();
  options.base = options.domain = options.request = options.drift = options.phase = 0;
  const Result<ExpertStatistics> even = measure_process(options);
  ASSERT_TRUE(even.ok()) << even.error().message;
  EXPECT_NEAR(even->saving, 0, 0.005);
  EXPECT_NEAR(even->of_even, 1, 0.01);
  EXPECT_NEAR(even->same_request, 0, 0.1);
  EXPECT_NEAR(even->correlation, 0, 0.4);
  for (const ExpertStatistics::Saving& saving : even->savings) {
    EXPECT_NEAR(saving.mixed, uniform_union(32, 4, saving.batch), 0.3) << saving.batch;
  }
}

TEST(Calibrate, EachDeviationMovesItsFigure) {
  const auto measure = [](const std::function<void(SyntheticOptions&)>& change) {
    SyntheticOptions options = small();
    change(options);
    const Result<ExpertStatistics> statistics = measure_process(options);
    EXPECT_TRUE(statistics.ok());
    return *statistics;
  };
  const ExpertStatistics as_is = measure([](SyntheticOptions&) {});
  EXPECT_LT(measure([](SyntheticOptions& o) { o.base = 2; }).of_even, as_is.of_even - 0.05);
  EXPECT_GT(measure([](SyntheticOptions& o) { o.domain = 2; }).saving, as_is.saving + 0.05);
  EXPECT_LT(measure([](SyntheticOptions& o) { o.request = 2; }).same_domain, as_is.same_domain - 0.1);
  EXPECT_LT(measure([](SyntheticOptions& o) { o.drift = 2; }).same_request, as_is.same_request - 0.1);
  EXPECT_LT(measure([](SyntheticOptions& o) { o.phase = 2; }).correlation, as_is.correlation - 0.1);
}

// What the command found is what ships.
TEST(Calibrate, ShippedDeviationsMeetWhatIsPublished) {
  const Result<ExpertStatistics> reached =
      measure_process(calibrated_synthetic({.layers = {0, 1, 2, 3}, .experts = 128, .top_k = 8}));
  ASSERT_TRUE(reached.ok());
  for (const CalibrationTarget& target : published_targets()) {
    const double slack = target.least == target.most ? target.tolerance : 0;
    EXPECT_GE((*reached).*target.figure, target.least - slack) << target.name;
    EXPECT_LE((*reached).*target.figure, target.most + slack) << target.name;
  }
}

TEST(Calibrate, ComesCloserAndIsDeterministic) {
  const auto run = [](int evaluations) {
    Result<Calibration> fit = calibrate_process(small(), published_targets(), evaluations, [](size_t, size_t) {});
    EXPECT_TRUE(fit.ok());
    return *std::move(fit);
  };
  const Calibration first = run(1), longer = run(24), again = run(24);
  EXPECT_LT(longer.misfit, first.misfit);
  EXPECT_DOUBLE_EQ(longer.misfit, again.misfit);
  EXPECT_DOUBLE_EQ(longer.options.domain, again.options.domain);
  SyntheticOptions wrong = small();
  wrong.base = -1;
  EXPECT_EQ(calibrate_process(wrong, published_targets(), 1, [](size_t, size_t) {}).error().field, "base");
}

}  // namespace
}  // namespace kindred::sim

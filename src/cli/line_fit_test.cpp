#include "cli/line_fit.h"

#include <gtest/gtest.h>

#include <vector>

namespace kindred::cli {
namespace {

TEST(LineFit, FindsALine) {
  const std::vector<double> x = {1, 2, 5, 9}, y = {5, 7, 13, 21};
  const LineFit fit = fit_line(x, y);
  EXPECT_NEAR(fit.a, 3, 1e-12);
  EXPECT_NEAR(fit.b, 2, 1e-12);
  EXPECT_NEAR(fit.r2, 1, 1e-12);
}

TEST(LineFit, SaysHowMuchIsExplained) {
  // By hand: means 2 and 3, slope 0.5, r2 = 1 / (2 x 2) x ... = 0.25 of y's variance.
  const std::vector<double> x = {1, 2, 3}, y = {3, 2, 4};
  const LineFit fit = fit_line(x, y);
  EXPECT_NEAR(fit.b, 0.5, 1e-12);
  EXPECT_NEAR(fit.a, 2, 1e-12);
  EXPECT_NEAR(fit.r2, 0.25, 1e-12);
}

TEST(LineFit, OfNothingOrOneXIsFlat) {
  EXPECT_EQ(fit_line({}, {}).b, 0);
  const std::vector<double> x = {4, 4}, y = {1, 3};
  const LineFit fit = fit_line(x, y);
  EXPECT_EQ(fit.a, 2);
  EXPECT_EQ(fit.b, 0);
  EXPECT_EQ(fit.r2, 0);
}

}  // namespace
}  // namespace kindred::cli

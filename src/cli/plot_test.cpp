#include "cli/plot.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <cstdio>

#include "base/config.h"

namespace kindred::cli {
namespace {

size_t times(const std::string& text, const std::string& part) {
  size_t found = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + part.size())) ++found;
  return found;
}

TEST(Plot, PointsThatAreNotFiniteAreLeftOut) {
  const std::string svg = line_chart({"t", "x", "y", {{"a", {0, 1, 2, 3}, {0, NAN, 2, INFINITY}}}});
  EXPECT_EQ(times(svg, "<circle"), 2U);
  EXPECT_EQ(svg.find("nan"), std::string::npos);
  EXPECT_EQ(svg.find("inf"), std::string::npos);
}

TEST(Plot, TheLineBreaksAtAGap) {
  const std::string svg = line_chart({"t", "x", "y", {{"a", {0, 1, 2, 3}, {0, 1, NAN, 3}, true, false}}});
  const size_t path = svg.find("<path d=\"M", svg.find("fill=\"none\" stroke=\"#444\""));
  const std::string drawn = svg.substr(path, svg.find('>', path) - path);
  EXPECT_EQ(times(drawn, "M"), 2U) << drawn;
  EXPECT_EQ(times(drawn, "L"), 1U) << drawn;
}

TEST(Plot, TicksAreRound) {
  const std::string svg = line_chart({"t", "x", "y", {{"", {0, 10}, {0.13, 0.87}}}});
  for (const char* tick : {">0.0<", ">0.2<", ">0.8<", ">1.0<", ">10<"})
    EXPECT_NE(svg.find(tick), std::string::npos) << tick;
}

TEST(Plot, NothingOrOneValueIsStillAPicture) {
  for (const std::string& svg : {line_chart({"t", "x", "y", {}}), line_chart({"t", "x", "y", {{"a", {5}, {5}}}}),
                                 bar_chart({"t", "y", {}, {}, {}}), heat_map({"t", "x", "y", {}, {}})}) {
    EXPECT_EQ(svg.rfind("<svg", 0), 0U);
    EXPECT_EQ(svg.find("nan"), std::string::npos);
  }
}

TEST(Plot, NamesAreEscaped) {
  const std::string svg = bar_chart({"a<b & c", "y", {"\"x\""}, {"g"}, {{1}}});
  EXPECT_NE(svg.find("a&lt;b &amp; c"), std::string::npos);
  EXPECT_NE(svg.find("&quot;x&quot;"), std::string::npos);
}

TEST(Plot, BarsStandOnZero) {
  // One bar up, one down: both begin at the same height.
  const std::string svg = bar_chart({"t", "y", {"a", "b"}, {"g"}, {{2, -2}}});
  std::vector<std::pair<double, double>> bars;  // y, height
  for (size_t at = svg.find("<rect"); at != std::string::npos; at = svg.find("<rect", at + 1)) {
    double y = 0, height = 0;
    if (svg.substr(at, svg.find('>', at) - at).find("#0072b2") == std::string::npos) continue;
    ASSERT_EQ(std::sscanf(svg.c_str() + at, "<rect x=\"%*f\" y=\"%lf\" width=\"%*f\" height=\"%lf\"", &y, &height), 2);
    bars.emplace_back(y, height);
  }
  ASSERT_EQ(bars.size(), 2U);
  EXPECT_NEAR(bars[0].first + bars[0].second, bars[1].first, 0.11);
  EXPECT_NEAR(bars[0].second, bars[1].second, 0.11);
}

TEST(Plot, HeatMapDarkensTheHighest) {
  const std::string svg = heat_map({"t", "x", "y", {"r"}, {{1, 3, 2}}});
  EXPECT_NE(svg.find("fill-opacity=\"0.000\""), std::string::npos);
  EXPECT_NE(svg.find("fill-opacity=\"1.000\""), std::string::npos);
  EXPECT_NE(svg.find("fill-opacity=\"0.500\""), std::string::npos);
}

TEST(Plot, SavesIntoANewFolder) {
  const std::string folder = testing::TempDir() + "kindred_plots_" + std::to_string(getpid());
  ASSERT_TRUE(save_svg(folder, "a", "<svg/>").ok());
  EXPECT_EQ(*read_file(folder + "/a.svg"), "<svg/>");
  EXPECT_FALSE(save_svg(folder + "/a.svg", "b", "<svg/>").ok());  // a file is in the way
}

}  // namespace
}  // namespace kindred::cli

#include "cli/terminal.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include "base/config.h"
#include "cli/chat_load.h"
#include "cli/prompts.h"

namespace kindred::cli {
namespace {

TEST(Terminal, WidthCountsColumns) {
  EXPECT_EQ(display_width("abc"), 3U);
  EXPECT_EQ(display_width("é"), 1U);
  EXPECT_EQ(display_width("漢字"), 4U);
  EXPECT_EQ(display_width(""), 0U);
}

TEST(Terminal, TableAlignsTextLeftAndNumbersRight) {
  Table table({"name", "n"});
  table.row({"漢", "7"});
  table.row({"abc", "123"});
  EXPECT_EQ(table.text(0), "name    n\n────  ───\n漢      7\nabc   123\n");
}

TEST(Terminal, SvgEscapes) {
  const std::string svg = text_as_svg("a < b & c\n", "t");
  EXPECT_NE(svg.find("a &lt; b &amp; c"), std::string::npos);
  EXPECT_TRUE(svg.starts_with("<svg"));
}

TEST(Quantile, NearestRank) {
  EXPECT_EQ(quantile({}, 0.5), 0);
  EXPECT_EQ(quantile({3, 1, 2}, 0.5), 2);
  EXPECT_EQ(quantile({3, 1, 2}, 0.99), 3);
  EXPECT_EQ(quantile({4, 3, 1, 2}, 0.5), 2);
}

TEST(MetricSum, AddsSeriesOfExactlyThatName) {
  const std::string text = "# TYPE a counter\na{w=\"1\"} 2\na{w=\"2\"} 3.5\na_total 9\nab 1\n";
  EXPECT_EQ(metric_sum(text, "a"), 5.5);
  EXPECT_EQ(metric_sum(text, "missing"), 0);
}

TEST(Prompts, NamesTheLineThatIsWrong) {
  const std::string path = testing::TempDir() + "prompts_" + std::to_string(getpid()) + ".jsonl";
  ASSERT_TRUE(write_file(path, "{\"prompt\":\"a\",\"domain\":\"x\"}\n\n{\"prompt\":\"b\"}\n").ok());
  const auto good = load_prompts(path);
  ASSERT_TRUE(good.ok());
  ASSERT_EQ(good->size(), 2U);
  EXPECT_EQ((*good)[0].domain, "x");
  for (const char* bad : {"{\"prompt\":\"a\"}\nnope\n", "{\"prompt\":\"a\"}\n{\"prompt\":5}\n",
                          "{\"prompt\":\"a\"}\n{\"prompt\":\"\"}\n"}) {
    ASSERT_TRUE(write_file(path, bad).ok());
    const auto result = load_prompts(path);
    ASSERT_FALSE(result.ok());
    EXPECT_NE(result.error().message.find(path + ":2:"), std::string::npos) << result.error().message;
  }
}

}  // namespace
}  // namespace kindred::cli

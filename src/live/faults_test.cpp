#include "live/faults.h"

#include <gtest/gtest.h>

namespace kindred::live {
namespace {

TEST(FaultScript, ReadsYamlAndJson) {
  const auto yaml = parse_faults(
      "- {at_s: 2.5, worker: 1, kind: kill, for_s: 3}\n- at_s: 0\n  worker: 0\n"
      "  kind: slow\n  factor: 4\n",
      2);
  ASSERT_TRUE(yaml.ok()) << yaml.error().message;
  ASSERT_EQ(yaml->size(), 2U);
  EXPECT_EQ((*yaml)[0].kind, FaultKind::kKill);
  EXPECT_EQ((*yaml)[0].at_s, 2.5);
  EXPECT_EQ((*yaml)[0].for_s, 3);
  EXPECT_EQ((*yaml)[1].factor, 4);
  const auto json = parse_faults(R"([{"at_s":1,"worker":0,"kind":"wrong_counts"}])", 1);
  ASSERT_TRUE(json.ok());
  EXPECT_EQ((*json)[0].kind, FaultKind::kWrongCounts);
}

struct BadScript {
  const char* text;
  const char* says;
};
class FaultScriptRefuses : public ::testing::TestWithParam<BadScript> {};

TEST_P(FaultScriptRefuses, SaysWhatIsWrong) {
  const auto got = parse_faults(GetParam().text, 2);
  ASSERT_FALSE(got.ok());
  EXPECT_NE(got.error().message.find(GetParam().says), std::string::npos) << got.error().message;
}

INSTANTIATE_TEST_SUITE_P(
    All, FaultScriptRefuses,
    ::testing::Values(BadScript{"a: 1", "expected a list"}, BadScript{"- 3", "line 1: expected a fault"},
                      BadScript{"- {worker: 0, kind: kill}", "at_s: is required"},
                      BadScript{"- {at_s: 1, kind: kill}", "worker: is required: 0 to 1"},
                      BadScript{"- {at_s: 1, worker: 2, kind: kill}", "worker: got '2', accepted: 0 to 1"},
                      BadScript{"- {at_s: 1, worker: 0.5, kind: kill}", "whole numbers"},
                      BadScript{"- {at_s: -1, worker: 0, kind: kill}", "at_s: got '-1'"},
                      BadScript{"- {at_s: nan, worker: 0, kind: kill}", "at_s: got 'nan'"},
                      BadScript{"- {at_s: 1, worker: 0, kind: explode}", "accepted: kill, restart"},
                      BadScript{"- {at_s: 1, worker: 0, kind: slow}", "factor: is required"},
                      BadScript{"- {at_s: 1, worker: 0, kind: kill, factor: 2}", "factor: goes with slow"},
                      BadScript{"- {at_s: 1, worker: 0, kind: reset, for_s: 2}", "for_s: reset has no length"},
                      BadScript{"- {at_s: 1, worker: 0, kind: kill, when: 2}", "when: is not a field"},
                      BadScript{"- {at_s: 1, worker: [0], kind: kill}", "worker: expected a single value"},
                      BadScript{"- {at_s: ", "line"}));

}  // namespace
}  // namespace kindred::live

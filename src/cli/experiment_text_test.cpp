#include "cli/experiment_text.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include "cli/router_experiment.h"

namespace kindred::cli {
namespace {

TEST(ExperimentText, SaysDifferencesAndClaims) {
  const Json report = {{"running_s", 600},
                       {"blocks_over", 10},
                       {"slice_s", 30},
                       {"seam_s", 5},
                       {"level", 0.95},
                       {"in_force", "near"},
                       {"in_seam", true},
                       {"arms",
                        {{{"name", "even"},
                          {"requests", 100},
                          {"means", {{"tpot_s", 0.02}, {"ttft_s", nullptr}}},
                          {"against_control", nullptr}},
                         {{"name", "near\x1b"},
                          {"requests", 90},
                          {"means", {{"tpot_s", 0.018}}},
                          {"against_control",
                           {{"tpot_s",
                             {{"blocks", 10},
                              {"control", 0.02},
                              {"difference", -0.002},
                              {"interval", {-0.003, -0.001}},
                              {"claimed", true}}},
                            {"ttft_s", nullptr}}}}}}};
  const std::string text = experiment_text(report);
  EXPECT_NE(text.find("in force: near (seam)"), std::string::npos) << text;
  EXPECT_NE(text.find("-2.00 [-3.00, -1.00] -10.0 %"), std::string::npos) << text;
  EXPECT_NE(text.find("less"), std::string::npos);
  EXPECT_NE(text.find("too few blocks"), std::string::npos);
  EXPECT_EQ(text.find('\x1b'), std::string::npos);
}

TEST(ExperimentText, AnyJsonIsReadOrSaidToBeNone) {
  for (const char* text : {"null", "[]", "{}", R"({"arms":3})", R"({"arms":[]})", R"({"arms":[1,2]})",
                           R"({"arms":[{},{"against_control":{"ttft_s":{"interval":[1]}}}]})"}) {
    EXPECT_FALSE(experiment_text(parse_json(text)).empty()) << text;
  }
}

TEST(ExperimentArguments, ArmsChangeWhatTheyName) {
  router::RouterOptions base;
  base.decode_policy.tau = 0.3;
  const auto arm = parse_arm("near: decode_policy=locality-band load_cap=2 prefill_policy=kv-aware", base);
  ASSERT_TRUE(arm.ok()) << arm.error().message;
  EXPECT_EQ(arm->name, "near");
  EXPECT_EQ(arm->decode.name, "locality-band");
  EXPECT_EQ(arm->decode.tau, 0.3);
  EXPECT_EQ(arm->decode.load_cap, 2);
  EXPECT_EQ(arm->prefill.name, "kv-aware");
  EXPECT_TRUE(parse_arm("as-it-is:", base).ok());
}

TEST(ExperimentArguments, WrongArmsAreNamed) {
  const router::RouterOptions base;
  for (const char* text :
       {"noname", ": tau=1", "a b: tau=1", "a: tau", "a: taw=1", "a: decode_policy=fastest", "a: tau=3"}) {
    const auto arm = parse_arm(text, base);
    ASSERT_FALSE(arm.ok()) << text;
    EXPECT_EQ(arm.error().field, "experiment");
    EXPECT_NE(arm.error().message.find(text), std::string::npos);
  }
}

TEST(ExperimentArguments, AFileHasArmsAndTimes) {
  const std::string path = ::testing::TempDir() + "kindred_experiment_" + std::to_string(getpid()) + ".yaml";
  ASSERT_TRUE(write_file(path,
                         "slice_ms: 1000\nseam_ms: 100\nseed: 9\narms:\n  - 'even: decode_policy=round-robin'\n"
                         "  - 'near: decode_policy=locality-band'\n")
                  .ok());
  ExperimentArguments arguments;
  arguments.experiment = {path};
  arguments.shadow_policy = "random";
  router::RouterOptions out;
  const Status applied = arguments.apply(out);
  ASSERT_TRUE(applied.ok()) << applied.error().message;
  ASSERT_EQ(out.experiment.arms.size(), 2U);
  EXPECT_EQ(out.experiment.arms[1].name, "near");
  EXPECT_EQ(out.experiment.slice_ms.count(), 1000);
  EXPECT_EQ(out.experiment.seed, 9U);
  ASSERT_TRUE(out.shadow_policy);
  EXPECT_EQ(out.shadow_policy->name, "random");
}

}  // namespace
}  // namespace kindred::cli

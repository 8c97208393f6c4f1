#include "engine/pace.h"

#include <gtest/gtest.h>

#include "base/json.h"
#include "engine/test_support.h"

namespace kindred::engine {
namespace {

using namespace std::chrono_literals;

constexpr const char* kProfile =
    R"({"v":1,"name":"demo","source":"made up","step_us":1000,"prefill_us_per_token":10,"per_sequence_us":100,)"
    R"("expert_us":50,"layers":4})";

TEST(PaceProfile, SaysTheTimeOfAStep) {
  const auto profile = parse_pace_profile(kProfile);
  ASSERT_TRUE(profile.ok()) << profile.error().message;
  EXPECT_EQ(profile->name, "demo");
  EXPECT_EQ(profile->source, "made up");
  EXPECT_EQ(profile->step_time(0, 0, 0), 1ms);
  EXPECT_EQ(profile->step_time(7, 3, 2.5), 1000us + 70us + 300us + 500us);
}

TEST(PaceProfile, BadOnesAreRefusedByKey) {
  const auto refused = [](const std::string& pointer, const Json& value, const std::string& field) {
    Json object = parse_json(kProfile);
    if (value.is_null()) {
      object.erase(pointer);
    } else {
      object[pointer] = value;
    }
    const auto profile = parse_pace_profile(dump_json(object));
    ASSERT_FALSE(profile.ok()) << dump_json(object);
    EXPECT_EQ(profile.error().code, ErrorCode::kInvalid);
    EXPECT_EQ(profile.error().field, field) << profile.error().message;
    EXPECT_NE(profile.error().message.find("accepted"), std::string::npos) << profile.error().message;
  };
  for (const char* key :
       {"v", "name", "source", "step_us", "prefill_us_per_token", "per_sequence_us", "expert_us", "layers"}) {
    refused(key, nullptr, key);
    refused(key, Json::array(), key);
    refused(key, -1, key);
  }
  refused("expert_ms", 5, "expert_ms");
  refused("step_us", 1e7, "step_us");
  refused("step_us", "12", "step_us");
  refused("layers", 0, "layers");
  refused("layers", 2.5, "layers");
  refused("layers", 5000, "layers");
  refused("name", "", "name");
  refused("v", 2, "v");
  EXPECT_FALSE(parse_pace_profile("[]").ok());
  EXPECT_FALSE(parse_pace_profile("").ok());
  std::string nan = kProfile;
  nan.replace(nan.find("1000"), 4, "NaN");
  EXPECT_NE(parse_pace_profile(nan).error().message.find("NaN"), std::string::npos);
  nan.replace(nan.find("NaN"), 3, "1e999");
  EXPECT_FALSE(parse_pace_profile(nan).ok());
  EXPECT_FALSE(parse_pace_profile(R"({"v":1,"name":"n","source":"s","step_us":0,"prefill_us_per_token":0,)"
                                  R"("per_sequence_us":0,"expert_us":0,"layers":1})")
                   .ok());
  EXPECT_EQ(load_pace_profile("/no/such/profile.json").ok(), false);
}

TEST(PaceProfile, TheBundledOneIsValid) {
  const auto profile = load_pace_profile(std::string(KINDRED_SOURCE_DIR) + "/models/pace-demo.json");
  ASSERT_TRUE(profile.ok()) << profile.error().message;
  EXPECT_LE(profile->step_time(512, 64, 64), kLongestPacedStep);  // the worker's defaults
}

// Sleeping moves the clock, and a little too far.
class ManualSleeper final : public Sleeper {
 public:
  explicit ManualSleeper(ManualClock& clock) : clock_(clock) {}
  void sleep_until(MonotonicTime time) override {
    ++sleeps;
    clock_.advance(time - clock_.now() + late);
  }
  int sleeps = 0;
  std::chrono::nanoseconds late{0};

 private:
  ManualClock& clock_;
};

class Paced : public testing::Test {
 protected:
  double metric(const char* name) { return metrics_.counter(name, "").value(); }
  void step(std::chrono::nanoseconds work, uint32_t prefill = 0, uint32_t batch = 0, double experts = 0) {
    pacer_.begin_step();
    clock_.advance(work);
    pacer_.end_step(prefill, batch, experts);
  }

  ManualClock clock_;
  ManualSleeper sleeper_{clock_};
  Registry metrics_;
  Pacer pacer_{*parse_pace_profile(kProfile), clock_, sleeper_, metrics_};
};

TEST_F(Paced, StepsTakeTheProfilesTime) {
  step(300us);
  EXPECT_EQ(clock_.now().time_since_epoch(), 1ms);
  step(300us, 10, 2, 1.5);
  EXPECT_EQ(clock_.now().time_since_epoch(), 1ms + 1ms + 100us + 200us + 300us);
  EXPECT_EQ(metric("kindred_paced_steps_total"), 2);
  EXPECT_EQ(metric("kindred_pace_overruns_total"), 0);
  EXPECT_NE(metrics_.render().find("kindred_paced{profile=\"demo\"} 1"), std::string::npos);
}

TEST_F(Paced, OversleepingAndWorkBetweenStepsDoNotAddUp) {
  sleeper_.late = 70us;
  for (int i = 0; i < 100; ++i) {
    step(300us);
    clock_.advance(200us);  // handing out tokens
  }
  EXPECT_EQ(clock_.now().time_since_epoch(), 100ms + 70us + 200us);
  EXPECT_EQ(metric("kindred_pace_overruns_total"), 0);
}

TEST_F(Paced, IdleTimeIsNotPartOfAStep) {
  step(300us);
  pacer_.idle();
  clock_.advance(1s);
  step(300us);
  EXPECT_EQ(clock_.now().time_since_epoch(), 1ms + 1s + 1ms);
  EXPECT_EQ(metric("kindred_pace_overruns_total"), 0);
}

TEST_F(Paced, OverrunsAreCountedAndLeaveNoDebt) {
  step(3ms);
  EXPECT_EQ(sleeper_.sleeps, 0);
  EXPECT_EQ(metric("kindred_pace_overruns_total"), 1);
  step(300us);
  EXPECT_EQ(clock_.now().time_since_epoch(), 4ms);
  EXPECT_EQ(metric("kindred_pace_overruns_total"), 1);
  step(300us, 0, 0, -1);  // unknown experts
  EXPECT_EQ(metric("kindred_pace_overruns_total"), 2);
}

TEST_F(Paced, AStepWaitsASecondAtMost) {
  step(300us, 1'000'000);
  EXPECT_EQ(clock_.now().time_since_epoch(), kLongestPacedStep);
  EXPECT_EQ(metric("kindred_pace_overruns_total"), 1);
}

TEST(PacedEngine, GivesTheSameTokensInTheProfilesTime) {
  EngineOptions options = test::TestEngine::small();
  test::TestEngine plain(options);
  options.pace = PaceProfile{"slow", "test", 15'000, 0, 0, 100, 6};
  test::TestEngine paced(options);
  const Job job = test::make_job("def add(a, b):\n    return a", 10, 0.8, 3);
  const auto quick = test::run(*plain, job);
  const auto began = std::chrono::steady_clock::now();
  const auto slow = test::run(*paced, job);
  const auto took = std::chrono::steady_clock::now() - began;
  ASSERT_FALSE(slow.error);
  EXPECT_EQ(slow.tokens, quick.tokens);
  EXPECT_EQ(slow.prefill->counts->data, quick.prefill->counts->data);
  // Ten steps at least; each decoding one has 4 experts in each of 6 layers.
  EXPECT_GE(took, 10 * 15ms + 10 * 24 * 100us);
  EXPECT_EQ(paced.metric("kindred_paced_steps_total"), static_cast<double>(slow.tokens.at(0).size()));
  EXPECT_EQ(paced.metric("kindred_paced"), 1);
}

TEST(PacedEngine, ProfilesThatCannotBeKeptAreRefused) {
  Registry metrics;
  EngineOptions options = test::TestEngine::small();
  options.pace = PaceProfile{"huge", "test", 900'000, 1000, 0, 0, 6};
  const auto huge = Engine::start(test::bundled_model(), options, test::system_clock(), metrics);
  ASSERT_FALSE(huge.ok());
  EXPECT_EQ(huge.error().field, "pace");
  options.pace = PaceProfile{"experts", "test", 1000, 0, 0, 100, 6};
  options.capture_experts = false;
  const auto blind = Engine::start(test::bundled_model(), options, test::system_clock(), metrics);
  ASSERT_FALSE(blind.ok());
  EXPECT_EQ(blind.error().field, "pace");
}

}  // namespace
}  // namespace kindred::engine

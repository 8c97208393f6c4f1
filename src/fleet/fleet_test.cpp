#include "fleet/fleet.h"

#include <gtest/gtest.h>

#include <array>
#include <string>
#include <thread>

namespace kindred::fleet {
namespace {

Description kindred_worker(Role role, std::string fingerprint = "f0", std::string model = "m") {
  Description out;
  out.dialect = Dialect::kKindred;
  out.models = {std::move(model)};
  out.role = role;
  out.fingerprint = std::move(fingerprint);
  return out;
}

Description plain_worker(std::vector<std::string> models) {
  Description out;
  out.models = std::move(models);
  return out;
}

TEST(ParseModels, ReadsAKindredWorker) {
  const auto got = parse_models(
      R"({"object":"list","data":[{"id":"m","object":"model","created":0,"owned_by":"kindred","max_model_len":4096,
          "kindred":{"v":1,"role":"prefill","fingerprint":"abc","layers":[0,1,4],"experts":64,"top_k":4,
          "paced":"h200"}}]})");
  ASSERT_TRUE(got.ok()) << got.error().message;
  EXPECT_EQ(got->dialect, Dialect::kKindred);
  EXPECT_EQ(got->role, Role::kPrefill);
  EXPECT_EQ(got->models, std::vector<std::string>{"m"});
  EXPECT_EQ(got->fingerprint, "abc");
  EXPECT_EQ(got->paced, "h200");
  EXPECT_EQ(got->shape, (expert::ExpertShape{{0, 1, 4}, 64, 4}));
  EXPECT_EQ(got->max_model_len_tokens, 4096U);
}

TEST(ParseModels, TakesAnyOtherServerAsPlain) {
  const auto got = parse_models(R"({"data":[{"id":"a"},{"id":"b","kindred":null,"max_model_len":null}]})");
  ASSERT_TRUE(got.ok()) << got.error().message;
  EXPECT_EQ(got->dialect, Dialect::kOpenAi);
  EXPECT_TRUE(got->serves("a"));
  EXPECT_TRUE(got->serves("b"));
  EXPECT_FALSE(got->serves("c"));
}

TEST(ParseModels, RefusesWhatIsNot) {
  for (
      const char* text : {
          "",
          "[]",
          "nonsense",
          R"({"data":[]})",
          R"({"data":{}})",
          R"({"data":[{"id":1}]})",
          R"({"data":[{"id":""}]})",
          R"({"data":[{"id":"m\u001b[31m"}]})",
          R"({"data":["m"]})",
          R"({"data":[{"id":"m","kindred":1}]})",
          R"({"data":[{"id":"m","kindred":{"v":2,"role":"prefill","fingerprint":"f","layers":[],"experts":0,"top_k":0}}]})",
          R"({"data":[{"id":"m","kindred":{"v":1,"role":"cook","fingerprint":"f","layers":[],"experts":0,"top_k":0}}]})",
          R"({"data":[{"id":"m","kindred":{"v":1,"role":"both","layers":[],"experts":0,"top_k":0}}]})",
          R"({"data":[{"id":"m","kindred":{"v":1,"role":"both","fingerprint":"f","layers":[2,1],"experts":4,"top_k":1}}]})",
          R"({"data":[{"id":"m","kindred":{"v":1,"role":"both","fingerprint":"f","layers":[-1],"experts":4,"top_k":1}}]})",
          R"({"data":[{"id":"m","kindred":{"v":1,"role":"both","fingerprint":"f","layers":[],"experts":-4,"top_k":1}}]})",
      }) {
    EXPECT_FALSE(parse_models(text).ok()) << text;
  }
}

TEST(LoadGuard, CountsExactlyOnce) {
  ManualClock clock;
  Fleet fleet(clock);
  const WorkerId id = fleet.add({"http://w", Role::kDecode});
  const auto in_flight = [&] { return fleet.status()[id].in_flight; };
  {
    LoadGuard one = fleet.take(id, 1);
    LoadGuard four = fleet.take(id, 4);
    EXPECT_EQ(in_flight(), 5);
    LoadGuard moved = std::move(four);
    EXPECT_EQ(in_flight(), 5);
    four.release();
    EXPECT_EQ(in_flight(), 5);
    moved.release();
    moved.release();
    EXPECT_EQ(in_flight(), 1);
    one = fleet.take(id, 2);
    EXPECT_EQ(in_flight(), 2);
  }
  EXPECT_EQ(in_flight(), 0);
}

TEST(LoadGuard, OutlivesTheFleet) {
  ManualClock clock;
  LoadGuard guard;
  {
    Fleet fleet(clock);
    guard = fleet.take(fleet.add({"http://w", Role::kDecode}), 1);
  }
  guard.release();
}

TEST(LoadGuard, MayBeDroppedOnAnyThread) {
  ManualClock clock;
  Fleet fleet(clock);
  const WorkerId id = fleet.add({"http://w", Role::kDecode});
  const auto work = [&] {
    for (int i = 0; i < 2000; ++i) {
      const LoadGuard guard = fleet.take(id, 3);
      ASSERT_GE(fleet.snapshot({.role = Role::kDecode}).views[0].load, 3);
    }
  };
  std::thread other(work);
  work();
  other.join();
  EXPECT_EQ(fleet.status()[id].in_flight, 0);
}

TEST(Health, UpNeedsADescription) {
  ManualClock clock;
  Fleet fleet(clock);
  const WorkerId id = fleet.add({"http://w", Role::kPrefill});
  EXPECT_EQ(fleet.health(id), Health::kUnknown);
  EXPECT_FALSE(fleet.report_failure(id, "connection refused"));
  EXPECT_EQ(fleet.health(id), Health::kUnknown);
  EXPECT_EQ(fleet.status()[id].problem, "connection refused");
  EXPECT_TRUE(fleet.report_up(id, kindred_worker(Role::kPrefill)));
  EXPECT_EQ(fleet.health(id), Health::kUp);
  EXPECT_EQ(fleet.status()[id].problem, "");
}

TEST(Health, OutAfterThreeFailuresInARow) {
  ManualClock clock;
  Fleet fleet(clock);
  const WorkerId id = fleet.add({"http://w", Role::kDecode});
  fleet.report_up(id, kindred_worker(Role::kDecode));
  EXPECT_FALSE(fleet.report_failure(id, "timeout"));
  EXPECT_FALSE(fleet.report_failure(id, "timeout"));
  fleet.report_up(id, kindred_worker(Role::kDecode));  // the row is broken
  EXPECT_FALSE(fleet.report_failure(id, "timeout"));
  EXPECT_FALSE(fleet.report_failure(id, "timeout"));
  EXPECT_EQ(fleet.health(id), Health::kUp);
  EXPECT_TRUE(fleet.report_failure(id, "timeout"));
  EXPECT_EQ(fleet.health(id), Health::kDown);
  clock.advance(std::chrono::seconds(2));
  EXPECT_DOUBLE_EQ(fleet.status()[id].state_age_s, 2);
  EXPECT_TRUE(fleet.report_up(id, kindred_worker(Role::kDecode)));
  EXPECT_EQ(fleet.health(id), Health::kUp);
}

TEST(Health, OutAtOnceOnRefusalAndLoadSurvives) {
  ManualClock clock;
  Fleet fleet(clock);
  const WorkerId id = fleet.add({"http://w", Role::kDecode});
  fleet.report_up(id, kindred_worker(Role::kDecode));
  const LoadGuard guard = fleet.take(id, 1);
  EXPECT_TRUE(fleet.report_out(id, "refused"));
  EXPECT_EQ(fleet.snapshot({.role = Role::kDecode}).available, 0U);
  EXPECT_TRUE(fleet.report_up(id, kindred_worker(Role::kDecode)));
  EXPECT_EQ(fleet.status()[id].in_flight, 1);
}

TEST(Health, AWorkerInTheWrongRoleIsOfNoUse) {
  ManualClock clock;
  Fleet fleet(clock);
  const WorkerId prefill = fleet.add({"http://p", Role::kPrefill});
  fleet.report_up(prefill, kindred_worker(Role::kDecode));
  EXPECT_EQ(fleet.health(prefill), Health::kDown);
  EXPECT_NE(fleet.status()[prefill].problem.find("says its role is decode"), std::string::npos);
  fleet.report_up(prefill, plain_worker({"m"}));
  EXPECT_NE(fleet.status()[prefill].problem.find("does not speak"), std::string::npos);
  fleet.report_up(prefill, kindred_worker(Role::kBoth));
  EXPECT_EQ(fleet.health(prefill), Health::kUp);

  const WorkerId whole = fleet.add({"http://b", Role::kBoth});
  fleet.report_up(whole, kindred_worker(Role::kPrefill));
  EXPECT_EQ(fleet.health(whole), Health::kDown);
  fleet.report_up(whole, plain_worker({"m"}));
  EXPECT_EQ(fleet.health(whole), Health::kUp);
}

TEST(Snapshot, KeepsConfigurationOrderAndMarksTheUnsuitable) {
  ManualClock clock;
  Fleet fleet(clock);
  const WorkerId p = fleet.add({"http://p", Role::kPrefill});
  const WorkerId d0 = fleet.add({"http://d0", Role::kDecode});
  const WorkerId d1 = fleet.add({"http://d1", Role::kDecode});
  const WorkerId d2 = fleet.add({"http://d2", Role::kDecode});
  fleet.report_up(p, kindred_worker(Role::kPrefill, "f1"));
  fleet.report_up(d0, kindred_worker(Role::kDecode, "f0"));
  fleet.report_up(d1, kindred_worker(Role::kDecode, "f1"));
  fleet.report_up(d2, kindred_worker(Role::kDecode, "f1"));
  fleet.assign_cohorts(3);
  const LoadGuard guard = fleet.take(d1, 2);

  const std::array tried = {d2};
  const Snapshot got = fleet.snapshot({.role = Role::kDecode, .model = "m", .fingerprint = "f1", .exclude = tried});
  ASSERT_EQ(got.ids, (std::vector<WorkerId>{d0, d1, d2}));
  EXPECT_FALSE(got.views[0].available);  // another fingerprint
  EXPECT_TRUE(got.views[1].available);
  EXPECT_FALSE(got.views[2].available);  // tried
  EXPECT_EQ(got.available, 1U);
  EXPECT_EQ(got.views[1].url, "http://d1");
  EXPECT_DOUBLE_EQ(got.views[1].load, 2);
  EXPECT_EQ(got.views[2].cohort, 2);
  EXPECT_EQ(fleet.snapshot({.role = Role::kDecode, .model = "other"}).available, 0U);
}

TEST(Snapshot, PrefillWorkersPairByFingerprint) {
  ManualClock clock;
  Fleet fleet(clock);
  const WorkerId p0 = fleet.add({"http://p0", Role::kPrefill});
  const WorkerId p1 = fleet.add({"http://p1", Role::kPrefill});
  const WorkerId d = fleet.add({"http://d", Role::kDecode});
  fleet.report_up(p0, kindred_worker(Role::kPrefill, "old"));
  fleet.report_up(p1, kindred_worker(Role::kPrefill, "new"));
  fleet.report_up(d, kindred_worker(Role::kDecode, "new"));
  const Snapshot got = fleet.snapshot({.role = Role::kPrefill, .model = "m", .paired = true});
  EXPECT_FALSE(got.views[0].available);
  EXPECT_TRUE(got.views[1].available);
  EXPECT_TRUE(fleet.serving("m").paired);
  fleet.report_out(d, "gone");
  EXPECT_EQ(fleet.snapshot({.role = Role::kPrefill, .model = "m", .paired = true}).available, 0U);
  const Serving serving = fleet.serving("m");
  EXPECT_TRUE(serving.known);
  EXPECT_FALSE(serving.paired);
  EXPECT_EQ(serving.prefill_up, 2U);
  EXPECT_EQ(serving.decode_up, 0U);
  EXPECT_FALSE(fleet.serving("other").known);
}

TEST(Membership, ARemovedWorkerFinishesAndGetsNothingNew) {
  ManualClock clock;
  Fleet fleet(clock);
  const WorkerId a = fleet.add({"http://a", Role::kDecode});
  const WorkerId b = fleet.add({"http://b", Role::kDecode});
  for (const WorkerId id : {a, b}) fleet.report_up(id, kindred_worker(Role::kDecode));
  fleet.assign_cohorts(2);
  LoadGuard guard = fleet.take(a, 1);
  fleet.remove(a);
  EXPECT_TRUE(fleet.removed(a));
  EXPECT_EQ(fleet.size(), 1U);
  EXPECT_EQ(fleet.recorded(), 2U);
  EXPECT_EQ(fleet.count(Role::kDecode), 1U);
  const Snapshot got = fleet.snapshot({.role = Role::kDecode});
  EXPECT_EQ(got.ids, std::vector<WorkerId>{b});
  EXPECT_EQ(got.views[0].cohort, 1);  // others keep theirs
  EXPECT_EQ(fleet.serving("m").decode_up, 1U);
  EXPECT_FALSE(fleet.report_up(a, kindred_worker(Role::kDecode)));  // a check that was under way
  EXPECT_FALSE(fleet.report_failure(a, "x"));
  EXPECT_FALSE(fleet.report_out(a, "x"));
  ASSERT_EQ(fleet.status().size(), 2U);  // while it drains
  EXPECT_TRUE(fleet.status()[0].removed);
  EXPECT_EQ(fleet.status()[0].problem, "removed");
  guard.release();
  EXPECT_EQ(fleet.status().size(), 1U);
  EXPECT_EQ(fleet.status(/*all=*/true).size(), 2U);
  EXPECT_EQ(fleet.worker_status(b).spec.url, "http://b");
}

TEST(Membership, ARestoredWorkerHasItsPlaceIdAndCohort) {
  ManualClock clock;
  Fleet fleet(clock);
  const WorkerId a = fleet.add({"http://a", Role::kDecode});
  const WorkerId b = fleet.add({"http://b", Role::kDecode});
  for (const WorkerId id : {a, b}) fleet.report_up(id, kindred_worker(Role::kDecode));
  fleet.assign_cohorts(2);
  fleet.remove(a);
  fleet.remove(a);
  fleet.restore(a);
  fleet.restore(a);
  EXPECT_EQ(fleet.health(a), Health::kUnknown);
  const Snapshot got = fleet.snapshot({.role = Role::kDecode});
  EXPECT_EQ(got.ids, (std::vector<WorkerId>{a, b}));
  EXPECT_FALSE(got.views[0].available);
  EXPECT_EQ(got.views[0].cohort, 0);
  EXPECT_TRUE(fleet.report_up(a, kindred_worker(Role::kDecode)));
  fleet.set_cohort(a, -1);
  EXPECT_EQ(fleet.worker_status(a).cohort, -1);
  EXPECT_EQ(fleet.role(a), Role::kDecode);
}

TEST(Models, AreListedOnceAlsoWhenDown) {
  ManualClock clock;
  Fleet fleet(clock);
  const WorkerId a = fleet.add({"http://a", Role::kBoth});
  const WorkerId b = fleet.add({"http://b", Role::kBoth});
  fleet.add({"http://c", Role::kBoth});
  fleet.report_up(a, plain_worker({"m", "n"}));
  fleet.report_up(b, plain_worker({"n", "o"}));
  fleet.report_out(b, "refused");
  std::string ids;
  for (const ServedModel& model : fleet.models()) ids += model.id;
  EXPECT_EQ(ids, "mno");
  EXPECT_EQ(fleet.serving("o").plain_up, 0U);
  EXPECT_TRUE(fleet.serving("o").known);
}

}  // namespace
}  // namespace kindred::fleet

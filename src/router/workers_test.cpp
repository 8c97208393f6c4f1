// The fleet changed at run time, and requests placed by the domain their client names.

#include "base/json.h"
#include "policy/domain.h"
#include "router/testing.h"

namespace kindred::router::testing {
namespace {

class WorkersTest : public PdFlowTest {
 protected:
  void SetUp() override { options_.manage_workers = true; }

  // A worker that the router does not know yet.
  FakeWorker& stranger(Role role) {
    fakes_.push_back(std::make_unique<FakeWorker>(loop_, role));
    return *fakes_.back();
  }
  Answer post(const std::string& body) { return call("POST", "/workers", body); }
  Answer post(const std::string& url, const std::string& role) {
    return post(Json{{"url", url}, {"role", role}}.dump());
  }
  Answer remove(const std::string& url) { return call("DELETE", "/workers?url=" + url); }
  Json workers() { return Json::parse(call("GET", "/status").body)["workers"]; }
};

TEST_F(WorkersTest, AFleetMayGrowFromNothing) {
  start(/*wait_until_ready=*/false);
  EXPECT_FALSE(ready());
  FakeWorker& p = stranger(Role::kPrefill);
  FakeWorker& d = stranger(Role::kDecode);
  const Answer added = post(p.url(), "prefill");
  EXPECT_EQ(added.status, 201);
  EXPECT_EQ(Json::parse(added.body)["url"], p.url());
  EXPECT_EQ(Json::parse(added.body)["role"], "prefill");
  EXPECT_EQ(post(d.url(), "decode").status, 201);
  ASSERT_TRUE(eventually([&] { return ready(); }));
  EXPECT_EQ(chat(true).body, kWholeStream);
  EXPECT_EQ(workers().size(), 2U);
}

TEST_F(WorkersTest, ARemovedWorkerFinishesWhatItHas) {
  options_.decode_policy = {.name = "round-robin", .tie_break = "lowest-index"};
  FakeWorker& p = prefill();
  FakeWorker& d0 = decode();
  FakeWorker& d1 = decode();
  Gate gate;
  d0.play([&](const SeenLeg& leg, net::Request&, net::ResponseWriter& writer) -> net::Task<void> {
    co_await gate.wait();
    co_await d0.answer_decode(leg, writer);
  });
  start();
  auto client = open("POST", "/v1/chat/completions", chat_body(true));
  ASSERT_TRUE(eventually([&] { return d0.leg_count() == 1; }));
  const Answer removed = remove(d0.url());
  EXPECT_EQ(removed.status, 200);
  EXPECT_EQ(Json::parse(removed.body)["in_flight"], 1);
  for (int i = 0; i < 4; ++i) EXPECT_EQ(chat(true).body, kWholeStream);
  EXPECT_EQ(d0.leg_count(), 1U);
  EXPECT_EQ(d1.leg_count(), 4U);
  ASSERT_EQ(workers().size(), 3U);
  EXPECT_EQ(workers()[1]["removed"], true);
  EXPECT_EQ(workers()[1]["in_flight"], 1);
  gate.open();
  EXPECT_EQ(parse_answer(client->read_to_end()).body, kWholeStream);
  EXPECT_TRUE(eventually([&] { return workers().size() == 2; }));
  EXPECT_TRUE(eventually([&] { return p.released().size() == 5; }));
  EXPECT_TRUE(has_metric("kindred_router_worker_up{role=\"decode\",worker=\"" + d0.url() + "\"} 0"));

  // Back again, with its place.
  EXPECT_EQ(post(d0.url(), "decode").status, 201);
  EXPECT_TRUE(eventually([&] { return workers()[1]["health"] == "up"; }));
  EXPECT_EQ(workers()[1]["url"], d0.url());
  for (int i = 0; i < 2; ++i) EXPECT_EQ(chat(true).body, kWholeStream);
  EXPECT_EQ(d0.leg_count(), 2U);
}

TEST_F(WorkersTest, ComingAndGoingManyTimesLeavesOneProberAndOnePollerEach) {
  prefill();
  FakeWorker& d = decode();
  start();
  const auto standing = [this] { return loop_.call([this] { return router_->core().standing(); }); };
  ASSERT_TRUE(eventually([&] { return standing() >= 4; }));
  const size_t before = standing();
  for (int i = 0; i < 20; ++i) {
    EXPECT_EQ(remove(d.url()).status, 200);
    EXPECT_EQ(post(d.url(), "decode").status, 201);
  }
  EXPECT_TRUE(eventually([&] { return ready(); }));
  EXPECT_EQ(standing(), before);
  EXPECT_EQ(remove(d.url()).status, 200);
  EXPECT_TRUE(eventually([&] { return standing() == before - 2; }));
  EXPECT_EQ(workers().size(), 1U);
}

TEST_F(WorkersTest, WithoutRefitANewcomerTakesWhatIsTooMuchForTheOthers) {
  options_.cohorts = cohort_file({0, 1});
  options_.decode_policy.tau = 0;
  options_.decode_policy.load_cap = 0;
  prefill();
  FakeWorker& d0 = decode();
  FakeWorker& d1 = decode();
  Gate gate;
  d0.play([&](const SeenLeg& leg, net::Request&, net::ResponseWriter& writer) -> net::Task<void> {
    co_await gate.wait();
    co_await d0.answer_decode(leg, writer);
  });
  start();
  FakeWorker& d2 = stranger(Role::kDecode);
  EXPECT_EQ(post(d2.url(), "decode").status, 201);
  EXPECT_TRUE(eventually([&] { return workers().size() == 4 && workers()[3]["health"] == "up"; }));
  EXPECT_TRUE(workers()[3]["cohort"].is_null());
  auto client = open("POST", "/v1/chat/completions", chat_body(true));
  ASSERT_TRUE(eventually([&] { return d0.leg_count() == 1; }));  // idle: the cohort wins
  EXPECT_EQ(chat(true).body, kWholeStream);                      // its worker is busier than the newcomer
  EXPECT_EQ(d2.leg_count(), 1U);
  EXPECT_EQ(d1.leg_count(), 0U);
  const Json last = Json::parse(call("GET", "/status?decisions=1").body)["decisions"][0];
  EXPECT_EQ(last["reason"], "no_cohort");
  EXPECT_EQ(last["fallback"], "none");
  EXPECT_TRUE(last["similarity"].is_null());
  EXPECT_EQ(last["scores"].size(), 2U);
  gate.open();
  EXPECT_EQ(parse_answer(client->read_to_end()).body, kWholeStream);
}

TEST_F(WorkersTest, SaysWhatIsWrongAndInWhichField) {
  prefill();
  FakeWorker& d = decode();
  start();
  const std::string url = d.url();
  const struct {
    std::string body, param, says;
  } bad[] = {
      {"", "", "url"},
      {"[]", "", "url"},
      {R"({"role":"decode"})", "url", "required"},
      {R"({"url":7,"role":"decode"})", "url", "string"},
      {R"({"url":"ftp://x","role":"decode"})", "url", "ftp://x"},
      {R"({"url":"http://127.0.0.1","role":"decode"})", "url", "127.0.0.1"},
      {R"({"url":")" + url + R"(","role":"decode"})", "url", "already"},
      {R"({"url":")" + url + R"(","role":"prefill"})", "url", "already"},
      {R"({"url":"http://127.0.0.1:9"})", "role", "prefill, decode, both"},
      {R"({"url":"http://127.0.0.1:9","role":"cook"})", "role", "prefill, decode, both"},
      {R"({"url":"http://127.0.0.1:9","role":"decode","weight":"2"})", "weight", "url, role, dialect"},
  };
  for (const auto& [body, param, says] : bad) {
    const Answer answer = post(body);
    EXPECT_EQ(answer.status, 400) << body;
    const Json error = Json::parse(answer.body)["error"];
    EXPECT_EQ(error["param"].is_null() ? "" : error["param"].get<std::string>(), param) << body;
    EXPECT_NE(error["message"].get<std::string>().find(says), std::string::npos) << answer.body;
  }
  EXPECT_EQ(post(R"({"url":")" + std::string(20'000, 'x') + R"("})").status, 413);
  EXPECT_EQ(remove("http://127.0.0.1:9").status, 404);
  EXPECT_EQ(remove("nonsense").status, 400);
  const Answer missing = call("DELETE", "/workers");
  EXPECT_EQ(missing.status, 400);
  EXPECT_EQ(Json::parse(missing.body)["error"]["param"], "url");
  const Answer get = call("GET", "/workers");
  EXPECT_EQ(get.status, 405);
  EXPECT_EQ(*get.headers.find("Allow"), "POST, DELETE");
  EXPECT_EQ(workers().size(), 2U);
}

TEST_F(WorkersTest, IsOffUnlessAskedFor) {
  options_.manage_workers = false;
  prefill();
  FakeWorker& d = decode();
  start();
  const Answer refused = post("http://127.0.0.1:9", "decode");
  EXPECT_EQ(refused.status, 403);
  EXPECT_NE(refused.body.find("--manage-workers"), std::string::npos);
  EXPECT_EQ(remove(d.url()).status, 403);
  EXPECT_EQ(workers().size(), 2U);
}

class DomainFlowTest : public PdFlowTest {
 protected:
  void SetUp() override { options_.decode_policy.name = "domain"; }
  Answer chat_about(const std::string& domain) {
    return call("POST", "/v1/chat/completions", chat_body(true), "X-Kindred-Domain: " + domain + "\r\n");
  }
};

TEST_F(DomainFlowTest, EachDomainHasItsWorkerAndWorkersNeverSeeTheLabel) {
  FakeWorker& p = prefill();
  FakeWorker& d0 = decode();
  FakeWorker& d1 = decode();
  start();
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(chat_about("code").body, kWholeStream);
    EXPECT_EQ(chat_about("de").body, kWholeStream);
    EXPECT_EQ(chat_about("code").body, kWholeStream);
  }
  EXPECT_EQ(d0.leg_count(), 6U);
  EXPECT_EQ(d1.leg_count(), 3U);
  for (const FakeWorker* worker : {&p, &d0, &d1}) {
    for (const SeenLeg& leg : worker->legs()) EXPECT_EQ(leg.headers.count("X-Kindred-Domain"), 0U);
  }
  const Json last = Json::parse(call("GET", "/status?decisions=1").body)["decisions"][0];
  EXPECT_EQ(last["policy"], "domain");
  EXPECT_EQ(last["reason"], "domain");
  EXPECT_EQ(chat(true).body, kWholeStream);
  EXPECT_TRUE(has_metric("kindred_router_fallbacks_total{reason=\"no_label\"} 1"));
}

TEST_F(DomainFlowTest, WholeWorkersAreSortedByDomainToo) {
  FakeWorker& a = add(Role::kBoth, "");
  FakeWorker& b = add(Role::kBoth, "");
  start();
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(chat_about("code").status, 200);
    EXPECT_EQ(chat_about("de").status, 200);
    EXPECT_EQ(chat_about("code").status, 200);
  }
  EXPECT_EQ(a.leg_count(), 6U);
  EXPECT_EQ(b.leg_count(), 3U);
  EXPECT_EQ(chat(true).status, 200);
  EXPECT_TRUE(has_metric("kindred_router_fallbacks_total{reason=\"no_label\"} 1"));
}

TEST_F(DomainFlowTest, ALabelThatIsTooLongIsRefused) {
  FakeWorker& p = prefill();
  decode();
  start();
  EXPECT_EQ(chat_about(std::string(policy::kMaxLabelBytes, 'x')).status, 200);
  const size_t before = p.leg_count();
  for (const std::string& bad : {std::string(policy::kMaxLabelBytes + 1, 'x'), std::string("caf\xc3\xa9")}) {
    const Answer answer = chat_about(bad);
    EXPECT_EQ(answer.status, 400);
    const Json error = Json::parse(answer.body)["error"];
    EXPECT_EQ(error["param"], "X-Kindred-Domain");
    EXPECT_NE(error["message"].get<std::string>().find("at most 128"), std::string::npos);
  }
  EXPECT_EQ(p.leg_count(), before);
}

}  // namespace
}  // namespace kindred::router::testing

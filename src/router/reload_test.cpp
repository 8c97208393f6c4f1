// A new configuration while requests are under way; and the end of a router.

#include "router/reload.h"

#include <unistd.h>

#include <algorithm>

#include "base/config.h"
#include "base/json.h"
#include "router/testing.h"

namespace kindred::router::testing {
namespace {

// Gives what the test wants next.
class ScriptedConfig final : public ConfigSource {
 public:
  std::vector<Error> read(std::optional<std::string_view> yaml, RouterOptions& out) override {
    seen = yaml ? std::string(*yaml) : "(file)";
    out = next;
    return problems;
  }
  void accept() override { ++accepted; }
  std::string running() const override { return R"({"tau":)" + std::to_string(accepted) + "}"; }

  RouterOptions next;
  std::vector<Error> problems;
  std::string seen;
  int accepted = 0;
};

class Reload : public RouterTest {
 protected:
  void SetUp() override { options_.decode_policy = {.name = "round-robin"}; }

  void start_with_config() {
    start();
    loop_.call([this] {
      auto source = std::make_unique<ScriptedConfig>();
      config_ = source.get();
      config_->next = router_->core().settings()->options;
      router_->set_config_source(std::move(source));
      return 0;
    });
  }
  // What a SIGHUP does.
  std::vector<Error> reload(const std::function<void(RouterOptions&)>& change) {
    return loop_.call([&] {
      config_->next = router_->core().settings()->options;
      change(config_->next);
      return router_->reload();
    });
  }
  FakeWorker& stranger() {
    fakes_.push_back(std::make_unique<FakeWorker>(loop_, Role::kBoth, ""));
    return *fakes_.back();
  }
  Json workers() { return Json::parse(call("GET", "/status").body)["workers"]; }

  ScriptedConfig* config_ = nullptr;
};

TEST_F(Reload, TheAccessLogMovesUnlessItCannotBeOpened) {
  add(Role::kBoth, "");
  start_with_config();
  const std::string file = ::testing::TempDir() + "kindred_reload_log_" + std::to_string(::getpid());
  EXPECT_EQ(chat(false).status, 200);  // none is written yet
  const auto to = [&](AccessLogFormat format, const std::string& path) {
    return reload([&](RouterOptions& next) {
      next.edge.access_log = format;
      next.edge.access_log_file = path;
    });
  };
  EXPECT_TRUE(to(AccessLogFormat::kJson, file).empty());
  EXPECT_EQ(chat(false).status, 200);
  const auto lines = [&] {
    const auto text = read_file(file);
    return text ? std::ranges::count(*text, '\n') : 0;
  };
  EXPECT_TRUE(eventually([&] { return lines() == 1; }));
  const std::vector<Error> problems = to(AccessLogFormat::kText, "/nonexistent/log");
  ASSERT_EQ(problems.size(), 1U);
  EXPECT_EQ(problems[0].field, "access_log_file");
  EXPECT_EQ(chat(false).status, 200);
  EXPECT_TRUE(eventually([&] { return lines() == 2; }));
  EXPECT_TRUE(to(AccessLogFormat::kNone, "").empty());
  EXPECT_EQ(chat(false).status, 200);
  EXPECT_EQ(lines(), 2);
  std::remove(file.c_str());
}

TEST_F(Reload, EachSettingThatCannotChangeIsNamed) {
  add(Role::kBoth, "");
  start_with_config();
  const std::vector<Error> problems = reload([](RouterOptions& next) {
    next.edge.server.connections += 1;
    next.edge.tls_cert = "other.pem";
    next.edge.admin_port = 1;
  });
  std::vector<std::string> fields;
  for (const Error& problem : problems) {
    fields.push_back(problem.field);
    EXPECT_NE(problem.message.find("restart"), std::string::npos);
  }
  EXPECT_EQ(fields, (std::vector<std::string>{"connections", "admin_port", "tls_cert"}));
}

TEST_F(Reload, WorkersPoliciesAndLimitsChangeAndNoRequestIsDropped) {
  FakeWorker& a = add(Role::kBoth, "");
  Gate gate;
  a.play([&](const SeenLeg&, net::Request&, net::ResponseWriter& writer) -> net::Task<void> {
    co_await writer.start(200, events_type());
    co_await writer.write("data: {\"n\":1}\n\n");
    co_await gate.wait();
    co_await writer.write("data: [DONE]\n\n");
    co_await writer.finish();
  });
  start_with_config();
  auto stream = open("POST", "/v1/chat/completions", chat_body(true));
  stream->read_until("\"n\":1");
  FakeWorker& b = stranger();
  const auto problems = reload([&](RouterOptions& next) {
    next.worker = {b.url()};
    next.decode_policy.name = "least-loaded";
    next.retries = 0;
    next.max_inflight = 1;
    next.queue = 0;
    next.model_aliases = {"alias=m"};
  });
  ASSERT_TRUE(problems.empty()) << problems.front().message;
  EXPECT_EQ(config_->accepted, 1);
  EXPECT_EQ(workers()[0]["removed"], true);
  EXPECT_EQ(workers()[0]["in_flight"], 1);
  ASSERT_TRUE(eventually([&] { return workers().size() == 2 && workers()[1]["health"] == "up"; }));
  EXPECT_EQ(chat(false).status, 429);  // the stream still counts, and the limit is one now
  gate.open();
  EXPECT_TRUE(stream->read_to_end().ends_with("data: [DONE]\n\n\r\n0\r\n\r\n"));
  ASSERT_TRUE(eventually([&] { return chat(false).status == 200; }));
  EXPECT_EQ(call("POST", "/v1/chat/completions", R"({"model":"alias","messages":[]})").status, 200);
  EXPECT_EQ(a.leg_count(), 1U);
  EXPECT_EQ(b.leg_count(), 2U);
  EXPECT_EQ(Json::parse(call("GET", "/status").body)["policy"]["decode"], "least-loaded");
  EXPECT_TRUE(has_metric("kindred_router_reloads_total{result=\"accepted\"} 1"));
}

TEST_F(Reload, RequestsInAStreamOfReloadsAllSucceed) {
  FakeWorker& a = add(Role::kBoth, "");
  FakeWorker& b = add(Role::kBoth, "");
  start_with_config();
  for (int i = 0; i < 40; ++i) {
    const auto problems = reload([&](RouterOptions& next) {
      next.decode_policy.name = i % 2 == 0 ? "least-loaded" : "round-robin";
      // Each time another one goes or comes; one is always up.
      next.worker = i % 4 < 2 ? std::vector<std::string>{a.url(), b.url()} : std::vector<std::string>{a.url()};
    });
    ASSERT_TRUE(problems.empty());
    EXPECT_EQ(chat(i % 3 == 0).status, 200);
  }
  EXPECT_EQ(a.leg_count() + b.leg_count(), 40U);
}

TEST_F(Reload, AnInvalidOneIsRefusedWithAllReasonsAndTheOldOneStays) {
  FakeWorker& a = add(Role::kBoth, "");
  start_with_config();
  const auto problems = reload([&](RouterOptions& next) {
    next.worker = {"nonsense", a.url(), a.url()};
    next.decode_policy.tau = 7;
    next.prefill_policy.name = "oracle";
    next.model_aliases = {"x"};
    next.dialects = {a.url() + "=tgi"};
    next.port = 1;
    next.retries = 0;
  });
  std::vector<std::string> fields;
  for (const Error& problem : problems) fields.push_back(problem.field);
  EXPECT_EQ(fields,
            (std::vector<std::string>{"port", "prefill_policy", "tau", "model_alias", "worker", "worker", "dialect"}));
  EXPECT_EQ(config_->accepted, 0);
  EXPECT_EQ(workers().size(), 1U);
  EXPECT_EQ(workers()[0]["health"], "up");
  EXPECT_EQ(loop_.call([this] { return router_->core().settings()->options.retries; }), 2U);
  EXPECT_EQ(chat(false).status, 200);
  EXPECT_TRUE(has_metric("kindred_router_reloads_total{result=\"refused\"} 1"));
}

TEST_F(Reload, ByPutAndSeenByGet) {
  options_.manage_workers = true;
  add(Role::kBoth, "");
  start_with_config();
  EXPECT_EQ(Json::parse(call("GET", "/config").body)["tau"], 0);
  const Answer put = call("PUT", "/config", "tau: 0.2\n");
  EXPECT_EQ(put.status, 200);
  EXPECT_EQ(config_->seen, "tau: 0.2\n");
  EXPECT_EQ(Json::parse(put.body)["tau"], 1);
  loop_.call([this] {
    config_->problems = {invalid("config:1: tau: got '9', accepted: 0 to 2", "tau"), invalid("retries: no", "retries")};
    return 0;
  });
  const Answer refused = call("PUT", "/config", "tau: 9\nretries: -1\n");
  EXPECT_EQ(refused.status, 400);
  const Json error = Json::parse(refused.body)["error"];
  EXPECT_EQ(error["param"], "tau");
  ASSERT_EQ(error["reasons"].size(), 2U);
  EXPECT_EQ(error["reasons"][1]["field"], "retries");
  EXPECT_EQ(Json::parse(call("GET", "/config").body)["tau"], 1);
  EXPECT_EQ(call("POST", "/config").status, 405);
}

TEST_F(Reload, PutIsOffUnlessWorkersMayBeManaged) {
  add(Role::kBoth, "");
  start_with_config();
  EXPECT_EQ(call("PUT", "/config", "tau: 0.2\n").status, 403);
  EXPECT_EQ(config_->seen, "");
  EXPECT_EQ(call("GET", "/config").status, 200);
}

class Drain : public RouterTest {
 protected:
  // Starts to drain and returns at once.
  std::future<void> drain(std::chrono::milliseconds deadline_ms) {
    return loop_.start([this, deadline_ms]() -> net::Task<void> { co_await router_->drain(deadline_ms); });
  }
};

TEST_F(Drain, StreamsFinishAndNothingNewIsTaken) {
  FakeWorker& w = add(Role::kBoth, "");
  Gate gate;
  w.play([&](const SeenLeg&, net::Request&, net::ResponseWriter& writer) -> net::Task<void> {
    co_await writer.start(200, events_type());
    co_await writer.write("data: {\"n\":1}\n\n");
    co_await gate.wait();
    co_await writer.write("data: [DONE]\n\n");
    co_await writer.finish();
  });
  start();
  auto stream = open("POST", "/v1/chat/completions", chat_body(true));
  stream->read_until("\"n\":1");
  auto drained = drain(10'000ms);
  ASSERT_TRUE(eventually([&] { return loop_.call([this] { return router_->core().draining.load(); }); }));
  const net::testing::RawConnection late(net::testing::raw_connect(port_));
  EXPECT_FALSE(late.open());
  gate.open();
  EXPECT_TRUE(stream->read_to_end().ends_with("data: [DONE]\n\n\r\n0\r\n\r\n"));
  drained.get();
  EXPECT_EQ(w.leg_count(), 1U);
}

TEST_F(Drain, TheDeadlineEndsWhatWouldGoOn) {
  FakeWorker& w = add(Role::kBoth, "");
  w.play([](const SeenLeg& leg, net::Request& request, net::ResponseWriter& writer) -> net::Task<void> {
    co_await writer.start(200, events_type());
    co_await writer.write("data: {\"n\":1}\n\n");
    co_await hang(leg, request, writer);
  });
  start();
  auto stream = open("POST", "/v1/chat/completions", chat_body(true));
  stream->read_until("\"n\":1");
  auto drained = drain(50ms);
  EXPECT_EQ(drained.wait_for(5s), std::future_status::ready);
  EXPECT_FALSE(stream->read_to_end().ends_with("0\r\n\r\n"));  // never a clean-looking end
  EXPECT_TRUE(eventually([&] { return w.cancelled() == 1; }));
}

}  // namespace
}  // namespace kindred::router::testing

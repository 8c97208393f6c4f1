// Workers that come and go by /workers, by a watched file and by Kubernetes.

#include <fstream>

#include "base/config.h"
#include "base/json.h"
#include "router/testing.h"

namespace kindred::router::testing {
namespace {

class MembershipFlow : public RouterTest {
 protected:
  void SetUp() override { options_.decode_policy = {.name = "round-robin"}; }

  // A worker that the router does not know yet.
  FakeWorker& stranger() {
    fakes_.push_back(std::make_unique<FakeWorker>(loop_, Role::kBoth, ""));
    return *fakes_.back();
  }
  Json workers() { return Json::parse(call("GET", "/status").body)["workers"]; }
  size_t up() {
    size_t out = 0;
    for (const Json& worker : workers()) out += worker["health"] == "up" && !worker.contains("draining") ? 1 : 0;
    return out;
  }
};

TEST_F(MembershipFlow, ADrainingWorkerFinishesWhatItHasAndStaysAMember) {
  options_.manage_workers = true;
  FakeWorker& a = add(Role::kBoth, "");
  FakeWorker& b = add(Role::kBoth, "");
  Gate gate;
  a.play([&](const SeenLeg& leg, net::Request&, net::ResponseWriter& writer) -> net::Task<void> {
    co_await gate.wait();
    co_await a.answer_plain(leg, writer);
  });
  start();
  auto first = open("POST", "/v1/chat/completions", chat_body(true));
  ASSERT_TRUE(eventually([&] { return a.leg_count() == 1; }));
  const std::string body = Json{{"url", a.url()}}.dump();
  const Answer drained = call("POST", "/workers/drain", body);
  EXPECT_EQ(drained.status, 200);
  EXPECT_EQ(Json::parse(drained.body)["in_flight"], 1);
  EXPECT_EQ(workers()[0]["draining"], true);
  EXPECT_EQ(workers()[0]["health"], "up");
  for (int i = 0; i < 4; ++i) EXPECT_EQ(chat(false).status, 200);
  EXPECT_EQ(a.leg_count(), 1U);
  EXPECT_EQ(b.leg_count(), 4U);
  gate.open();
  EXPECT_TRUE(parse_answer(first->read_to_end()).complete);
  // Added again, it serves at once: it was up all the time.
  EXPECT_EQ(call("POST", "/workers", Json{{"url", a.url()}, {"role", "both"}}.dump()).status, 201);
  for (int i = 0; i < 2; ++i) EXPECT_EQ(chat(false).status, 200);
  EXPECT_EQ(a.leg_count(), 2U);
  EXPECT_EQ(call("POST", "/workers/drain", R"({"url":"http://127.0.0.1:9"})").status, 404);
  EXPECT_EQ(call("POST", "/workers/drain", R"({"url":"http://127.0.0.1:9","role":"both"})").status, 400);
  EXPECT_EQ(call("GET", "/workers/drain").status, 405);
}

class WorkersFile : public MembershipFlow {
 protected:
  void SetUp() override {
    MembershipFlow::SetUp();
    path_ = ::testing::TempDir() + "kindred_workers_" +
            ::testing::UnitTest::GetInstance()->current_test_info()->name() + ".yaml";
    options_.workers_file = path_;
    options_.workers_file_interval_ms = 10ms;
  }
  void write(const std::string& text) { ASSERT_TRUE(write_file(path_, text).ok()); }
  static std::string entry(const FakeWorker& worker, const std::string& more = {}) {
    return "- {url: " + worker.url() + more + "}\n";
  }
  std::string path_;
};

TEST_F(WorkersFile, IsFollowedAndRulesOnlyOverItsOwn) {
  FakeWorker& configured = add(Role::kBoth, "");
  FakeWorker& a = stranger();
  FakeWorker& b = stranger();
  write("workers:\n" + entry(a) + entry(b, ", dialect: openai"));
  start();
  ASSERT_TRUE(eventually([&] { return up() == 3; }));
  write(entry(b) + entry(configured));
  ASSERT_TRUE(eventually([&] { return up() == 2 && workers().size() == 2; }));
  EXPECT_EQ(workers()[0]["url"], configured.url());
  write("[]\n");
  ASSERT_TRUE(eventually([&] { return workers().size() == 1; }));
  EXPECT_EQ(chat(false).status, 200);
  EXPECT_EQ(configured.leg_count(), 1U);
}

TEST_F(WorkersFile, WhatIsInvalidLeavesTheWorkersAsTheyWere) {
  FakeWorker& a = stranger();
  write(entry(a));
  start();
  ASSERT_TRUE(eventually([&] { return up() == 1; }));
  for (const std::string bad : {"- {url: http://x:1, role: cook}\n", "", "{", "- {role: both}\n"}) {
    const std::string before = metrics();
    write(bad);
    const auto errors = [](const std::string& text) {
      const size_t at = text.find("kindred_router_membership_errors_total{source=\"file\"}");
      return at == std::string::npos ? std::string() : text.substr(at, text.find('\n', at) - at);
    };
    ASSERT_TRUE(eventually([&] { return errors(metrics()) != errors(before); })) << bad;
    EXPECT_EQ(chat(false).status, 200) << bad;
  }
  std::remove(path_.c_str());
  EXPECT_EQ(chat(false).status, 200);
  write(entry(a, ", drain: true"));
  EXPECT_TRUE(eventually([&] { return up() == 0; }));
  EXPECT_EQ(workers()[0]["draining"], true);
}

// Enough of the Kubernetes API for one Service's slices.
class FakeApi {
 public:
  explicit FakeApi(std::string list)
      : list_(std::move(list)), server_([this](net::testing::RawConnection& connection, int) { serve(connection); }) {}

  std::string url() const { return server_.endpoint().url(); }
  void set_list(std::string list) {
    const std::lock_guard lock(mutex_);
    list_ = std::move(list);
  }
  void send(std::string event) {
    const std::lock_guard lock(mutex_);
    events_.push_back(std::move(event));
  }
  int lists() const { return lists_; }
  int watches() const { return watches_; }
  std::string last_head() const {
    const std::lock_guard lock(mutex_);
    return head_;
  }

 private:
  void serve(net::testing::RawConnection& connection) {
    for (std::string head = connection.read_head(); !head.empty(); head = connection.read_head()) {
      const bool watch = head.find("watch=1") != std::string::npos;
      std::string list;
      {
        const std::lock_guard lock(mutex_);
        head_ = head;
        list = list_;
        if (watch) events_.clear();
      }
      if (!watch) {
        ++lists_;
        connection.send("HTTP/1.1 200 OK\r\nContent-Length: " + std::to_string(list.size()) + "\r\n\r\n" + list);
        continue;
      }
      connection.send("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n");
      ++watches_;
      while (pass_events(connection)) std::this_thread::sleep_for(5ms);
      connection.send("0\r\n\r\n");
    }
  }
  // False once the watch is to end.
  bool pass_events(net::testing::RawConnection& connection) {
    std::vector<std::string> now;
    {
      const std::lock_guard lock(mutex_);
      now.swap(events_);
    }
    for (const std::string& event : now) {
      if (event.empty()) return false;
      char size[32];
      std::snprintf(size, sizeof size, "%zx\r\n", event.size() + 1);
      if (!connection.send(size + event + "\n\r\n")) return false;
    }
    return !stopping_;
  }

  mutable std::mutex mutex_;
  std::string list_, head_;
  std::vector<std::string> events_;
  std::atomic<int> lists_{0}, watches_{0};

 public:
  std::atomic<bool> stopping_{false};

 private:
  net::testing::RawServer server_;  // last: its threads use the rest
};

class Kubernetes : public MembershipFlow {
 protected:
  static uint16_t port_of(const FakeWorker& worker) { return net::parse_endpoint(worker.url())->port; }
  static std::string slice(const FakeWorker& worker, const std::string& name, const std::string& version,
                           const std::string& conditions = R"({"ready":true})") {
    return R"({"metadata":{"name":")" + name + R"(","resourceVersion":")" + version +
           R"(","labels":{"kindred/role":"both"}},"addressType":"IPv4","ports":[{"name":"http","port":)" +
           std::to_string(port_of(worker)) + R"(}],"endpoints":[{"addresses":["127.0.0.1"],"conditions":)" +
           conditions + "}]}";
  }
  static std::string list_of(const std::string& items, const std::string& version) {
    return R"({"metadata":{"resourceVersion":")" + version + R"("},"items":[)" + items + "]}";
  }
  static std::string event(const std::string& type, const std::string& object) {
    return R"({"type":")" + type + R"(","object":)" + object + "}";
  }
};

TEST_F(Kubernetes, EndpointSlicesAreListedWatchedAndListedAgainAfter410) {
  FakeWorker& a = stranger();
  FakeWorker& b = stranger();
  FakeApi api(list_of(slice(a, "s-a", "5"), "7"));
  options_.kubernetes_services = {"ai/vllm:http"};
  options_.kubernetes_api = api.url();
  start();
  ASSERT_TRUE(eventually([&] { return up() == 1 && api.watches() == 1; }));
  EXPECT_NE(api.last_head().find("/apis/discovery.k8s.io/v1/namespaces/ai/endpointslices?"), std::string::npos);
  EXPECT_NE(api.last_head().find("resourceVersion=7"), std::string::npos);
  EXPECT_EQ(chat(false).status, 200);

  api.send(event("ADDED", slice(b, "s-b", "8")));
  ASSERT_TRUE(eventually([&] { return up() == 2; }));
  api.send(event("MODIFIED", slice(a, "s-a", "9", R"({"ready":false,"serving":true,"terminating":true})")));
  ASSERT_TRUE(eventually([&] { return up() == 1; }));
  EXPECT_EQ(workers()[0]["draining"], true);
  api.send(event("DELETED", slice(a, "s-a", "10")));
  ASSERT_TRUE(eventually([&] { return workers().size() == 1; }));

  api.set_list(list_of(slice(a, "s-a", "20") + "," + slice(b, "s-b", "8"), "21"));
  api.send(R"({"type":"ERROR","object":{"kind":"Status","code":410,"message":"too old resource version"}})");
  ASSERT_TRUE(eventually([&] { return api.lists() == 2 && up() == 2; }));
  ASSERT_TRUE(eventually([&] { return api.watches() == 2; }));
  EXPECT_NE(api.last_head().find("resourceVersion=21"), std::string::npos);
  api.stopping_ = true;
}

TEST_F(Kubernetes, AnApiServerThatIsAwayLeavesTheWorkersAsTheyWere) {
  FakeWorker& a = stranger();
  auto api = std::make_unique<FakeApi>(list_of(slice(a, "s-a", "5"), "7"));
  options_.kubernetes_services = {"ai/vllm"};
  options_.kubernetes_api = api->url();
  start();
  ASSERT_TRUE(eventually([&] { return up() == 1 && api->watches() == 1; }));
  api->stopping_ = true;
  api.reset();
  ASSERT_TRUE(eventually([&] {
    return metrics().find("kindred_router_membership_errors_total{source=\"kubernetes\"}") != std::string::npos;
  }));
  EXPECT_EQ(chat(false).status, 200);
}

TEST_F(Kubernetes, ServicesAreCheckedAtTheStart) {
  options_.kubernetes_services = {"vllm"};
  options_.kubernetes_api = "http://127.0.0.1:1";
  const std::string message = loop_.call([this] {
    const auto made = Router::make(loop_.executor(), options_, clock_);
    return made.ok() ? std::string() : made.error().message;
  });
  EXPECT_NE(message.find("NAMESPACE/NAME[:PORT]"), std::string::npos);
}

}  // namespace
}  // namespace kindred::router::testing

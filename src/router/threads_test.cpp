// A router on several threads: limits hold for all of them together, nothing is lost or counted twice, and what
// changes the router does not disturb the requests of any thread.

#include <array>
#include <atomic>
#include <thread>

#include "router/gate.h"
#include "router/headers.h"
#include "router/testing.h"

namespace kindred::router::testing {
namespace {

constexpr size_t kThreads = 4;

class OneConfig final : public ConfigSource {
 public:
  std::vector<Error> read(std::optional<std::string_view>, RouterOptions& out) override {
    out = next;
    return {};
  }
  void accept() override { ++accepted; }
  std::string running() const override { return "{}"; }
  RouterOptions next;
  std::atomic<int> accepted{0};
};

// The workers and the control loop share a thread; the three others only serve requests.
class ThreadsTest : public PdFlowTest {
 protected:
  // One prefill and two decode workers of model "m", two plain workers of model "plain".
  void fleet_of_five() {
    prefill();
    for (int i = 0; i < 2; ++i) decode();
    for (int i = 0; i < 2; ++i) add(Role::kBoth, "").model = "plain";
    start_threads();
  }
  void start_threads() {
    options_.port = 0;
    options_.threads = kThreads;
    options_.health_interval_ms = 50ms;
    options_.health_timeout_ms = 2s;
    loop_.call([this] {
      std::vector<net::asio::any_io_executor> executors = {loop_.executor()};
      for (auto& other : others_) executors.push_back(other.executor());
      auto made = Router::make(executors, options_, clock_);
      EXPECT_TRUE(made.ok()) << (made.ok() ? "" : made.error().message);
      router_ = *std::move(made);
      const Result<uint16_t> port = router_->listen();
      EXPECT_TRUE(port.ok());
      port_ = port ? *port : 0;
      return 0;
    });
    ASSERT_NE(port_, 0);
    ASSERT_TRUE(eventually([this] { return ups() == fakes_.size(); }));
  }
  // From now on what a reload reads; begins as what runs.
  OneConfig& configure() {
    auto owned = std::make_unique<OneConfig>();
    OneConfig& config = *owned;
    loop_.call([&] {
      config.next = router_->core().settings()->options;
      router_->set_config_source(std::move(owned));
      return 0;
    });
    return config;
  }
  size_t ups() {
    size_t out = 0;
    for (const auto& worker : router_->core().fleet.status()) out += worker.health == fleet::Health::kUp ? 1 : 0;
    return out;
  }
  void TearDown() override {
    RouterTest::TearDown();
    for (auto& other : others_) other.stop();
  }

  std::string body_for(const std::string& model, bool stream) {
    return fmt::format(R"({{"model":"{}","messages":[{{"role":"user","content":"hello"}}],"stream":{}}})", model,
                       stream);
  }
  ConnectionPtr ask(const std::string& model, bool stream, const std::string& headers = {}) {
    return open("POST", "/v1/chat/completions", body_for(model, stream), headers);
  }
  // Runs `work(client)` on a thread of its own for each of `clients`, and waits for all.
  static void at_once(size_t clients, const std::function<void(size_t)>& work) {
    std::vector<std::jthread> threads;
    for (size_t i = 0; i < clients; ++i) threads.emplace_back([&work, i] { work(i); });
  }
  // Everything that a request takes has come back.
  bool at_rest() { return in_flight() == 0 && gate().running() == 0 && gate().waiting() == 0; }
  router::Gate& gate() { return *router_->core().gate; }
  size_t prompts() { return fakes_[0]->leg_count(); }
  std::vector<size_t> given() {
    std::vector<size_t> out;
    for (const auto& one : fakes_) out.push_back(one->leg_count());
    return out;
  }

  std::array<net::testing::TestLoop, kThreads - 1> others_;
};

TEST_F(ThreadsTest, AllFlowsOfManyClientsEndWholeAndEverythingComesBack) {
  options_.cohorts = cohort_file({0, 1});
  options_.decode_inflight = 64;
  fleet_of_five();
  constexpr size_t kClients = 12, kEach = 10;
  std::atomic<size_t> good{0};
  at_once(kClients, [&](size_t client) {
    for (size_t i = 0; i < kEach; ++i) {
      const bool pd = (client + i) % 2 == 0, stream = (client + i) % 4 < 2;
      const Answer answer = parse_answer(ask(pd ? "m" : "plain", stream)->read_to_end());
      const bool whole = answer.status == 200 && answer.complete && (!stream || !pd || answer.body == kWholeStream) &&
                         answer.headers.find(kRequestIdHeader);
      EXPECT_TRUE(whole) << answer.status << " " << answer.body;
      good += whole ? 1 : 0;
    }
  });
  EXPECT_EQ(good, kClients * kEach);
  EXPECT_TRUE(eventually([this] { return at_rest() && fakes_[0]->released().size() == prompts(); }));
  EXPECT_EQ(prompts(), kClients * kEach / 2);
  EXPECT_EQ(router_->core().decisions.total(), kClients * kEach);
  EXPECT_TRUE(has_metric(R"(kindred_router_requests_total{outcome="ok",status="200"} 120)"));
  EXPECT_TRUE(has_metric("kindred_router_leases_released_total 60"));
}

// Round robin has one cursor for all threads.
TEST_F(ThreadsTest, PoliciesTakeTurnsAsOneRouter) {
  options_.decode_policy.name = "round-robin";
  for (int i = 0; i < 3; ++i) add(Role::kBoth, "").model = "plain";
  start_threads();
  at_once(6, [&](size_t) {
    for (int i = 0; i < 10; ++i) EXPECT_EQ(parse_answer(ask("plain", false)->read_to_end()).status, 200);
  });
  EXPECT_EQ(given(), (std::vector<size_t>{20, 20, 20}));
}

TEST_F(ThreadsTest, AdmissionIsExactAndWhoWaitsIsWokenOnItsOwnThread) {
  options_.max_inflight = 3;
  options_.queue = 5;
  FakeWorker& w = add(Role::kBoth, "");
  w.model = "plain";
  Gate open_now;
  std::atomic<int> inside{0}, most{0};
  w.play([&](const SeenLeg& leg, net::Request&, net::ResponseWriter& writer) -> net::Task<void> {
    most = std::max<int>(most, ++inside);
    co_await open_now.wait();
    co_await pause_for(2ms);
    --inside;  // before the answer, after which the next one may come
    co_await w.answer_plain(leg, writer);
  });
  start_threads();
  std::vector<ConnectionPtr> clients;
  for (int i = 0; i < 20; ++i) clients.push_back(ask("plain", i % 2 == 0));
  // 3 run, 5 wait, and 12 have been told to go.
  ASSERT_TRUE(eventually([&] { return gate().running() == 3 && gate().waiting() == 5 && w.leg_count() == 3; }));
  EXPECT_TRUE(
      eventually([&] { return has_metric(R"(kindred_router_requests_total{outcome="rejected",status="429"} 12)"); }));
  open_now.open();
  size_t served = 0, refused = 0;
  for (const auto& client : clients) {
    const int status = parse_answer(client->read_to_end()).status;
    served += status == 200 ? 1 : 0;
    refused += status == 429 ? 1 : 0;
  }
  EXPECT_EQ(served, 8U);
  EXPECT_EQ(refused, 12U);
  EXPECT_EQ(most, 3);
  EXPECT_TRUE(eventually([this] { return at_rest(); }));
  // The same under a storm, in which places change hands all the time.
  most = 0;
  at_once(8, [&](size_t) {
    for (int i = 0; i < 10; ++i) EXPECT_EQ(parse_answer(ask("plain", false)->read_to_end()).status, 200);
  });
  EXPECT_EQ(most, 3);
  EXPECT_TRUE(eventually([this] { return at_rest(); }));
}

TEST_F(ThreadsTest, ABatchRequestOfAnotherThreadMakesWay) {
  options_.max_inflight = 2;
  options_.batch_headroom_percent = 0;
  FakeWorker& w = add(Role::kBoth, "");
  w.model = "plain";
  w.play(hang);
  start_threads();
  // Connections go round the threads, so these two and those that follow are on four.
  auto one = ask("plain", false, "X-Kindred-Lane: batch\r\n"), two = ask("plain", true, "X-Kindred-Lane: batch\r\n");
  ASSERT_TRUE(eventually([&] { return w.leg_count() == 2; }));
  auto third = ask("plain", false), fourth = ask("plain", false);
  for (const auto& batch : {&one, &two}) {
    EXPECT_NE((*batch)->read_to_end().find("\"code\":\"preempted\""), std::string::npos);
  }
  ASSERT_TRUE(eventually([&] { return w.leg_count() == 4 && w.cancelled() == 2 && gate().running() == 2; }));
  third->close();
  fourth->close();
  EXPECT_TRUE(eventually([&] { return w.cancelled() == 4 && at_rest(); }));
}

TEST_F(ThreadsTest, ClientsThatLeaveAtAnyTimeLeaveNothingBehind) {
  fleet_of_five();
  const auto slow = [](FakeWorker& worker) {
    return [&worker](const SeenLeg& leg, net::Request&, net::ResponseWriter& writer) -> net::Task<void> {
      co_await pause_for(5ms);
      co_await worker.answer_decode(leg, writer);
    };
  };
  for (size_t i = 1; i < fakes_.size(); ++i) fakes_[i]->play(slow(*fakes_[i]));
  at_once(12, [&](size_t client) {
    for (size_t i = 0; i < 12; ++i) {
      auto connection = ask(client % 2 == 0 ? "m" : "plain", i % 3 != 0);
      std::this_thread::sleep_for(std::chrono::microseconds(700 * i));
      if (i % 2 == 0) connection->reset();
      else connection->close();
    }
  });
  EXPECT_TRUE(eventually([this] { return at_rest(); }, 5s));
  const Core& core = router_->core();
  EXPECT_TRUE(eventually([&] { return core.background() == core.standing(); }));  // all leases are given back
  EXPECT_EQ(ups(), fakes_.size());                                                // nobody was blamed for it
  EXPECT_EQ(chat(true).body, kWholeStream);
}

TEST_F(ThreadsTest, ReloadsAndOperatorsDisturbNoRequest) {
  options_.manage_workers = true;
  fleet_of_five();
  OneConfig& config = configure();
  std::atomic<bool> over{false};
  std::jthread operators([&] {
    for (int i = 0; !over; ++i) {
      loop_.call([&] {
        config.next.decode_policy.name = i % 2 == 0 ? "round-robin" : "least-loaded";
        config.next.prefill_policy.name = i % 2 == 0 ? "least-loaded" : "prefix-hash";
        config.next.model_aliases = {fmt::format("alias-{}=m", i)};
        EXPECT_TRUE(router_->reload().empty());
        return 0;
      });
      // On whichever thread their connection falls.
      EXPECT_EQ(call("GET", "/status?decisions=100").status, 200);
      EXPECT_EQ(call("GET", "/config").status, 200);
      EXPECT_EQ(call("PUT", "/config", "a: b").status, 200);
      EXPECT_EQ(call("GET", "/v1/models").status, 200);
      const std::string stranger = fmt::format("http://127.0.0.1:{}", 1 + i % 500);
      EXPECT_EQ(call("POST", "/workers", R"({"url":")" + stranger + R"(","role":"both"})").status, 201);
      EXPECT_EQ(call("DELETE", "/workers?url=" + stranger).status, 200);
    }
  });
  at_once(6, [&](size_t client) {
    for (size_t i = 0; i < 20; ++i) {
      const Answer answer = parse_answer(ask(client % 2 == 0 ? "m" : "plain", true)->read_to_end());
      EXPECT_TRUE(answer.status == 200 && answer.complete) << answer.status << answer.body;
    }
  });
  over = true;
  operators.join();
  EXPECT_GT(config.accepted, 0);
  EXPECT_TRUE(eventually([this] { return at_rest(); }));
}

TEST_F(ThreadsTest, TheNumberOfThreadsIsFixed) {
  add(Role::kBoth, "");
  start_threads();
  OneConfig& config = configure();
  const auto problems = loop_.call([&] {
    config.next.threads = 2;
    return router_->reload();
  });
  ASSERT_EQ(problems.size(), 1U);
  EXPECT_EQ(problems[0].field, "threads");
}

TEST_F(ThreadsTest, AWorkerThatDiesIsNoticedFromAnyThreadAndCheckedAgain) {
  for (int i = 0; i < 2; ++i) add(Role::kBoth, "").model = "plain";
  start_threads();
  fakes_[0]->kill();
  at_once(4, [&](size_t) {
    for (int i = 0; i < 10; ++i) EXPECT_EQ(parse_answer(ask("plain", false)->read_to_end()).status, 200);
  });
  EXPECT_EQ(ups(), 1U);
  fakes_[0]->revive();
  EXPECT_TRUE(eventually([this] { return ups() == 2; }));
  EXPECT_TRUE(eventually([this] { return at_rest(); }));
}

TEST_F(ThreadsTest, DrainingWaitsForTheStreamsOfAllThreads) {
  prefill();
  FakeWorker& d = decode();
  Gate go_on;
  d.play([&](const SeenLeg& leg, net::Request&, net::ResponseWriter& writer) -> net::Task<void> {
    co_await go_on.wait();
    co_await d.answer_decode(leg, writer);
  });
  start_threads();
  std::vector<ConnectionPtr> clients;
  std::vector<std::string> begun;
  for (size_t i = 0; i < 2 * kThreads; ++i) {
    clients.push_back(ask("m", true));
    begun.push_back(clients.back()->read_until("\"one\""));
  }
  ASSERT_TRUE(eventually([&] { return d.leg_count() == clients.size(); }));
  auto drained = loop_.start([this]() -> net::Task<void> { co_await router_->drain(10s); });
  EXPECT_TRUE(eventually([&] { return !net::testing::raw_connect(port_).open(); }));
  EXPECT_EQ(drained.wait_for(100ms), std::future_status::timeout);
  go_on.open();
  for (size_t i = 0; i < clients.size(); ++i) {
    EXPECT_EQ(parse_answer(begun[i] + clients[i]->read_to_end()).body, kWholeStream);
  }
  EXPECT_EQ(drained.wait_for(5s), std::future_status::ready);
  EXPECT_EQ(router_->core().background(), 0U);
  EXPECT_EQ(fakes_[0]->released().size(), clients.size());
}

TEST_F(ThreadsTest, WhatDoesNotEndInTimeIsCutOnEveryThread) {
  FakeWorker& w = add(Role::kBoth, "");
  w.model = "plain";
  w.play(hang);
  start_threads();
  std::vector<ConnectionPtr> clients;
  for (size_t i = 0; i < 2 * kThreads; ++i) clients.push_back(ask("plain", true));
  ASSERT_TRUE(eventually([&] { return w.leg_count() == clients.size(); }));
  loop_.run([this]() -> net::Task<void> { co_await router_->drain(50ms); });
  for (const auto& client : clients) EXPECT_TRUE(client->wait_closed());
  EXPECT_TRUE(eventually([&] { return w.cancelled() == clients.size() && at_rest(); }));
}

}  // namespace
}  // namespace kindred::router::testing

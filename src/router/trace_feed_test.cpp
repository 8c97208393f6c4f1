#include "router/trace_feed.h"

#include <gtest/gtest.h>

#include <array>
#include <optional>
#include <thread>

#include "fleet/engine_trace.h"
#include "net/zmq.h"
#include "router/testing.h"

namespace kindred::router {
namespace {

using testing::eventually;

class TraceFeedTest : public ::testing::Test {
 protected:
  TraceFeedTest() {
    for (const char* url : {"http://a:1", "http://b:1"}) {
      fleet::Description said;
      said.dialect = fleet::Dialect::kKindred;
      said.models = {"m"};
      said.fingerprint = "f";
      said.engines = 2;
      fleet_.report_up(fleet_.add({.url = url, .role = Role::kBoth}), said);
    }
  }
  net::ZmqSocket publisher(const std::string& endpoint = "tcp://127.0.0.1:*") {
    return *net::ZmqSocket::bind(context_, net::ZmqKind::kPublisher, endpoint);
  }
  // Publishes until it has come or the time is over.
  bool arrives(net::ZmqSocket& from, fleet::WorkerId worker, uint32_t rank,
               std::chrono::milliseconds within = std::chrono::seconds(5)) {
    const uint64_t before = sequence_;
    return eventually(
        [&] {
          fleet::EngineTrace trace;
          trace.rank = rank;
          trace.epoch = 3;
          trace.sequence = ++sequence_;
          const std::string payload = fleet::encode_trace(trace), number(8, '\0');
          (void)from.send(std::array<std::string_view, 3>{fleet::kTraceTopic, number, payload});
          std::this_thread::sleep_for(std::chrono::milliseconds(2));
          return fleet_.worker_status(worker).engines[rank].sequence > before;
        },
        within);
  }

  SystemClock clock_;
  fleet::Fleet fleet_{clock_};
  net::ZmqContext context_;
  uint64_t sequence_ = 0;
};

TEST_F(TraceFeedTest, EachWorkersTracesAreItsOwn) {
  TraceFeed feed(fleet_);
  net::ZmqSocket a = publisher(), b = publisher();
  ASSERT_TRUE(feed.add(0, a.endpoint()).ok());
  ASSERT_TRUE(feed.add(1, b.endpoint()).ok());
  EXPECT_TRUE(arrives(a, 0, 1));
  EXPECT_TRUE(arrives(b, 1, 0));
  EXPECT_EQ(fleet_.worker_status(0).engines[0].sequence, 0U);
  EXPECT_EQ(feed.status().subscriptions, 2U);
  EXPECT_GE(feed.status().traces, 2U);
}

TEST_F(TraceFeedTest, APublisherThatComesBackIsHeardAgain) {
  TraceFeed feed(fleet_);
  std::optional<net::ZmqSocket> first = publisher();
  const std::string endpoint = first->endpoint();
  ASSERT_TRUE(feed.add(0, endpoint).ok());
  EXPECT_TRUE(arrives(*first, 0, 0));
  first.reset();
  std::optional<net::ZmqSocket> second;
  ASSERT_TRUE(eventually([&] {  // its port may be busy for a moment
    auto bound = net::ZmqSocket::bind(context_, net::ZmqKind::kPublisher, endpoint);
    if (bound) second.emplace(*std::move(bound));
    return second.has_value();
  }));
  EXPECT_TRUE(arrives(*second, 0, 0));
}

TEST_F(TraceFeedTest, AnotherEndpointTakesThePlaceOfTheFirst) {
  TraceFeed feed(fleet_);
  net::ZmqSocket old = publisher(), fresh = publisher();
  ASSERT_TRUE(feed.add(0, old.endpoint()).ok());
  EXPECT_TRUE(arrives(old, 0, 0));
  ASSERT_TRUE(feed.add(0, fresh.endpoint()).ok());
  EXPECT_TRUE(arrives(fresh, 0, 0));
  EXPECT_FALSE(arrives(old, 0, 0, std::chrono::milliseconds(50)));
  feed.remove(0);
  EXPECT_TRUE(eventually([&] { return feed.status().subscriptions == 0; }));
  EXPECT_FALSE(feed.add(0, "tcp//nowhere").ok());
}

TEST_F(TraceFeedTest, WhatIsNoTraceIsCounted) {
  TraceFeed feed(fleet_);
  net::ZmqSocket a = publisher();
  ASSERT_TRUE(feed.add(0, a.endpoint()).ok());
  ASSERT_TRUE(arrives(a, 0, 0));
  (void)a.send(std::array<std::string_view, 3>{fleet::kTraceTopic, "12345678", "nonsense"});
  (void)a.send(std::array<std::string_view, 3>{"kindred.other", "12345678", ""});
  (void)a.send(std::array<std::string_view, 1>{fleet::kTraceTopic});
  EXPECT_TRUE(eventually([&] { return feed.status().errors == 3; }));
  fleet::EngineTrace nobody;
  nobody.rank = 5;
  const std::string payload = fleet::encode_trace(nobody);
  (void)a.send(std::array<std::string_view, 3>{fleet::kTraceTopic, "12345678", payload});
  EXPECT_TRUE(eventually([&] { return feed.status().ignored >= 1; }));
}

TEST(TraceEndpoint, IsThePortThatWasNamedAtTheHostThatIsReached) {
  const net::Endpoint worker = *net::parse_endpoint("http://worker-1:8001");
  EXPECT_EQ(trace_endpoint({}, worker, "tcp://0.0.0.0:5557"), "tcp://worker-1:5557");
  EXPECT_EQ(trace_endpoint({}, worker, "tcp://[::]:5557"), "tcp://worker-1:5557");
  EXPECT_EQ(trace_endpoint({}, *net::parse_endpoint("http://[::1]:8001"), "tcp://*:5557"), "tcp://[::1]:5557");
  for (const char* none :
       {"", "5557", "ipc:///tmp/x", "tcp://host", "tcp://host:0", "tcp://host:70000", "tcp://host:1x"}) {
    EXPECT_EQ(trace_endpoint({}, worker, none), "") << none;
  }
  const auto sources = parse_trace_sources({"http://worker-1:8001=tcp://elsewhere:9"});
  ASSERT_TRUE(sources.ok());
  EXPECT_EQ(trace_endpoint(*sources, worker, "tcp://*:5557"), "tcp://elsewhere:9");
}

}  // namespace
}  // namespace kindred::router

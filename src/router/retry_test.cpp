// Which answers and faults of workers are retried, and which pass to the client as they are.

#include "router/retry.h"

#include "base/json.h"
#include "router/testing.h"

namespace kindred::router::testing {
namespace {

using json = Json;

TEST(RetryStatuses, AreReadAndRefused) {
  const auto parse = [](std::vector<std::string> names) { return RetryStatuses::parse(names); };
  const auto some = parse({"429", "503"});
  ASSERT_TRUE(some.ok());
  EXPECT_TRUE(some->contains(429));
  EXPECT_FALSE(some->contains(500));
  EXPECT_FALSE(some->contains(200));
  EXPECT_FALSE(some->contains(1000));
  const auto all = parse({"5xx", "408"});
  ASSERT_TRUE(all.ok());
  EXPECT_TRUE(all->contains(599) && all->contains(500) && all->contains(408));
  EXPECT_FALSE(all->contains(499));
  EXPECT_FALSE(parse({"none"})->contains(503));
  for (const char* bad : {"", "200", "600", "5x", "503 ", "-429", "none"}) {
    const auto refused = parse({"429", bad});
    ASSERT_FALSE(refused.ok()) << bad;
    EXPECT_EQ(refused.error().field, "retry_on");
    EXPECT_NE(refused.error().message.find("400 to 599"), std::string::npos);
  }
}

class RetryTest : public RouterTest {
 protected:
  // Two plain workers in turn; both play the same script.
  void two(const Script& script) {
    options_.decode_policy.name = "round-robin";
    for (int i = 0; i < 2; ++i) add(Role::kBoth, "").play(script);
  }
  size_t legs() {
    size_t sum = 0;
    for (const auto& fake : fakes_) sum += fake->leg_count();
    return sum;
  }
  void expect_all_up() {
    for (const auto& worker : router_->core().fleet.status()) EXPECT_EQ(worker.health, fleet::Health::kUp);
  }
};

Script busy(int status) {
  return [status](const SeenLeg&, net::Request&, net::ResponseWriter& writer) -> net::Task<void> {
    net::Headers headers = json_type();
    headers.add("Retry-After", "7");
    headers.add("X-Reason", "queue");
    co_await writer.send(status, std::move(headers), R"({"error":{"message":"busy","code":"queue_full"},"x":1.0e0})");
  };
}

TEST_F(RetryTest, ClientErrorsPassThroughOnceAndHarmNobody) {
  two(nullptr);
  start();
  for (const int status : {400, 401, 403, 404, 408, 409, 413, 422, 499}) {
    for (const auto& fake : fakes_) fake->play(busy(status));
    const size_t before = legs();
    for (const bool stream : {false, true}) {
      const Answer answer = chat(stream);
      EXPECT_EQ(answer.status, status);
      EXPECT_EQ(answer.body, R"({"error":{"message":"busy","code":"queue_full"},"x":1.0e0})");
      EXPECT_EQ(*answer.headers.find("X-Reason"), "queue");
    }
    EXPECT_EQ(legs(), before + 2) << status;
  }
  expect_all_up();
  EXPECT_EQ(in_flight(), 0);
}

TEST_F(RetryTest, BusyAnswersAreTriedElsewhereAndThenPassThroughWhole) {
  two(nullptr);
  start();
  for (const int status : {429, 503}) {
    for (const auto& fake : fakes_) fake->play(busy(status));
    const size_t before = legs();
    const Answer answer = chat(true);
    EXPECT_EQ(answer.status, status);
    EXPECT_EQ(*answer.headers.find("Retry-After"), "7");
    EXPECT_EQ(answer.headers.count("Retry-After"), 1U);
    EXPECT_EQ(answer.body, R"({"error":{"message":"busy","code":"queue_full"},"x":1.0e0})");
    EXPECT_EQ(legs(), before + 2) << status;  // each once
    fakes_[1]->play(nullptr);
    for (int i = 0; i < 2; ++i) EXPECT_EQ(chat(true).status, 200);
  }
  expect_all_up();
}

TEST_F(RetryTest, WhatIsNotListedPassesThroughAtOnce) {
  options_.retry_on = {"500"};
  two(busy(503));
  start();
  const Answer answer = chat(false);
  EXPECT_EQ(answer.status, 503);
  EXPECT_EQ(*answer.headers.find("Retry-After"), "7");
  EXPECT_EQ(legs(), 1U);
  for (const auto& fake : fakes_) fake->play(refuse(500, "internal_error"));
  EXPECT_EQ(chat(false).status, 500);
  EXPECT_EQ(legs(), 3U);
}

TEST_F(RetryTest, TriesAreBounded) {
  options_.retries = 3;
  for (int i = 0; i < 6; ++i) add(Role::kBoth, "").play(refuse(500, "internal_error"));
  start();
  EXPECT_EQ(chat(false).status, 500);
  EXPECT_EQ(legs(), 4U);
}

TEST_F(RetryTest, FaultsAreRetriedWhileNothingHasReachedTheClient) {
  two(nullptr);
  start();
  fakes_[0]->play(hang_up);
  for (int i = 0; i < 2; ++i) {
    EXPECT_EQ(chat(false).status, 200);
    ASSERT_TRUE(eventually([&] { return ready(); }));
  }
  // The head of a stream has come, but nothing of its body: the client has nothing yet.
  fakes_[0]->play([](const SeenLeg&, net::Request&, net::ResponseWriter& writer) -> net::Task<void> {
    co_await writer.start(200, events_type());
    writer.abort();
  });
  for (int i = 0; i < 4; ++i) EXPECT_TRUE(chat(true).body.ends_with("data: [DONE]\n\n"));
  // Half an answer that is not streamed.
  fakes_[0]->play([](const SeenLeg&, net::Request&, net::ResponseWriter& writer) -> net::Task<void> {
    co_await writer.start(200, json_type());
    co_await writer.write("{\"half\":");
    writer.abort();
  });
  for (int i = 0; i < 4; ++i) EXPECT_EQ(chat(false).body, R"({"text":"plain"})");
}

TEST_F(RetryTest, FaultsAreNotRetriedOnceTheClientHasBytes) {
  two([](const SeenLeg&, net::Request&, net::ResponseWriter& writer) -> net::Task<void> {
    co_await writer.start(200, events_type());
    co_await writer.write("data: {\"x\":1}\n\n");
    co_await pause_for(20ms);
    writer.abort();
  });
  start();
  const Answer answer = chat(true);
  EXPECT_FALSE(answer.complete);
  EXPECT_NE(answer.body.find("data: {\"error\""), std::string::npos);
  EXPECT_EQ(legs(), 1U);
}

}  // namespace
}  // namespace kindred::router::testing

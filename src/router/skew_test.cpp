// Many equal prompts at once do not pile up on one worker: load counts from the dispatch on.

#include <algorithm>
#include <cmath>

#include "router/testing.h"

namespace kindred::router::testing {
namespace {

constexpr size_t kRequests = 200;
constexpr size_t kWorkers = 4;

class SkewTest : public PdFlowTest {
 protected:
  // All of them wait at the gate, so that nothing but dispatch tells the workers apart.
  void hold(FakeWorker& worker, bool prefill) {
    worker.play(
        [this, &worker, prefill](const SeenLeg& leg, net::Request&, net::ResponseWriter& writer) -> net::Task<void> {
          co_await gate_.wait();
          if (prefill) co_await worker.answer_prefill(leg, writer);
          else co_await worker.answer_decode(leg, writer);
        });
  }

  // The most that one of `workers` has, once all requests are at them.
  size_t most_at(const std::vector<FakeWorker*>& workers) {
    std::vector<ConnectionPtr> clients;
    for (size_t i = 0; i < kRequests; ++i) clients.push_back(open("POST", "/v1/chat/completions", chat_body(true)));
    const auto sum = [&] {
      size_t legs = 0;
      for (const FakeWorker* worker : workers) legs += worker->leg_count();
      return legs;
    };
    EXPECT_TRUE(eventually([&] { return sum() == kRequests; }, 30s));
    size_t most = 0;
    for (const FakeWorker* worker : workers) most = std::max(most, worker->leg_count());
    gate_.open();
    for (auto& client : clients) EXPECT_TRUE(parse_answer(client->read_to_end()).complete);
    EXPECT_TRUE(eventually([&] { return in_flight() == 0; }));
    return most;
  }

  Gate gate_;
};

TEST_F(SkewTest, EqualPromptsSpreadOverPrefillWorkers) {
  std::vector<FakeWorker*> workers;
  for (size_t i = 0; i < kWorkers; ++i) workers.push_back(&prefill());
  for (FakeWorker* worker : workers) hold(*worker, true);
  decode();
  start();
  // The prefix's owner takes up to 1.25 times the mean, and one more.
  EXPECT_LE(most_at(workers), static_cast<size_t>(std::ceil(1.25 * kRequests / kWorkers)) + 1);
}

TEST_F(SkewTest, EqualPromptsSpreadOverDecodeWorkersOfOneCohort) {
  prefill();
  std::vector<FakeWorker*> workers;
  for (size_t i = 0; i < kWorkers; ++i) workers.push_back(&decode());
  for (FakeWorker* worker : workers) hold(*worker, false);
  options_.cohorts = cohort_file({0, 1, 2, 3});
  options_.decode_policy.tau = 0;  // their expert counts point to one worker alone
  start();
  EXPECT_LE(most_at(workers), static_cast<size_t>(std::ceil(1.25 * kRequests / kWorkers)) + 1);
}

TEST_F(SkewTest, EqualPromptsSpreadOverPlainWorkers) {
  std::vector<FakeWorker*> workers;
  for (size_t i = 0; i < kWorkers; ++i) workers.push_back(&add(Role::kBoth, ""));
  for (FakeWorker* worker : workers) hold(*worker, false);
  start();
  EXPECT_LE(most_at(workers), kRequests / kWorkers + 1);
}

}  // namespace
}  // namespace kindred::router::testing

#include "policy/queue_order.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <map>
#include <vector>

#include "base/rng.h"

namespace kindred::policy {
namespace {

constexpr int64_t kSecond = 1'000'000'000;

// All of them, in the order in which they would be picked at one moment.
std::vector<uint64_t> drain(QueueOrder& queue, int64_t now_ns) {
  std::vector<uint64_t> out;
  while (const auto next = queue.next(now_ns)) {
    out.push_back(*next);
    queue.remove(*next);
  }
  return out;
}

std::vector<uint64_t> picked(QueuePolicy policy, const std::vector<QueuedRequest>& requests, int64_t now_ns) {
  QueueOrder queue({.policy = policy});
  for (const QueuedRequest& request : requests) queue.add(request);
  return drain(queue, now_ns);
}

const std::vector<QueuedRequest> kFour = {
    {.sequence = 1, .arrival_ns = 0, .prefill_tokens = 900, .priority = 5},
    {.sequence = 2, .arrival_ns = 1 * kSecond, .prefill_tokens = 10, .priority = 0},
    {.sequence = 3, .arrival_ns = 2 * kSecond, .prefill_tokens = 500, .priority = -7},
    {.sequence = 4, .arrival_ns = 3 * kSecond, .prefill_tokens = 10, .priority = 5},
};
using Order = std::vector<uint64_t>;

TEST(QueueOrder, ByHand) {
  EXPECT_EQ(picked(QueuePolicy::kFcfs, kFour, 4 * kSecond), (Order{1, 2, 3, 4}));
  EXPECT_EQ(picked(QueuePolicy::kPriority, kFour, 4 * kSecond), (Order{3, 2, 1, 4}));
  EXPECT_EQ(picked(QueuePolicy::kSjfAging, kFour, 4 * kSecond), (Order{2, 4, 3, 1}));
  // 4/900, 3/10, 2/500, 1/10 seconds a token
  EXPECT_EQ(picked(QueuePolicy::kHrrn, kFour, 4 * kSecond), (Order{2, 4, 1, 3}));
}

TEST(QueueOrder, ThetaIsPassedNotReached) {
  EXPECT_EQ(picked(QueuePolicy::kSjfAging, kFour, 5 * kSecond), (Order{2, 4, 3, 1}));
  EXPECT_EQ(picked(QueuePolicy::kSjfAging, kFour, 5 * kSecond + 1), (Order{1, 2, 4, 3}));
  EXPECT_EQ(picked(QueuePolicy::kSjfAging, kFour, 7 * kSecond + 1), (Order{1, 2, 3, 4}));
  QueueOrder short_queue({.policy = QueuePolicy::kSjfAging, .age_ns = 0});
  for (const QueuedRequest& request : kFour) short_queue.add(request);
  EXPECT_EQ(drain(short_queue, 4 * kSecond), (Order{1, 2, 3, 4}));
}

TEST(QueueOrder, WhoWasPreemptedIsFirstOldestFirst) {
  std::vector<QueuedRequest> requests = kFour;
  requests.push_back(
      {.sequence = 6, .arrival_ns = 3 * kSecond, .prefill_tokens = 5000, .priority = 99, .preempted = true});
  requests.push_back(
      {.sequence = 5, .arrival_ns = 3 * kSecond, .prefill_tokens = 7000, .priority = 98, .preempted = true});
  for (const QueuePolicy policy :
       {QueuePolicy::kFcfs, QueuePolicy::kPriority, QueuePolicy::kSjfAging, QueuePolicy::kHrrn}) {
    for (const int64_t now_s : {4, 100}) {
      const Order order = picked(policy, requests, now_s * kSecond);
      EXPECT_EQ(order[0], 5U) << to_string(policy);
      EXPECT_EQ(order[1], 6U) << to_string(policy);
    }
  }
}

TEST(QueueOrder, ExtremesDoNotOverflow) {
  constexpr auto kMin = std::numeric_limits<int64_t>::min(), kMax = std::numeric_limits<int64_t>::max();
  const std::vector<QueuedRequest> requests = {
      {.sequence = 1, .prefill_tokens = UINT64_MAX, .priority = kMax},
      {.sequence = 2, .prefill_tokens = 0, .priority = kMin},
  };
  for (const QueuePolicy policy : {QueuePolicy::kPriority, QueuePolicy::kSjfAging, QueuePolicy::kHrrn}) {
    EXPECT_EQ(picked(policy, requests, 1), (Order{2, 1})) << to_string(policy);
  }
  // A clock that stands before an arrival: nobody has waited.
  EXPECT_EQ(picked(QueuePolicy::kHrrn, kFour, -kSecond), (Order{1, 2, 3, 4}));
}

TEST(QueueOrder, NamesRoundTrip) {
  for (const std::string_view name : queue_policy_names()) {
    const auto policy = parse_queue_policy(name);
    ASSERT_TRUE(policy.ok());
    EXPECT_EQ(to_string(*policy), name);
  }
  const auto wrong = parse_queue_policy("lifo");
  ASSERT_FALSE(wrong.ok());
  EXPECT_EQ(wrong.error().field, "queue_policy");
  EXPECT_NE(wrong.error().message.find("fcfs, priority, sjf-aging, hrrn"), std::string::npos);
}

// Small ranges, so that everything ties now and then.
QueuedRequest draw(Rng& rng, uint64_t sequence, int64_t arrival_ns) {
  return {.sequence = sequence,
          .arrival_ns = arrival_ns,
          .prefill_tokens = rng.below(8) == 0 ? rng.below(50'000) : rng.below(4),
          .priority = static_cast<int64_t>(rng.below(5)) - 2,
          .preempted = rng.below(16) == 0};
}

TEST(QueueOrder, OrderIsTotalAndDoesNotDependOnHowTheQueueWasFilled) {
  Rng rng(3);
  for (int round = 0; round < 50; ++round) {
    std::vector<QueuedRequest> requests;
    for (uint64_t i = 0; i < 40; ++i) {
      requests.push_back(draw(rng, i * 7919 % 40, static_cast<int64_t>(rng.below(4)) * 3 * kSecond));
    }
    for (const std::string_view name : queue_policy_names()) {
      const QueuePolicy policy = *parse_queue_policy(name);
      const int64_t now_ns = 10 * kSecond;
      const Order once = picked(policy, requests, now_ns);
      EXPECT_EQ(once.size(), requests.size());
      // Backwards, and with others that come and go.
      QueueOrder queue({.policy = policy});
      for (uint64_t i = 0; i < 20; ++i) queue.add(draw(rng, 1000 + i, 0));
      std::ranges::for_each(requests.rbegin(), requests.rend(), [&](const QueuedRequest& r) { queue.add(r); });
      for (uint64_t i = 0; i < 20; ++i) queue.remove(1000 + i);
      EXPECT_EQ(drain(queue, now_ns), once) << name;
    }
  }
}

// Whatever comes later, and in whatever numbers: who has waited for θ is overtaken only by who was there before,
// and by the preempted.
TEST(QueueOrder, SjfAgingStarvesNobody) {
  for (uint64_t seed = 0; seed < 10; ++seed) {
    Rng rng(seed);
    const QueueOptions options{.policy = QueuePolicy::kSjfAging,
                               .age_ns = static_cast<int64_t>(rng.below(5)) * kSecond};
    QueueOrder queue(options);
    std::map<uint64_t, QueuedRequest> here;
    std::map<uint64_t, int> picks_since_aged;
    int64_t now_ns = 0;
    uint64_t sequence = 0;
    size_t longest = 0;
    for (int step = 0; step < 1500; ++step) {
      now_ns += static_cast<int64_t>(rng.below(3)) * kSecond / 10;
      // More come than are served, nearly all of them shorter than what waits: the worst for shortest-first.
      for (uint64_t n = here.size() < 200 ? rng.below(4) : 0; n > 0; --n) {
        QueuedRequest request = draw(rng, sequence++, now_ns);
        request.preempted = false;
        queue.add(request);
        here.emplace(request.sequence, request);
      }
      longest = std::max(longest, here.size());
      const auto next = queue.next(now_ns);
      ASSERT_EQ(next.has_value(), !here.empty());
      if (!next) continue;
      const QueuedRequest chosen = here.at(*next);
      for (const auto& [id, other] : here) {
        if (id == *next || now_ns - other.arrival_ns <= options.age_ns) continue;
        // Nobody who came later overtakes an aged one.
        ASSERT_LE(std::pair(chosen.arrival_ns, chosen.sequence), std::pair(other.arrival_ns, id));
        ASSERT_LE(static_cast<size_t>(++picks_since_aged[id]), longest);
      }
      queue.remove(*next);
      here.erase(*next);
    }
  }
}

// Ages are monotone: who was before another among the aged stays so, and nobody's age is lost by waiting.
TEST(QueueOrder, AgedStaysAged) {
  Rng rng(11);
  std::vector<QueuedRequest> requests;
  for (uint64_t i = 0; i < 60; ++i) {
    requests.push_back(draw(rng, i, static_cast<int64_t>(rng.below(100)) * kSecond / 10));
  }
  const auto aged_at = [&](int64_t now_ns) {
    Order out = picked(QueuePolicy::kSjfAging, requests, now_ns);
    std::erase_if(out,
                  [&](uint64_t s) { return !requests[s].preempted && now_ns - requests[s].arrival_ns <= 5 * kSecond; });
    return out;
  };
  Order before;
  for (int64_t tenths = 0; tenths < 160; ++tenths) {
    const Order now = aged_at(tenths * kSecond / 10);
    ASSERT_GE(now.size(), before.size());
    Order kept = now;
    std::erase_if(kept, [&](uint64_t s) { return std::ranges::find(before, s) == before.end(); });
    ASSERT_EQ(kept, before);
    before = now;
  }
  EXPECT_EQ(before.size(), requests.size());
}

}  // namespace
}  // namespace kindred::policy

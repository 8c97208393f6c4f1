#include "fleet/engine_ledger.h"

#include <gtest/gtest.h>

#include <vector>

#include "base/rng.h"

namespace kindred::fleet {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

bool is_zero(const EngineLedger::Sums& sums) {
  return sums.requests == 0 && sums.unseen_requests == 0 && sums.unseen_prefill_tokens == 0 &&
         sums.unseen_kv_tokens == 0 && sums.unanswered_requests == 0 && sums.unanswered_tokens == 0;
}

TEST(EngineLedger, CountsUntilATraceIncludesTheRequest) {
  const ManualClock clock;
  EngineLedger ledger(clock, 1);
  const uint64_t first = ledger.begin({.requests = 1, .prefill_tokens = 100, .kv_tokens = 150});
  const uint64_t second = ledger.begin({.requests = 2, .prefill_tokens = 10, .kv_tokens = 20});
  EXPECT_NE(first, second);
  EXPECT_EQ(ledger.sums().requests, 3);
  EXPECT_EQ(ledger.sums().unseen_prefill_tokens, 110);
  EXPECT_EQ(ledger.sums().unseen_kv_tokens, 170);

  const std::vector<uint64_t> received = {7, first, first};
  ledger.seen(received);
  EXPECT_EQ(ledger.sums().requests, 3);
  EXPECT_EQ(ledger.sums().unseen_requests, 2);
  EXPECT_EQ(ledger.sums().unseen_prefill_tokens, 10);
  EXPECT_EQ(ledger.sums().unanswered_tokens, 110);
}

TEST(EngineLedger, APollHasSeenWhatWasSentBeforeIt) {
  ManualClock clock;
  EngineLedger ledger(clock, 1);
  ledger.begin({.prefill_tokens = 100});
  clock.advance(milliseconds(5));
  const MonotonicTime asked = clock.now();
  ledger.begin({.prefill_tokens = 10});  // at the same moment: it may have come too late
  ledger.seen_before(asked);
  EXPECT_EQ(ledger.sums().unseen_prefill_tokens, 10);
}

TEST(EngineLedger, AnAnswerSaysThatThePromptIsDone) {
  const ManualClock clock;
  EngineLedger ledger(clock, 1);
  const uint64_t id = ledger.begin({.prefill_tokens = 100});
  ledger.answered(id);
  ledger.answered(id);
  EXPECT_EQ(ledger.sums().unanswered_tokens, 0);
  EXPECT_EQ(ledger.sums().unanswered_requests, 0);
  EXPECT_EQ(ledger.sums().requests, 1);
}

TEST(EngineLedger, ATraceWithoutNamesIncludesWhatWasAnswered) {
  const ManualClock clock;
  EngineLedger ledger(clock, 1);
  ledger.answered(ledger.begin({.prefill_tokens = 100}));
  ledger.begin({.prefill_tokens = 10});
  EXPECT_EQ(ledger.sums().unseen_prefill_tokens, 110);
  ledger.seen_answered();
  EXPECT_EQ(ledger.sums().unseen_prefill_tokens, 10);
  EXPECT_EQ(ledger.sums().requests, 2);
}

TEST(EngineLedger, ReturnsToZeroWhenIdle) {
  ManualClock clock;
  EngineLedger ledger(clock, 3);
  Rng rng(11);
  for (int round = 0; round < 50; ++round) {
    std::vector<uint64_t> ids;
    for (uint64_t i = rng.below(40); i > 0; --i) {
      ids.push_back(ledger.begin({.requests = static_cast<int64_t>(1 + rng.below(3)),
                                  .prefill_tokens = static_cast<int64_t>(rng.below(10'000)),
                                  .kv_tokens = static_cast<int64_t>(rng.below(20'000))}));
      clock.advance(milliseconds(rng.below(5)));
    }
    // In any order: traces that include some, answers, ends before either, and ends told twice.
    for (size_t i = 0; i < 3 * ids.size(); ++i) {
      const uint64_t id = ids[rng.below(ids.size())];
      switch (rng.below(4)) {
        case 0: ledger.seen({&id, 1}); break;
        case 1: ledger.answered(id); break;
        case 2: ledger.end(id); break;
        default: ledger.seen_before(clock.now()); break;
      }
    }
    for (const uint64_t id : ids) ledger.end(id);
    ASSERT_TRUE(is_zero(ledger.sums())) << round;
  }
}

TEST(EngineLedger, KnowsHowManyEndASecond) {
  ManualClock clock;
  EngineLedger ledger(clock, 1);
  EXPECT_EQ(ledger.sums().ended_per_s, 0);
  for (int i = 0; i < 1000; ++i) {
    ledger.end(ledger.begin({}));
    clock.advance(milliseconds(100));
  }
  EXPECT_NEAR(ledger.sums().ended_per_s, 10, 0.2);
  clock.advance(seconds(100));
  EXPECT_LT(ledger.sums().ended_per_s, 0.01);
}

TEST(EngineLedger, IdsOfTwoLedgersDiffer) {
  const ManualClock clock;
  EngineLedger one(clock, 1), other(clock, 2);
  for (int i = 0; i < 100; ++i) EXPECT_NE(one.begin({}), other.begin({}));
}

}  // namespace
}  // namespace kindred::fleet

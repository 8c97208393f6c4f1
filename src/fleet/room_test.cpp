#include "fleet/room.h"

#include <gtest/gtest.h>

#include <vector>

#include "base/rng.h"

namespace kindred::fleet {
namespace {

using namespace std::chrono_literals;

const std::vector<WorkerId> kTwo = {0, 1};

TEST(DecodeRoom, WithoutALimitThereIsRoomUntilAWorkerSaysOtherwise) {
  ManualClock clock;
  DecodeRoom room(clock, 0);
  std::vector<RoomGuard> held;
  for (int i = 0; i < 1000; ++i) {
    auto answer = room.reserve("m", kTwo, 4);
    ASSERT_TRUE(answer.guard.has_value());
    held.push_back(*std::move(answer.guard));
  }
  room.report_full(0, 3s);
  EXPECT_TRUE(room.full(0));
  EXPECT_TRUE(room.reserve("m", kTwo, 1).guard.has_value());  // the other one
  room.report_full(1, 2s);
  const auto none = room.reserve("m", kTwo, 1);
  EXPECT_FALSE(none.guard.has_value());
  EXPECT_EQ(none.retry_after_ms, 3s);
  clock.advance(2s);
  EXPECT_FALSE(room.full(1));
  EXPECT_TRUE(room.reserve("m", kTwo, 1).guard.has_value());
  room.report_full(0, 24h);  // not believed for so long
  clock.advance(DecodeRoom::kMaxFullMs);
  EXPECT_FALSE(room.full(0));
}

TEST(DecodeRoom, ReservationsAndPlacesShareTheLimit) {
  ManualClock clock;
  DecodeRoom room(clock, 2);
  RoomGuard at0 = room.occupy(0, 2), at1 = room.occupy(1, 1);
  EXPECT_TRUE(room.full(0));
  auto last = room.reserve("m", kTwo, 1);
  ASSERT_TRUE(last.guard.has_value());
  const auto none = room.reserve("m", kTwo, 1);
  EXPECT_FALSE(none.guard.has_value());
  EXPECT_EQ(none.retry_after_ms, 1s);
  last.guard->release();
  last.guard->release();  // once
  EXPECT_TRUE(room.reserve("m", kTwo, 1).guard.has_value());
  EXPECT_FALSE(room.reserve("m", kTwo, 2).guard.has_value());
  at0.release();
  EXPECT_TRUE(room.reserve("m", kTwo, 100).guard.has_value());  // as much as one worker holds
  EXPECT_FALSE(room.reserve("m", {}, 1).guard.has_value());
}

TEST(DecodeRoom, TheLimitMayChange) {
  ManualClock clock;
  DecodeRoom room(clock, 1);
  const RoomGuard at0 = room.occupy(0, 1), at1 = room.occupy(1, 1);
  EXPECT_FALSE(room.reserve("m", kTwo, 1).guard.has_value());
  room.set_limit(2);
  EXPECT_TRUE(room.reserve("m", kTwo, 1).guard.has_value());
  EXPECT_FALSE(room.full(0));
  room.set_limit(0);
  EXPECT_TRUE(room.reserve("m", kTwo, 100).guard.has_value());
}

TEST(DecodeRoom, NothingIsLostOrCountedTwice) {
  ManualClock clock;
  DecodeRoom room(clock, 8);
  Rng rng(7);
  std::vector<RoomGuard> held;
  for (int i = 0; i < 20'000; ++i) {
    const uint64_t act = rng.below(4);
    if (act == 0) held.push_back(room.occupy(static_cast<WorkerId>(rng.below(2)), 1));
    if (act == 1) {
      if (auto answer = room.reserve(rng.below(2) == 0 ? "a" : "b", kTwo, 1 + static_cast<int64_t>(rng.below(3)));
          answer.guard) {
        held.push_back(*std::move(answer.guard));
      }
    }
    if (act >= 2 && !held.empty()) {
      std::swap(held[rng.below(held.size())], held.back());  // moves
      held.pop_back();
    }
  }
  held.clear();
  std::vector<RoomGuard> all;
  for (int i = 0; i < 16; ++i) {
    auto answer = room.reserve("a", kTwo, 1);
    ASSERT_TRUE(answer.guard.has_value()) << i;
    all.push_back(*std::move(answer.guard));
  }
  EXPECT_FALSE(room.reserve("a", kTwo, 1).guard.has_value());
}

}  // namespace
}  // namespace kindred::fleet

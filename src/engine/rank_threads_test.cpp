// The hand-off to rank threads and the change of owners, without llama.cpp: also run under ThreadSanitizer.
#include "engine/rank_threads.h"

#include <gtest/gtest.h>

#include <cstring>
#include <future>
#include <new>
#include <optional>
#include <thread>

#include "base/rng.h"
#include "engine/expert_migration.h"
#include "engine/expert_owners.h"
#include "engine/rank_arena.h"

namespace kindred::engine {
namespace {

using std::chrono::milliseconds;

// Adds its rank's index + 1 to a cell of its own, and delivers the cell.
class SumJob final : public RankJob {
 public:
  explicit SumJob(uint32_t ranks) : computed_(ranks), delivered(ranks) {}
  bool takes_part(uint32_t rank) const override { return rank != left_out; }
  bool compute(uint32_t rank) override {
    if (rank == stalls) released.get_future().wait();
    if (rank == dies) throw std::bad_alloc();
    computed_[rank] = rank + 1;
    return rank != fails;
  }
  void deliver(uint32_t rank) override { delivered[rank] = computed_[rank]; }

  uint32_t left_out = UINT32_MAX, fails = UINT32_MAX, dies = UINT32_MAX, stalls = UINT32_MAX;
  std::promise<void> released;

 private:
  std::vector<uint32_t> computed_;

 public:
  std::vector<uint32_t> delivered;
};

TEST(RankThreads, EachRankDeliversItsPart) {
  for (const bool caller_too : {false, true}) {
    RankThreads threads({.ranks = 3, .caller_is_rank_0 = caller_too, .spin = std::chrono::microseconds(caller_too)});
    for (int i = 0; i < 200; ++i) {
      const auto job = std::make_shared<SumJob>(3);
      job->left_out = i % 4 == 0 ? 1 : UINT32_MAX;
      ASSERT_TRUE(threads.run(job).ok());
      EXPECT_EQ(job->delivered, (std::vector<uint32_t>{1, i % 4 == 0 ? 0U : 2U, 3}));
    }
  }
}

TEST(RankThreads, CallersTakeTurns) {
  RankThreads threads({.ranks = 2});
  std::vector<std::thread> callers;
  for (int c = 0; c < 3; ++c) {
    callers.emplace_back([&] {
      const auto job = std::make_shared<SumJob>(2);
      for (int i = 0; i < 200; ++i) {
        job->delivered = {0, 0};
        ASSERT_TRUE(threads.run(job).ok());
        ASSERT_EQ(job->delivered, (std::vector<uint32_t>{1, 2}));
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
}

TEST(RankThreads, AFailedPartFailsTheJobOnly) {
  RankThreads threads({.ranks = 2});
  const auto job = std::make_shared<SumJob>(2);
  job->fails = 1;
  const Status failed = threads.run(job);
  ASSERT_FALSE(failed.ok());
  EXPECT_EQ(failed.error().code, ErrorCode::kInternal);
  EXPECT_TRUE(threads.run(std::make_shared<SumJob>(2)).ok());
}

// What would end a rank's thread ends its job instead, be it on the caller's thread or on its own.
TEST(RankThreads, ARankThatThrowsFailsTheJobOnly) {
  RankThreads threads({.ranks = 2});
  for (const uint32_t rank : {0U, 1U}) {
    const auto job = std::make_shared<SumJob>(2);
    job->dies = rank;
    const Status failed = threads.run(job);
    ASSERT_FALSE(failed.ok());
    EXPECT_EQ(failed.error().code, ErrorCode::kInternal);
    EXPECT_EQ(job->delivered[rank], 0U);
  }
  EXPECT_EQ(threads.stalled(), 0U);
  EXPECT_TRUE(threads.run(std::make_shared<SumJob>(2)).ok());
}

TEST(RankThreads, AStalledRankFailsTheStepAndComesBack) {
  RankThreads threads({.ranks = 2, .stall_timeout = milliseconds(50)});
  const auto job = std::make_shared<SumJob>(2);
  job->stalls = 1;
  const Status stalled = threads.run(job);
  ASSERT_FALSE(stalled.ok());
  EXPECT_EQ(stalled.error().code, ErrorCode::kTimeout);
  EXPECT_EQ(threads.stalled(), 1U);
  // Not tried again while it is away: no second wait.
  EXPECT_EQ(threads.run(std::make_shared<SumJob>(2), std::chrono::hours(1)).error().code, ErrorCode::kTimeout);
  job->released.set_value();
  for (int i = 0; i < 500 && threads.stalled() > 0; ++i) std::this_thread::sleep_for(milliseconds(10));
  EXPECT_EQ(threads.stalled(), 0U);
  EXPECT_EQ(job->delivered[1], 0U);  // too late
  EXPECT_TRUE(threads.run(std::make_shared<SumJob>(2)).ok());
}

TEST(RankThreads, EndsWhileARankIsStalled) {
  const auto job = std::make_shared<SumJob>(2);
  job->stalls = 1;
  {
    RankThreads threads({.ranks = 2, .stall_timeout = milliseconds(20)});
    EXPECT_FALSE(threads.run(job).ok());
  }
  job->released.set_value();
}

TEST(RankArena, GivesWholePagesBack) {
  const uint64_t page = RankArena::page_bytes();
  auto arena = RankArena::reserve(1ULL << 40);  // far more than there is memory
  ASSERT_TRUE(arena.ok());
  std::memset(arena->at(0), 7, 4 * page);
  arena->release(page / 2, 3 * page);
  EXPECT_EQ(*arena->at(page / 2), std::byte{7});  // its page belongs to a neighbour too
  EXPECT_EQ(*arena->at(page), std::byte{0});
  EXPECT_EQ(*arena->at(3 * page - 1), std::byte{0});
  EXPECT_EQ(*arena->at(3 * page), std::byte{7});
}

TEST(ExpertOwners, AMoveWaitsForReadersBeforeItAndReadersForNobody) {
  ExpertOwners owners({0, 0});
  std::optional<ExpertOwners::Reading> before(std::in_place, owners);
  std::atomic<bool> moved{false};
  std::thread mover([&] {
    owners.move(0, 1);
    moved = true;
  });
  while (owners.owner(0) == 0) std::this_thread::yield();
  {
    const ExpertOwners::Reading after(owners);
    EXPECT_EQ(after.owner(0), 1);
  }
  std::this_thread::sleep_for(milliseconds(50));
  EXPECT_FALSE(moved.load());
  before.reset();
  mover.join();
  EXPECT_TRUE(moved.load());
}

// Two ranks' copies of 8 experts, each filled with its number. Readers check each owner's copy while experts
// move and old copies are overwritten: no reader may see a copy that is not whole.
TEST(ExpertOwners, ReadersNeverSeeAReleasedCopy) {
  constexpr uint32_t kExperts = 8, kWords = 256;
  std::vector<std::vector<uint32_t>> copies(2, std::vector<uint32_t>(kExperts * kWords));
  const auto copy = [&](uint32_t rank, uint32_t expert) { return copies[rank].data() + expert * kWords; };
  for (uint32_t e = 0; e < kExperts; ++e) std::fill_n(copy(0, e), kWords, e + 1);
  ExpertOwners owners(std::vector<uint16_t>(kExperts, 0));
  std::atomic<bool> stop{false};
  std::atomic<uint64_t> readings{0};
  std::vector<std::thread> readers;
  for (int r = 0; r < 2; ++r) {
    readers.emplace_back([&] {
      while (!stop.load()) {
        const ExpertOwners::Reading reading(owners);
        for (uint32_t e = 0; e < kExperts; ++e) {
          const uint32_t* mine = copy(reading.owner(e), e);
          for (uint32_t i = 0; i < kWords; ++i) ASSERT_EQ(mine[i], e + 1);
        }
        ++readings;
      }
    });
  }
  Rng rng(3);
  for (int i = 0; i < 2000 || readings.load() < 100; ++i) {
    const auto expert = static_cast<uint32_t>(rng.below(kExperts));
    const uint16_t from = owners.owner(expert);
    const auto to = static_cast<uint16_t>(1 - from);
    std::copy_n(copy(from, expert), kWords, copy(to, expert));
    owners.move(expert, to);
    std::fill_n(copy(from, expert), kWords, 0);
  }
  stop = true;
  for (std::thread& reader : readers) reader.join();
}

ExpertPlacement all_at(uint16_t rank) { return {2, 10, 2, std::vector<uint16_t>(20, rank)}; }

// Experts of 100 bytes. Remembers what was done.
class FakeMover final : public ExpertMover {
 public:
  uint64_t expert_bytes(uint32_t) const override { return 100; }
  void copy(uint32_t, uint32_t, uint16_t, uint64_t begin, uint64_t end) override {
    if (piece_takes.count() > 0) std::this_thread::sleep_for(piece_takes);
    ++pieces;
    bytes += end - begin;
  }
  void finish(uint32_t, uint32_t, uint16_t) override { ++finished; }
  void drop(uint32_t, uint32_t, uint16_t) override { ++dropped; }

  milliseconds piece_takes{0};
  std::atomic<uint64_t> pieces{0}, bytes{0}, finished{0}, dropped{0};
};

void wait_until(const auto& done) {
  for (int i = 0; i < 500 && !done(); ++i) std::this_thread::sleep_for(milliseconds(2));
}

TEST(ExpertMigration, IsBoundedByStepAndReplaced) {
  FakeMover mover;
  ExpertMigration migration(all_at(0), {.moves_per_step = 3}, mover);
  migration.begin_step();  // a step that lasts
  migration.set_target(all_at(1));
  std::this_thread::sleep_for(milliseconds(60));
  EXPECT_EQ(mover.finished, 0U);  // the step began before
  migration.begin_step();
  wait_until([&] { return mover.finished >= 3; });
  std::this_thread::sleep_for(milliseconds(60));
  EXPECT_EQ(mover.finished, 3U);
  EXPECT_EQ(migration.progress().remaining, 17U);

  migration.set_target(all_at(0));  // back: only what had moved
  EXPECT_EQ(migration.progress().remaining, 3U);
  migration.end_step();
  migration.end_step();
  migration.wait();  // no step: as fast as can be
  EXPECT_EQ(migration.current(), all_at(0));
  EXPECT_EQ(mover.finished, 6U);
  EXPECT_FALSE(migration.progress().active);
  EXPECT_EQ(migration.progress().bytes, 300U);
}

// Whatever a step's credit: a tenth of its time is what moves may take.
TEST(ExpertMigration, AStepLosesAShareOfItsTime) {
  FakeMover mover;
  mover.piece_takes = milliseconds(2);
  ExpertMigration migration(all_at(0), {.moves_per_step = 100, .piece_bytes = 25, .share = 0.1}, mover);
  const auto began = std::chrono::steady_clock::now();
  migration.begin_step();
  migration.set_target(all_at(1));
  migration.begin_step();
  wait_until([&] { return mover.finished > 0; });
  const auto pieces = static_cast<double>(mover.pieces.load());
  const double took_ms = std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - began).count();
  EXPECT_GE(pieces, 4);    // of an expert
  EXPECT_GE(took_ms, 62);  // with a rest of nine times 2 ms after each of the first three
  EXPECT_LE(pieces, 1 + took_ms / 20);
  migration.cancel();
  migration.end_step();
  migration.end_step();
}

TEST(ExpertMigration, CancelledHalfWayItIsAPlacement) {
  FakeMover mover;
  ExpertMigration migration(all_at(0), {.moves_per_step = 1}, mover);
  migration.begin_step();
  migration.set_target(all_at(1));
  migration.begin_step();
  wait_until([&] { return migration.progress().moved > 0; });
  migration.cancel();
  migration.wait();
  EXPECT_TRUE(migration.progress().cancelled);
  const ExpertPlacement now = migration.current();
  EXPECT_EQ(std::count(now.rank_of.begin(), now.rank_of.end(), 1), 1);
  migration.end_step();
  migration.end_step();

  migration.set_target(all_at(1));  // goes on from there
  EXPECT_EQ(migration.progress().remaining, 19U);
  migration.wait();
  EXPECT_EQ(migration.current(), all_at(1));
  EXPECT_EQ(mover.finished, 20U);
}

// Half a copy is given back, and its expert stays where it is.
TEST(ExpertMigration, CancelledWithinAnExpertItStays) {
  FakeMover mover;
  mover.piece_takes = milliseconds(5);
  ExpertMigration migration(all_at(0), {.piece_bytes = 1}, mover);  // takes five seconds
  migration.begin_step();
  migration.set_target(all_at(1));
  migration.begin_step();
  wait_until([&] { return mover.pieces > 0; });
  migration.cancel();
  wait_until([&] { return mover.dropped > 0; });
  EXPECT_EQ(mover.dropped, 1U);
  EXPECT_EQ(mover.finished, 0U);
  EXPECT_EQ(migration.current(), all_at(0));
  migration.end_step();
  migration.end_step();
}

}  // namespace
}  // namespace kindred::engine

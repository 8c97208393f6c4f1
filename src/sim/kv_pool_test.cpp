#include "sim/kv_pool.h"

#include <gtest/gtest.h>

#include <array>

namespace kindred::sim {
namespace {

constexpr KvPoolOptions kEight = {.blocks = 8, .block_tokens = 16, .piece_tokens = 32, .cache = true};
constexpr std::array<uint64_t, 3> kChain = {11, 22, 33};

TEST(KvPool, CountsBlocks) {
  KvPool pool(kEight);
  EXPECT_EQ(pool.blocks_for(0), 0U);
  EXPECT_EQ(pool.blocks_for(1), 1U);
  EXPECT_EQ(pool.blocks_for(16), 1U);
  EXPECT_EQ(pool.blocks_for(17), 2U);
  EXPECT_TRUE(pool.take(8));
  EXPECT_FALSE(pool.take(1));
  EXPECT_EQ(pool.used(), 8U);
  pool.give(8);
  EXPECT_EQ(pool.used(), 0U);
}

TEST(KvPool, WhatIsPublishedStaysUntilRoomIsNeeded) {
  KvPool pool(kEight);
  ASSERT_TRUE(pool.take(6));
  for (const uint64_t piece : kChain) EXPECT_TRUE(pool.publish(piece));
  EXPECT_FALSE(pool.publish(22));
  EXPECT_EQ(pool.used(), 6U);
  pool.drop(kChain);
  EXPECT_EQ(pool.used(), 0U);  // cached, held by nobody
  EXPECT_EQ(pool.held(kChain), 3U);
  ASSERT_TRUE(pool.take(3));  // two are free: the chain loses its end, not its beginning
  EXPECT_EQ(pool.held(kChain), 2U);
  EXPECT_EQ(pool.take_evicted(), std::vector<uint64_t>{33});
  EXPECT_TRUE(pool.take_evicted().empty());
}

TEST(KvPool, WhatIsHeldIsNotThrownOut) {
  KvPool pool(kEight);
  ASSERT_TRUE(pool.take(4));
  ASSERT_TRUE(pool.publish(11) && pool.publish(22));
  const std::array<uint64_t, 2> both = {11, 22};
  pool.drop(both);
  pool.share(std::array<uint64_t, 1>{11});
  EXPECT_EQ(pool.used(), 2U);
  EXPECT_FALSE(pool.take(7));
  EXPECT_EQ(pool.held(both), 2U);  // a refusal throws out nothing
  EXPECT_TRUE(pool.take(6));
  EXPECT_EQ(pool.held(both), 1U);
  pool.drop(std::array<uint64_t, 1>{11});
  EXPECT_EQ(pool.used(), 6U);
}

TEST(KvPool, WithoutCacheNothingIsShared) {
  KvPool pool({.blocks = 8, .block_tokens = 16, .piece_tokens = 32, .cache = false});
  EXPECT_FALSE(pool.publish(11));
  EXPECT_EQ(pool.held(kChain), 0U);
}

}  // namespace
}  // namespace kindred::sim

#include "engine/lease_store.h"

#include <gtest/gtest.h>

#include <set>

namespace kindred::engine {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

std::shared_ptr<const Bytes> blob(size_t size, uint8_t fill = 7) { return std::make_shared<const Bytes>(size, fill); }

class Leases : public testing::Test {
 protected:
  ManualClock clock;
  LeaseStore store{clock, 1000, seconds(30)};
};

TEST_F(Leases, ArePulledAsOftenAsNeeded) {
  const auto lease = store.put(blob(100));
  ASSERT_TRUE(lease.ok());
  EXPECT_EQ(lease->bytes, 100U);
  EXPECT_EQ(lease->ttl, seconds(30));
  EXPECT_EQ(lease->id.size(), 32U);
  EXPECT_EQ(lease->hash, kv_hash(*blob(100)));
  for (int i = 0; i < 3; ++i) {
    const auto pulled = store.get(lease->id);
    ASSERT_TRUE(pulled.ok());
    EXPECT_EQ(*pulled->bytes, *blob(100));
    EXPECT_EQ(pulled->hash, lease->hash);
  }
  const auto pulled = store.get(lease->id);
  store.release(lease->id);
  store.release(lease->id);
  EXPECT_EQ(store.get(lease->id).error().code, ErrorCode::kNotFound);
  EXPECT_EQ(store.renew(lease->id).error().code, ErrorCode::kNotFound);
  EXPECT_EQ(store.bytes(), 0U);
  EXPECT_EQ(pulled->bytes->size(), 100U);  // who has it keeps it
}

TEST_F(Leases, AreBoundedInBytes) {
  EXPECT_EQ(store.put(blob(1001)).error().code, ErrorCode::kTooLarge);
  const auto first = store.put(blob(600));
  ASSERT_TRUE(first.ok());
  EXPECT_EQ(store.put(blob(401)).error().code, ErrorCode::kExhausted);
  EXPECT_TRUE(store.put(blob(400)).ok());
  EXPECT_EQ(store.bytes(), 1000U);
  store.release(first->id);
  EXPECT_TRUE(store.put(blob(600)).ok());
}

TEST_F(Leases, ExpireUnlessRenewed) {
  const auto stays = store.put(blob(500));
  const auto goes = store.put(blob(500));
  clock.advance(seconds(20));
  EXPECT_EQ(*store.renew(stays->id), milliseconds(30000));
  clock.advance(seconds(10));
  EXPECT_FALSE(store.get(goes->id).ok());
  EXPECT_TRUE(store.get(stays->id).ok());
  EXPECT_TRUE(store.put(blob(500)).ok());  // its bytes are free again
  clock.advance(seconds(60));
  EXPECT_EQ(store.expire(), 2U);
  EXPECT_EQ(store.count(), 0U);
  EXPECT_EQ(store.bytes(), 0U);
}

TEST_F(Leases, IdsDiffer) {
  std::set<std::string> ids;
  for (int i = 0; i < 100; ++i) ids.insert(store.put(blob(1))->id);
  EXPECT_EQ(ids.size(), 100U);
}

TEST(KvHash, IsXxh3) {
  // xxhsum -H2 of an empty input.
  EXPECT_EQ(kv_hash({}), "99aa06d3014798d86001c324468d497f");
}

}  // namespace
}  // namespace kindred::engine

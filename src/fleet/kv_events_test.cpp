#include "fleet/kv_events.h"

#include <gtest/gtest.h>

#include "base/json.h"
#include "base/rng.h"
#include "fleet/kv_index.h"
#include "fleet/kv_sequence.h"

namespace kindred::fleet {
namespace {

using Bytes = std::vector<uint8_t>;

Json array_stored(const Json& hashes, const Json& parent, const Json& tokens) {
  return {"BlockStored", hashes, parent, tokens, 2, nullptr};
}
Json map_stored(const Json& hashes, const Json& parent, const Json& tokens) {
  return {{"type", "BlockStored"}, {"block_hashes", hashes}, {"parent_block_hash", parent},
          {"token_ids", tokens},   {"block_size", 2},        {"lora_id", nullptr},
          {"medium", "GPU"},       {"lora_name", nullptr}};
}
Bytes array_batch(const Json& events) { return Json::to_msgpack(Json::array({1.5, events, 0})); }
Bytes map_batch(const Json& events) {
  return Json::to_msgpack({{"ts", 1.5}, {"events", events}, {"data_parallel_rank", 0}});
}

class KvEventsTest : public ::testing::Test {
 protected:
  void apply(const Bytes& payload, uint32_t worker = 1) {
    apply_kv_events(MsgpackDocument::parse(payload), worker, index_, counts_);
  }
  uint32_t held(const std::vector<uint32_t>& prompt, uint32_t worker = 1, std::string_view adapter = {}) {
    std::vector<BlockHash> chain;
    chain_blocks(chain_root(adapter, 2), prompt, 2, chain);
    std::vector<PrefixIndex::Held> out;
    index_.match(chain, out);
    for (const auto& one : out) {
      if (one.worker == worker) return one.blocks;
    }
    return 0;
  }

  PrefixIndex index_{{.budget_bytes = 1 << 20, .workers = 4}};
  KvEventCounts counts_;
};

TEST_F(KvEventsTest, ArrayForm) {
  apply(array_batch({array_stored({10, -11}, nullptr, {1, 2, 3, 4}), array_stored({12}, -11, {5, 6})}));
  EXPECT_EQ(held({1, 2, 3, 4, 5, 6, 7, 8}), 3U);
  apply(array_batch(Json::array({Json{"BlockRemoved", {12}}})));
  EXPECT_EQ(held({1, 2, 3, 4, 5, 6}), 2U);
  apply(array_batch(Json::array({Json::array({"AllBlocksCleared"})})));
  EXPECT_EQ(held({1, 2}), 0U);
  EXPECT_EQ(counts_.malformed, 0U);
  EXPECT_EQ(counts_.events, 4U);
}

TEST_F(KvEventsTest, MapFormWithHashesOfBytes) {
  const Json a = Json::binary(Bytes(32, 1)), b = Json::binary(Bytes(32, 2));
  apply(map_batch(Json::array({map_stored({a, b}, nullptr, {1, 2, 3, 4})})));
  EXPECT_EQ(held({1, 2, 3, 4}), 2U);
  apply(map_batch(Json::array({{{"type", "BlockRemoved"}, {"block_hashes", {b}}, {"medium", "GPU"}}})));
  EXPECT_EQ(held({1, 2, 3, 4}), 1U);
  apply(map_batch(Json::array({{{"type", "AllBlocksCleared"}}})));
  EXPECT_EQ(held({1, 2, 3, 4}), 0U);
  EXPECT_EQ(counts_.malformed, 0U);
}

TEST_F(KvEventsTest, WorkersHaveTheirOwnNames) {
  apply(map_batch(Json::array({map_stored({7}, nullptr, {1, 2})})), 1);
  apply(map_batch(Json::array({map_stored({7}, nullptr, {3, 4})})), 2);
  EXPECT_EQ(held({1, 2}, 1), 1U);
  EXPECT_EQ(held({1, 2}, 2), 0U);
  EXPECT_EQ(held({3, 4}, 2), 1U);
}

TEST_F(KvEventsTest, OtherMemoryAndOtherGroupsSayNothing) {
  Json cpu = map_stored({7}, nullptr, {1, 2}), group = cpu;
  cpu["medium"] = "CPU";
  group["group_idx"] = 1;
  apply(map_batch({cpu, group}));
  EXPECT_EQ(held({1, 2}), 0U);
  apply(map_batch(Json::array({map_stored({7}, nullptr, {1, 2})})));
  apply(map_batch(Json::array({{{"type", "BlockRemoved"}, {"block_hashes", {7}}, {"medium", "CPU"}}})));
  EXPECT_EQ(held({1, 2}), 1U);
  EXPECT_EQ(counts_.ignored, 3U);
  EXPECT_EQ(counts_.malformed, 0U);
}

TEST_F(KvEventsTest, AdaptersAndPicturesSetBlocksApart) {
  Json lora = map_stored({7}, nullptr, {1, 2}), picture = map_stored({8}, nullptr, {3, 4});
  lora["lora_name"] = "german";
  lora["extra_keys"] = {{"german"}};
  picture["extra_keys"] = {{"hash-of-a-picture"}};
  apply(map_batch({lora, picture}));
  EXPECT_EQ(counts_.malformed, 0U);
  EXPECT_EQ(held({1, 2}), 0U);
  EXPECT_EQ(held({1, 2}, 1, "german"), 1U);
  EXPECT_EQ(held({3, 4}), 0U);
}

TEST_F(KvEventsTest, MalformedEventsAreLeftOutAndTheRestCounts) {
  Json no_size = map_stored({1}, nullptr, {1, 2}), zero = no_size, few = no_size, text = no_size, keys = no_size;
  no_size.erase("block_size");
  zero["block_size"] = 0;
  few["token_ids"] = {1};
  text["token_ids"] = {"one", 2};
  keys["extra_keys"] = Json::array();
  const Json bad[] = {no_size,
                      zero,
                      few,
                      text,
                      keys,
                      {{"type", "Unheard"}},
                      5,
                      Json::array(),
                      Json::object(),
                      {{"type", "BlockRemoved"}}};
  for (const Json& event : bad) {
    counts_ = {};
    apply(map_batch({event, map_stored({9}, nullptr, {8, 9})}));
    EXPECT_EQ(counts_.malformed, 1U) << event;
    EXPECT_EQ(counts_.events, 1U) << event;
    EXPECT_EQ(held({8, 9}), 1U);
    EXPECT_EQ(held({1, 2}), 0U);
  }
  for (const Json& message : {Json(5), Json::array({1.0}), Json{{"ts", 1}}, Json{{"events", 3}}}) {
    counts_ = {};
    apply(Json::to_msgpack(message));
    EXPECT_EQ(counts_.malformed, 1U) << message;
  }
}

// Whatever a worker sends, nothing breaks, the bounds hold, and other workers' blocks stay.
TEST_F(KvEventsTest, MutatedMessagesHarmNobody) {
  Rng rng(4);
  apply(map_batch(Json::array({map_stored({1, 2}, nullptr, {1, 2, 3, 4})})), 3);
  const Bytes seeds[] = {
      array_batch(
          {array_stored({10, 11}, nullptr, {1, 2, 3, 4}), array_stored({12}, 11, {5, 6}), Json{"BlockRemoved", {10}}}),
      map_batch({map_stored({10, 11}, nullptr, {1, 2, 3, 4}), map_stored({12}, 11, {5, 6}),
                 Json{{"type", "BlockRemoved"}, {"block_hashes", {12}}, {"medium", nullptr}}}),
  };
  for (int i = 0; i < 30'000; ++i) {
    Bytes bytes = seeds[rng.below(2)];
    for (uint64_t n = 0; n < 1 + rng.below(5); ++n) {
      switch (rng.below(4)) {
        case 0: bytes[rng.below(bytes.size())] = static_cast<uint8_t>(rng.next()); break;
        case 1: bytes[rng.below(bytes.size())] ^= static_cast<uint8_t>(1U << rng.below(8)); break;
        case 2: bytes.erase(bytes.begin() + static_cast<ptrdiff_t>(rng.below(bytes.size()))); break;
        case 3:
          bytes.insert(bytes.begin() + static_cast<ptrdiff_t>(rng.below(bytes.size())),
                       static_cast<uint8_t>(rng.next()));
          break;
      }
    }
    apply(bytes, 1);
    ASSERT_LE(index_.bytes(), 1U << 20);
  }
  EXPECT_EQ(counts_.messages, 30'001U);
  EXPECT_GT(counts_.malformed, 1000U);
  EXPECT_EQ(held({1, 2, 3, 4}, 3), 2U);
}

TEST(KvIndex, TokensOfWorkersWithDifferentBlockSizes) {
  KvIndex index({.budget_bytes = 1 << 20, .workers = 4});
  Json big = map_stored({1}, nullptr, {1, 2, 3, 4});
  big["block_size"] = 4;
  index.apply(1, map_batch(Json::array({map_stored({1}, nullptr, {1, 2})})));
  index.apply(2, map_batch(Json::array({big})));
  EXPECT_TRUE(index.known(1));
  EXPECT_FALSE(index.known(3));
  const std::vector<uint32_t> prompt = {1, 2, 3, 4, 5};
  std::map<uint32_t, uint64_t> held;
  for (const auto& one : index.held(prompt, {})) held[one.worker] = one.tokens;
  EXPECT_EQ(held, (std::map<uint32_t, uint64_t>{{1, 2}, {2, 4}}));
  index.clear(2);
  EXPECT_FALSE(index.known(2));
  EXPECT_EQ(index.held(prompt, {}).size(), 1U);
}

using Then = KvSequence::Then;

TEST(KvSequence, InOrderAllIsApplied) {
  KvSequence sequence(true);
  for (uint64_t n = 0; n < 5; ++n) EXPECT_EQ(sequence.live(n), (KvSequence::Step{.then = Then::kApply}));
}

TEST(KvSequence, AGapIsFilledAndWhatComesTwiceIsDropped) {
  KvSequence sequence(true);
  EXPECT_EQ(sequence.live(0).then, Then::kApply);
  EXPECT_EQ(sequence.live(3), (KvSequence::Step{.then = Then::kReplay, .replay_from = 1}));
  for (uint64_t n = 1; n <= 5; ++n) EXPECT_EQ(sequence.replayed(n), (KvSequence::Step{.then = Then::kApply}));
  EXPECT_EQ(sequence.resume().then, Then::kDrop);
  EXPECT_EQ(sequence.live(4), (KvSequence::Step{.then = Then::kDrop}));
  EXPECT_EQ(sequence.live(5), (KvSequence::Step{.then = Then::kDrop}));
  EXPECT_EQ(sequence.live(6), (KvSequence::Step{.then = Then::kApply}));
}

TEST(KvSequence, AHoleThatStaysForgetsTheWorker) {
  KvSequence deaf(false);
  EXPECT_EQ(deaf.live(0).reset, false);
  EXPECT_EQ(deaf.live(2), (KvSequence::Step{.reset = true, .then = Then::kApply}));
  EXPECT_EQ(deaf.live(3), (KvSequence::Step{.then = Then::kApply}));

  KvSequence sequence(true);
  EXPECT_EQ(sequence.live(0).then, Then::kApply);
  EXPECT_EQ(sequence.live(9).then, Then::kReplay);
  EXPECT_EQ(sequence.replayed(7), (KvSequence::Step{.reset = true, .then = Then::kApply}));  // 1..6 are gone
  EXPECT_EQ(sequence.replayed(8).reset, false);
  EXPECT_EQ(sequence.resume(), (KvSequence::Step{.then = Then::kApply}));

  KvSequence silent(true);
  EXPECT_EQ(silent.live(0).then, Then::kApply);
  EXPECT_EQ(silent.live(4).then, Then::kReplay);
  EXPECT_EQ(silent.resume(), (KvSequence::Step{.reset = true, .then = Then::kApply}));
}

TEST(KvSequence, GoingBackIsARestart) {
  KvSequence sequence(true);
  for (uint64_t n = 0; n < 5; ++n) (void)sequence.live(n);
  EXPECT_EQ(sequence.live(0), (KvSequence::Step{.reset = true, .then = Then::kApply}));
  EXPECT_EQ(sequence.live(1), (KvSequence::Step{.then = Then::kApply}));
  // Restarted, and its first messages missed.
  EXPECT_EQ(sequence.live(1), (KvSequence::Step{.reset = true, .then = Then::kReplay, .replay_from = 0}));
}

TEST(KvSequence, AFirstMessageInTheMiddleAsksForAllBefore) {
  KvSequence sequence(true);
  EXPECT_EQ(sequence.live(100), (KvSequence::Step{.then = Then::kReplay, .replay_from = 0}));
  EXPECT_EQ(sequence.replayed(100).then, Then::kApply);
}

}  // namespace
}  // namespace kindred::fleet

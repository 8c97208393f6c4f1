// Which worker holds which KV blocks: exact, from the workers' own events.
//
// A block is known by the hash of its tokens and of everything before them (`BlockHash`, ours, equal on all
// workers); what an engine calls it is opaque and mapped per worker. A look-up gives, for a prompt's chain of
// hashes, how many blocks from the start each worker holds.
//
// Bytes. All tables have their final size from the start. Per block: 20 for the node (hash 8, parent 4, holders 4,
// last use 2, children 2); 64 / (12 x 0.88) = 6.1 in the block table; and 64 / (7 x 0.9) = 10.2 in the holding
// table for each worker that holds it, of which there are 1.2 per block: 12.2. Together 38.3, and at most 40 with
// the holder sets and what does not grow. Blocks held by many workers fill the holding table first; then fewer
// blocks fit.
//
// Eviction. When the budget is used up, the index forgets the least recently used of kSample leaves (blocks
// nobody continues), so that no block loses its way to the root; "used" is found by a look-up or stored. What is
// forgotten here is still at its worker, which then just looks less attractive than it is.
//
// A worker's reset costs O(1): it gets a new slot, and the old slot's entries are cleared little by little.
//
// Thread-safety: none; see kv_index.h for one that is shared.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "fleet/block_tables.h"
#include "fleet/holder_sets.h"

namespace kindred::fleet {

using BlockHash = uint64_t;

// The hash that a chain begins with. Blocks are equal only for the same adapter (empty: none) and tokens per block.
// The model need not be part of it: who asks compares workers of one model.
BlockHash chain_root(std::string_view adapter, uint32_t block_tokens);
// `salt`: what else makes the block differ (a picture's hash); empty: nothing.
BlockHash chain_block(BlockHash parent, std::span<const uint32_t> tokens, std::string_view salt = {});
// One hash per whole block of `tokens`; appended to `out`.
void chain_blocks(BlockHash root, std::span<const uint32_t> tokens, uint32_t block_tokens, std::vector<BlockHash>& out);

struct PrefixIndexOptions {
  size_t budget_bytes = 256ULL << 20;
  uint32_t workers = 64;  // at most 512; more than this get no entries
};

// Blocks that one worker stored, each behind the one before.
struct StoredBlocks {
  std::span<const uint64_t> engine_hashes;
  std::optional<uint64_t> parent;  // engine's hash of the block before the first; none: `root`
  BlockHash root = 0;
  std::span<const uint32_t> tokens;  // block_tokens for each
  uint32_t block_tokens = 0;
  std::span<const std::string_view> salts = {};  // one for each, or none at all
};

class PrefixIndex {
 public:
  using WorkerId = uint32_t;

  struct Held {
    WorkerId worker;
    uint32_t blocks;
    auto operator<=>(const Held&) const = default;
  };

  struct Counts {
    size_t blocks = 0;    // some worker's, or on the way to one
    size_t holdings = 0;  // pairs of worker and block
    uint64_t stored = 0, removed = 0, evicted = 0;
    uint64_t orphans = 0;  // stored blocks whose parent is not known: lost events, or evicted here
    uint64_t unknown = 0;  // removed blocks that were not known
    uint64_t refused = 0;  // no room for the worker, its block or its set
  };

  explicit PrefixIndex(const PrefixIndexOptions& options);

  // tokens.size() must be engine_hashes.size() x block_tokens.
  void store(WorkerId worker, const StoredBlocks& blocks);
  void remove(WorkerId worker, std::span<const uint64_t> engine_hashes);
  void clear(WorkerId worker);  // it holds nothing any more

  // The workers that hold at least the first block, in no order; `out` is replaced. What is found counts as used.
  void match(std::span<const BlockHash> chain, std::vector<Held>& out);

  // For tests and counters.
  bool holds(WorkerId worker, uint64_t engine_hash) const;
  size_t capacity() const { return nodes_.size() - 1; }
  static size_t capacity_of(const PrefixIndexOptions& options);  // blocks that fit
  size_t bytes() const;
  const Counts& counts() const { return counts_; }
  size_t holdings() const { return holdings_.size(); }  // pairs of worker and block, and what is still to be swept

 private:
  struct Node {
    uint32_t hash_low, hash_high;
    uint32_t parent : HoldingTable::kNodeBits;  // or the next free one
    uint32_t generation : HoldingTable::kGenerationBits;
    uint32_t holders;
    uint16_t used, children;
    BlockHash hash() const { return (static_cast<uint64_t>(hash_high) << 32) | hash_low; }
  };
  static_assert(sizeof(Node) == 20);

  static constexpr uint32_t kNoSlot = UINT32_MAX;
  static constexpr size_t kSample = 16;           // leaves looked at for one eviction
  static constexpr size_t kSweepStep = 64;        // buckets cleared of retired slots per store
  static constexpr size_t kSweepPerEviction = 2;  // round within a tenth of the blocks: so many entries are stale
  static constexpr size_t kMaxTries = 4096;       // evictions to make room for one holding
  static constexpr uint16_t kManyChildren = UINT16_MAX;  // from here on it counts as a parent for good

  struct Slot {
    WorkerId worker = 0;
    bool active = false;
    uint32_t left = 0;  // buckets that may still hold entries of its last owner
  };

  uint32_t slot_for(WorkerId worker);
  void retire(uint32_t slot);
  void sweep(size_t buckets);
  uint32_t find(BlockHash hash) const;
  uint32_t find_or_add(BlockHash hash, uint32_t parent);
  void free_if_unused(uint32_t node);
  void forget(uint32_t node);
  bool evict();
  bool counts(const HoldingTable::Entry& entry) const;
  std::optional<HoldingTable::Place> place_of(uint32_t slot, uint64_t engine_hash) const;
  uint32_t held_node(uint32_t slot, uint64_t engine_hash) const;
  void drop(HoldingTable::Place place);
  bool hold(uint32_t slot, uint64_t engine_hash, uint32_t node);
  static bool unused(const Node& node) { return node.holders == HolderSets::kNone && node.children == 0; }
  void touch(Node& node) { node.used = epoch_; }
  void tick(size_t touches);
  uint16_t age(const Node& node) const { return static_cast<uint16_t>(epoch_ - node.used); }

  ZeroedArray<Node> nodes_;  // number 0 is none
  BlockTable blocks_;
  HoldingTable holdings_;
  size_t most_holdings_;
  HolderSets sets_;
  std::vector<Slot> slots_;
  std::vector<uint64_t> active_;  // a bit per slot
  std::unordered_map<WorkerId, uint32_t> slot_of_;
  uint32_t workers_;
  uint32_t free_ = 0, fresh_ = 1;  // freed nodes, linked by parent; never used ones
  size_t swept_ = 0;               // bucket of holdings_ that sweep() goes on from
  uint32_t hand_ = 0;              // node that evict() goes on from
  uint32_t climb_ = 0;             // parent of the last one evicted, if it is to go next
  uint32_t pinned_ = 0;            // node that must not go: about to become a parent
  uint16_t epoch_ = 0;
  size_t touches_ = 0, epoch_touches_;
  bool retired_ = false;  // some slot has buckets left
  Counts counts_;
  std::vector<uint64_t> alive_, next_;  // scratch of match()
};

}  // namespace kindred::fleet

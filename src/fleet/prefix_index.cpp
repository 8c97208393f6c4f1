#include "fleet/prefix_index.h"

#include <xxhash.h>

#include <algorithm>
#include <bit>

#include "base/result.h"

namespace kindred::fleet {
namespace {

constexpr double kHoldingsPerBlock = 1.2;
constexpr double kBytesPerBlock =
    20 + sizeof(BlockTable::Bucket) / (BlockTable::Bucket::kSlots * BlockTable::kLoad) +
    kHoldingsPerBlock * sizeof(HoldingTable::Bucket) / (HoldingTable::Bucket::kSlots * HoldingTable::kLoad);
static_assert(kBytesPerBlock < 38.5);
// Sets of holders get this share of the budget.
constexpr size_t kSetShare = 64;
// Of an entry of a hash map with two words: the node, its link, its hash's bucket, the allocator's word.
constexpr size_t kMapBytes = 48;
// Look-ups fetch so many blocks ahead: the bucket first, then, half way, the node that it names.
constexpr size_t kAhead = 16;

// Twice as many slots as workers: a reset takes a new one at once.
uint32_t slots_for(uint32_t workers) { return std::min(HoldingTable::kMaxSlots, (2 * workers + 63) / 64 * 64); }

size_t sets_for(const PrefixIndexOptions& options) {
  return std::max<size_t>(16, options.budget_bytes / kSetShare / HolderSets::bytes_per_set(slots_for(options.workers)));
}

size_t blocks_for(const PrefixIndexOptions& options) {
  const uint32_t slots = slots_for(options.workers);
  const size_t fixed = 2048 + slots * 16 + sets_for(options) * HolderSets::bytes_per_set(slots) +
                       std::min(options.workers, slots) * kMapBytes;
  const double left = static_cast<double>(options.budget_bytes) - static_cast<double>(fixed);
  return static_cast<size_t>(std::clamp(left / kBytesPerBlock, 16.0, static_cast<double>(HoldingTable::kMaxNodes - 2)));
}

}  // namespace

BlockHash chain_root(std::string_view adapter, uint32_t block_tokens) {
  return XXH3_64bits_withSeed(adapter.data(), adapter.size(), block_tokens);
}

BlockHash chain_block(BlockHash parent, std::span<const uint32_t> tokens, std::string_view salt) {
  const uint64_t hash = XXH3_64bits_withSeed(tokens.data(), tokens.size_bytes(), parent);
  return salt.empty() ? hash : XXH3_64bits_withSeed(salt.data(), salt.size(), hash);
}

void chain_blocks(BlockHash root, std::span<const uint32_t> tokens, uint32_t block_tokens,
                  std::vector<BlockHash>& out) {
  KINDRED_CHECK(block_tokens > 0);
  out.reserve(out.size() + tokens.size() / block_tokens);
  for (size_t at = 0; at + block_tokens <= tokens.size(); at += block_tokens) {
    root = chain_block(root, tokens.subspan(at, block_tokens));
    out.push_back(root);
  }
}

size_t PrefixIndex::capacity_of(const PrefixIndexOptions& options) { return blocks_for(options); }

PrefixIndex::PrefixIndex(const PrefixIndexOptions& options)
    : nodes_(blocks_for(options) + 1),
      blocks_(capacity()),
      holdings_(static_cast<size_t>(static_cast<double>(capacity()) * kHoldingsPerBlock)),
      most_holdings_(static_cast<size_t>(static_cast<double>(capacity()) * kHoldingsPerBlock)),
      sets_(slots_for(options.workers), sets_for(options)),
      slots_(slots_for(options.workers)),
      active_(sets_.words()),
      workers_(std::min(options.workers, HoldingTable::kMaxSlots / 2)),
      epoch_touches_(capacity() / 256 + 1),
      alive_(sets_.words()),
      next_(sets_.words()) {}

size_t PrefixIndex::bytes() const {
  return sizeof(*this) + nodes_.bytes() + blocks_.bytes() + holdings_.bytes() + sets_.bytes() +
         slots_.size() * sizeof(Slot) + 3 * active_.size() * 8 + slot_of_.size() * kMapBytes;
}

// ---- workers and their slots ---------------------------------------------------------------------------------

uint32_t PrefixIndex::slot_for(WorkerId worker) {
  const auto known = slot_of_.find(worker);
  if (known != slot_of_.end()) return known->second;
  if (slot_of_.size() >= workers_) return kNoSlot;
  const auto idle = [](const Slot& slot) { return !slot.active && slot.left == 0; };
  auto free = std::ranges::find_if(slots_, idle);
  if (free == slots_.end()) {
    sweep(holdings_.buckets());
    free = std::ranges::find_if(slots_, idle);
    KINDRED_CHECK(free != slots_.end());
  }
  const auto slot = static_cast<uint32_t>(free - slots_.begin());
  *free = {.worker = worker, .active = true, .left = 0};
  active_[slot / 64] |= 1ULL << (slot % 64);
  slot_of_.emplace(worker, slot);
  return slot;
}

void PrefixIndex::retire(uint32_t slot) {
  slots_[slot].active = false;
  slots_[slot].left = static_cast<uint32_t>(holdings_.buckets());
  active_[slot / 64] &= ~(1ULL << (slot % 64));
  retired_ = true;
}

void PrefixIndex::clear(WorkerId worker) {
  const auto known = slot_of_.find(worker);
  if (known == slot_of_.end()) return;
  retire(known->second);
  slot_of_.erase(known);
}

// Erases what does not count any more from the next buckets: entries of retired slots and of nodes used anew.
void PrefixIndex::sweep(size_t buckets) {
  for (size_t i = 0; i < buckets; ++i, swept_ = holdings_.next(swept_)) {
    for (uint32_t s = 0; s < HoldingTable::Bucket::kSlots; ++s) {
      const HoldingTable::Place place{swept_, s};
      const HoldingTable::Entry& entry = holdings_.entry(place);
      if (entry.node != 0 && (!slots_[entry.slot].active || !counts(entry))) drop(place);
    }
  }
  if (!retired_) return;
  retired_ = false;
  for (Slot& slot : slots_) {
    slot.left -= static_cast<uint32_t>(std::min<size_t>(slot.left, buckets));
    retired_ = retired_ || slot.left > 0;
  }
}

// ---- nodes ---------------------------------------------------------------------------------------------------

uint32_t PrefixIndex::find(BlockHash hash) const {
  return blocks_.find(hash, [&](uint32_t node) { return nodes_[node].hash() == hash; });
}

void PrefixIndex::tick(size_t touches) {
  touches_ += touches;
  if (touches_ < epoch_touches_) return;
  touches_ = 0;
  ++epoch_;
}

uint32_t PrefixIndex::find_or_add(BlockHash hash, uint32_t parent) {
  if (const uint32_t known = find(hash); known != 0) return known;
  if (counts_.blocks == capacity() && !evict()) return 0;
  uint32_t node = free_;
  if (node != 0) free_ = nodes_[node].parent;
  else node = fresh_++;
  nodes_[node] = {.hash_low = static_cast<uint32_t>(hash),
                  .hash_high = static_cast<uint32_t>(hash >> 32),
                  .parent = parent,
                  .generation = nodes_[node].generation,
                  .holders = HolderSets::kNone,
                  .used = epoch_,
                  .children = 0};
  if (parent != 0 && nodes_[parent].children != kManyChildren) ++nodes_[parent].children;
  blocks_.insert(hash, node);
  ++counts_.blocks;
  return node;
}

// Frees the node if nobody holds it and nothing hangs on it; then its parent, and so on.
void PrefixIndex::free_if_unused(uint32_t node) {
  while (node != 0 && node != pinned_ && unused(nodes_[node])) {
    const uint32_t parent = nodes_[node].parent;
    blocks_.erase(nodes_[node].hash(), node);
    nodes_[node].parent = free_;
    free_ = node;
    --counts_.blocks;
    if (parent != 0 && nodes_[parent].children != kManyChildren) --nodes_[parent].children;
    node = parent;
  }
}

// Nobody holds it any more; what its holders' entries say of it does not count.
void PrefixIndex::forget(uint32_t node) {
  nodes_[node].holders = sets_.none(nodes_[node].holders);
  nodes_[node].generation = (nodes_[node].generation + 1) % (1U << HoldingTable::kGenerationBits);
}

// Frees the least recently used of the next kSample leaves. Its parent, if it was used no later, is the next to go.
bool PrefixIndex::evict() {
  uint32_t oldest = climb_;
  climb_ = 0;
  // Nodes behind fresh_ were never used, and freed ones look unused.
  const auto leaf = [&](uint32_t node) {
    return nodes_[node].children == 0 && nodes_[node].holders != HolderSets::kNone && node != pinned_;
  };
  if (oldest == 0 || !leaf(oldest)) {
    oldest = 0;
    size_t seen = 0;
    for (uint32_t looked = 1; looked < fresh_ && seen < kSample; ++looked) {
      hand_ = hand_ + 1 >= fresh_ ? 1 : hand_ + 1;
      if (!leaf(hand_)) continue;
      ++seen;
      if (oldest == 0 || age(nodes_[hand_]) > age(nodes_[oldest])) oldest = hand_;
    }
    if (oldest == 0) return false;
  }
  const uint32_t parent = nodes_[oldest].parent;
  const uint16_t old = age(nodes_[oldest]);
  forget(oldest);
  free_if_unused(oldest);
  if (parent != 0 && leaf(parent) && age(nodes_[parent]) + 1 >= old) climb_ = parent;
  ++counts_.evicted;
  sweep(kSweepPerEviction);
  return true;
}

// ---- holdings ------------------------------------------------------------------------------------------------

bool PrefixIndex::counts(const HoldingTable::Entry& entry) const {
  const Node& node = nodes_[entry.node];
  return entry.generation == node.generation && sets_.contains(node.holders, entry.slot);
}

std::optional<HoldingTable::Place> PrefixIndex::place_of(uint32_t slot, uint64_t engine_hash) const {
  return holdings_.find(slot, engine_hash, [this](const HoldingTable::Entry& entry) { return counts(entry); });
}

// The node that the worker knows by this name, or 0.
uint32_t PrefixIndex::held_node(uint32_t slot, uint64_t engine_hash) const {
  const auto place = place_of(slot, engine_hash);
  return place ? static_cast<uint32_t>(holdings_.entry(*place).node) : 0;
}

void PrefixIndex::drop(HoldingTable::Place place) {
  const HoldingTable::Entry entry = holdings_.entry(place);
  holdings_.erase(place);
  if (!counts(entry)) return;
  const auto node = static_cast<uint32_t>(entry.node);
  if (const auto left = sets_.without(nodes_[node].holders, entry.slot)) nodes_[node].holders = *left;
  else forget(node);  // no room to say who is left: better that nobody looks as if he had it
  free_if_unused(node);
}

bool PrefixIndex::hold(uint32_t slot, uint64_t engine_hash, uint32_t node) {
  if (sets_.contains(nodes_[node].holders, slot)) return true;
  for (size_t tries = 0; holdings_.size() >= most_holdings_; ++tries) {
    // Each eviction sweeps a little; this is for fleets whose blocks are at many workers.
    if (tries == kMaxTries || !evict()) return false;
  }
  const auto holders = sets_.with(nodes_[node].holders, slot);
  if (!holders) return false;
  nodes_[node].holders = *holders;
  if (holdings_.insert(slot, engine_hash, node, nodes_[node].generation)) return true;
  if (const auto before = sets_.without(*holders, slot)) nodes_[node].holders = *before;
  else forget(node);
  return false;
}

bool PrefixIndex::holds(WorkerId worker, uint64_t engine_hash) const {
  const auto slot = slot_of_.find(worker);
  return slot != slot_of_.end() && held_node(slot->second, engine_hash) != 0;
}

// ---- events and look-ups -------------------------------------------------------------------------------------

void PrefixIndex::store(WorkerId worker, const StoredBlocks& blocks) {
  const size_t count = blocks.engine_hashes.size();
  KINDRED_CHECK(blocks.block_tokens > 0 && blocks.tokens.size() == count * blocks.block_tokens);
  KINDRED_CHECK(blocks.salts.empty() || blocks.salts.size() == count);
  if (retired_) sweep(kSweepStep);
  const uint32_t slot = slot_for(worker);
  if (slot == kNoSlot) {
    counts_.refused += count;
    return;
  }
  BlockHash hash = blocks.root;
  uint32_t parent = 0;
  if (blocks.parent) {
    parent = held_node(slot, *blocks.parent);
    if (parent == 0) {
      counts_.orphans += count;
      return;
    }
    hash = nodes_[parent].hash();
    touch(nodes_[parent]);
  }
  for (size_t i = 0; i < count; ++i) {
    hash = chain_block(hash, blocks.tokens.subspan(i * blocks.block_tokens, blocks.block_tokens),
                       blocks.salts.empty() ? std::string_view() : blocks.salts[i]);
    pinned_ = parent;
    const uint32_t node = find_or_add(hash, parent);
    pinned_ = node;
    const bool held = node != 0 && hold(slot, blocks.engine_hashes[i], node);
    pinned_ = 0;
    if (!held) {
      counts_.refused += count - i;
      free_if_unused(node != 0 ? node : parent);
      break;
    }
    touch(nodes_[node]);
    ++counts_.stored;
    parent = node;
  }
  tick(count);
}

void PrefixIndex::remove(WorkerId worker, std::span<const uint64_t> engine_hashes) {
  const auto slot = slot_of_.find(worker);
  for (const uint64_t engine_hash : engine_hashes) {
    const auto place = slot == slot_of_.end() ? std::nullopt : place_of(slot->second, engine_hash);
    if (!place) {
      ++counts_.unknown;
      continue;
    }
    drop(*place);
    ++counts_.removed;
  }
}

void PrefixIndex::match(std::span<const BlockHash> chain, std::vector<Held>& out) {
  out.clear();
  alive_ = active_;
  const auto report = [&](std::span<const uint64_t> gone, size_t blocks) {
    for (size_t w = 0; w < gone.size(); ++w) {
      for (uint64_t left = gone[w]; left != 0; left &= left - 1) {
        const size_t slot = w * 64 + static_cast<size_t>(std::countr_zero(left));
        out.push_back({slots_[slot].worker, static_cast<uint32_t>(blocks)});
      }
    }
  };
  for (size_t i = 0; i < std::min(kAhead, chain.size()); ++i) blocks_.prefetch(chain[i]);
  std::optional<HolderSets::Holders> last;  // of the block before: mostly the same
  size_t at = 0;
  for (; at < chain.size(); ++at) {
    if (at + kAhead < chain.size()) blocks_.prefetch(chain[at + kAhead]);
    if (at + kAhead / 2 < chain.size()) __builtin_prefetch(&nodes_[blocks_.guess(chain[at + kAhead / 2])]);
    const uint32_t number = find(chain[at]);
    if (number == 0) break;
    Node& node = nodes_[number];
    touch(node);
    if (node.holders == last) continue;
    next_ = alive_;
    sets_.intersect(node.holders, next_);
    if (at > 0) {
      for (size_t w = 0; w < next_.size(); ++w) alive_[w] ^= next_[w];  // those that end here
      report(alive_, at);
    }
    alive_ = next_;
    last = node.holders;
    if (std::ranges::all_of(alive_, [](uint64_t word) { return word == 0; })) break;
  }
  if (at > 0) report(alive_, at);
  tick(at);
}

}  // namespace kindred::fleet

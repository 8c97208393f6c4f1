#include "engine/prefix_cache.h"

#include <algorithm>

#include "base/result.h"
#include "base/rng.h"

namespace kindred::engine {
namespace {

uint64_t chain(uint64_t parent, std::span<const Token> tokens) {
  uint64_t hash = mix64(parent);
  for (const Token token : tokens) hash = mix64(hash ^ static_cast<uint32_t>(token));
  return hash;
}

}  // namespace

PrefixCache::PrefixCache(KvStore& store, uint32_t block_tokens, std::vector<SequenceId> holders, size_t counts)
    : store_(store), block_tokens_(block_tokens), counts_(counts), free_holders_(std::move(holders)), blocks_of_(1) {
  KINDRED_CHECK(block_tokens_ > 0 && block_tokens_ <= 255);  // counts are bytes
}

PrefixCache::Match PrefixCache::match(std::span<const Token> tokens) {
  const Match found = look_up(tokens);
  touch(found.node, ++tick_);
  return found;
}

PrefixCache::Match PrefixCache::look_up(std::span<const Token> tokens) const {
  Match found;
  uint64_t hash = 0;
  while ((found.blocks + 1) * size_t{block_tokens_} <= tokens.size()) {
    const auto block = tokens.subspan(found.blocks * size_t{block_tokens_}, block_tokens_);
    hash = chain(hash, block);
    const Node next = find_child(found.node, block, hash);
    if (next == kRoot) break;
    found.node = next;
    ++found.blocks;
  }
  return found;
}

void PrefixCache::copy_to(Node node, SequenceId sequence, uint32_t tokens) {
  KINDRED_CHECK(node != kRoot && tokens <= blocks_of_[node].depth * block_tokens_);
  store_.copy(holder_below(node), sequence, 0, tokens);
}

void PrefixCache::add_counts(Node node, expert::ExpertCounts& sum) const {
  for (; node != kRoot; node = blocks_of_[node].parent) {
    const std::vector<uint8_t>& counts = blocks_of_[node].counts;
    for (size_t i = 0; i < counts.size(); ++i) sum.data[i] += counts[i];
    sum.tokens += block_tokens_;
  }
}

void PrefixCache::pin(Node node) {
  for (; node != kRoot; node = blocks_of_[node].parent) {
    if (blocks_of_[node].pins++ > 0) continue;
    ++pinned_;
    unlist(node);
  }
}

void PrefixCache::unpin(Node node) {
  for (; node != kRoot; node = blocks_of_[node].parent) {
    KINDRED_CHECK(blocks_of_[node].pins > 0);
    if (--blocks_of_[node].pins > 0) continue;
    --pinned_;
    if (leaf(node)) list(node);
  }
}

PrefixCache::Inserted PrefixCache::insert(std::span<const Token> tokens, SequenceId sequence, uint32_t first_counted,
                                          std::span<const std::vector<uint8_t>> counts) {
  const auto full = static_cast<uint32_t>(tokens.size() / block_tokens_);
  const Match known = match(tokens.first(full * size_t{block_tokens_}));
  KINDRED_CHECK(known.blocks >= std::min(first_counted, full) && first_counted + counts.size() >= full);
  if (known.blocks == full) return {known.node, 0};

  // The end of the known path must survive the eviction that may be needed for a holder.
  pin(known.node);
  const SequenceId holder = holder_for_child(known.node);
  unpin(known.node);
  if (holder < 0) return {known.node, 0};
  if (leaf(known.node)) {
    unlist(known.node);
    blocks_of_[known.node].holder = -1;
  } else if (known.blocks > 0) {
    store_.copy(holder_below(known.node), holder, 0, known.blocks * block_tokens_);
  }
  store_.copy(sequence, holder, known.blocks * block_tokens_, full * block_tokens_);

  Inserted result{known.node, full - known.blocks};
  for (uint32_t b = known.blocks; b < full; ++b) {
    const auto block = tokens.subspan(b * size_t{block_tokens_}, block_tokens_);
    result.node = add_child(result.node, block, chain(blocks_of_[result.node].hash, block), counts[b - first_counted]);
  }
  blocks_of_[result.node].holder = holder;
  list(result.node);
  return result;
}

uint32_t PrefixCache::evict(uint32_t blocks) {
  Cuts cut;
  uint32_t dropped = 0;
  for (; dropped < blocks && !candidates_.empty(); ++dropped) drop_leaf(candidates_.begin()->second, cut);
  apply(cut);
  return dropped;
}

PrefixCache::Node PrefixCache::find_child(Node parent, std::span<const Token> tokens, uint64_t hash) const {
  const auto [begin, end] = by_hash_.equal_range(hash);
  for (auto it = begin; it != end; ++it) {
    const Block& block = blocks_of_[it->second];
    // Two chains may share a hash; the tokens decide.
    if (block.parent == parent && std::ranges::equal(block.tokens, tokens)) return it->second;
  }
  return kRoot;
}

PrefixCache::Node PrefixCache::add_child(Node parent, std::span<const Token> tokens, uint64_t hash,
                                         const std::vector<uint8_t>& counts) {
  KINDRED_CHECK(counts.size() == counts_);
  Node node;
  if (free_nodes_.empty()) {
    node = static_cast<Node>(blocks_of_.size());
    blocks_of_.emplace_back();
  } else {
    node = free_nodes_.back();
    free_nodes_.pop_back();
  }
  Block& block = blocks_of_[node];
  block = Block{};
  block.hash = hash;
  block.parent = parent;
  block.depth = blocks_of_[parent].depth + 1;
  block.used = tick_;
  block.tokens.assign(tokens.begin(), tokens.end());
  block.counts = counts;
  blocks_of_[parent].children.push_back(node);
  by_hash_.emplace(hash, node);
  ++blocks_;
  return node;
}

SequenceId PrefixCache::holder_below(Node node) const {
  while (!blocks_of_[node].children.empty()) node = blocks_of_[node].children.front();
  return blocks_of_[node].holder;
}

SequenceId PrefixCache::holder_for_child(Node parent) {
  // Evicting may also turn the parent itself into a leaf.
  Cuts cut;
  while (!leaf(parent) && free_holders_.empty() && !candidates_.empty()) drop_leaf(candidates_.begin()->second, cut);
  apply(cut);
  if (leaf(parent)) return blocks_of_[parent].holder;
  if (free_holders_.empty()) return -1;
  const SequenceId holder = free_holders_.back();
  free_holders_.pop_back();
  return holder;
}

void PrefixCache::touch(Node node, uint64_t tick) {
  for (; node != kRoot; node = blocks_of_[node].parent) {
    const bool listed = leaf(node) && blocks_of_[node].pins == 0;
    if (listed) unlist(node);
    blocks_of_[node].used = tick;
    if (listed) list(node);
  }
}

void PrefixCache::list(Node leaf) {
  if (blocks_of_[leaf].pins == 0) candidates_.emplace(blocks_of_[leaf].used, leaf);
}

void PrefixCache::unlist(Node leaf) { candidates_.erase({blocks_of_[leaf].used, leaf}); }

void PrefixCache::drop_leaf(Node node, Cuts& cut) {
  unlist(node);
  Block& block = blocks_of_[node];
  const Node parent = block.parent;
  const auto [begin, end] = by_hash_.equal_range(block.hash);
  by_hash_.erase(std::find_if(begin, end, [node](const auto& entry) { return entry.second == node; }));

  Block& above = blocks_of_[parent];
  std::erase(above.children, node);
  if (leaf(parent)) {  // inherits the holder, which gives up the tail
    above.holder = block.holder;
    cut[block.holder] = above.depth * block_tokens_;
    list(parent);
  } else {
    cut[block.holder] = 0;
    free_holders_.push_back(block.holder);
  }
  block = Block{};
  free_nodes_.push_back(node);
  --blocks_;
}

void PrefixCache::apply(const Cuts& cut) {
  for (const auto& [holder, tokens] : cut) store_.remove(holder, tokens);
}

}  // namespace kindred::engine

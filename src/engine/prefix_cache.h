// The prefix cache and, beside it, the signature cache: a tree of KV blocks, each with the expert
// counts of its tokens.
//
// Cells of KV are owned by llama.cpp sequences, and a sequence is a path: so every *leaf* of the tree has
// a sequence of its own, its holder, that holds the cells of the whole path from the root. Blocks shared
// by several leaves share their cells. llama.cpp scans all cells for every operation, so there is at
// most one operation per holder and call here, never one per block.
//
// Whoever uses a block pins it, and a pinned block is not evicted. Hence physical cells are
// `blocks() * block_tokens`, and what running sequences hold beyond what they pinned.
//
// Thread-safety: none; belongs to the engine's thread.
#pragma once

#include <cstdint>
#include <set>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

#include "engine/types.h"
#include "expert/counts.h"

namespace kindred::engine {

using SequenceId = int32_t;

// The two operations on KV cells that the cache needs; llama.cpp's seq_cp and seq_rm.
class KvStore {
 public:
  virtual ~KvStore() = default;
  // Cells of `from` at positions [begin, end) belong to `to` as well.
  virtual void copy(SequenceId from, SequenceId to, uint32_t begin, uint32_t end) = 0;
  // `sequence` gives up its cells from position `begin` on; cells of no sequence are free.
  virtual void remove(SequenceId sequence, uint32_t begin) = 0;
};

class PrefixCache {
 public:
  using Node = uint32_t;
  static constexpr Node kRoot = 0;  // no blocks

  // `store` must outlive the cache. `block_tokens` <= 255. `holders`: sequence ids for the cache alone.
  // `counts`: cells of the expert counts per block, 0 for models without experts.
  PrefixCache(KvStore& store, uint32_t block_tokens, std::vector<SequenceId> holders, size_t counts);

  struct Match {
    Node node = kRoot;
    uint32_t blocks = 0;
  };
  // The longest cached path that begins `tokens`. match() marks it as used, look_up() changes nothing.
  Match match(std::span<const Token> tokens);
  Match look_up(std::span<const Token> tokens) const;
  uint32_t depth(Node node) const { return blocks_of_[node].depth; }  // blocks from the root
  // Copies the first `tokens` tokens of a non-empty path to a sequence.
  void copy_to(Node node, SequenceId sequence, uint32_t tokens);
  // Adds the counts of all blocks of the path; tokens too.
  void add_counts(Node node, expert::ExpertCounts& sum) const;

  // Pins the whole path, until unpin of the same node.
  void pin(Node node);
  void unpin(Node node);

  struct Inserted {
    Node node = kRoot;    // the end of the path, or as far as it could be stored
    uint32_t blocks = 0;  // new ones
  };
  // Stores the full blocks of `tokens`, whose KV `sequence` holds. `counts`: those of the blocks from
  // block `first_counted` on; that and all earlier ones must be cached already (be pinned by the caller).
  // Stores less when all holders are pinned.
  Inserted insert(std::span<const Token> tokens, SequenceId sequence, uint32_t first_counted,
                  std::span<const std::vector<uint8_t>> counts);

  // Evicts blocks, least recently used first, from the ends of paths. Returns how many.
  uint32_t evict(uint32_t blocks);

  uint32_t block_tokens() const { return block_tokens_; }
  uint32_t blocks() const { return blocks_; }
  uint32_t evictable() const { return blocks_ - pinned_; }

 private:
  struct Block {
    uint64_t hash = 0;  // of the path
    Node parent = kRoot;
    uint32_t depth = 0;  // blocks from the root, this one included
    uint32_t pins = 0;
    uint64_t used = 0;           // tick of the last use
    SequenceId holder = -1;      // leaves only
    std::vector<Node> children;  // no more than there are holders
    std::vector<Token> tokens;
    std::vector<uint8_t> counts;
  };

  Node find_child(Node parent, std::span<const Token> tokens, uint64_t hash) const;
  Node add_child(Node parent, std::span<const Token> tokens, uint64_t hash, const std::vector<uint8_t>& counts);
  SequenceId holder_below(Node node) const;
  // The holder for a new path that goes on from `parent`: the parent's own if it is a leaf, else a free
  // one, for which the least recently used path is evicted if need be. -1 if all are pinned.
  SequenceId holder_for_child(Node parent);
  void touch(Node node, uint64_t tick);
  bool leaf(Node node) const { return node != kRoot && blocks_of_[node].children.empty(); }
  void list(Node leaf);    // as a candidate for eviction
  void unlist(Node leaf);  // if it is one
  // Takes an unpinned leaf out of the tree. What its holder must give up goes to `cut`.
  using Cuts = std::unordered_map<SequenceId, uint32_t>;
  void drop_leaf(Node node, Cuts& cut);
  void apply(const Cuts& cut);

  KvStore& store_;
  uint32_t block_tokens_;
  size_t counts_;
  std::vector<SequenceId> free_holders_;
  std::vector<Block> blocks_of_;  // by Node; [0] is the root
  std::vector<Node> free_nodes_;
  std::unordered_multimap<uint64_t, Node> by_hash_;
  std::set<std::pair<uint64_t, Node>> candidates_;  // unpinned leaves by last use
  uint32_t blocks_ = 0, pinned_ = 0;
  uint64_t tick_ = 0;
};

}  // namespace kindred::engine

// The KV blocks of one engine: private ones, and whole pieces of prompts that requests share and that stay, least
// recently used first out, while nobody needs their room.
//
// A piece is `piece_tokens` of a prompt, known by the hash of itself and all before it; it takes
// piece_tokens / block_tokens blocks. The prompts of a trace come in such pieces.
//
// Thread-safety: none. Nothing here depends on the order of a hash table.
#pragma once

#include <cstdint>
#include <list>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

namespace kindred::sim {

struct KvPoolOptions {
  uint32_t blocks = 0;
  uint32_t block_tokens = 16;
  uint32_t piece_tokens = 512;  // a multiple of block_tokens
  bool cache = true;            // false: nothing is ever shared
};

class KvPool {
 public:
  explicit KvPool(const KvPoolOptions& options)
      : options_(options), piece_blocks_(options.piece_tokens / options.block_tokens), free_(options.blocks) {}

  uint32_t blocks_for(uint64_t tokens) const {
    return static_cast<uint32_t>((tokens + options_.block_tokens - 1) / options_.block_tokens);
  }
  uint32_t capacity() const { return options_.blocks; }
  // Blocks that requests hold; cached ones that nobody uses do not count.
  uint32_t used() const { return options_.blocks - free_ - idle_pieces_ * piece_blocks_; }

  // How many pieces from the start are here.
  size_t held(std::span<const uint64_t> chain) const;
  // Holds these pieces, all of them here, until drop().
  void share(std::span<const uint64_t> pieces);
  void drop(std::span<const uint64_t> pieces);

  // Private blocks; false, and nothing taken, if there are not enough even without the cache.
  bool take(uint32_t blocks);
  void give(uint32_t blocks) { free_ += blocks; }

  // A piece that its request has just computed into private blocks becomes one that is shared, held by that
  // request. False, and nothing changed: it is here already, or nothing is cached.
  bool publish(uint64_t piece);

  // Pieces that were thrown out since the last call.
  std::vector<uint64_t> take_evicted() { return std::exchange(evicted_, {}); }
  void clear();  // the engine is gone: everything free, nothing cached

 private:
  struct Piece {
    uint32_t holders = 0;
    std::list<uint64_t>::iterator idle;  // where in idle_, while nobody holds it
  };

  KvPoolOptions options_;
  uint32_t piece_blocks_;
  uint32_t free_;
  uint32_t idle_pieces_ = 0;
  std::unordered_map<uint64_t, Piece> pieces_;
  std::list<uint64_t> idle_;  // least recently used first
  std::vector<uint64_t> evicted_;
};

}  // namespace kindred::sim

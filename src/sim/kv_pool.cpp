#include "sim/kv_pool.h"

#include "base/result.h"

namespace kindred::sim {

size_t KvPool::held(std::span<const uint64_t> chain) const {
  size_t count = 0;
  while (count < chain.size() && pieces_.contains(chain[count])) ++count;
  return count;
}

void KvPool::share(std::span<const uint64_t> pieces) {
  for (const uint64_t hash : pieces) {
    Piece& piece = pieces_.at(hash);
    if (piece.holders++ > 0) continue;
    idle_.erase(piece.idle);
    --idle_pieces_;
  }
}

// The last piece becomes the least recently used, so that a chain loses its end before its beginning.
void KvPool::drop(std::span<const uint64_t> pieces) {
  for (size_t i = pieces.size(); i-- > 0;) {
    Piece& piece = pieces_.at(pieces[i]);
    if (--piece.holders > 0) continue;
    piece.idle = idle_.insert(idle_.end(), pieces[i]);
    ++idle_pieces_;
  }
}

bool KvPool::take(uint32_t blocks) {
  if (blocks > free_ + static_cast<uint64_t>(idle_pieces_) * piece_blocks_) return false;
  while (free_ < blocks) {
    const uint64_t hash = idle_.front();
    idle_.pop_front();
    pieces_.erase(hash);
    evicted_.push_back(hash);
    --idle_pieces_;
    free_ += piece_blocks_;
  }
  free_ -= blocks;
  return true;
}

bool KvPool::publish(uint64_t hash) {
  if (!options_.cache) return false;
  return pieces_.try_emplace(hash, Piece{.holders = 1, .idle = {}}).second;
}

void KvPool::clear() {
  free_ = options_.blocks;
  idle_pieces_ = 0;
  pieces_.clear();
  idle_.clear();
  evicted_.clear();
}

}  // namespace kindred::sim

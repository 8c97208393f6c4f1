#include "fleet/kv_index.h"

#include <set>

namespace kindred::fleet {

void KvIndex::apply(WorkerId worker, std::span<const uint8_t> payload) {
  const std::lock_guard lock(mutex_);
  if (const uint32_t tokens = apply_kv_events(payload, worker, index_, counts_); tokens > 0) {
    block_tokens_[worker] = tokens;
  }
}

void KvIndex::clear(WorkerId worker) {
  const std::lock_guard lock(mutex_);
  index_.clear(worker);
  block_tokens_.erase(worker);
}

bool KvIndex::known(WorkerId worker) const {
  const std::lock_guard lock(mutex_);
  return block_tokens_.contains(worker);
}

std::vector<KvIndex::HeldTokens> KvIndex::held(std::span<const uint32_t> tokens, std::string_view adapter) const {
  const std::lock_guard lock(mutex_);
  std::set<uint32_t> sizes;  // one, unless workers were started with different settings
  for (const auto& [worker, size] : block_tokens_) sizes.insert(size);
  std::vector<HeldTokens> out;
  for (const uint32_t size : sizes) {
    chain_.clear();
    chain_blocks(chain_root(adapter, size), tokens, size, chain_);
    index_.match(chain_, found_);
    for (const PrefixIndex::Held& one : found_) out.push_back({one.worker, static_cast<uint64_t>(one.blocks) * size});
  }
  return out;
}

KvIndexStatus KvIndex::status() const {
  const std::lock_guard lock(mutex_);
  return {.index = index_.counts(),
          .events = counts_,
          .bytes = index_.bytes(),
          .capacity_blocks = index_.capacity(),
          .workers = block_tokens_.size()};
}

}  // namespace kindred::fleet

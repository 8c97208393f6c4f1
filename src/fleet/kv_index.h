// The prefix index as the router shares it: the thread that reads events writes, requests look up.
//
// Thread-safety: all methods take one mutex. What is done under it is short: one message (bounded by
// MsgpackLimits), or one prompt.
#pragma once

#include <map>
#include <mutex>
#include <span>
#include <string_view>
#include <vector>

#include "fleet/kv_events.h"
#include "fleet/prefix_index.h"

namespace kindred::fleet {

struct KvIndexStatus {
  PrefixIndex::Counts index;
  KvEventCounts events;
  size_t bytes = 0, capacity_blocks = 0, workers = 0;
};

class KvIndex {
 public:
  using WorkerId = PrefixIndex::WorkerId;
  struct HeldTokens {
    WorkerId worker;
    uint64_t tokens;
  };

  explicit KvIndex(const PrefixIndexOptions& options) : index_(options) {}

  void apply(WorkerId worker, std::span<const uint8_t> payload);
  void clear(WorkerId worker);

  // Whether the worker's events have told anything yet; else what it holds is not known.
  bool known(WorkerId worker) const;
  // How many tokens of the prompt, from its start, each worker holds; those that hold none are left out.
  // `adapter`: LoRA adapter; empty: none. O(tokens).
  std::vector<HeldTokens> held(std::span<const uint32_t> tokens, std::string_view adapter) const;
  KvIndexStatus status() const;

 private:
  mutable std::mutex mutex_;
  mutable PrefixIndex index_;  // a look-up marks what it finds as used
  KvEventCounts counts_;
  std::map<WorkerId, uint32_t> block_tokens_;  // of workers that stored something
  mutable std::vector<BlockHash> chain_;       // scratch
  mutable std::vector<PrefixIndex::Held> found_;
};

}  // namespace kindred::fleet

// Expert traffic as the dispatches see it: which source sent how many tokens to which expert.
//
// A source is one llama_context (an engine). It alone adds to its counts, so an addition is a load and a store;
// readers take copies. Counts only grow; a window is the difference of two copies.
//
// Thread-safety: a Source belongs to its thread; all else from any thread.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "base/clock.h"

namespace kindred::engine {

struct RankShape {
  uint32_t layers = 0, experts = 0, ranks = 0;
};

// Sums over a window, or since the start.
struct RankTraffic {
  uint32_t sources = 0;
  std::vector<uint64_t> tokens;       // A: [layers][sources][experts], a token counts once for each of its experts
  std::vector<uint64_t> rank_tokens;  // [layers][sources][ranks], by who owned the expert at the time
  std::vector<uint64_t> active;       // [layers], distinct experts, summed over dispatches
  std::vector<uint64_t> rank_active;  // [ranks], the same by owner, over all layers
  std::vector<uint64_t> dispatches;   // [layers], of all sources
  uint64_t busiest_tokens = 0;        // of each dispatch's busiest rank, which the others wait for; summed
  double seconds = 0;                 // how long the window is
};

class RankCounts {
 public:
  static constexpr uint32_t kMostSources = 64;

  explicit RankCounts(RankShape shape);

  class Source {
   public:
    explicit Source(const RankShape& shape);
    void add_token(uint32_t layer, uint32_t expert) { add(tokens_[size_t{layer} * experts_ + expert], 1); }
    void add_dispatch(uint32_t layer, uint32_t active) {
      add(active_[layer], active);
      add(dispatches_[layer], 1);
    }
    void add_rank_tokens(uint32_t layer, uint32_t rank, uint64_t tokens) {
      add(rank_tokens_[size_t{layer} * ranks_ + rank], tokens);
    }
    void add_rank_active(uint32_t rank, uint32_t active) { add(rank_active_[rank], active); }
    void add_busiest(uint64_t tokens) { add(busiest_, tokens); }

   private:
    friend class RankCounts;
    using Counters = std::vector<std::atomic<uint64_t>>;
    static void add(std::atomic<uint64_t>& to, uint64_t by) {
      to.store(to.load(std::memory_order_relaxed) + by, std::memory_order_relaxed);
    }
    uint32_t experts_, ranks_;
    Counters tokens_, rank_tokens_, active_, rank_active_, dispatches_;
    std::atomic<uint64_t> busiest_{0};
    bool open_ = true;
  };

  // The lowest index that is free; null if all kMostSources are taken. Its counts go on where its predecessor's
  // ended.
  Source* open();
  void close(Source* source);

  RankTraffic total() const;
  // Since the last reset_window(), or what rotate() has made of it.
  RankTraffic window(MonotonicTime now) const;
  void reset_window(MonotonicTime now);
  // Once a `length` has passed: the window begins where the last one ended, so it covers one to two lengths.
  void rotate(MonotonicTime now, std::chrono::milliseconds length);

 private:
  RankTraffic total_locked() const;

  const RankShape shape_;
  mutable std::mutex mutex_;
  std::deque<Source> sources_;
  struct Mark {
    RankTraffic traffic;
    MonotonicTime at{};
  };
  Mark begin_, middle_;
};

// What came after `mark`, an earlier total of the same counts.
void subtract_traffic(RankTraffic& from, const RankTraffic& mark, const RankShape& shape);
// Σ over sources of A: [layers][experts].
std::vector<uint64_t> expert_tokens(const RankTraffic& traffic, const RankShape& shape);
// Σ over layers and sources: [ranks].
std::vector<uint64_t> rank_loads(const RankTraffic& traffic, const RankShape& shape);
// Largest load over the mean, both summed over layers, since the ranks wait for each other in each; 1 without load.
double rank_imbalance(const RankTraffic& traffic, const RankShape& shape);
// The same dispatch by dispatch: what steps waited for. Small batches are uneven whatever the placement.
double dispatch_imbalance(const RankTraffic& traffic, const RankShape& shape);
// Distinct experts of a rank in a dispatch, mean: [ranks].
std::vector<double> rank_active_experts(const RankTraffic& traffic);
// Which ranks are a source's own: equal runs of ranks in order; with more sources than ranks they share them.
bool owns_rank(uint32_t source, uint32_t sources, uint32_t rank, uint32_t ranks);
// Share of tokens that went to ranks which are not their source's own.
double remote_share(const RankTraffic& traffic, const RankShape& shape);
// For each source, the load of all sources on the ranks it owns (its share of it where it shares them), in
// token equivalents: expert selections / (layers × top_k).
std::vector<double> source_pressure(const RankTraffic& traffic, const RankShape& shape, uint32_t top_k);

}  // namespace kindred::engine

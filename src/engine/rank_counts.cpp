#include "engine/rank_counts.h"

#include <algorithm>
#include <numeric>

namespace kindred::engine {

// Sources that came after the mark have no counts in it.
void subtract_traffic(RankTraffic& from, const RankTraffic& mark, const RankShape& shape) {
  for (uint32_t l = 0; l < shape.layers; ++l) {
    for (uint32_t s = 0; s < mark.sources; ++s) {
      for (uint32_t e = 0; e < shape.experts; ++e) {
        from.tokens[(size_t{l} * from.sources + s) * shape.experts + e] -=
            mark.tokens[(size_t{l} * mark.sources + s) * shape.experts + e];
      }
    }
  }
  for (size_t i = 0; i < mark.rank_tokens.size(); ++i) from.rank_tokens[i] -= mark.rank_tokens[i];
  for (size_t l = 0; l < mark.active.size(); ++l) {
    from.active[l] -= mark.active[l];
    from.dispatches[l] -= mark.dispatches[l];
  }
}

RankCounts::RankCounts(RankShape shape) : shape_(shape) {}

RankCounts::Source::Source(const RankShape& shape)
    : experts_(shape.experts),
      tokens_(size_t{shape.layers} * shape.experts),
      rank_tokens_(shape.ranks),
      active_(shape.layers),
      dispatches_(shape.layers) {}

RankCounts::Source* RankCounts::open() {
  const std::lock_guard lock(mutex_);
  for (Source& source : sources_) {
    if (source.open_) continue;
    source.open_ = true;
    return &source;
  }
  if (sources_.size() == kMostSources) return nullptr;
  return &sources_.emplace_back(shape_);
}

void RankCounts::close(Source* source) {
  const std::lock_guard lock(mutex_);
  source->open_ = false;
}

RankTraffic RankCounts::total() const {
  const std::lock_guard lock(mutex_);
  return total_locked();
}

RankTraffic RankCounts::total_locked() const {
  RankTraffic out;
  out.sources = static_cast<uint32_t>(sources_.size());
  out.tokens.resize(size_t{shape_.layers} * out.sources * shape_.experts);
  out.rank_tokens.resize(size_t{out.sources} * shape_.ranks);
  out.active.resize(shape_.layers);
  out.dispatches.resize(shape_.layers);
  const auto get = [](const std::atomic<uint64_t>& counter) { return counter.load(std::memory_order_relaxed); };
  uint32_t s = 0;
  for (const Source& source : sources_) {
    for (uint32_t l = 0; l < shape_.layers; ++l) {
      for (uint32_t e = 0; e < shape_.experts; ++e) {
        out.tokens[(size_t{l} * out.sources + s) * shape_.experts + e] =
            get(source.tokens_[size_t{l} * shape_.experts + e]);
      }
      out.active[l] += get(source.active_[l]);
      out.dispatches[l] += get(source.dispatches_[l]);
    }
    for (uint32_t r = 0; r < shape_.ranks; ++r) {
      out.rank_tokens[size_t{s} * shape_.ranks + r] = get(source.rank_tokens_[r]);
    }
    ++s;
  }
  return out;
}

RankTraffic RankCounts::window(MonotonicTime now) const {
  const std::lock_guard lock(mutex_);
  RankTraffic out = total_locked();
  subtract_traffic(out, begin_.traffic, shape_);
  out.seconds = seconds_between(begin_.at, now);
  return out;
}

void RankCounts::reset_window(MonotonicTime now) {
  const std::lock_guard lock(mutex_);
  begin_ = {total_locked(), now};
  middle_ = begin_;
}

void RankCounts::rotate(MonotonicTime now, std::chrono::milliseconds length) {
  const std::lock_guard lock(mutex_);
  if (now - middle_.at < length) return;
  begin_ = std::move(middle_);
  middle_ = {total_locked(), now};
}

std::vector<uint64_t> expert_tokens(const RankTraffic& traffic, const RankShape& shape) {
  std::vector<uint64_t> out(size_t{shape.layers} * shape.experts);
  for (size_t i = 0; i < traffic.tokens.size(); ++i) {
    const size_t layer = i / (size_t{traffic.sources} * shape.experts);
    out[layer * shape.experts + i % shape.experts] += traffic.tokens[i];
  }
  return out;
}

std::vector<uint64_t> rank_loads(const RankTraffic& traffic, const RankShape& shape) {
  std::vector<uint64_t> out(shape.ranks);
  for (size_t i = 0; i < traffic.rank_tokens.size(); ++i) out[i % shape.ranks] += traffic.rank_tokens[i];
  return out;
}

double rank_imbalance(std::span<const uint64_t> loads) {
  const auto sum = std::accumulate(loads.begin(), loads.end(), uint64_t{0});
  if (sum == 0) return 1;
  return static_cast<double>(std::ranges::max(loads)) * static_cast<double>(loads.size()) / static_cast<double>(sum);
}

bool owns_rank(uint32_t source, uint32_t sources, uint32_t rank, uint32_t ranks) {
  const auto begin = static_cast<uint32_t>(uint64_t{source} * ranks / sources);
  const auto end = static_cast<uint32_t>((uint64_t{source} + 1) * ranks / sources);
  return rank >= begin && rank < std::max(begin + 1, end);
}

double remote_share(const RankTraffic& traffic, const RankShape& shape) {
  uint64_t remote = 0, all = 0;
  for (uint32_t s = 0; s < traffic.sources; ++s) {
    for (uint32_t r = 0; r < shape.ranks; ++r) {
      const uint64_t tokens = traffic.rank_tokens[size_t{s} * shape.ranks + r];
      all += tokens;
      if (!owns_rank(s, traffic.sources, r, shape.ranks)) remote += tokens;
    }
  }
  return all == 0 ? 0 : static_cast<double>(remote) / static_cast<double>(all);
}

std::vector<double> source_pressure(const RankTraffic& traffic, const RankShape& shape, uint32_t top_k) {
  const std::vector<uint64_t> loads = rank_loads(traffic, shape);
  const double selections = std::max(1.0, static_cast<double>(shape.layers) * top_k);
  std::vector<double> out(traffic.sources);
  for (uint32_t r = 0; r < shape.ranks; ++r) {
    uint32_t owners = 0;
    for (uint32_t s = 0; s < traffic.sources; ++s) owners += owns_rank(s, traffic.sources, r, shape.ranks) ? 1 : 0;
    for (uint32_t s = 0; s < traffic.sources; ++s) {
      if (!owns_rank(s, traffic.sources, r, shape.ranks)) continue;
      out[s] += static_cast<double>(loads[r]) / owners / selections;
    }
  }
  return out;
}

}  // namespace kindred::engine

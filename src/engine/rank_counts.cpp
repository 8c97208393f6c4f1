#include "engine/rank_counts.h"

#include <algorithm>
#include <numeric>

namespace kindred::engine {

namespace {

// [layers][sources][width]. Sources that came after the mark have no counts in it.
void subtract_rows(std::vector<uint64_t>& from, uint32_t from_sources, const std::vector<uint64_t>& mark,
                   uint32_t mark_sources, size_t width) {
  const size_t layers = mark_sources == 0 ? 0 : mark.size() / (mark_sources * width);
  for (size_t l = 0; l < layers; ++l) {
    for (size_t i = 0; i < mark_sources * width; ++i)
      from[l * from_sources * width + i] -= mark[l * mark_sources * width + i];
  }
}

void subtract_all(std::vector<uint64_t>& from, const std::vector<uint64_t>& mark) {
  for (size_t i = 0; i < mark.size(); ++i) from[i] -= mark[i];
}

}  // namespace

void subtract_traffic(RankTraffic& from, const RankTraffic& mark, const RankShape& shape) {
  subtract_rows(from.tokens, from.sources, mark.tokens, mark.sources, shape.experts);
  subtract_rows(from.rank_tokens, from.sources, mark.rank_tokens, mark.sources, shape.ranks);
  subtract_all(from.active, mark.active);
  subtract_all(from.rank_active, mark.rank_active);
  subtract_all(from.dispatches, mark.dispatches);
  from.busiest_tokens -= mark.busiest_tokens;
}

RankCounts::RankCounts(RankShape shape) : shape_(shape) {}

RankCounts::Source::Source(const RankShape& shape)
    : experts_(shape.experts),
      ranks_(shape.ranks),
      tokens_(size_t{shape.layers} * shape.experts),
      rank_tokens_(size_t{shape.layers} * shape.ranks),
      active_(shape.layers),
      rank_active_(shape.ranks),
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
  out.rank_tokens.resize(size_t{shape_.layers} * out.sources * shape_.ranks);
  out.active.resize(shape_.layers);
  out.rank_active.resize(shape_.ranks);
  out.dispatches.resize(shape_.layers);
  const auto get = [](const std::atomic<uint64_t>& counter) { return counter.load(std::memory_order_relaxed); };
  uint32_t s = 0;
  for (const Source& source : sources_) {
    for (uint32_t l = 0; l < shape_.layers; ++l) {
      for (uint32_t e = 0; e < shape_.experts; ++e) {
        out.tokens[(size_t{l} * out.sources + s) * shape_.experts + e] =
            get(source.tokens_[size_t{l} * shape_.experts + e]);
      }
      for (uint32_t r = 0; r < shape_.ranks; ++r) {
        out.rank_tokens[(size_t{l} * out.sources + s) * shape_.ranks + r] =
            get(source.rank_tokens_[size_t{l} * shape_.ranks + r]);
      }
      out.active[l] += get(source.active_[l]);
      out.dispatches[l] += get(source.dispatches_[l]);
    }
    for (uint32_t r = 0; r < shape_.ranks; ++r) out.rank_active[r] += get(source.rank_active_[r]);
    out.busiest_tokens += get(source.busiest_);
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

namespace {

// `busiest`: a sum of largest loads, against the mean of the ranks.
double over_mean(uint64_t busiest, const RankTraffic& traffic, const RankShape& shape) {
  const auto all = std::accumulate(traffic.rank_tokens.begin(), traffic.rank_tokens.end(), uint64_t{0});
  if (all == 0) return 1;
  return static_cast<double>(busiest) * shape.ranks / static_cast<double>(all);
}

}  // namespace

double rank_imbalance(const RankTraffic& traffic, const RankShape& shape) {
  uint64_t busiest = 0;
  std::vector<uint64_t> loads(shape.ranks);
  for (uint32_t l = 0; l < shape.layers; ++l) {
    loads.assign(shape.ranks, 0);
    const size_t row = size_t{traffic.sources} * shape.ranks;
    for (size_t i = 0; i < row; ++i) loads[i % shape.ranks] += traffic.rank_tokens[l * row + i];
    busiest += std::ranges::max(loads);
  }
  return over_mean(busiest, traffic, shape);
}

double dispatch_imbalance(const RankTraffic& traffic, const RankShape& shape) {
  return over_mean(traffic.busiest_tokens, traffic, shape);
}

std::vector<double> rank_active_experts(const RankTraffic& traffic) {
  const auto dispatches = std::accumulate(traffic.dispatches.begin(), traffic.dispatches.end(), uint64_t{0});
  std::vector<double> out;
  for (const uint64_t active : traffic.rank_active) {
    out.push_back(dispatches == 0 ? 0 : static_cast<double>(active) / static_cast<double>(dispatches));
  }
  return out;
}

bool owns_rank(uint32_t source, uint32_t sources, uint32_t rank, uint32_t ranks) {
  const auto begin = static_cast<uint32_t>(uint64_t{source} * ranks / sources);
  const auto end = static_cast<uint32_t>((uint64_t{source} + 1) * ranks / sources);
  return rank >= begin && rank < std::max(begin + 1, end);
}

double remote_share(const RankTraffic& traffic, const RankShape& shape) {
  uint64_t remote = 0, all = 0;
  for (size_t i = 0; i < traffic.rank_tokens.size(); ++i) {
    const auto rank = static_cast<uint32_t>(i % shape.ranks);
    const auto source = static_cast<uint32_t>(i / shape.ranks % traffic.sources);
    all += traffic.rank_tokens[i];
    if (!owns_rank(source, traffic.sources, rank, shape.ranks)) remote += traffic.rank_tokens[i];
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

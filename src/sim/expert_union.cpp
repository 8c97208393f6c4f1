#include "sim/expert_union.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cstring>

namespace kindred::sim {
namespace {

using Words4 [[gnu::vector_size(32)]] = uint64_t;

}  // namespace

ExpertRanks ExpertRanks::linear(uint32_t layers, uint32_t experts, uint32_t ranks) {
  ExpertRanks out(layers, experts, ranks);
  for (uint32_t l = 0; l < layers; ++l) {
    for (uint32_t e = 0; e < experts; ++e) {
      const auto rank = static_cast<uint32_t>(static_cast<uint64_t>(e) * ranks / experts);
      out.masks_[(static_cast<size_t>(rank) * layers + l) * out.words_ + e / 64] |= uint64_t{1} << (e % 64);
    }
  }
  return out;
}

Result<ExpertRanks> ExpertRanks::make(uint32_t layers, uint32_t experts, uint32_t ranks,
                                      std::span<const uint32_t> placement) {
  const size_t cells = static_cast<size_t>(layers) * experts;
  if (placement.size() != cells) {
    return invalid(fmt::format("placement: {} entries; accepted: {} layers x {} experts = {}", placement.size(), layers,
                               experts, cells),
                   "placement");
  }
  ExpertRanks out(layers, experts, ranks);
  for (size_t i = 0; i < cells; ++i) {
    const size_t l = i / experts, e = i % experts;
    if (placement[i] >= ranks) {
      return invalid(
          fmt::format("placement: layer {}, expert {}: rank {}; accepted: 0 to {}", l, e, placement[i], ranks - 1),
          "placement");
    }
    out.masks_[(placement[i] * layers + l) * out.words_ + e / 64] |= uint64_t{1} << (e % 64);
  }
  return out;
}

uint32_t ExpertRanks::rank_of(uint32_t layer, uint32_t expert) const {
  uint32_t rank = 0;
  while ((mask(rank)[layer * words_ + expert / 64] >> (expert % 64) & 1) == 0) ++rank;
  return rank;
}

ExpertUnion::ExpertUnion(std::shared_ptr<const ExpertRanks> ranks)
    : ranks_(std::move(ranks)),
      bits_(static_cast<size_t>(ranks_->layers()) * ranks_->words(), 0),
      counts_(ranks_->layers(), 0) {}

void ExpertUnion::clear() {
  std::ranges::fill(bits_, 0);
  tokens_.clear();
}

void ExpertUnion::add(std::span<const uint64_t> token) {
  KINDRED_CHECK(token.size() == bits_.size());
  tokens_.push_back(token.data());
}

// Rows lie anywhere in tapes far larger than the caches, and waiting for them is most of a run's time: so the rows
// to come are fetched while this one is read.
void ExpertUnion::merge() {
  constexpr size_t kAhead = 3, kLine = 8;  // rows; words of a cache line
  uint64_t* const into = bits_.data();
  const size_t words = bits_.size();
  for (size_t t = 0; t < tokens_.size(); ++t) {
    if (t + kAhead < tokens_.size()) {
      for (size_t i = 0; i < words; i += kLine) __builtin_prefetch(tokens_[t + kAhead] + i);
    }
    const uint64_t* const from = tokens_[t];
    size_t i = 0;
    for (; i + 4 <= words; i += 4) {
      Words4 a, b;
      std::memcpy(&a, into + i, sizeof a);
      std::memcpy(&b, from + i, sizeof b);
      a |= b;
      std::memcpy(into + i, &a, sizeof a);
    }
    for (; i < words; ++i) into[i] |= from[i];
  }
  tokens_.clear();
}

void ExpertUnion::add_chunk(const expert::ExpertCounts& prompt, uint64_t chunk_tokens) {
  const uint32_t experts = prompt.shape.experts;
  if (chunk_tokens == 0 || prompt.tokens == 0) return;
  // c * chunk / T >= 0.693, in integers: the same on every machine.
  const uint64_t least = (693 * prompt.tokens + 1000 * chunk_tokens - 1) / (1000 * chunk_tokens);
  const auto threshold = static_cast<uint32_t>(std::clamp<uint64_t>(least, 1, UINT32_MAX));
  for (uint32_t l = 0; l < ranks_->layers(); ++l) {
    const uint32_t* const row = prompt.data.data() + static_cast<size_t>(l) * experts;
    uint64_t* const into = bits_.data() + static_cast<size_t>(l) * ranks_->words();
    for (uint32_t e = 0; e < experts; e += 64) {
      const uint32_t many = std::min<uint32_t>(64, experts - e);
      uint64_t word = 0;
      for (uint32_t i = 0; i < many; ++i) word |= static_cast<uint64_t>(row[e + i] >= threshold) << i;
      into[e / 64] |= word;
    }
  }
}

std::span<const uint32_t> ExpertUnion::count() {
  merge();
  const uint32_t words = ranks_->words();
  std::ranges::fill(counts_, 0);
  distinct_ = 0;
  for (uint32_t rank = 0; rank < ranks_->ranks(); ++rank) {
    const std::span<const uint64_t> mask = ranks_->mask(rank);
    for (size_t l = 0; l < counts_.size(); ++l) {
      uint32_t on_rank = 0;
      for (size_t w = l * words; w < (l + 1) * words; ++w) {
        on_rank += static_cast<uint32_t>(std::popcount(bits_[w] & mask[w]));
      }
      counts_[l] = std::max(counts_[l], on_rank);
      distinct_ += on_rank;
    }
  }
  return counts_;
}

}  // namespace kindred::sim

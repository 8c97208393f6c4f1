#include "sim/rank_flow.h"

#include <algorithm>
#include <bit>

namespace kindred::sim {
namespace {

constexpr float kUsedFrom = 0.693F;  // expected copies: used more likely than not

}  // namespace

RankFlow::RankFlow(uint32_t layers, uint32_t experts, uint32_t sources, uint32_t ranks)
    : layers_(layers),
      experts_(experts),
      sources_(sources),
      ranks_(ranks),
      owner_of_(ranks, 0),
      own_ranks_(sources, 0),
      counts_(sources, std::vector<float>(size_t{layers} * experts, 0)),
      window_(size_t{layers} * sources * experts, 0),
      copies_(size_t{layers} * ranks, 0),
      link_(layers, 0),
      distinct_(size_t{layers} * ranks, 0),
      sent_(sources, 0),
      received_(ranks, 0) {
  for (uint32_t l = 0; l < layers; ++l) {
    for (uint32_t e = 0; e < experts; ++e) rank_of_.push_back(static_cast<uint32_t>(uint64_t{e} * ranks / experts));
  }
  for (uint32_t s = 0; s < sources; ++s) {
    const place::RankRange own = place::ranks_of_source(s, sources, ranks);
    own_ranks_[s] = own.end - own.begin;
    for (uint32_t r = own.begin; r < own.end; ++r) owner_of_[r] = s;
  }
}

void RankFlow::place(std::span<const uint32_t> rank_of) {
  KINDRED_CHECK(rank_of.size() == rank_of_.size());
  rank_of_.assign(rank_of.begin(), rank_of.end());
}

void RankFlow::begin() {
  for (std::vector<float>& counts : counts_) std::ranges::fill(counts, 0.0F);
}

void RankFlow::add_token(uint32_t source, std::span<const uint64_t> row) {
  const size_t words = row.size() / layers_;
  float* counts = counts_[source].data();
  for (size_t l = 0; l < layers_; ++l, counts += experts_) {
    for (size_t w = 0; w < words; ++w) {
      for (uint64_t left = row[l * words + w]; left != 0; left &= left - 1)
        counts[w * 64 + std::countr_zero(left)] += 1;
    }
  }
}

void RankFlow::add_chunk(uint32_t source, const expert::ExpertCounts& prompt, uint32_t tokens) {
  if (prompt.tokens == 0) return;
  const auto share = static_cast<float>(static_cast<double>(tokens) / static_cast<double>(prompt.tokens));
  std::vector<float>& counts = counts_[source];
  for (size_t i = 0; i < counts.size(); ++i) counts[i] += share * static_cast<float>(prompt.data[i]);
}

void RankFlow::count() {
  std::ranges::fill(copies_, 0.0F);
  std::ranges::fill(distinct_, 0U);
  all_ = remote_ = busiest_ = 0;
  for (size_t l = 0; l < layers_; ++l) {
    std::ranges::fill(sent_, 0.0F);
    std::ranges::fill(received_, 0.0F);
    for (size_t e = 0; e < experts_; ++e) {
      const size_t cell = l * experts_ + e;
      const uint32_t rank = rank_of_[cell];
      float sum = 0;
      for (uint32_t s = 0; s < sources_; ++s) {
        const float copies = counts_[s][cell];
        sum += copies;
        window_[(l * sources_ + s) * experts_ + e] += copies;
        if (owner_of_[rank] == s) continue;
        sent_[s] += copies;
        received_[rank] += copies;
      }
      copies_[l * ranks_ + rank] += sum;
      if (sum >= kUsedFrom) ++distinct_[l * ranks_ + rank];
    }
    float link = *std::ranges::max_element(received_), busiest = 0;
    for (uint32_t s = 0; s < sources_; ++s) {
      link = std::max(link, sent_[s] / static_cast<float>(own_ranks_[s]));
      remote_ += sent_[s];
    }
    for (uint32_t r = 0; r < ranks_; ++r) {
      all_ += copies_[l * ranks_ + r];
      busiest = std::max(busiest, copies_[l * ranks_ + r]);
    }
    link_[l] = link;
    busiest_ += busiest;
  }
}

double RankFlow::rank_copies(uint32_t first, uint32_t last) const {
  double sum = 0;
  for (size_t l = 0; l < layers_; ++l) {
    for (uint32_t r = first; r < last; ++r) sum += copies_[l * ranks_ + r];
  }
  return sum;
}

place::Traffic RankFlow::take_window() {
  place::Traffic out{.layers = layers_, .sources = sources_, .experts = experts_, .tokens = std::move(window_)};
  window_.assign(out.tokens.size(), 0);
  return out;
}

}  // namespace kindred::sim

#include "sim/expert_load.h"

#include <algorithm>
#include <bit>
#include <numeric>

namespace kindred::sim {
namespace {

constexpr int64_t kWindow_ns = 1'000'000'000;

// Whatever the sum: nothing is known of a prompt without counts.
std::vector<double> normalised(std::vector<double> parts) {
  const double sum = std::accumulate(parts.begin(), parts.end(), 0.0);
  for (double& part : parts) part = sum > 0 ? part / sum : 1.0 / static_cast<double>(parts.size());
  return parts;
}

double between(const std::vector<double>& values, uint32_t first, uint32_t last) {
  return std::accumulate(values.begin() + first, values.begin() + last, 0.0);
}

}  // namespace

ExpertLoad::ExpertLoad(std::shared_ptr<const ExpertRanks> ranks)
    : ranks_(std::move(ranks)), now_(ranks_->ranks(), 0), before_(ranks_->ranks(), 0) {}

const ExpertLoad::Shares& ExpertLoad::of_prompt(const expert::ExpertCounts& counts) {
  Shares& out = known_[&counts];
  if (!out.empty()) return out;
  Shares tokens(ranks_->ranks(), 0);
  const uint32_t experts = counts.shape.experts, words = ranks_->words();
  for (uint32_t rank = 0; rank < ranks_->ranks(); ++rank) {
    const std::span<const uint64_t> mask = ranks_->mask(rank);
    uint64_t sum = 0;
    for (size_t l = 0; l < ranks_->layers(); ++l) {
      for (uint32_t e = 0; e < experts; ++e) {
        if ((mask[l * words + e / 64] >> (e % 64) & 1) != 0) sum += counts.data[l * experts + e];
      }
    }
    tokens[rank] = static_cast<double>(sum);
  }
  return out = normalised(std::move(tokens));
}

const ExpertLoad::Shares& ExpertLoad::of_tape(const ExpertTape& tape) {
  Shares& out = known_[&tape];
  if (!out.empty()) return out;
  Shares tokens(ranks_->ranks(), 0);
  const uint32_t stride = std::max(1U, tape.tokens() / kSampledTokens);
  for (uint32_t t = 0; t < tape.tokens(); t += stride) {
    const std::span<const uint64_t> row = tape.token(t);
    for (uint32_t rank = 0; rank < ranks_->ranks(); ++rank) {
      const std::span<const uint64_t> mask = ranks_->mask(rank);
      for (size_t w = 0; w < row.size(); ++w) tokens[rank] += std::popcount(row[w] & mask[w]);
    }
  }
  return out = normalised(std::move(tokens));
}

void ExpertLoad::move_to(int64_t now_ns) {
  const int64_t window = now_ns / kWindow_ns;
  if (window == window_) return;
  if (window == window_ + 1) before_.swap(now_);
  else std::ranges::fill(before_, 0);
  std::ranges::fill(now_, 0);
  window_ = window;
}

void ExpertLoad::add(const RequestExperts& experts, uint32_t prompt_tokens, uint32_t generated_tokens, int64_t now_ns) {
  move_to(now_ns);
  const auto add_shares = [this](const Shares& shares, uint32_t tokens) {
    for (size_t rank = 0; rank < shares.size(); ++rank) now_[rank] += shares[rank] * tokens;
  };
  if (prompt_tokens > 0) add_shares(of_prompt(*experts.prompt), prompt_tokens);
  if (generated_tokens > 0) add_shares(of_tape(*experts.decode), generated_tokens);
}

void ExpertLoad::add_ranks(std::span<const double> tokens, int64_t now_ns) {
  move_to(now_ns);
  for (size_t rank = 0; rank < now_.size(); ++rank) now_[rank] += tokens[rank];
}

double ExpertLoad::recent_tokens(uint32_t first, uint32_t last, int64_t now_ns) {
  move_to(now_ns);
  const double gone = static_cast<double>(now_ns - window_ * kWindow_ns) / static_cast<double>(kWindow_ns);
  return between(now_, first, last) + (1 - gone) * between(before_, first, last);
}

double ExpertLoad::prompt_share(const RequestExperts& experts, uint32_t first, uint32_t last) {
  return between(of_prompt(*experts.prompt), first, last);
}

double ExpertLoad::generated_share(const RequestExperts& experts, uint32_t first, uint32_t last) {
  return between(of_tape(*experts.decode), first, last);
}

}  // namespace kindred::sim

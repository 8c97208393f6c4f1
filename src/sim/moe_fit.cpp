#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <optional>

#include "base/rng.h"
#include "sim/kernel_fit.h"
#include "sim/nelder_mead.h"
#include "sim/step_time.h"

namespace kindred::sim {
namespace {

constexpr double kInfeasible = 1e9;
constexpr int kUnionDraws = 200;

// A row with what is known or simulated of its experts.
struct Sample {
  uint32_t tokens = 0, experts = 0, top_k = 0;
  double distinct = 0, us = 0;
  bool skewed = false, fitted = false;

  double assignments() const { return static_cast<double>(tokens) * top_k; }
};

double predict(const MoeFigures& figures, const Sample& sample) {
  return moe_kernel_us(figures, sample.assignments(), sample.distinct, sample.experts, sample.top_k, sample.skewed);
}

double mean_log_error(const MoeFigures& figures, const std::vector<Sample>& samples) {
  double sum = 0;
  for (const Sample& sample : samples) sum += std::abs(std::log(predict(figures, sample) / sample.us));
  return sum / static_cast<double>(samples.size());
}

// "power_law_1.2" -> 1.2; "balanced" -> none.
std::optional<double> exponent(const std::string& distribution) {
  constexpr std::string_view kPrefix = "power_law_";
  if (!distribution.starts_with(kPrefix)) return std::nullopt;
  try {
    return std::stod(distribution.substr(kPrefix.size()));
  } catch (const std::exception&) {
    return std::nullopt;
  }
}

struct Line {
  double a = 0, b = 0, r2 = 0;
};

Line straight_line(const std::vector<Sample>& samples) {
  const auto n = static_cast<double>(samples.size());
  double x = 0, y = 0, xx = 0, xy = 0, yy = 0;
  for (const Sample& sample : samples) x += sample.distinct / n, y += sample.us / n;
  for (const Sample& sample : samples) {
    xx += (sample.distinct - x) * (sample.distinct - x);
    xy += (sample.distinct - x) * (sample.us - y);
    yy += (sample.us - y) * (sample.us - y);
  }
  Line line;
  line.b = xx > 0 ? xy / xx : 0;
  line.a = y - line.b * x;
  line.r2 = xx > 0 && yy > 0 ? xy * xy / (xx * yy) : 0;
  return line;
}

std::vector<MoeBlock> blocks_between(uint32_t least, uint32_t most) {
  std::vector<MoeBlock> blocks;
  for (uint32_t rows = least; rows <= most; rows *= 2) blocks.push_back({.rows = rows, .tile_us = 0});
  return blocks;
}

struct Candidate {
  MoeFigures figures;
  double error = kInfeasible;
};

void keep_better(Candidate& best, Candidate next) {
  if (next.error < best.error - 1e-9) best = std::move(next);
}

// Parameters: time of a tile that does not depend on its rows, time per row, time per token, p. Fetching is what
// the line leaves once the smallest tiles have had their share: (b^p - tile^p)^(1/p).
class OverlapFit {
 public:
  OverlapFit(const Line& line, const std::vector<Sample>& samples) : line_(line), samples_(samples) {}

  Candidate run(double factor, uint32_t least, uint32_t most) const {
    const Sample& largest = samples_.back();
    const double tiles = moe_tiles(largest.assignments(), largest.distinct, most, false);
    const double tile = std::max((largest.us - line_.a) / tiles, 1e-6);
    Candidate best;
    for (const double fixed : {0.3 * tile, 0.9 * line_.b}) {
      for (const double power : {3.0, 12.0}) {
        std::vector<double> at = {fixed, 0.7 * tile / most, 0.005, power};
        for (int round = 0; round < 3; ++round) {
          const std::vector<double> scale = {0.1 * tile, 0.2 * tile / most, 0.02, 1};
          at = nelder_mead([&](std::span<const double> p) { return error(p, factor, least, most); }, at, scale, 250).at;
        }
        keep_better(best, {figures(at, factor, least, most).value_or(MoeFigures{}), error(at, factor, least, most)});
      }
    }
    return best;
  }

 private:
  std::optional<MoeFigures> figures(std::span<const double> at, double factor, uint32_t least, uint32_t most) const {
    const double power = at[3];
    if (std::min({at[0], at[1], at[2]}) < 0 || power < 1 || power >= kHardMax) return std::nullopt;
    MoeFigures figures;
    figures.a_us = line_.a;
    figures.token_us = at[2];
    figures.power = power;
    figures.block_factor = factor;
    figures.blocks = blocks_between(least, most);
    for (MoeBlock& block : figures.blocks) block.tile_us = at[0] + at[1] * block.rows;
    const double share = figures.blocks.front().tile_us / line_.b;
    if (share >= 1) return std::nullopt;
    figures.b_us = line_.b * std::pow(1 - std::pow(share, power), 1 / power);
    return figures;
  }
  double error(std::span<const double> at, double factor, uint32_t least, uint32_t most) const {
    const std::optional<MoeFigures> of = figures(at, factor, least, most);
    return of ? mean_log_error(*of, samples_) : kInfeasible;
  }

  const Line& line_;
  const std::vector<Sample>& samples_;
};

// The mean over the rows of each block size of what is left for a tile.
Candidate fit_tiled(const Line& line, const std::vector<Sample>& samples, double factor, uint32_t least,
                    uint32_t most) {
  Candidate candidate;
  MoeFigures& figures = candidate.figures;
  figures.a_us = line.a;
  figures.b_us = line.b;
  figures.power = kHardMax;
  figures.block_factor = factor;
  figures.blocks = blocks_between(least, most);
  std::vector<double> rows(figures.blocks.size(), 0);
  for (const Sample& sample : samples) {
    const size_t at = moe_block(figures, sample.assignments() / sample.experts);
    const double tiles = moe_tiles(sample.assignments(), sample.distinct, figures.blocks[at].rows, sample.skewed);
    rows[at] += 1;
    figures.blocks[at].tile_us += ((sample.us - line.a) / tiles - figures.blocks[at].tile_us) / rows[at];
  }
  for (size_t at = 1; at < rows.size(); ++at) {
    if (rows[at] == 0) figures.blocks[at].tile_us = figures.blocks[at - 1].tile_us;
  }
  candidate.error = mean_log_error(figures, samples);
  return candidate;
}

std::vector<Sample> select(std::span<const MoeRow> rows, const MoeSelection& selection, std::string& kernel) {
  std::vector<Sample> samples;
  std::map<std::pair<uint32_t, double>, double> unions;
  for (const MoeRow& row : rows) {
    if (row.ranks != 1 || row.gpu != selection.gpu || row.framework != selection.framework ||
        row.version != selection.version || row.model != selection.model || row.dtype != selection.dtype) {
      continue;
    }
    const std::optional<double> alpha = exponent(row.distribution);
    const bool fitted = row.distribution == selection.fit_to;
    // Balanced rows are no test where they are no fit: their experts are not known then.
    if (!alpha && !fitted) continue;
    kernel = row.kernel;
    Sample sample{.tokens = row.tokens,
                  .experts = row.experts,
                  .top_k = row.top_k,
                  .distinct = 0,
                  .us = row.us,
                  .skewed = alpha.has_value(),
                  .fitted = fitted};
    sample.distinct = std::min<double>(row.experts, sample.assignments());
    if (alpha) {
      const auto [at, fresh] = unions.try_emplace({row.tokens, *alpha}, 0);
      if (fresh) at->second = power_law_union(row.tokens, row.experts, row.top_k, *alpha);
      sample.distinct = at->second;
    }
    samples.push_back(sample);
  }
  std::stable_sort(samples.begin(), samples.end(),
                   [](const Sample& a, const Sample& b) { return a.tokens < b.tokens; });
  return samples;
}

}  // namespace

double power_law_union(uint32_t tokens, uint32_t experts, uint32_t top_k, double alpha) {
  const auto total = static_cast<int64_t>(tokens) * top_k;
  const bool many = total > experts;
  const double low = std::pow(many ? 1 : 0.01, 1 - alpha);
  const double high = std::pow(many ? 0.8 * tokens : 2.0, 1 - alpha);
  Rng rng(mix64(tokens) ^ mix64(experts * 1000 + top_k));
  int64_t distinct = 0;
  std::vector<double> share(experts);
  std::vector<int64_t> counts(experts);
  for (int draw = 0; draw < kUnionDraws; ++draw) {
    double sum = 0;
    for (double& x : share) sum += x = std::pow((high - low) * rng.uniform() + low, 1 / (1 - alpha));
    int64_t left = total;
    for (uint32_t e = 0; e < experts; ++e) {
      counts[e] = std::min<int64_t>(std::llrint(share[e] / sum * static_cast<double>(total)), tokens);
      left -= counts[e];
    }
    for (; left > 0; --left) ++*std::min_element(counts.begin(), counts.end());
    for (; left < 0; ++left) --*std::max_element(counts.begin(), counts.end());
    distinct += std::count_if(counts.begin(), counts.end(), [](int64_t count) { return count > 0; });
  }
  return static_cast<double>(distinct) / kUnionDraws;
}

Result<MoeFit> fit_moe(std::span<const MoeRow> rows, const MoeSelection& selection) {
  MoeFit fit;
  const std::vector<Sample> samples = select(rows, selection, fit.kernel);
  std::vector<Sample> sparse, full;
  for (const Sample& sample : samples) {
    if (sample.fitted) (sample.assignments() <= sample.experts ? sparse : full).push_back(sample);
  }
  if (sparse.size() < 3 || full.size() < 6) {
    return invalid(
        fmt::format("moe_kernels: {} rows of {} on {} ({}, {} {}, {}, one rank) with at most as many "
                    "assignments as experts, {} with more; at least 3 and 6 are needed",
                    sparse.size(), selection.model, selection.gpu, selection.dtype, selection.framework,
                    selection.version, selection.fit_to, full.size()));
  }
  const Line line = straight_line(sparse);
  Candidate best;
  for (const double factor : selection.block_factors) {
    for (const uint32_t most : {64U, 128U, 256U}) {
      keep_better(best, selection.tiled ? fit_tiled(line, full, factor, selection.least_rows, most)
                                        : OverlapFit(line, full).run(factor, selection.least_rows, most));
    }
  }
  if (best.error >= kInfeasible || line.b <= 0) {
    return invalid(
        fmt::format("moe_kernels: the rows of {} on {} fit no law: time does not rise with the experts in "
                    "use",
                    selection.model, selection.gpu));
  }
  fit.figures = std::move(best.figures);
  fit.a_us = line.a;
  fit.b_us = line.b;
  fit.r2 = line.r2;
  for (const Sample& sample : samples) {
    const double us = predict(fit.figures, sample);
    (sample.fitted ? fit.fitted : fit.held_out).add(us, sample.us);
    if (!sample.fitted && sample.tokens <= kDecodeTokens) fit.held_out_decode.add(us, sample.us);
  }
  return fit;
}

}  // namespace kindred::sim

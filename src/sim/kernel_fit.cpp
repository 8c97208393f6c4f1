// Attention, dense products, all-to-all. The experts' kernels are in moe_fit.cpp.
#include "sim/kernel_fit.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <set>

#include "sim/nelder_mead.h"
#include "sim/step_time.h"

namespace kindred::sim {
namespace {

constexpr double kOutside = 1e9;  // where the search must not go
constexpr int kRounds = 4, kIterations = 300;

// The mean of |ln(predicted / measured)|: relative, and not led by single rows that are off.
template <class Row, class Predict>
double log_error(const std::vector<Row>& rows, Predict predict) {
  double sum = 0;
  for (const Row& row : rows) sum += std::abs(std::log(predict(row) / row.us));
  return sum / static_cast<double>(rows.size());
}

bool any_negative(std::span<const double> values) {
  return std::any_of(values.begin(), values.end(), [](double value) { return value < 0; });
}

// Restarts from where the last search ended, since a simplex may collapse early.
std::vector<double> minimise(const std::function<double(std::span<const double>)>& f, std::vector<double> start) {
  for (int round = 0; round < kRounds; ++round) {
    std::vector<double> scale;
    for (const double value : start) scale.push_back(std::max(0.2 * value, 1e-9));
    start = nelder_mead(f, start, scale, kIterations).at;
  }
  return start;
}

struct Split {
  std::vector<AttentionRow> fit, held;
};

double attention_us(std::span<const double> law, const AttentionRow& row) {
  const double seen = row.window > 0 ? std::min(row.context, row.window) : row.context;
  return law[0] + law[1] * row.requests + law[2] * row.requests * seen;
}

// launch + bytes / rate, of rows (bytes, us).
struct BytesRow {
  double bytes = 0, us = 0;
};
struct BytesFit {
  double launch_us = 0, bytes_per_us = 0;
};

BytesFit fit_bytes(const std::vector<BytesRow>& rows, FitError& fitted, FitError& held_out) {
  std::vector<BytesRow> fit, held;
  for (size_t i = 0; i < rows.size(); ++i) (i % 2 == 0 ? fit : held).push_back(rows[i]);
  const auto predict = [](std::span<const double> law, const BytesRow& row) { return law[0] + law[1] * row.bytes; };
  const std::vector<double> law = minimise(
      [&](std::span<const double> at) {
        return any_negative(at) ? kOutside : log_error(fit, [&](const BytesRow& row) { return predict(at, row); });
      },
      {fit.front().us, fit.back().us / fit.back().bytes});
  for (const BytesRow& row : fit) fitted.add(predict(law, row), row.us);
  for (const BytesRow& row : held) held_out.add(predict(law, row), row.us);
  return {.launch_us = law[0], .bytes_per_us = 1 / law[1]};
}

}  // namespace

void FitError::add(double predicted, double measured) {
  const double error = std::abs(predicted / measured - 1);
  ++rows;
  mean += (error - mean) / static_cast<double>(rows);
  worst = std::max(worst, error);
}

Result<AttentionFit> fit_attention(std::span<const AttentionRow> rows, uint32_t heads, uint32_t kv_heads,
                                   uint32_t head_dim, uint32_t window) {
  Split split;
  size_t seen = 0;
  for (const AttentionRow& row : rows) {
    if (row.heads != heads || row.kv_heads != kv_heads || row.head_dim != head_dim || row.window != window) continue;
    (seen++ % 2 == 0 ? split.fit : split.held).push_back(row);
  }
  if (seen < 8) {
    return invalid(
        fmt::format("h200_decode_attention: {} rows of {} heads, {} KV heads, head size {}, window {}; at "
                    "least 8 are needed",
                    seen, heads, kv_heads, head_dim, window));
  }
  const std::vector<double> law = minimise(
      [&](std::span<const double> at) {
        if (any_negative(at)) return kOutside;
        return log_error(split.fit, [&](const AttentionRow& row) { return attention_us(at, row); });
      },
      {10, 0.1, 5e-4});
  AttentionFit fit{
      .law = {.launch_us = law[0], .request_us = law[1], .token_us = law[2]}, .fitted = {}, .held_out = {}};
  for (const AttentionRow& row : split.fit) fit.fitted.add(attention_us(law, row), row.us);
  for (const AttentionRow& row : split.held) fit.held_out.add(attention_us(law, row), row.us);
  return fit;
}

Result<GemmFit> fit_gemm(std::span<const GemmRow> rows) {
  if (rows.size() < 16) return invalid(fmt::format("h200_gemm_bf16: {} rows; at least 16 are needed", rows.size()));
  std::set<uint32_t> sizes;
  for (const GemmRow& row : rows) sizes.insert(row.k);
  const uint32_t middle = *std::next(sizes.begin(), static_cast<std::ptrdiff_t>(sizes.size() / 2));
  std::vector<GemmRow> fit, held;
  for (const GemmRow& row : rows) (sizes.size() > 1 && row.k == middle ? held : fit).push_back(row);
  const auto figures = [](std::span<const double> at) {
    GemmFigures of;
    of.launch_us = at[0];
    of.bytes_per_us = at[1] * 1e6;
    of.flops_per_us = at[2] * 1e6;
    of.power = at[3];
    of.edge = at[4];
    return of;
  };
  const auto predict = [](const GemmFigures& of, const GemmRow& row) {
    return gemm_kernel_us(of, row.m, row.n, row.k, 2);
  };
  const std::vector<double> law = minimise(
      [&](std::span<const double> at) {
        if (any_negative(at) || at[1] <= 0 || at[2] <= 0 || at[3] < 1 || at[3] > kHardMax) return kOutside;
        return log_error(fit, [&](const GemmRow& row) { return predict(figures(at), row); });
      },
      {4, 4, 700, 3, 8});
  GemmFit result{.figures = figures(law), .fitted = {}, .held_out = {}};
  for (const GemmRow& row : fit) result.fitted.add(predict(result.figures, row), row.us);
  for (const GemmRow& row : held) result.held_out.add(predict(result.figures, row), row.us);
  return result;
}

Result<AllToAllFit> fit_all_to_all(std::span<const AllToAllRow> rows, uint32_t hidden, uint32_t top_k) {
  AllToAllFit fit;
  const auto distance = [hidden](uint32_t of) { return of > hidden ? of - hidden : hidden - of; };
  // Fewer rows have GPT-OSS's top 4 (none) than a top 8: bytes, not copies, set the pace.
  uint32_t nearest_k = 0;
  for (const AllToAllRow& row : rows) {
    const bool closer_k = nearest_k == 0 || std::abs(int64_t{row.top_k} - top_k) < std::abs(int64_t{nearest_k} - top_k);
    if (closer_k && row.top_k >= 6) nearest_k = row.top_k;
  }
  for (const AllToAllRow& row : rows) {
    if (row.top_k == nearest_k && (fit.hidden == 0 || distance(row.hidden) < distance(fit.hidden))) {
      fit.hidden = row.hidden;
    }
  }
  std::vector<BytesRow> dispatch, combine;
  uint32_t experts = 0;
  for (const AllToAllRow& row : rows) {
    if (row.top_k != nearest_k || row.hidden != fit.hidden) continue;
    if (experts == 0) experts = row.experts;
    if (row.experts != experts) continue;
    const double values = static_cast<double>(row.tokens) * row.top_k * row.hidden;
    dispatch.push_back({.bytes = values, .us = row.dispatch_us});
    combine.push_back({.bytes = 2 * values, .us = row.combine_us});
  }
  if (dispatch.size() < 8) {
    return invalid(fmt::format("h200_deepep_low_latency: {} rows near hidden size {} and top {}; at least 8 are needed",
                               dispatch.size(), hidden, top_k));
  }
  const BytesFit out = fit_bytes(dispatch, fit.fitted, fit.held_out);
  const BytesFit back = fit_bytes(combine, fit.fitted, fit.held_out);
  fit.figures.dispatch_us = out.launch_us;
  fit.figures.dispatch_bytes_per_us = out.bytes_per_us;
  fit.figures.combine_us = back.launch_us;
  fit.figures.combine_bytes_per_us = back.bytes_per_us;
  return fit;
}

}  // namespace kindred::sim

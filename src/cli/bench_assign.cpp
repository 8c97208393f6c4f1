// `kindred bench assign`: the exact balanced assignment of the cohort fit.

#include <fmt/format.h>

#include <algorithm>
#include <string_view>
#include <vector>

#include "base/rng.h"
#include "cli/bench.h"
#include "cli/terminal.h"
#include "expert/assign.h"

namespace kindred::cli {
namespace {

struct AssignOptions {
  int64_t rows = 10'000, columns = 16, runs = 7, seed = 1;
  BenchOutput output;
};

struct AssignCase {
  std::string_view name;
  void (*fill)(std::vector<double>& cost, size_t columns, Rng& rng);
};

// What k-means meets: cosine distances of clustered points, some clusters above their cap.
void clustered(std::vector<double>& cost, size_t columns, Rng& rng) {
  for (size_t begin = 0; begin < cost.size(); begin += columns) {
    const uint64_t home = std::min(rng.below(columns), rng.below(columns + 3));
    for (size_t c = 0; c < columns; ++c) cost[begin + c] = (c == home ? 0.2 : 0.5) + 0.4 * rng.uniform();
  }
}

// The worst case: all rows rank the columns alike, so that nearly all must be moved along long paths.
void contested(std::vector<double>& cost, size_t columns, Rng& rng) {
  for (size_t i = 0; i < cost.size(); ++i) cost[i] = 0.3 * static_cast<double>(i % columns) + 0.1 * rng.uniform();
}

struct AssignTimes {
  std::vector<double> exact_s, scan_s;
};

// `scan`: a pass that only takes row minima, the least that any method must do, timed in the same run.
AssignTimes time_assign(const AssignOptions& options, const AssignCase& with) {
  const auto n = static_cast<size_t>(options.rows), k = static_cast<size_t>(options.columns);
  const std::vector<uint32_t> capacity(k, static_cast<uint32_t>((n + k - 1) / k));
  std::vector<double> cost(n * k);
  AssignTimes times;
  for (int64_t run = 0; run < options.runs; ++run) {
    Rng rng(static_cast<uint64_t>(options.seed + run));
    with.fill(cost, k, rng);
    double minima = 0;
    times.scan_s.push_back(seconds([&] {
      for (size_t i = 0; i < n; ++i) minima += *std::min_element(&cost[i * k], &cost[i * k] + k);
    }));
    double total = 0;
    times.exact_s.push_back(seconds([&] {
      const Result<expert::Assignment> assigned = expert::assign_rows(cost, capacity);
      KINDRED_CHECK(assigned.ok());
      total = assigned->total;
    }));
    KINDRED_CHECK(total >= minima - 1e-6);  // and keeps the scan from being optimised away
  }
  return times;
}

int measure_assign(const AssignOptions& options) {
  Table table({"exact assignment", "median ms", "most ms", "row minima ms"});
  const Machine machine = this_machine();
  Json json = {{"bench", "assign"},
               {"machine", machine_json(machine)},
               {"rows", options.rows},
               {"columns", options.columns},
               {"runs", options.runs}};
  for (const AssignCase& with : {AssignCase{"clustered", clustered}, AssignCase{"contested", contested}}) {
    const AssignTimes times = time_assign(options, with);
    const double median_ms = 1e3 * quantile(times.exact_s, 0.5), most_ms = 1e3 * quantile(times.exact_s, 1);
    const double scan_ms = 1e3 * quantile(times.scan_s, 0.5);
    table.row({fmt::format("{} x {}, {}", options.rows, options.columns, with.name), fmt::format("{:.1f}", median_ms),
               fmt::format("{:.1f}", most_ms), fmt::format("{:.2f}", scan_ms)});
    json[fmt::format("{}_ms", with.name)] = median_ms;
    json[fmt::format("{}_row_minima_ms", with.name)] = scan_ms;
  }
  fmt::print("{}\n", options.output.json ? dump_json(json) : table.text() + "\n  " + machine_text(machine));
  return 0;
}

}  // namespace

int bench_assign(Args args) {
  AssignOptions options;
  ConfigSchema schema("bench assign [--rows N] [--columns K]",
                      "Times the exact balanced assignment of the cohort fit: requests to cohorts of equal size.");
  schema.integer("rows", &options.rows, 1, 1'000'000, "requests");
  schema.integer("columns", &options.columns, 1, 1024, "cohorts");
  schema.integer("runs", &options.runs, 1, 1000, "the median of so many");
  schema.integer("seed", &options.seed, 0, 1LL << 40, "of the random costs");
  options.output.declare(schema, /*draws=*/false);
  if (const auto status = parse_bench_flags(schema, args)) return *status;
  return measure_assign(options);
}

}  // namespace kindred::cli

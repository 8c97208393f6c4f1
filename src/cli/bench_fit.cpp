// `kindred bench fit`: the balanced k-means of the cohort fit at ELDR's size, and the exact assignment
// inside it against SciPy's Hungarian algorithm on the same costs, in one run.
//
// SciPy solves the square problem: each cohort's column is repeated once per place. That is O(n^3) in
// time and n^2 * 8 bytes, so it is tried at growing n until one takes longer than its limit.

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <span>
#include <vector>

#include "base/rng.h"
#include "cli/bench.h"
#include "cli/plot.h"
#include "cli/process.h"
#include "cli/terminal.h"
#include "expert/assign.h"
#include "expert/inner_product.h"
#include "expert/kmeans.h"

namespace kindred::cli {
namespace {

struct FitBenchOptions {
  int64_t requests = 10'000, dims = 6'144, clusters = 16, iterations = 10, seed = 1;
  std::string python;
  int64_t scipy_limit_s = 120;
  BenchOutput output;
};

// Unit vectors around `clusters` directions of unlike popularity, so that the cap has work to do.
std::vector<float> random_signatures(const FitBenchOptions& options, Rng& rng) {
  const auto n = static_cast<size_t>(options.requests), d = static_cast<size_t>(options.dims);
  const auto k = static_cast<size_t>(options.clusters);
  std::vector<float> homes(k * d), out(n * d);
  for (float& x : homes) x = rng.uniform() < 0.1 ? static_cast<float>(rng.uniform()) : 0.0F;
  for (size_t i = 0; i < n; ++i) {
    const size_t home = std::min(rng.below(k), rng.below(k));
    double norm = 0;
    for (size_t c = 0; c < d; ++c) {
      const float x = homes[home * d + c] + 0.25F * static_cast<float>(rng.uniform());
      out[i * d + c] = x;
      norm += static_cast<double>(x) * static_cast<double>(x);
    }
    const auto scale = static_cast<float>(1 / std::sqrt(norm));
    for (size_t c = 0; c < d; ++c) out[i * d + c] *= scale;
  }
  return out;
}

struct FitTimes {
  double iteration_s = 0, assign_s = 0;
  uint32_t iterations = 0;
  std::vector<float> centroids;
  std::vector<double> cost;  // [n * k], cosine distances to the final centroids
};

FitTimes time_kmeans(const FitBenchOptions& options, const expert::Points& points) {
  const auto k = static_cast<size_t>(options.clusters);
  FitTimes times;
  for (size_t c = 0; c < k; ++c) {
    const auto row = points.row(c * points.size() / k);
    times.centroids.insert(times.centroids.end(), row.begin(), row.end());
  }
  std::vector<uint32_t> assignment;
  Progress progress("k-means", static_cast<size_t>(options.iterations));
  std::vector<double> each_s;
  each_s.reserve(static_cast<size_t>(options.iterations));
  for (int64_t i = 0; i < options.iterations; ++i) {
    const std::vector<float> before = times.centroids;
    each_s.push_back(seconds([&] { expert::kmeans_step(points, times.centroids, assignment); }));
    progress.set(static_cast<size_t>(i) + 1);
    ++times.iterations;
    if (before == times.centroids) break;
  }
  progress.set(static_cast<size_t>(options.iterations));
  times.iteration_s = quantile(each_s, 0.5);
  times.cost.resize(points.size() * k);
  std::vector<float> cosines(k);
  for (size_t i = 0; i < points.size(); ++i) {
    expert::dots(points.row(i), times.centroids, cosines);
    for (size_t c = 0; c < k; ++c) times.cost[i * k + c] = 1.0 - static_cast<double>(cosines[c]);
  }
  return times;
}

struct Solved {
  double seconds = 0, total = 0;
};

Solved assign_ours(std::span<const double> cost, size_t rows, size_t columns) {
  const std::vector<uint32_t> capacity(columns, static_cast<uint32_t>((rows + columns - 1) / columns));
  Solved out;
  std::vector<double> times;
  for (int run = 0; run < 3; ++run) {
    times.push_back(seconds([&] {
      const Result<expert::Assignment> assigned = expert::assign_rows(cost, capacity);
      KINDRED_CHECK(assigned.ok());
      out.total = assigned->total;
    }));
  }
  out.seconds = quantile(times, 0.5);
  return out;
}

// Reads [rows, columns] float64 from a file; prints seconds and total of the solution. Small enough to be
// passed with -c, so that the program needs no file beside it.
constexpr const char* kScipyProgram = R"(
import sys, time
import numpy, scipy
from scipy.optimize import linear_sum_assignment
path, rows, columns = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
cost = numpy.fromfile(path).reshape(rows, columns)
square = numpy.repeat(cost, -(-rows // columns), axis=1)
began = time.perf_counter()
row, column = linear_sum_assignment(square)
print(time.perf_counter() - began, square[row, column].sum(), "scipy", scipy.__version__)
)";

Result<Solved> assign_scipy(const FitBenchOptions& options, const ScratchDir& scratch, std::span<const double> cost,
                            size_t rows, std::string& version) {
  const std::string path = scratch.path() + "/cost.f64";
  const std::string_view bytes(reinterpret_cast<const char*>(cost.data()), cost.size_bytes());
  if (const Status written = write_file(path, bytes); !written) return written.error();
  const std::string log = scratch.path() + "/scipy.log";
  const Result<int> status =
      run_program({options.python, "-c", kScipyProgram, path, std::to_string(rows), std::to_string(options.clusters)},
                  log, std::chrono::seconds(options.scipy_limit_s * 4 + 60));
  if (!status) return status.error();
  const Result<std::string> text = read_file(log);
  Solved solved;
  char name[32] = {};
  if (*status != 0 || !text ||
      std::sscanf(text->c_str(), "%lf %lf scipy %31s", &solved.seconds, &solved.total, name) != 3) {
    return Error{ErrorCode::kUnavailable, fmt::format("{} with SciPy: {}", options.python, text ? *text : "no output")};
  }
  version = name;
  return solved;
}

struct Comparison {
  size_t rows = 0;
  Solved ours, scipy;
};

// Doubling n until SciPy takes longer than the limit, or all requests are in.
Result<std::vector<Comparison>> compare_with_scipy(const FitBenchOptions& options, const FitTimes& times,
                                                   std::string& version) {
  Result<ScratchDir> scratch = ScratchDir::make();
  if (!scratch) return std::move(scratch).error();
  const auto n = static_cast<size_t>(options.requests), k = static_cast<size_t>(options.clusters);
  std::vector<Comparison> out;
  for (size_t rows = std::min<size_t>(n, 625);; rows = std::min(rows * 2, n)) {
    fmt::print(stderr, "  SciPy at n = {}\n", rows);
    const std::span<const double> cost(times.cost.data(), rows * k);
    Result<Solved> scipy = assign_scipy(options, *scratch, cost, rows, version);
    if (!scipy) return std::move(scipy).error();
    out.push_back({rows, assign_ours(cost, rows, k), *scipy});
    const Comparison& last = out.back();
    if (std::abs(last.ours.total - last.scipy.total) > 1e-6 * std::max(1.0, last.scipy.total)) {
      return Error{ErrorCode::kInternal,
                   fmt::format("totals differ at n = {}: ours {}, SciPy {}", rows, last.ours.total, last.scipy.total)};
    }
    // The next one would take about eight times as long.
    if (rows == n || last.scipy.seconds * 8 > static_cast<double>(options.scipy_limit_s)) return out;
  }
}

void print_comparison(const std::vector<Comparison>& compared, const std::string& version, Json& json, Chart& chart,
                      std::string& text) {
  Table table({"exact assignment, n", "Kindred ms", "SciPy ms", "times faster", "totals"});
  Series ours{"Kindred", {}, {}}, scipy{"SciPy " + version, {}, {}};
  for (const Comparison& c : compared) {
    table.row({std::to_string(c.rows), fmt::format("{:.2f}", 1e3 * c.ours.seconds),
               fmt::format("{:.0f}", 1e3 * c.scipy.seconds), fmt::format("{:.0f}", c.scipy.seconds / c.ours.seconds),
               "equal"});
    json["scipy"].push_back(
        {{"rows", c.rows}, {"kindred_s", c.ours.seconds}, {"scipy_s", c.scipy.seconds}, {"total", c.ours.total}});
    ours.x.push_back(static_cast<double>(c.rows)), ours.y.push_back(std::log10(c.ours.seconds));
    scipy.x.push_back(static_cast<double>(c.rows)), scipy.y.push_back(std::log10(c.scipy.seconds));
  }
  json["scipy_version"] = version;
  chart.series = {ours, scipy};
  text += "\n" + table.text();
}

Status measure_fit(const FitBenchOptions& options) {
  if (options.clusters > options.requests) return invalid("--clusters: accepted: up to --requests", "clusters");
  const Machine machine = this_machine();
  Rng rng(static_cast<uint64_t>(options.seed));
  const std::vector<float> data = random_signatures(options, rng);
  const expert::Points points{data, static_cast<size_t>(options.dims)};
  FitTimes times = time_kmeans(options, points);
  const Solved whole = assign_ours(times.cost, points.size(), static_cast<size_t>(options.clusters));

  Table table({"balanced k-means", "seconds"});
  table.row({"one iteration, median", fmt::format("{:.3f}", times.iteration_s)});
  table.row({"  of it the exact assignment", fmt::format("{:.3f}", whole.seconds)});
  std::string text = fmt::format("{} requests x {} dimensions, K = {}, {} iterations\n\n{}", options.requests,
                                 options.dims, options.clusters, times.iterations, table.text());
  Json json = {{"bench", "fit"},
               {"machine", machine_json(machine)},
               {"requests", options.requests},
               {"dims", options.dims},
               {"clusters", options.clusters},
               {"iterations", times.iterations},
               {"iteration_s", times.iteration_s},
               {"assign_s", whole.seconds},
               {"scipy", Json::array()}};
  if (options.python.empty()) {
    text += "\n  no comparison with SciPy: give --python PYTHON (./dev bench fit does)\n";
  } else {
    std::string version;
    Result<std::vector<Comparison>> compared = compare_with_scipy(options, times, version);
    if (!compared) return std::move(compared).error();
    Chart chart{"Exact balanced assignment", "requests", "log10 of seconds", {}, machine_text(machine)};
    print_comparison(*compared, version, json, chart, text);
    if (!options.output.plots.empty()) {
      if (Status saved = save_svg(options.output.plots, "fit", line_chart(chart)); !saved) return saved;
    }
  }
  fmt::print("{}\n", options.output.json ? dump_json(json) : text + "\n  " + machine_text(machine));
  return {};
}

}  // namespace

int bench_fit(Args args) {
  FitBenchOptions options;
  ConfigSchema schema(
      "bench fit [--requests N] [--dims D] [--clusters K]",
      "Times balanced spherical k-means, and its exact assignment against SciPy's Hungarian algorithm.");
  schema.integer("requests", &options.requests, 1, 1'000'000, "signatures");
  schema.integer("dims", &options.dims, 1, 65'536, "of a signature: kept layers x experts");
  schema.integer("clusters", &options.clusters, 1, 1024, "cohorts");
  schema.integer("iterations", &options.iterations, 1, 1000, "at most");
  schema.integer("seed", &options.seed, 0, 1LL << 40, "of the synthetic signatures");
  schema.text("python", &options.python, "a Python with SciPy to compare with; none: no comparison");
  schema.integer("scipy_limit_s", &options.scipy_limit_s, 1, 3600, "stop before SciPy would take longer than this");
  options.output.declare(schema, /*draws=*/true);
  if (const auto status = parse_bench_flags(schema, args)) return *status;
  if (const Status done = measure_fit(options); !done) return fail("bench fit", done.error());
  return 0;
}

}  // namespace kindred::cli

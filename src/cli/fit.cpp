// `kindred fit`: recorded expert counts in, a cohort file for the router out, and what there is to know of them.

#include "cli/fit.h"

#include <fmt/format.h>

#include <array>
#include <cstdio>
#include <limits>

#include "base/config.h"
#include "cli/commands.h"
#include "cli/terminal.h"

namespace kindred::cli {
namespace {

constexpr std::array<uint32_t, 4> kBatches = {2, 4, 8, 16};  // ELDR's figure 4

ConfigSchema schema_for(FitArguments& options) {
  ConfigSchema schema("fit ACTIVATIONS --workers N [--output cohorts.safetensors] [--compare] [--predict]",
                      "Makes a cohort file for the router from recorded expert counts: one cohort of requests that use "
                      "the same experts for each decode worker.");
  std::vector<std::string> transforms;
  for (const expert::Transform transform : expert::kTransforms) transforms.emplace_back(to_string(transform));
  schema.positional("ACTIVATIONS", &options.input, 1, "file of `kindred record`");
  schema.integer("workers", &options.workers, 1, 4096, "decode workers, one cohort each");
  schema.text("output", &options.output, "cohort file to write");
  schema.choice("transform", &options.transform, std::move(transforms), "how counts (or gate sums) become signatures");
  schema.flag("compare", &options.compare, "rank the transforms by how well they foretell decode; needs no workers");
  schema.flag("predict", &options.predict,
              "how well prefill predicts decode, and what batches of one domain save; needs no workers");
  schema.choice("balance", &options.balance, {"count", "work"},
                "what cohorts have alike: requests, or decode tokens (at least 1 a request)");
  schema.real("tolerance", &options.tolerance, 0, 1,
              "with --balance work: the share by which work may exceed the mean");
  schema.flag("unbalanced", &options.unbalanced, "vanilla k-means without any balance, to compare with");
  schema.integer("pairs", &options.pairs, 1, 1'000'000, "request pairs drawn to choose layers");
  schema.flag("all_layers", &options.all_layers, "keep every layer instead of choosing; needs no decode counts");
  schema.integer("restarts", &options.restarts, 1, 1000, "k-means starts, of which the best is kept");
  schema.integer("seed", &options.seed, 0, std::numeric_limits<int64_t>::max(), "equal seeds give equal files");
  schema.integer("batch", &options.batch, 1, 256, "decode batch per worker for the expected active experts");
  schema.text("plots", &options.plots, "folder for SVG plots of all that is computed");
  schema.flag("json", &options.json, "print the report as JSON");
  return schema;
}

Status check_arguments(const FitArguments& options) {
  if (options.input.empty()) return invalid("which activations file? usage: kindred fit ACTIVATIONS --workers N");
  if (options.workers == 0 && !options.compare && !options.predict) {
    return invalid("--workers is missing: how many decode workers are there?");
  }
  if (options.unbalanced && options.balance == "work") {
    return invalid("--unbalanced and --balance work exclude each other");
  }
  return {};
}

expert::FitOptions fit_options(const FitArguments& options, expert::Transform transform) {
  using expert::Balance;
  return {.workers = static_cast<uint32_t>(options.workers),
          .pairs = static_cast<uint32_t>(options.pairs),
          .restarts = static_cast<uint32_t>(options.restarts),
          .seed = static_cast<uint64_t>(options.seed),
          .batch = static_cast<uint32_t>(options.batch),
          .all_layers = options.all_layers,
          .transform = transform,
          .balance = options.unbalanced          ? Balance::kNone
                     : options.balance == "work" ? Balance::kWork
                                                 : Balance::kCount,
          .tolerance = options.tolerance};
}

Status compute(const FitArguments& options, FitResults& results) {
  Result<expert::Activations> activations = expert::load_activations(options.input.front());
  if (!activations) return std::move(activations).error();
  results.activations = *std::move(activations);
  const Result<expert::Transform> transform = expert::parse_transform(options.transform);
  if (!transform) return transform.error();
  expert::FitOptions fit = fit_options(options, *transform);
  if (options.compare) {
    std::optional<Progress> progress;
    Result<std::vector<expert::TransformScore>> scores =
        expert::compare_transforms(results.activations, fit, [&](size_t done, size_t of) {
          if (!progress) progress.emplace("comparing transforms", of);
          progress->set(done);
        });
    if (!scores) return std::move(scores).error();
    results.transforms = *std::move(scores);
  }
  if (options.predict) {
    Result<expert::Prediction> prediction = expert::predict_decode(results.activations);
    if (!prediction) return std::move(prediction).error();
    results.prediction = *std::move(prediction);
    Result<std::vector<expert::BatchComparison>> batches = expert::compare_batches(results.activations, kBatches);
    if (!batches) return std::move(batches).error();
    results.batches = *std::move(batches);
  }
  if (options.workers > 0) {
    Progress progress("fitting cohorts", static_cast<size_t>(options.restarts));
    fit.on_restart = [&](size_t done) { progress.set(done); };
    Result<expert::FitReport> report = expert::fit_cohorts(results.activations, fit);
    if (!report) return std::move(report).error();
    results.fit = *std::move(report);
  }
  return {};
}

}  // namespace

int run_fit(Args args) {
  FitArguments options;
  ConfigSchema schema = schema_for(options);
  if (const Status parsed = schema.parse_flags(args); !parsed) return fail("fit", parsed.error(), 2);
  if (schema.help_requested()) {
    fmt::print("{}", schema.help());
    return 0;
  }
  if (const Status good = check_arguments(options); !good) return fail("fit", good.error(), 2);
  FitResults results;
  if (const Status done = compute(options, results); !done) return fail("fit", done.error());
  if (results.fit) {
    if (const Status saved = results.fit->model.save(options.output); !saved) return fail("fit", saved.error());
  }
  if (!options.plots.empty()) {
    if (const Status drawn = write_fit_plots(options, results); !drawn) return fail("fit", drawn.error());
  }
  // Labels come from files: what is not UTF-8 is replaced, not thrown over.
  if (options.json) fmt::print("{}\n", dump_json(fit_json(options, results), 2));
  else print_fit(options, results);
  return 0;
}

}  // namespace kindred::cli

// `kindred simulate calibrate`: the synthetic expert process, fitted to what is published of real models.

#include <fmt/format.h>

#include <limits>
#include <numeric>
#include <optional>

#include "base/config.h"
#include "base/json.h"
#include "cli/commands.h"
#include "cli/terminal.h"
#include "sim/calibrate.h"

namespace kindred::cli {
namespace {

struct CalibrateArguments {
  int64_t experts = 128, top_k = 8, layers = 4, domains = 4, evaluations = 150, seed = 1;
  bool json = false;
};

ConfigSchema calibrate_schema(CalibrateArguments& options) {
  ConfigSchema schema("simulate calibrate [--experts 128] [--top-k 8]",
                      "Fits the synthetic expert process to published figures of real models and prints the fit "
                      "against them. docs/simulator.md says what the parameters mean.");
  schema.integer("experts", &options.experts, 2, 4096, "of a layer");
  schema.integer("top_k", &options.top_k, 1, 64, "experts of a token");
  schema.integer("layers", &options.layers, 1, 128, "measured; layers are alike, so few are enough");
  schema.integer("domains", &options.domains, 2, 64, "of requests");
  schema.integer("evaluations", &options.evaluations, 1, 10'000, "of the search; about a quarter of a second each");
  schema.integer("seed", &options.seed, 0, std::numeric_limits<int64_t>::max(), "equal seeds give equal fits");
  schema.flag("json", &options.json, "print the fit as JSON");
  return schema;
}

sim::SyntheticOptions start_from(const CalibrateArguments& arguments) {
  sim::SyntheticOptions start = sim::calibrated_synthetic({.layers = std::vector<uint32_t>(arguments.layers),
                                                           .experts = static_cast<uint32_t>(arguments.experts),
                                                           .top_k = static_cast<uint32_t>(arguments.top_k)});
  std::iota(start.shape.layers.begin(), start.shape.layers.end(), 0);
  start.domains.clear();
  for (int64_t d = 1; d <= arguments.domains; ++d) start.domains.push_back(fmt::format("domain {}", d));
  start.seed = static_cast<uint64_t>(arguments.seed);
  return start;
}

void print_calibration(const sim::Calibration& fit, const std::vector<sim::CalibrationTarget>& targets) {
  const sim::SyntheticOptions& options = fit.options;
  fmt::print("{} experts, top {}, {} layers measured, {} domains, seed {}\n\n", options.shape.experts,
             options.shape.top_k, options.shape.layers.size(), options.domains.size(), options.seed);
  Table parameters({"deviation of utility", "fitted"});
  for (const auto& [name, value] :
       {std::pair("base", options.base), std::pair("domain", options.domain), std::pair("request", options.request),
        std::pair("drift", options.drift), std::pair("phase", options.phase)}) {
    parameters.row({name, fmt::format("{:.3f}", value)});
  }
  Table figures({"figure", "published", "aim", "reached", "within"});
  for (const sim::CalibrationTarget& target : targets) {
    const double reached = fit.reached.*target.figure;
    const std::string published = target.least == target.most
                                      ? fmt::format("{:.2f}", target.least)
                                      : fmt::format("{:.2f} to {:.2f}", target.least, target.most);
    // A single published figure is met as closely as the search was asked to.
    const double slack = target.least == target.most ? target.tolerance : 0;
    const bool within = reached >= target.least - slack && reached <= target.most + slack;
    figures.row({target.name, published, fmt::format("{:.2f}", target.aim), fmt::format("{:.3f}", reached),
                 within ? "yes" : "no"});
  }
  fmt::print("{}\n{}\n", parameters.text(), figures.text());
  Table savings({"batch", "one domain", "mixed", "fewer"});
  for (const sim::ExpertStatistics::Saving& saving : fit.reached.savings) {
    savings.row({fmt::format("{}", saving.batch), fmt::format("{:.1f}", saving.same_domain),
                 fmt::format("{:.1f}", saving.mixed), fmt::format("{:.1f} %", 100 * saving.share())});
  }
  fmt::print(
      "Expected distinct experts a layer:\n\n{}\nCorrelation of single requests {:.3f}; cosine across domains "
      "{:.3f} (its mean over {} domains is below 0, since the mean of all is taken off)\n",
      savings.text(), fit.reached.request_correlation, fit.reached.across, options.domains.size());
}

Json calibration_json(const sim::Calibration& fit, const std::vector<sim::CalibrationTarget>& targets) {
  const sim::SyntheticOptions& options = fit.options;
  Json out = {{"base", options.base},   {"domain", options.domain}, {"request", options.request},
              {"drift", options.drift}, {"phase", options.phase},   {"misfit", fit.misfit}};
  for (const sim::CalibrationTarget& target : targets) {
    Json figure = {
        {"name", target.name}, {"least", target.least}, {"most", target.most}, {"reached", fit.reached.*target.figure}};
    out["figures"].push_back(std::move(figure));
  }
  for (const sim::ExpertStatistics::Saving& saving : fit.reached.savings) {
    Json batch = {{"batch", saving.batch}, {"same_domain", saving.same_domain}, {"mixed", saving.mixed}};
    out["batches"].push_back(std::move(batch));
  }
  return out;
}

}  // namespace

int run_simulate_calibrate(Args args) {
  CalibrateArguments arguments;
  ConfigSchema schema = calibrate_schema(arguments);
  if (const Status parsed = schema.parse_flags(args); !parsed) return fail("simulate calibrate", parsed.error(), 2);
  if (schema.help_requested()) {
    fmt::print("{}", schema.help());
    return 0;
  }
  if (arguments.top_k > arguments.experts) {
    return fail("simulate calibrate",
                invalid(fmt::format("--top-k {}: a token takes that many of --experts {}; accepted: at most those",
                                    arguments.top_k, arguments.experts)),
                2);
  }
  const std::vector<sim::CalibrationTarget> targets = sim::published_targets();
  std::optional<Progress> progress;
  const Result<sim::Calibration> fit = sim::calibrate_process(
      start_from(arguments), targets, static_cast<int>(arguments.evaluations), [&](size_t done, size_t of) {
        if (!progress) progress.emplace("calibrating", of);
        progress->set(done);
      });
  progress.reset();
  if (!fit) return fail("simulate calibrate", fit.error());
  if (arguments.json) fmt::print("{}\n", dump_json(calibration_json(*fit, targets), 2));
  else print_calibration(*fit, targets);
  return 0;
}

}  // namespace kindred::cli

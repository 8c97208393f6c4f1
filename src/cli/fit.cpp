// `kindred fit`: recorded expert counts in, a cohort file for the router out.

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>

#include "base/config.h"
#include "base/json.h"
#include "cli/commands.h"
#include "cli/terminal.h"
#include "expert/fit.h"

namespace kindred::cli {
namespace {

constexpr size_t kDomainsShown = 4;  // per cohort, the rest is summed up

struct FitArguments {
  std::vector<std::string> input;
  std::string output = "cohorts.safetensors";
  int64_t workers = 0;
  int64_t pairs = 20'000;
  int64_t restarts = 8;
  int64_t seed = 1;
  int64_t batch = 8;
  bool all_layers = false;
  bool json = false;
};

double share(uint32_t part, uint32_t whole) {
  return whole == 0 ? 0 : static_cast<double>(part) / static_cast<double>(whole);
}

std::string domains_text(const expert::CohortSummary& cohort) {
  std::string out;
  uint32_t shown = 0;
  for (size_t d = 0; d < std::min(cohort.domains.size(), kDomainsShown); ++d) {
    const expert::DomainShare& domain = cohort.domains[d];
    if (d > 0) out += ", ";
    out += fmt::format("{} {:.0f}%", domain.domain, 100 * share(domain.requests, cohort.requests));
    shown += domain.requests;
  }
  if (shown < cohort.requests && !cohort.domains.empty()) {
    out += fmt::format(", {} more {:.0f}%", cohort.domains.size() - kDomainsShown,
                       100 * share(cohort.requests - shown, cohort.requests));
  }
  return out;
}

void print_layers(const expert::Activations& activations, const expert::FitReport& report) {
  const expert::LayerMask& mask = report.mask;
  const auto& layers = activations.shape.layers;
  if (mask.order.empty()) {
    fmt::print("layers: all {}, as asked\n", layers.size());
    return;
  }
  fmt::print("layers: {} of {} kept; rho with decode (Spearman) {:.3f}, with all layers {:.3f}\n", mask.kept,
             layers.size(), mask.peak_rho(), mask.rho.back());
  fmt::print("  in the order chosen:");
  for (size_t s = 0; s < mask.kept; ++s) fmt::print(" {} ({:.3f})", layers[mask.order[s]], mask.rho[s]);
  fmt::print("\n");
}

void print_report(const FitArguments& options, const expert::Activations& activations,
                  const expert::FitReport& report) {
  fmt::print("{} requests of {}: {} layers x {} experts, top {}\n", activations.requests(),
             activations.model.empty() ? "an unnamed model" : activations.model, activations.shape.layers.size(),
             activations.shape.experts, activations.shape.top_k);
  print_layers(activations, report);
  const std::string active = fmt::format("active experts, batch {}", report.batch);
  const bool labels = activations.has_domains();
  std::vector<std::string> header = {"cohort", "requests", active};
  if (labels) header.push_back("domains");
  Table table(std::move(header));
  for (size_t k = 0; k < report.cohorts.size(); ++k) {
    const expert::CohortSummary& cohort = report.cohorts[k];
    std::vector<std::string> cells = {fmt::to_string(k), fmt::to_string(cohort.requests),
                                      fmt::format("{:.1f}", cohort.active_experts)};
    if (labels) cells.push_back(domains_text(cohort));
    table.row(std::move(cells));
  }
  fmt::print("\n{}\n", table.text());
  const double saved = report.active_random > 0 ? 1 - report.active_experts / report.active_random : 0;
  fmt::print(
      "expected active experts per layer and worker, batch {}, {} counts: {:.1f}; random assignment: {:.1f} ({} "
      "{:.1f}%)\n",
      report.batch, report.active_from_decode ? "decode" : "prompt", report.active_experts, report.active_random,
      saved >= 0 ? "saves" : "costs", 100 * std::abs(saved));
  if (report.batch < options.batch) {
    fmt::print("  (batch {} instead of {}: the smallest cohort has no more requests)\n", report.batch, options.batch);
  }
  if (labels) fmt::print("domain purity: {:.1f}%\n", 100 * report.purity);
  if (report.zero_signatures > 0) {
    fmt::print("{} requests use only experts that every request uses: no cohort, routed by load\n",
               report.zero_signatures);
  }
  fmt::print("\nwrote {}\nnext: kindred router --cohorts {} ...\n", options.output, options.output);
}

void print_json(const FitArguments& options, const expert::Activations& activations, const expert::FitReport& report) {
  const expert::CohortData& data = report.model.data();
  Json out = {{"output", options.output},
              {"model", data.model},
              {"model_fingerprint", data.model_fingerprint},
              {"requests", activations.requests()},
              {"layers", data.shape.layers},
              {"experts", data.shape.experts},
              {"top_k", data.shape.top_k},
              {"kept_layers", data.greedy_layers},
              {"rho", data.rho},
              {"all_layers", options.all_layers},
              {"cosine_cost", report.cost},
              {"batch", report.batch},
              {"active_experts", report.active_experts},
              {"active_experts_random", report.active_random},
              {"active_experts_from", report.active_from_decode ? "decode" : "prompt"},
              {"zero_signatures", report.zero_signatures},
              {"seed", data.seed}};
  if (activations.has_domains()) out["domain_purity"] = report.purity;
  out["cohorts"] = Json::array();
  for (const expert::CohortSummary& cohort : report.cohorts) {
    Json entry = {{"requests", cohort.requests}, {"active_experts", cohort.active_experts}};
    for (const expert::DomainShare& domain : cohort.domains) entry["domains"][domain.domain] = domain.requests;
    out["cohorts"].push_back(std::move(entry));
  }
  // Labels come from files: what is not UTF-8 is replaced, not thrown over.
  fmt::print("{}\n", dump_json(out, 2));
}

ConfigSchema schema_for(FitArguments& options) {
  ConfigSchema schema("fit ACTIVATIONS --workers N [--output cohorts.safetensors]",
                      "Makes a cohort file for the router from recorded expert counts: one cohort of requests that use "
                      "the same experts for each decode worker.");
  schema.positional("ACTIVATIONS", &options.input, 1, "file of `kindred record`");
  schema.integer("workers", &options.workers, 1, 4096, "decode workers, one cohort each");
  schema.text("output", &options.output, "cohort file to write");
  schema.integer("pairs", &options.pairs, 1, 1'000'000, "request pairs drawn to choose layers");
  schema.flag("all_layers", &options.all_layers, "keep every layer instead of choosing; needs no decode counts");
  schema.integer("restarts", &options.restarts, 1, 1000, "k-means starts, of which the best is kept");
  schema.integer("seed", &options.seed, 0, std::numeric_limits<int64_t>::max(), "equal seeds give equal files");
  schema.integer("batch", &options.batch, 1, 256, "decode batch per worker for the expected active experts");
  schema.flag("json", &options.json, "print the report as JSON");
  return schema;
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
  if (options.input.empty())
    return fail("fit", invalid("which activations file? usage: kindred fit ACTIVATIONS --workers N"), 2);
  if (options.workers == 0) return fail("fit", invalid("--workers is missing: how many decode workers are there?"), 2);

  const Result<expert::Activations> activations = expert::load_activations(options.input.front());
  if (!activations) return fail("fit", activations.error());
  const Result<expert::FitReport> report =
      expert::fit_cohorts(*activations, {.workers = static_cast<uint32_t>(options.workers),
                                         .pairs = static_cast<uint32_t>(options.pairs),
                                         .restarts = static_cast<uint32_t>(options.restarts),
                                         .seed = static_cast<uint64_t>(options.seed),
                                         .batch = static_cast<uint32_t>(options.batch),
                                         .all_layers = options.all_layers});
  if (!report) return fail("fit", report.error());
  if (const Status saved = report->model.save(options.output); !saved) return fail("fit", saved.error());
  if (options.json) print_json(options, *activations, *report);
  else print_report(options, *activations, *report);
  return 0;
}

}  // namespace kindred::cli

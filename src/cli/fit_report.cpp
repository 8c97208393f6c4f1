// What `kindred fit` prints, for people and for machines.

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "cli/fit.h"
#include "cli/terminal.h"

namespace kindred::cli {
namespace {

constexpr size_t kDomainsShown = 4;  // per cohort, the rest is summed up

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

void print_head(const FitResults& results) {
  const expert::Activations& activations = results.activations;
  fmt::print("{} requests of {}: {} layers x {} experts, top {}\n", activations.requests(),
             activations.model.empty() ? "an unnamed model" : activations.model, activations.shape.layers.size(),
             activations.shape.experts, activations.shape.top_k);
}

std::string layers_text(const expert::Activations& activations, const expert::LayerMask& mask) {
  std::string out;
  for (size_t s = 0; s < mask.kept; ++s) {
    out += fmt::format("{}{}", s == 0 ? "" : " ", activations.shape.layers[mask.order[s]]);
  }
  return out;
}

void print_compare(const FitResults& results) {
  Table table({"transform", "peak rho", "layers kept", "rho, all layers", "in the order chosen"});
  for (const expert::TransformScore& score : results.transforms) {
    table.row({std::string(to_string(score.transform)), fmt::format("{:.3f}", score.mask.peak_rho()),
               fmt::format("{}", score.mask.kept), fmt::format("{:.3f}", score.mask.rho.back()),
               layers_text(results.activations, score.mask)});
  }
  fmt::print("\nagreement of prompt distances with decode distances (Spearman), by transform:\n{}", table.text());
  if (!results.activations.has_gates()) {
    fmt::print("  (gate and gate-idf are left out: the file has no gate sums)\n");
  }
}

std::string correlation_text(double r) { return std::isfinite(r) ? fmt::format("{:.2f}", r) : "-"; }

void print_prediction(const FitResults& results) {
  Table table({"domain", "requests", "correlation", "of mean profiles"});
  for (const expert::DomainPrediction& domain : results.prediction->domains) {
    table.row({domain.domain, fmt::to_string(domain.requests), correlation_text(domain.mean_correlation),
               correlation_text(domain.pooled_correlation)});
  }
  fmt::print("\nprefill predicts decode (Pearson over layers and experts; ELDR reports 0.70 to 0.92):\n{}",
             table.text());
  fmt::print("  over all requests: {}\n", correlation_text(results.prediction->mean_correlation));

  Table batches({"batch", "same domain", "mixed", "saved", "domains"});
  for (const expert::BatchComparison& row : results.batches) {
    if (row.domains == 0) {
      batches.row({fmt::to_string(row.batch), "-", "-", "-", "0"});
      continue;
    }
    batches.row({fmt::to_string(row.batch), fmt::format("{:.1f}", row.same_domain), fmt::format("{:.1f}", row.mixed),
                 fmt::format("{:.1f}%", 100 * row.saved()), fmt::to_string(row.domains)});
  }
  fmt::print("\nexpected active experts per layer and decode step (ELDR reports 17 to 21% saved):\n{}", batches.text());
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

void print_balance(const FitArguments& options, const FitResults& results) {
  const expert::FitReport& report = *results.fit;
  const std::string largest = fmt::format("largest cohort: {:.2f} x the mean requests, {:.2f} x the mean decode tokens",
                                          report.most_requests, report.most_work);
  if (options.unbalanced) fmt::print("not balanced, as asked; {}\n", largest);
  else if (options.balance == "work")
    fmt::print("balanced by work, at most {:.2f} x; {}\n", 1 + options.tolerance, largest);
  else fmt::print("balanced by count; {}\n", largest);
  const std::vector<uint32_t>& tokens = results.activations.decode_tokens;
  if (options.balance == "work" && std::equal(tokens.begin() + 1, tokens.end(), tokens.begin())) {
    fmt::print("  (every recorded request decodes {} tokens, so work says no more than the count)\n", tokens.front());
  }
}

Table cohort_table(const expert::Activations& activations, const expert::FitReport& report) {
  const bool labels = activations.has_domains();
  std::vector<std::string> header = {"cohort", "requests", "decode tokens",
                                     fmt::format("active experts, batch {}", report.batch)};
  if (labels) header.push_back("domains");
  Table table(std::move(header));
  for (size_t k = 0; k < report.cohorts.size(); ++k) {
    const expert::CohortSummary& cohort = report.cohorts[k];
    std::vector<std::string> cells = {fmt::to_string(k), fmt::to_string(cohort.requests), fmt::to_string(cohort.work),
                                      fmt::format("{:.1f}", cohort.active_experts)};
    if (labels) cells.push_back(domains_text(cohort));
    table.row(std::move(cells));
  }
  return table;
}

void print_cohorts(const FitArguments& options, const FitResults& results) {
  const expert::FitReport& report = *results.fit;
  const bool labels = results.activations.has_domains();
  fmt::print("\ntransform: {}\n", to_string(report.model.data().transform));
  print_layers(results.activations, report);
  print_balance(options, results);
  fmt::print("\n{}\n", cohort_table(results.activations, report).text());
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
  if (uses_gates(report.model.data().transform)) {
    fmt::print("this transform needs gate sums at the handoff: without them the router goes by load (no_gates)\n");
  }
  fmt::print("\nwrote {}\nnext: kindred router --cohorts {} ...\n", options.output, options.output);
}

Json cohorts_json(const FitArguments& options, const FitResults& results) {
  const expert::FitReport& report = *results.fit;
  const expert::CohortData& data = report.model.data();
  Json out = {{"output", options.output},
              {"transform", to_string(data.transform)},
              {"kept_layers", data.greedy_layers},
              {"rho", data.rho},
              {"all_layers", options.all_layers},
              {"balance", options.unbalanced ? "none" : options.balance},
              {"most_requests_by_mean", report.most_requests},
              {"most_work_by_mean", report.most_work},
              {"cosine_cost", report.cost},
              {"batch", report.batch},
              {"active_experts", report.active_experts},
              {"active_experts_random", report.active_random},
              {"active_experts_from", report.active_from_decode ? "decode" : "prompt"},
              {"zero_signatures", report.zero_signatures},
              {"seed", data.seed}};
  if (!options.unbalanced && options.balance == "work") out["tolerance"] = options.tolerance;
  if (results.activations.has_domains()) out["domain_purity"] = report.purity;
  out["cohorts"] = Json::array();
  for (const expert::CohortSummary& cohort : report.cohorts) {
    Json entry = {
        {"requests", cohort.requests}, {"decode_tokens", cohort.work}, {"active_experts", cohort.active_experts}};
    for (const expert::DomainShare& domain : cohort.domains) entry["domains"][domain.domain] = domain.requests;
    out["cohorts"].push_back(std::move(entry));
  }
  return out;
}

}  // namespace

void print_fit(const FitArguments& options, const FitResults& results) {
  print_head(results);
  if (!results.transforms.empty()) print_compare(results);
  if (results.prediction) print_prediction(results);
  if (results.fit) print_cohorts(options, results);
  for (const std::string& name : results.plots) fmt::print("plot: {}/{}.svg\n", options.plots, name);
}

Json fit_json(const FitArguments& options, const FitResults& results) {
  const expert::Activations& activations = results.activations;
  Json out = results.fit ? cohorts_json(options, results) : Json::object();
  out["model"] = activations.model;
  out["model_fingerprint"] = activations.model_fingerprint;
  out["requests"] = activations.requests();
  out["layers"] = activations.shape.layers;
  out["experts"] = activations.shape.experts;
  out["top_k"] = activations.shape.top_k;
  for (const expert::TransformScore& score : results.transforms) {
    Json kept = Json::array();
    for (size_t s = 0; s < score.mask.kept; ++s) kept.push_back(activations.shape.layers[score.mask.order[s]]);
    out["compare"].push_back({{"transform", to_string(score.transform)},
                              {"peak_rho", score.mask.peak_rho()},
                              {"kept_layers", std::move(kept)},
                              {"rho", score.mask.rho},
                              {"rho_all_layers", score.mask.rho.back()}});
  }
  if (results.prediction) {
    Json& prediction = out["prediction"];
    prediction["correlation"] = results.prediction->mean_correlation;  // not a number: null
    for (const expert::DomainPrediction& domain : results.prediction->domains) {
      prediction["domains"].push_back({{"domain", domain.domain},
                                       {"requests", domain.requests},
                                       {"correlation", domain.mean_correlation},
                                       {"correlation_of_means", domain.pooled_correlation}});
    }
    for (const expert::BatchComparison& row : results.batches) {
      prediction["batches"].push_back({{"batch", row.batch},
                                       {"domains", row.domains},
                                       {"active_experts_same_domain", row.same_domain},
                                       {"active_experts_mixed", row.mixed},
                                       {"saved", row.saved()}});
    }
  }
  if (!results.plots.empty()) out["plots"] = results.plots;
  return out;
}

}  // namespace kindred::cli

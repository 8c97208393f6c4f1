#include "expert/fit.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>

#include "base/rng.h"
#include "expert/signature.h"
#include "expert/union_model.h"

namespace kindred::expert {
namespace {

// Fewer give no ranks worth correlating.
constexpr size_t kLeastMaskRequests = 3;

Status check_options(const Activations& activations, const FitOptions& options) {
  if (activations.requests() == 0) return invalid("no requests to fit on");
  if (options.pairs == 0) return invalid("pairs is 0; accepted: 1 or more", "pairs");
  if (uses_gates(options.transform) && !activations.has_gates()) {
    return invalid(fmt::format("transform '{}' needs gate sums, and none were recorded (no prefill_gate); record with "
                               "gates, or take count, count-idf, log-count or binary",
                               to_string(options.transform)),
                   "transform");
  }
  if (!options.all_layers && !activations.has_decode()) {
    return invalid(
        "no decode counts were recorded, and choosing layers needs them (it asks which layers of the prompt foretell "
        "the experts of decode); record with decode counts, or keep every layer with --all-layers",
        "decode_counts");
  }
  return {};
}

Status check_cohorts(const Activations& activations, const FitOptions& options) {
  const size_t requests = activations.requests();
  if (options.workers == 0 || options.workers > requests) {
    return invalid(
        fmt::format("{} workers need at least one recorded request each; the file has {}", options.workers, requests),
        "workers");
  }
  if (options.batch == 0) return invalid("batch is 0; accepted: 1 or more", "batch");
  if (!(options.tolerance >= 0 && options.tolerance <= 1)) {
    return invalid(fmt::format("tolerance is {}; accepted: 0 to 1", options.tolerance), "tolerance");
  }
  return {};
}

std::vector<float> idf_of_recording(const Activations& activations) {
  return inverse_document_frequency(document_frequency(activations.prefill_counts, activations.shape.cells()),
                                    activations.requests());
}

Result<LayerMask> choose_layers(const Activations& activations, std::span<const float> idf, const FitOptions& options) {
  LayerMask mask;
  const size_t layers = activations.shape.layers.size();
  if (options.all_layers) {
    mask.mask.assign(layers, 1);
    mask.kept = layers;
    return mask;
  }
  // A request that generated nothing has no decode profile to compare with.
  std::vector<uint32_t> usable;
  for (uint32_t i = 0; i < activations.requests(); ++i) {
    if (activations.decode_tokens[i] > 0) usable.push_back(i);
  }
  if (usable.size() < kLeastMaskRequests) {
    return invalid(fmt::format("only {} requests have decode tokens, choosing layers needs {}; record more, or keep "
                               "every layer with --all-layers",
                               usable.size(), kLeastMaskRequests),
                   "decode_tokens");
  }
  Rng rng(options.seed);
  std::vector<RequestPair> pairs = draw_pairs(usable.size(), options.pairs, rng);
  if (pairs.empty()) pairs.emplace_back(0, 1);  // each of the few drawn was of a request with itself
  for (auto& [a, b] : pairs) {
    a = usable[a];
    b = usable[b];
  }
  return fit_layer_mask({.prefill_counts = activations.prefill_counts,
                         .decode_counts = activations.decode_counts,
                         .idf = idf,
                         .layers = layers,
                         .experts = activations.shape.experts,
                         .transform = options.transform,
                         .prefill_gate = activations.prefill_gate},
                        pairs);
}

struct SignatureSet {
  std::vector<float> data;         // rows of `requests`
  std::vector<uint32_t> requests;  // those with a signature
};

SignatureSet signatures_of(const Activations& activations, std::span<const float> idf, std::span<const uint8_t> mask,
                           Transform transform) {
  SignatureSet set;
  Signature signature;
  for (uint32_t i = 0; i < activations.requests(); ++i) {
    if (!build_signature(transform, activations.profile(i), idf, mask, signature)) continue;
    set.data.insert(set.data.end(), signature.begin(), signature.end());
    set.requests.push_back(i);
  }
  return set;
}

Result<CohortModel> make_model(const Activations& activations, std::vector<float> idf, const LayerMask& mask,
                               std::vector<float> centroids, const FitOptions& options) {
  CohortData data;
  data.model = activations.model;
  data.model_fingerprint = activations.model_fingerprint;
  data.shape = activations.shape;
  data.centroids = std::move(centroids);
  data.idf = std::move(idf);
  data.layer_mask = mask.mask;
  for (size_t s = 0; s < std::min(mask.kept, mask.order.size()); ++s) {
    data.greedy_layers.push_back(activations.shape.layers[mask.order[s]]);
    data.rho.push_back(mask.rho[s]);
  }
  data.seed = options.seed;
  data.samples = activations.requests();
  data.transform = options.transform;
  return CohortModel::make(std::move(data));
}

void summarise_domains(const Activations& activations, FitReport& report) {
  if (!activations.has_domains()) return;
  std::vector<std::map<std::string, uint32_t>> counts(report.cohorts.size());
  for (size_t i = 0; i < report.assignment.size(); ++i) {
    if (report.assignment[i] != kNoCohort) ++counts[report.assignment[i]][activations.domains[i]];
  }
  uint64_t in_main_domain = 0, labelled = 0;
  for (size_t k = 0; k < counts.size(); ++k) {
    std::vector<DomainShare>& domains = report.cohorts[k].domains;
    for (const auto& [domain, requests] : counts[k]) domains.push_back({domain, requests});
    std::stable_sort(domains.begin(), domains.end(),
                     [](const DomainShare& a, const DomainShare& b) { return a.requests > b.requests; });
    if (!domains.empty()) in_main_domain += domains.front().requests;
    labelled += report.cohorts[k].requests;
  }
  if (labelled > 0) report.purity = static_cast<double>(in_main_domain) / static_cast<double>(labelled);
}

// Expected active experts of batches within each cohort and over all requests.
void summarise_unions(const Activations& activations, uint32_t batch, FitReport& report) {
  const bool decode = activations.has_decode();
  report.active_from_decode = decode;
  const auto tokens = [&](size_t i) { return decode ? activations.decode_tokens[i] : activations.prompt_tokens[i]; };
  std::vector<uint32_t> members(report.cohorts.size(), 0);
  for (size_t i = 0; i < report.assignment.size(); ++i) {
    if (report.assignment[i] != kNoCohort && tokens(i) > 0) ++members[report.assignment[i]];
  }
  // One batch size for all, so that the figures compare; cohorts that never decode do not count.
  report.batch = batch;
  uint32_t active_cohorts = 0;
  for (const uint32_t count : members) {
    if (count == 0) continue;
    report.batch = std::min(report.batch, count);
    ++active_cohorts;
  }
  if (active_cohorts == 0) {
    report.batch = 0;
    return;
  }
  const size_t cells = activations.shape.cells();
  const auto layers = static_cast<double>(activations.shape.layers.size());
  std::vector<BatchUnion> unions(report.cohorts.size(), BatchUnion(cells, report.batch));
  BatchUnion any(cells, report.batch);
  for (size_t i = 0; i < report.assignment.size(); ++i) {
    if (report.assignment[i] == kNoCohort || tokens(i) == 0) continue;
    const std::vector<float> inclusion =
        inclusion_probabilities(decode ? activations.decode(i) : activations.prefill(i), tokens(i));
    unions[report.assignment[i]].add(inclusion);
    any.add(inclusion);
  }
  report.active_random = any.value() / layers;
  for (size_t k = 0; k < unions.size(); ++k) {
    report.cohorts[k].active_experts = unions[k].value() / layers;
    report.active_experts += report.cohorts[k].active_experts / static_cast<double>(active_cohorts);
  }
}

uint32_t work_of(const Activations& activations, size_t request) {
  return std::max(1U, activations.decode_tokens[request]);
}

// The share of the mean that the largest has.
double most_of_mean(const std::vector<CohortSummary>& cohorts, const auto& value) {
  double sum = 0, most = 0;
  for (const CohortSummary& cohort : cohorts) {
    sum += static_cast<double>(value(cohort));
    most = std::max(most, static_cast<double>(value(cohort)));
  }
  return sum > 0 ? most * static_cast<double>(cohorts.size()) / sum : 0;
}

void summarise_loads(const Activations& activations, std::span<const uint32_t> requests,
                     std::span<const uint32_t> clusters, FitReport& report) {
  report.assignment.assign(activations.requests(), kNoCohort);
  for (size_t i = 0; i < requests.size(); ++i) {
    report.assignment[requests[i]] = clusters[i];
    CohortSummary& cohort = report.cohorts[clusters[i]];
    ++cohort.requests;
    cohort.work += work_of(activations, requests[i]);
  }
  report.most_requests = most_of_mean(report.cohorts, [](const CohortSummary& cohort) { return cohort.requests; });
  report.most_work = most_of_mean(report.cohorts, [](const CohortSummary& cohort) { return cohort.work; });
  report.zero_signatures = static_cast<uint32_t>(activations.requests() - requests.size());
}

}  // namespace

Result<FitReport> fit_cohorts(const Activations& activations, const FitOptions& options) {
  if (Status good = check_options(activations, options); !good) return std::move(good).error();
  if (Status good = check_cohorts(activations, options); !good) return std::move(good).error();
  std::vector<float> idf = idf_of_recording(activations);
  Result<LayerMask> mask = choose_layers(activations, idf, options);
  if (!mask) return std::move(mask).error();

  SignatureSet signatures = signatures_of(activations, idf, mask->mask, options.transform);
  if (signatures.requests.size() < options.workers) {
    return invalid(fmt::format("only {} of {} requests can be told apart by the experts they use, fewer than the {} "
                               "workers; record more varied prompts",
                               signatures.requests.size(), activations.requests(), options.workers),
                   "workers");
  }
  std::vector<uint32_t> work;
  for (const uint32_t i : signatures.requests) work.push_back(work_of(activations, i));
  const size_t dims = mask->kept * activations.shape.experts;
  Result<Clustering> clusters = balanced_spherical_kmeans(
      {signatures.data, dims},
      {.clusters = options.workers,
       .restarts = std::max(1U, options.restarts),
       .seed = options.seed,
       .capacity = {.balance = options.balance, .weights = work, .tolerance = options.tolerance},
       .on_restart = options.on_restart});
  if (!clusters) return std::move(clusters).error();
  Result<CohortModel> model = make_model(activations, std::move(idf), *mask, std::move(clusters->centroids), options);
  if (!model) return std::move(model).error();

  FitReport report{.model = *std::move(model)};
  report.mask = *std::move(mask);
  report.cost = clusters->cost;
  report.cohorts.resize(options.workers);
  summarise_loads(activations, signatures.requests, clusters->assignment, report);
  summarise_domains(activations, report);
  summarise_unions(activations, options.batch, report);
  report.signatures = std::move(signatures.data);
  return report;
}

Result<std::vector<TransformScore>> compare_transforms(const Activations& activations, const FitOptions& options,
                                                       const std::function<void(size_t, size_t)>& on_done) {
  FitOptions each = options;
  each.all_layers = false;
  each.transform = Transform::kCount;
  if (Status good = check_options(activations, each); !good) return std::move(good).error();
  std::vector<Transform> allowed;
  for (const Transform transform : kTransforms) {
    if (!uses_gates(transform) || activations.has_gates()) allowed.push_back(transform);
  }
  const std::vector<float> idf = idf_of_recording(activations);
  std::vector<TransformScore> scores;
  for (const Transform transform : allowed) {
    each.transform = transform;
    Result<LayerMask> mask = choose_layers(activations, idf, each);
    if (!mask) return std::move(mask).error();
    scores.push_back({transform, *std::move(mask)});
    if (on_done) on_done(scores.size(), allowed.size());
  }
  std::stable_sort(scores.begin(), scores.end(), [](const TransformScore& a, const TransformScore& b) {
    return a.mask.peak_rho() > b.mask.peak_rho();
  });
  return scores;
}

}  // namespace kindred::expert

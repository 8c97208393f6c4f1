// From recorded activations to cohorts: transform, idf, layer mask, signatures, balanced spherical
// k-means, and the figures that say whether it was worth it.
//
// Thread-safety: a pure function of its arguments; equal seeds give equal cohorts.
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "base/result.h"
#include "expert/activations.h"
#include "expert/cohorts.h"
#include "expert/kmeans.h"

namespace kindred::expert {

struct FitOptions {
  uint32_t workers = 0;     // cohorts to make, 1..requests
  uint32_t pairs = 20'000;  // request pairs drawn to fit the layer mask
  uint32_t restarts = 8;    // of k-means
  uint64_t seed = 1;
  uint32_t batch = 8;       // decode batch per worker for the expected active experts
  bool all_layers = false;  // keep every layer instead of fitting the mask; needs no decode counts
  Transform transform = Transform::kCountIdf;
  // kWork weighs a request by its decode tokens, at least 1: how long it will load its worker.
  Balance balance = Balance::kCount;
  double tolerance = 0.05;                           // kWork: a cohort's work may exceed the mean by this share
  std::function<void(size_t done)> on_restart = {};  // after each k-means start
};

struct DomainShare {
  std::string domain;
  uint32_t requests = 0;
};

struct CohortSummary {
  uint32_t requests = 0;
  uint64_t work = 0;                 // decode tokens, at least 1 per request
  std::vector<DomainShare> domains;  // most first; empty without labels
  double active_experts = 0;         // expected per layer, in a batch of this cohort's requests
};

// A request without a signature: it uses only experts that every request uses.
inline constexpr uint32_t kNoCohort = std::numeric_limits<uint32_t>::max();

struct FitReport {
  CohortModel model;
  std::vector<uint32_t> assignment = {};  // [N], or kNoCohort
  std::vector<CohortSummary> cohorts = {};
  LayerMask mask = {};             // with all_layers: only `mask` and `kept`
  double cost = 0;                 // total cosine distance of signatures to their centroids
  double purity = 0;               // share of requests of their cohort's most frequent domain; 0 without labels
  double active_experts = 0;       // expected per layer in a batch, mean over workers
  double active_random = 0;        // the same when any request may go to any worker
  uint32_t batch = 0;              // of those figures: the one asked for, or the smallest cohort
  bool active_from_decode = true;  // false: no decode counts, so the figures are those of the prompts
  uint32_t zero_signatures = 0;    // requests with kNoCohort
  double most_requests = 0;        // of a cohort, by their mean: 1 is perfect balance
  double most_work = 0;            // the same of decode tokens
  // What was clustered, [requests with a cohort, dims of the model], in the order of the requests.
  std::vector<float> signatures = {};
};

// `activations` must satisfy check(), save that layers without any count are taken as they are. Error:
// kInvalid: no requests, fewer requests (with a signature) than workers, no decode counts or too few
// requests with decode tokens (without all_layers), no gate sums for a transform that uses them.
Result<FitReport> fit_cohorts(const Activations& activations, const FitOptions& options);

struct TransformScore {
  Transform transform = Transform::kCountIdf;
  LayerMask mask;
};

// Fits the layer mask under each transform that the recording allows, on the same request pairs, and ranks
// them: the highest peak rho first, ties in the order of kTransforms. Of `options`, pairs and seed count.
// `on_done` hears of progress: transforms done of all. Error: as above.
Result<std::vector<TransformScore>> compare_transforms(const Activations& activations, const FitOptions& options,
                                                       const std::function<void(size_t, size_t)>& on_done = {});

}  // namespace kindred::expert

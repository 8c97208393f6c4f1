// Does prefill foretell decode, and what is it worth? (ELDR: correlation 0.70 to 0.92, figure 3; batches of one
// domain activate 17 to 21 % fewer experts than mixed ones, figure 4.)
//
// Thread-safety: pure functions.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/result.h"
#include "expert/activations.h"

namespace kindred::expert {

// Pearson's r; NaN if either side does not vary or they are empty. Equal lengths.
double pearson(std::span<const double> a, std::span<const double> b);

struct DomainPrediction {
  std::string domain;
  uint32_t requests = 0;  // with decode tokens
  // Over all layers and experts, of prefill and decode frequency (counts / (tokens * top_k)): of each request,
  // mean over the domain's requests; and of the domain's mean profiles, where chance has averaged out. NaN: no
  // request whose counts vary.
  double mean_correlation = 0, pooled_correlation = 0;
  std::vector<double> prefill = {}, decode = {};  // [L * E], the domain's mean profiles
};

struct Prediction {
  std::vector<DomainPrediction> domains;  // in alphabetical order; "all" without labels
  double mean_correlation = 0;            // over all requests
};

// Error: kInvalid: no decode counts, or no request with decode tokens.
Result<Prediction> predict_decode(const Activations& activations);

// Expected distinct experts per layer that a decode step of `batch` requests touches.
struct BatchComparison {
  uint32_t batch = 0;
  double same_domain = 0;  // of one domain; domains weigh by their requests
  double mixed = 0;        // of any requests of those domains
  uint32_t domains = 0;    // that have as many requests; the others are left out of both figures. 0: no figures
  double saved() const { return mixed > 0 ? 1 - same_domain / mixed : 0; }
};

// Exact means over all batches of different requests (BatchUnion), so nothing is drawn and nothing depends on a
// seed: each request touches expert e with the probability with which its decode tokens did. O(batch * N * L * E)
// per batch size. Error: as above.
Result<std::vector<BatchComparison>> compare_batches(const Activations& activations, std::span<const uint32_t> batches);

}  // namespace kindred::expert

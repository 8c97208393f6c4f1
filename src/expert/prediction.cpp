#include "expert/prediction.h"

#include <cmath>
#include <limits>

#include "expert/domains.h"
#include "expert/union_model.h"

namespace kindred::expert {
namespace {

Result<DomainProfiles> decode_profiles(const Activations& activations) {
  if (!activations.has_decode()) {
    return invalid("no decode counts were recorded, so nothing can be said of decode; record with decode counts",
                   "decode_counts");
  }
  Result<DomainProfiles> profiles = profile_domains(activations);
  if (profiles.ok() && profiles->names.empty()) return invalid("no request has decode tokens", "decode_tokens");
  return profiles;
}

// Adds the frequencies to `sum` and returns them.
std::vector<double> add_frequencies(std::span<const uint32_t> counts, double tokens, uint32_t top_k,
                                    std::vector<double>& sum) {
  std::vector<double> out(counts.size());
  for (size_t c = 0; c < counts.size(); ++c) {
    out[c] = counts[c] / (tokens * top_k);
    sum[c] += out[c];
  }
  return out;
}

}  // namespace

double pearson(std::span<const double> a, std::span<const double> b) {
  KINDRED_CHECK(a.size() == b.size());
  double mean_a = 0, mean_b = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    mean_a += a[i];
    mean_b += b[i];
  }
  const double size = std::max(1.0, static_cast<double>(a.size()));
  mean_a /= size;
  mean_b /= size;
  double ab = 0, aa = 0, bb = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    ab += (a[i] - mean_a) * (b[i] - mean_b);
    aa += (a[i] - mean_a) * (a[i] - mean_a);
    bb += (b[i] - mean_b) * (b[i] - mean_b);
  }
  return aa > 0 && bb > 0 ? ab / std::sqrt(aa * bb) : std::numeric_limits<double>::quiet_NaN();
}

Result<Prediction> predict_decode(const Activations& activations) {
  const Result<DomainProfiles> made = decode_profiles(activations);
  if (!made) return made.error();
  const DomainProfiles& profiles = *made;
  const size_t domains = profiles.names.size(), cells = activations.shape.cells();
  Prediction out;
  for (size_t d = 0; d < domains; ++d) {
    out.domains.push_back({.domain = profiles.names[d], .requests = profiles.requests[d]});
    out.domains[d].prefill.assign(cells, 0.0);
    out.domains[d].decode.assign(cells, 0.0);
  }
  std::vector<double> sum(domains, 0.0), varying(domains, 0.0);
  for (size_t i = 0; i < activations.requests(); ++i) {
    if (profiles.domain_of[i] == kNoDomain) continue;
    DomainPrediction& domain = out.domains[profiles.domain_of[i]];
    const uint32_t top_k = activations.shape.top_k;
    const std::vector<double> prefill =
        add_frequencies(activations.prefill(i), activations.prompt_tokens[i], top_k, domain.prefill);
    const std::vector<double> decode =
        add_frequencies(activations.decode(i), activations.decode_tokens[i], top_k, domain.decode);
    const double r = pearson(prefill, decode);
    if (!std::isfinite(r)) continue;
    sum[profiles.domain_of[i]] += r;
    varying[profiles.domain_of[i]] += 1;
  }
  const auto mean = [](double total, double count) {
    return count > 0 ? total / count : std::numeric_limits<double>::quiet_NaN();
  };
  double all = 0, count = 0;
  for (size_t d = 0; d < domains; ++d) {
    DomainPrediction& domain = out.domains[d];
    for (double& x : domain.prefill) x /= domain.requests;
    for (double& x : domain.decode) x /= domain.requests;
    domain.mean_correlation = mean(sum[d], varying[d]);
    domain.pooled_correlation = pearson(domain.prefill, domain.decode);
    all += sum[d];
    count += varying[d];
  }
  out.mean_correlation = mean(all, count);
  return out;
}

Result<std::vector<BatchComparison>> compare_batches(const Activations& activations,
                                                     std::span<const uint32_t> batches) {
  const Result<DomainProfiles> made = decode_profiles(activations);
  if (!made) return made.error();
  const DomainProfiles& profiles = *made;
  const size_t cells = activations.shape.cells();
  const auto layers = static_cast<double>(activations.shape.layers.size());
  std::vector<std::vector<uint32_t>> members(profiles.names.size());
  for (uint32_t i = 0; i < activations.requests(); ++i) {
    if (profiles.domain_of[i] != kNoDomain) members[profiles.domain_of[i]].push_back(i);
  }
  std::vector<BatchComparison> out;
  for (const uint32_t batch : batches) {
    if (batch == 0) return invalid("batch is 0; accepted: 1 or more", "batch");
    BatchComparison& row = out.emplace_back(BatchComparison{.batch = batch});
    BatchUnion mixed(cells, batch);
    for (const std::vector<uint32_t>& domain : members) {
      if (domain.size() < batch) continue;
      BatchUnion same(cells, batch);
      for (const uint32_t i : domain) {
        const std::vector<float> inclusion =
            inclusion_probabilities(activations.decode(i), activations.decode_tokens[i]);
        same.add(inclusion);
        mixed.add(inclusion);
      }
      ++row.domains;
      row.same_domain += same.value() / layers * static_cast<double>(domain.size());
    }
    if (row.domains == 0) continue;
    row.same_domain /= static_cast<double>(mixed.requests());
    row.mixed = mixed.value() / layers;
  }
  return out;
}

}  // namespace kindred::expert

#include "expert/domains.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>

namespace kindred::expert {
namespace {

// Names and domain_of; requests without tokens are left out.
Status collect_domains(const Activations& activations, const std::vector<uint32_t>& tokens, DomainProfiles& out) {
  std::map<std::string, uint32_t> index;
  const auto name_of = [&](size_t i) { return activations.has_domains() ? activations.domains[i] : "all"; };
  for (size_t i = 0; i < activations.requests(); ++i) {
    if (tokens[i] > 0) index.emplace(name_of(i), 0);
  }
  if (index.size() > kMostDomains) {
    return invalid(fmt::format("{} different domain labels; accepted: up to {}", index.size(), kMostDomains),
                   "domains");
  }
  for (auto& [name, at] : index) {
    at = static_cast<uint32_t>(out.names.size());
    out.names.push_back(name);
  }
  out.requests.assign(out.names.size(), 0);
  out.domain_of.assign(activations.requests(), kNoDomain);
  for (size_t i = 0; i < activations.requests(); ++i) {
    if (tokens[i] == 0) continue;
    out.domain_of[i] = index[name_of(i)];
    ++out.requests[out.domain_of[i]];
  }
  return {};
}

}  // namespace

size_t DomainProfiles::most_discriminative_layer() const {
  return static_cast<size_t>(std::max_element(between_share.begin(), between_share.end()) - between_share.begin());
}

Result<DomainProfiles> profile_domains(const Activations& activations) {
  DomainProfiles out;
  out.from_decode = activations.has_decode();
  const std::vector<uint32_t>& tokens = out.from_decode ? activations.decode_tokens : activations.prompt_tokens;
  if (Status good = collect_domains(activations, tokens, out); !good) return std::move(good).error();
  const size_t layers = activations.shape.layers.size(), experts = activations.shape.experts;
  const size_t cells = activations.shape.cells();
  out.frequency.assign(out.names.size() * cells, 0.0);
  std::vector<double> mean(cells, 0.0), square(layers, 0.0);  // over all requests
  double requests = 0;
  for (size_t i = 0; i < activations.requests(); ++i) {
    if (out.domain_of[i] == kNoDomain) continue;
    requests += 1;
    const std::span<const uint32_t> counts = out.from_decode ? activations.decode(i) : activations.prefill(i);
    const double scale = 1.0 / (static_cast<double>(tokens[i]) * activations.shape.top_k);
    double* profile = out.frequency.data() + out.domain_of[i] * cells;
    for (size_t c = 0; c < cells; ++c) {
      const double frequency = counts[c] * scale;
      profile[c] += frequency;
      mean[c] += frequency;
      square[c / experts] += frequency * frequency;
    }
  }
  for (double& x : mean) x /= std::max(1.0, requests);
  for (size_t d = 0; d < out.names.size(); ++d) {
    for (size_t c = 0; c < cells; ++c) out.frequency[d * cells + c] /= out.requests[d];
  }
  out.between_share.assign(layers, 0.0);
  for (size_t l = 0; l < layers; ++l) {
    double between = 0, total = square[l];
    for (size_t c = l * experts; c < (l + 1) * experts; ++c) {
      total -= requests * mean[c] * mean[c];
      for (size_t d = 0; d < out.names.size(); ++d) {
        const double off = out.frequency[d * cells + c] - mean[c];
        between += out.requests[d] * off * off;
      }
    }
    // The total is a difference of large sums: what is left of rounding there is no variance.
    if (total > 1e-12 * square[l]) out.between_share[l] = std::min(1.0, between / total);
  }
  return out;
}

DomainHeat domain_heat(const DomainProfiles& profiles, size_t layer, size_t experts) {
  const size_t domains = profiles.names.size();
  const size_t cells = profiles.between_share.size() * experts;
  const auto frequency = [&](size_t d, size_t e) { return profiles.frequency[d * cells + layer * experts + e]; };
  std::vector<double> base(experts, domains == 1 ? 1.0 / static_cast<double>(experts) : 0.0);
  for (size_t d = 0; d < domains && domains > 1; ++d) {
    for (size_t e = 0; e < experts; ++e) base[e] += frequency(d, e) / static_cast<double>(domains);
  }
  std::vector<std::vector<double>> excess(domains, std::vector<double>(experts, 0.0));
  std::vector<uint32_t> home(experts, 0);
  for (size_t e = 0; e < experts; ++e) {
    for (size_t d = 0; d < domains; ++d) {
      excess[d][e] = base[e] > 0 ? std::max(0.0, frequency(d, e) / base[e] - 1) : 0;
      if (excess[d][e] > excess[home[e]][e]) home[e] = static_cast<uint32_t>(d);
    }
  }
  DomainHeat heat;
  heat.experts.resize(experts);
  std::iota(heat.experts.begin(), heat.experts.end(), 0U);
  std::stable_sort(heat.experts.begin(), heat.experts.end(), [&](uint32_t a, uint32_t b) {
    return home[a] != home[b] ? home[a] < home[b] : excess[home[a]][a] > excess[home[b]][b];
  });
  for (const std::vector<double>& row : excess) {
    std::vector<double>& sorted = heat.excess.emplace_back();
    for (const uint32_t e : heat.experts) sorted.push_back(row[e]);
  }
  return heat;
}

}  // namespace kindred::expert

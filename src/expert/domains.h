// What tells domains apart: which layer, and which of its experts (ELDR, figure 1).
//
// The use of an expert by a request is its frequency, counts / (tokens * top_k), in decode; in the prompt if no
// decode counts were recorded. Requests without a token there are left out. Without labels all requests are
// of one domain, named "all".
//
// Thread-safety: pure functions.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/result.h"
#include "expert/activations.h"

namespace kindred::expert {

struct DomainProfiles {
  std::vector<std::string> names;   // [D], in alphabetical order
  std::vector<uint32_t> requests;   // [D]
  std::vector<double> frequency;    // [D, L, E]: means over the domain's requests
  std::vector<uint32_t> domain_of;  // [N], or kNoDomain: the request was left out
  // [L]: the variance of the domains' means, as a share of the variance of the requests; 0 (one domain, or a
  // layer where nothing varies) to 1. The most discriminative layer is the one where it is highest.
  std::vector<double> between_share;
  bool from_decode = true;

  size_t most_discriminative_layer() const;  // a row of the counts; the first of equals
};

inline constexpr uint32_t kNoDomain = UINT32_MAX;

inline constexpr size_t kMostDomains = 256;  // more are no domains, and their profiles need room

// activations.check() must hold. Error: kInvalid: more than kMostDomains labels.
Result<DomainProfiles> profile_domains(const Activations& activations);

// One layer for a picture: how much more than the mean of the domains a domain uses an expert, as a share of
// that mean; 0 where it uses it less. With one domain, against the mean of the experts instead. Experts are put
// in blocks: by the domain that uses them most, and within it the most distinctive first.
struct DomainHeat {
  std::vector<uint32_t> experts;            // [E], the order of the columns
  std::vector<std::vector<double>> excess;  // [D][E]
};

// `experts`: E of the profiles.
DomainHeat domain_heat(const DomainProfiles& profiles, size_t layer, size_t experts);

}  // namespace kindred::expert

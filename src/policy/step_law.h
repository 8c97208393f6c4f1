// How long a decode step takes, as far as a router has to know: T(U, B) = fixed + per_expert * U + per_request * B,
// with B requests in the batch that use U distinct experts a layer, on average over layers. Fetching experts is
// linear in U (ELDR; fleet of GPUs measured in docs/simulator.md), and so is attention in B.
//
// Units: any one, the same for the three, since decisions compare. The default is in units of one expert a layer, of
// the size that the shipped profiles have at 1,000 tokens of context (fixed 13 to 54, per_request 0.1 to 0.4).
#pragma once

namespace kindred::policy {

struct StepLaw {
  double fixed = 30;
  double per_expert = 1;
  double per_request = 0.2;

  double step(double experts, double requests) const { return fixed + per_expert * experts + per_request * requests; }
  // What all requests of a batch together wait longer each step, once one more joins that adds `more` experts:
  // (B + 1) T(U + more, B + 1) - B T(U, B).
  double joining(double experts, double more, double requests) const {
    return (requests + 1) * step(experts + more, requests + 1) - requests * step(experts, requests);
  }
  bool operator==(const StepLaw&) const = default;
};

}  // namespace kindred::policy

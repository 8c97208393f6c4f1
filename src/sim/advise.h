// What would routing by experts gain? From recorded activations and a hardware profile, before anything is installed.
//
// Half of the requests make cohorts, one a worker, from their prompts. The other half go to the nearest cohort by
// their prompts, and what counts is what they then decode: the expected distinct experts of a batch of one cohort's
// requests against one of any requests, and the step times that the profile gives for both. So the gain is that of a
// router that always sends a request to its cohort's worker: with load to balance, it is less.
//
// Thread-safety: a pure function; deterministic.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/result.h"
#include "expert/activations.h"
#include "sim/profile.h"

namespace kindred::sim {

struct AdviceOptions {
  uint32_t workers = 16;                                      // that decode; each may be a group of ranks
  std::vector<uint32_t> batches = {8, 16, 32, 64, 128, 256};  // decoding requests of each GPU
  std::vector<uint32_t> ranks = {1, 8};                       // GPUs of a worker; above 1 with expert parallelism
  double context_tokens = 1024;                               // of a request, on average
  uint64_t seed = 1;
};

struct AdviceRow {
  uint32_t ranks = 1, batch = 0;
  double mixed = 0, cohort = 0;        // expected distinct experts a layer on the rank with the most
  double mixed_us = 0, cohort_us = 0;  // a step
  // More requests than a cohort has, or than there are: expected as if requests were drawn with repeats, which
  // makes unions look a little smaller than they are.
  bool repeats = false;

  double experts_saved() const { return mixed > 0 ? 1 - cohort / mixed : 0; }
  double time_saved() const { return mixed_us > 0 ? 1 - cohort_us / mixed_us : 0; }
};

struct Advice {
  uint32_t requests = 0;         // that figures are about
  uint32_t cohorts = 0;          // that got some of them
  uint32_t smallest = 0;         // requests of the smallest of those
  std::vector<uint32_t> judged;  // [requests], rows of the activations
  std::vector<AdviceRow> rows;
  std::vector<std::string> skipped;  // topologies that the profile rules out, and why

  const AdviceRow* best() const;  // by time saved; null without rows
};

// Error: kInvalid: activations of another model than the profile's, without decode counts, or too few for so many
// workers; no batches or ranks.
Result<Advice> advise(const expert::Activations& activations, const Profile& profile, const AdviceOptions& options);

}  // namespace kindred::sim

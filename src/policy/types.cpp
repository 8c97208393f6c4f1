#include "policy/types.h"

#include <fmt/format.h>

namespace kindred::policy {

std::string_view to_string(TieBreak tie_break) {
  switch (tie_break) {
    case TieBreak::kLowestIndex: return "lowest-index";
    case TieBreak::kRotate: return "rotate";
    case TieBreak::kRandom: return "random";
  }
  return "";
}

Result<TieBreak> parse_tie_break(std::string_view name) {
  for (const TieBreak tie_break : {TieBreak::kLowestIndex, TieBreak::kRotate, TieBreak::kRandom}) {
    if (name == to_string(tie_break)) return tie_break;
  }
  return invalid(fmt::format("tie_break is '{}'; accepted: rotate, lowest-index, random", name), "tie_break");
}

std::string_view to_string(FallbackReason reason) {
  switch (reason) {
    case FallbackReason::kNone: return "none";
    case FallbackReason::kNoCounts: return "no_counts";
    case FallbackReason::kNoCohorts: return "no_cohorts";
    case FallbackReason::kOtherModel: return "other_model";
    case FallbackReason::kShapeMismatch: return "shape_mismatch";
    case FallbackReason::kZeroSignature: return "zero_signature";
    case FallbackReason::kCohortWorkerMismatch: return "cohort_worker_mismatch";
    case FallbackReason::kNoGates: return "no_gates";
    case FallbackReason::kNoLabel: return "no_label";
    case FallbackReason::kTooManyLabels: return "too_many_labels";
    case FallbackReason::kNoTrace: return "no_trace";
  }
  return "";
}

std::string_view to_string(Reason reason) {
  switch (reason) {
    case Reason::kRoundRobin: return "round_robin";
    case Reason::kRandom: return "random";
    case Reason::kPowerOfTwo: return "power_of_two";
    case Reason::kLeastLoaded: return "least_loaded";
    case Reason::kBand: return "band";
    case Reason::kNoCohort: return "no_cohort";
    case Reason::kDomain: return "domain";
    case Reason::kRing: return "ring";
    case Reason::kSpill: return "spill";
    case Reason::kEmptyKey: return "empty_key";
    case Reason::kHeld: return "held";
    case Reason::kPressure: return "pressure";
    case Reason::kOrdered: return "ordered";
    case Reason::kLowestKv: return "lowest_kv";
    case Reason::kAssigned: return "assigned";
    case Reason::kMarginal: return "marginal_cost";
  }
  return "";
}

}  // namespace kindred::policy

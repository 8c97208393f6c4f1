#include "policy/decode_policy.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "policy/band.h"
#include "policy/chooser.h"
#include "policy/domain.h"
#include "policy/held_price.h"
#include "policy/marginal_cost.h"
#include "policy/shuffled.h"

namespace kindred::policy {
namespace {

constexpr std::string_view kRoundRobinName = "round-robin";
constexpr std::string_view kLeastLoadedName = "least-loaded";
constexpr std::string_view kPowerOfTwoName = "power-of-two";
constexpr std::string_view kRandomName = "random";
constexpr std::string_view kBandName = "locality-band";
constexpr auto kNames = std::to_array<std::string_view>(
    {kBandName, kLeastLoadedName, kPowerOfTwoName, kMarginalCostName, kRandomName, kRoundRobinName, kDomainName});

// What most policies share: candidates are the available workers, and one worker is no choice.
class LoadPolicy : public DecodePolicy {
 public:
  LoadPolicy(std::string_view name, Chooser chooser) : chooser_(chooser), name_(name) {}

  std::optional<Decision> choose(const DecodeSnapshot& snapshot, const DecodeRequest& request) final {
    Decision decision;
    decision.policy = name_;
    decision.candidates = available_workers(snapshot.workers);
    if (decision.candidates.empty()) return std::nullopt;
    decide(snapshot, request, decision);
    return decision;
  }
  std::string_view name() const final { return name_; }

 protected:
  // Fills worker and reason; `candidates` holds the available workers, not empty.
  virtual void decide(const DecodeSnapshot& snapshot, const DecodeRequest& request, Decision& decision) = 0;

  Chooser chooser_;

 private:
  std::string_view name_;
};

class RoundRobin final : public LoadPolicy {
 public:
  using LoadPolicy::LoadPolicy;

 private:
  void decide(const DecodeSnapshot& snapshot, const DecodeRequest&, Decision& decision) override {
    decision.worker = chooser_.next_in_turn(snapshot.workers, decision.candidates);
    decision.reason = Reason::kRoundRobin;
  }
};

class LeastLoaded final : public LoadPolicy {
 public:
  using LoadPolicy::LoadPolicy;

 private:
  void decide(const DecodeSnapshot& snapshot, const DecodeRequest&, Decision& decision) override {
    decision.worker = chooser_.least_loaded(snapshot.workers, decision.candidates);
    decision.reason = Reason::kLeastLoaded;
  }
};

class Random final : public LoadPolicy {
 public:
  using LoadPolicy::LoadPolicy;

 private:
  void decide(const DecodeSnapshot& snapshot, const DecodeRequest&, Decision& decision) override {
    decision.worker = chooser_.at_random(snapshot.workers, decision.candidates);
    decision.reason = Reason::kRandom;
  }
};

// Mitzenmacher, "The power of two choices in randomized load balancing" (2001).
class PowerOfTwo final : public LoadPolicy {
 public:
  using LoadPolicy::LoadPolicy;

 private:
  void decide(const DecodeSnapshot& snapshot, const DecodeRequest&, Decision& decision) override {
    std::vector<uint32_t>& candidates = decision.candidates;
    if (candidates.size() > 2) {
      const size_t first = chooser_.rng().below(candidates.size());
      size_t second = chooser_.rng().below(candidates.size() - 1);
      second += second >= first ? 1 : 0;
      candidates = {candidates[std::min(first, second)], candidates[std::max(first, second)]};
    }
    decision.worker = chooser_.least_loaded(snapshot.workers, candidates);
    decision.reason = Reason::kPowerOfTwo;
  }
};

class LocalityBand final : public LoadPolicy {
 public:
  LocalityBand(Chooser chooser, double tau, double load_cap)
      : LoadPolicy(kBandName, chooser), tau_(static_cast<float>(tau)), load_cap_(load_cap) {}

  bool wants_counts() const override { return true; }

 private:
  void decide(const DecodeSnapshot& snapshot, const DecodeRequest& request, Decision& decision) override {
    decision.fallback = score(snapshot, request, decision);
    if (decision.fallback != FallbackReason::kNone) {
      decision.worker = chooser_.least_loaded(snapshot.workers, decision.candidates);
      decision.reason = Reason::kLeastLoaded;
      return;
    }
    // The cap comes first: a worker over it does not exist for the band, so that the next most similar
    // one takes its place.
    const double limit = load_limit(snapshot.workers, load_cap_, request.load);
    std::vector<uint32_t> eligible, without_cohort;
    for (const uint32_t w : decision.candidates) {
      if (!(snapshot.workers[w].load <= limit)) continue;
      (has_cohort(snapshot.workers[w], *snapshot.cohorts) ? eligible : without_cohort).push_back(w);
    }
    decision.capped = static_cast<uint32_t>(decision.candidates.size() - eligible.size() - without_cohort.size());
    if (eligible.empty() && without_cohort.empty()) eligible = decision.candidates;  // a load that is not a number
    std::vector<uint32_t> band = locality_band(decision.scores, eligible, tau_, tied_seconds());
    decision.reason = Reason::kBand;
    if (!without_cohort.empty()) {
      const auto by_load = [&](uint32_t a, uint32_t b) { return snapshot.workers[a].load < snapshot.workers[b].load; };
      const double least = snapshot.workers[*std::ranges::min_element(without_cohort, by_load)].load;
      const auto busier = [&](uint32_t w) { return snapshot.workers[w].load > least; };
      if (std::ranges::all_of(band, busier)) {
        band = std::move(without_cohort);
        decision.reason = Reason::kNoCohort;
      }
    }
    decision.candidates = std::move(band);
    decision.worker = chooser_.least_loaded(snapshot.workers, decision.candidates);
  }

  // The published band takes the lowest index of several second bests; that would always be the same worker.
  TiedSeconds tied_seconds() const {
    return chooser_.tie_break() == TieBreak::kLowestIndex ? TiedSeconds::kFirst : TiedSeconds::kAll;
  }

  static bool has_cohort(const WorkerView& worker, const expert::CohortModel& cohorts) {
    return worker.cohort >= 0 && static_cast<size_t>(worker.cohort) < cohorts.cohorts();
  }

  // Fills decision.scores, or says why it cannot.
  FallbackReason score(const DecodeSnapshot& snapshot, const DecodeRequest& request, Decision& decision) {
    if (snapshot.cohorts == nullptr) return FallbackReason::kNoCohorts;
    if (request.counts == nullptr) return FallbackReason::kNoCounts;
    const expert::CohortModel& cohorts = *snapshot.cohorts;
    const std::string& fitted_for = cohorts.data().model_fingerprint;
    if (!request.model_fingerprint.empty() && !fitted_for.empty() && request.model_fingerprint != fitted_for) {
      return FallbackReason::kOtherModel;
    }
    const auto sorted_in = [&](uint32_t w) { return has_cohort(snapshot.workers[w], cohorts); };
    if (std::ranges::none_of(decision.candidates, sorted_in)) return FallbackReason::kCohortWorkerMismatch;
    switch (cohorts.signature(*request.counts, signature_)) {
      case expert::SignatureProblem::kNone: break;
      case expert::SignatureProblem::kShapeMismatch: return FallbackReason::kShapeMismatch;
      case expert::SignatureProblem::kZeroVector: return FallbackReason::kZeroSignature;
      case expert::SignatureProblem::kNoGates: return FallbackReason::kNoGates;
    }
    const std::vector<float> similarities = cohorts.similarities(signature_);
    decision.scores.reserve(snapshot.workers.size());
    for (const WorkerView& worker : snapshot.workers) {
      const bool sorted = has_cohort(worker, cohorts);
      decision.scores.push_back(sorted ? similarities[static_cast<size_t>(worker.cohort)] : kNoScore);
    }
    return FallbackReason::kNone;
  }

  float tau_;
  double load_cap_;
  expert::Signature signature_;  // scratch, so that a decision does not allocate it anew
};

Error wrong(std::string_view field, std::string_view given, std::string_view accepted) {
  return invalid(fmt::format("decode policy: {} is '{}'; accepted: {}", field, given, accepted), std::string(field));
}

}  // namespace

std::span<const std::string_view> decode_policy_names() { return kNames; }

namespace {

Result<std::unique_ptr<DecodePolicy>> make_plain(const DecodePolicyOptions& options) {
  using Made = std::unique_ptr<DecodePolicy>;
  const Result<TieBreak> tie_break = parse_tie_break(options.tie_break);
  if (!tie_break) return tie_break.error();
  if (!(options.tau >= 0 && options.tau <= 2)) return wrong("tau", fmt::to_string(options.tau), "0 to 2");
  if (!(options.load_cap == 0 || options.load_cap >= 1)) {
    return wrong("load_cap", fmt::to_string(options.load_cap), "0 (none), 1 or more");
  }
  if (!(options.held_weight >= 0 && options.held_weight <= 1e9)) {
    return wrong("held_weight", fmt::to_string(options.held_weight), "0 (none) to 1e9");
  }
  if (!(options.marginal.cohort_weight >= 0 && options.marginal.cohort_weight <= 100)) {
    return wrong("cohort_weight", fmt::to_string(options.marginal.cohort_weight), "0 (none) to 100");
  }
  if (!(options.marginal.sharpen > 0 && options.marginal.sharpen <= 10)) {
    return wrong("sharpen", fmt::to_string(options.marginal.sharpen), "above 0, up to 10");
  }
  const Chooser chooser(*tie_break, options.seed);
  if (options.name == kBandName) return Made(std::make_unique<LocalityBand>(chooser, options.tau, options.load_cap));
  if (options.name == kLeastLoadedName) return Made(std::make_unique<LeastLoaded>(kLeastLoadedName, chooser));
  if (options.name == kPowerOfTwoName) return Made(std::make_unique<PowerOfTwo>(kPowerOfTwoName, chooser));
  if (options.name == kRandomName) return Made(std::make_unique<Random>(kRandomName, chooser));
  if (options.name == kRoundRobinName) return Made(std::make_unique<RoundRobin>(kRoundRobinName, chooser));
  if (options.name == kMarginalCostName) {
    return Made(std::make_unique<MarginalCost>(chooser, options.load_cap, options.held_weight, options.marginal));
  }
  if (options.name == kDomainName) return Made(std::make_unique<DomainPolicy>(chooser, options.load_cap));
  return wrong("name", options.name, fmt::format("{}", fmt::join(kNames, ", ")));
}

}  // namespace

Result<std::unique_ptr<DecodePolicy>> make_decode_policy(const DecodePolicyOptions& options) {
  Result<std::unique_ptr<DecodePolicy>> made = make_plain(options);
  if (!made) return made;
  if (options.held_weight > 0 && options.name != kMarginalCostName)  // it has a term for that
    made = std::unique_ptr<DecodePolicy>(new HeldPrice(*std::move(made), options.held_weight));
  if (!options.shuffle_signatures) return made;
  return std::unique_ptr<DecodePolicy>(std::make_unique<ShuffledSignatures>(std::move(*made), options.seed));
}

}  // namespace kindred::policy

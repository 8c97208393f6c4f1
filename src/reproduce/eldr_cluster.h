// ELDR's test bed in the simulator: 8P16D, its traffic and its six policies, deciding by the production objects.
//
// What is assumed, since it was published nowhere: which share of the traffic each domain has, prompts of 4 to 1024
// tokens drawn log-evenly, and experts by the synthetic process that `kindred simulate calibrate` fitted to published
// figures (its same-domain batches touch 17 to 21 % fewer experts). Runs keep the whole time, as the artifact's do:
// they begin and end with empty workers.
//
// Thread-safety: an EldrTraffic belongs to one thread; run_cell() is a function of its arguments.
#pragma once

#include <array>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "expert/cohorts.h"
#include "expert/fit.h"
#include "reproduce/eldr_law.h"
#include "sim/cluster.h"
#include "sim/summary.h"
#include "sim/synthetic_gates.h"

namespace kindred::reproduce {

inline constexpr std::array<std::string_view, 6> kEldrPolicies = {"rr", "random", "jsq", "p2c", "domain", "eldr"};

inline constexpr uint32_t kPrefixTokens = 64;  // a block of GPT-OSS-120B's prefix cache, in the artifact

struct TrafficOptions {
  double seconds = 120;  // of arrivals at each rate
  uint32_t calibration = 1000;
  uint64_t seed = 1;
};

// Of one model and workload.
class EldrTraffic {
 public:
  static Result<std::unique_ptr<EldrTraffic>> make(const EldrModel& model, Workload workload,
                                                   const TrafficOptions& options);

  const EldrModel& model() const { return model_; }
  Workload workload() const { return workload_; }
  const std::vector<double>& mixed() const { return mixed_; }  // mixed_experts()

  // kShuffled is the check that a gain comes from experts: each request decodes with another one's. kGates: what
  // prefill reports as counts are sums of gate probabilities, in 1/1024ths.
  enum class Experts : uint8_t { kOwn, kShuffled, kGates };
  // Up to 25 KB a request. `prompts`: so many different ones, in turn, in blocks of kPrefixTokens; 0: no prompt comes
  // twice. Error: of the rate.
  Result<std::vector<sim::SimRequest>> draw(uint32_t rate, Experts experts = Experts::kOwn, uint32_t prompts = 0);

  // One row for each decode worker: fitted as ELDR does, or without balance, or the domains' own means, each as often
  // as its share of the traffic has it; kGates: for requests drawn with gates, by gate probability.
  enum class Cohorts : uint8_t { kBalanced, kVanilla, kDomains, kGates };
  Result<std::shared_ptr<const expert::CohortModel>> cohorts(Cohorts kind, uint32_t workers) const;

 private:
  EldrTraffic(const EldrModel& model, Workload workload, const TrafficOptions& options)
      : model_(model), workload_(workload), options_(options) {}
  Status calibrate();
  Result<std::shared_ptr<const expert::CohortModel>> gate_cohorts(expert::FitOptions options) const;
  Result<std::shared_ptr<const expert::CohortModel>> domain_cohorts(const expert::CohortModel& fitted,
                                                                    uint32_t workers) const;

  EldrModel model_;
  Workload workload_;
  TrafficOptions options_;
  std::unique_ptr<sim::ExpertProcess> process_;
  std::unique_ptr<sim::SyntheticGates> gates_;
  std::vector<double> mixed_;
  expert::Activations calibration_;  // with the requests' domains as labels
};

struct CellOptions {
  std::string policy = "eldr";  // of kEldrPolicies
  double tau = 0.1;
  uint32_t prefill_workers = kPrefillWorkers, decode_workers = kDecodeWorkers;
  uint32_t ranks = 1;                                  // of expert parallelism, in each worker
  bool prefix_cache = false;                           // of the prefill workers
  std::shared_ptr<const expert::CohortModel> cohorts;  // null: none (only eldr and domain need any)
  uint64_t seed = 1;
};
struct Cell {
  double tpot50_ms = 0, tpot99_ms = 0, ttft50_ms = 0;
  double batch = 0, experts = 0;  // decode steps: mean batch, mean distinct experts a layer
  double worst_experts = 0;       // the same, of the rank that has the most
};
Result<Cell> run_cell(std::span<const sim::SimRequest> requests, std::shared_ptr<const sim::StepCost> cost,
                      const CellOptions& options);

// Shares of the traffic; sum 1.
std::vector<double> domain_shares(Workload workload);

}  // namespace kindred::reproduce

// `marginal-cost`: the decode worker where a request costs least, itself and those who are there already.
//
// Each step of a worker takes T(U, B) (policy/step_law.h), and every request there waits for it. A request whose
// prompt used experts with probabilities p is expected to add delta_w = sum q_w p experts to those in use at worker
// w, of which each is unused with probability q_w. So the rule is
//   argmin_w joining_w + kappa (best cosine - cosine_w) + held_weight (1 - held_w) mean joining
//   joining_w = slowness_w ((B_w + 1) T(U_w + delta_w, B_w + 1) - B_w T(U_w, B_w))
// The second term, in steps of the mean length, keeps domains apart where unions say little yet: it fades as batches
// grow (kappa is that at 16 requests a worker). It is left out where there are no cohorts. The third is the KV that
// would have to move: held_w is the share of the prompt's tokens that w has in its cache, and fetching all of it is
// worth as much as `held_weight` requests that join. With expert parallelism U_w and U_w + delta_w are those of each
// layer's busiest rank, under the placement that there is now (expert/rank_union.h). Workers with more than `load_cap`
// times their share of the load, by their speeds, are left out. Among costs that are equal, load and then the
// tie-break decide.
//
// It needs no cohorts, no profile and no calibration. Without counts, or with those of another shape than the
// worker's, it is least-loaded, and says why.
//
// Cost: O(available workers x L x E) multiplications, over the packed probabilities of one request; with ranks,
// additions rank by rank that cannot be vectorised, which takes longer.
// Thread-safety: as DecodePolicy.
#pragma once

#include <string_view>
#include <vector>

#include "expert/inclusion.h"
#include "policy/chooser.h"
#include "policy/decode_policy.h"

namespace kindred::policy {

inline constexpr std::string_view kMarginalCostName = "marginal-cost";

class MarginalCost final : public DecodePolicy {
 public:
  MarginalCost(Chooser chooser, double load_cap, double held_weight, MarginalOptions options)
      : chooser_(chooser), load_cap_(load_cap), held_weight_(held_weight), options_(options) {}

  std::optional<Decision> choose(const DecodeSnapshot& snapshot, const DecodeRequest& request) override;
  std::string_view name() const override { return kMarginalCostName; }
  bool wants_counts() const override { return true; }
  bool wants_expert_load() const override { return true; }

 private:
  bool over_cap(const WorkerView& worker, double load, double speed, double request_load) const;
  double speed_of(const WorkerView& worker) const;
  FallbackReason weigh(const DecodeSnapshot& snapshot, const DecodeRequest& request, Decision& decision);
  void add_cohorts(const DecodeSnapshot& snapshot, const DecodeRequest& request, Decision& decision);
  void add_transfer(const DecodeSnapshot& snapshot, const DecodeRequest& request, const Decision& decision);

  Chooser chooser_;
  double load_cap_;
  double held_weight_;
  MarginalOptions options_;
  // Scratch, so that a decision does not allocate it anew.
  std::vector<float> inclusion_, deltas_;
  std::vector<const float*> rows_;
  std::vector<double> costs_;  // by place among the candidates
  double mean_step_ = 0;       // of the candidates
  std::vector<WorkerView> priced_;
  expert::Signature signature_;
};

}  // namespace kindred::policy

// Which decode policy is best, and by how much: every policy on the same requests, over cluster sizes, loads, mixes of
// domains and faults of knowledge, through sim::run_cluster and so through the production objects.
//
// A cell: `workers` decode workers of one profile; Poisson arrivals at the rate at which `batch` requests, drawn from
// the mix without regard to experts, would keep each worker busy; prefill takes next to nothing and KV moves as the
// profile says, so that what differs is decode. A third of the experts' requests calibrates cohorts; the others are
// simulated. Requests of the first fifth and the last tenth of a run are not counted.
//
// What is compared: TPOT (mean, median, 99th percentile over requests), as change against the best of round-robin,
// least-loaded and power-of-two in that cell and statistic.
//
// Thread-safety: a study is a function of its arguments; cells may run side by side on one pool.
#pragma once

#include <array>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/result.h"
#include "sim/cohort_fit.h"
#include "sim/dispatch.h"
#include "sim/expert_process.h"
#include "sim/profile.h"

namespace kindred::sim {

// Requests' experts, to be drawn from.
struct StudyPool {
  std::string name;
  expert::ExpertShape shape;
  std::vector<std::string> domains;
  std::vector<RequestExperts> simulated, calibrating;
  Profile profile;
  uint32_t most_output_tokens = 192;  // of a request; fewer where its tape is shorter
};

// Recorded rows once each, or `drawn` requests of a process that draws. Every third calibrates.
StudyPool make_study_pool(std::string name, ExpertProcess& process, Profile profile, uint32_t drawn = 480);

enum class StudyMix {
  kEven,      // each row as likely as the others
  kSkewed,    // domains by Zipf's law, exponent 1
  kDrifting,  // the same, while popularity moves once through all domains; cohorts know its beginning
};
std::string_view to_string(StudyMix mix);

struct StudyCell {
  uint32_t workers = 8;
  double batch = 16;
  StudyMix mix = StudyMix::kEven;
  bool unlike = false;  // every second worker takes 1.6 times as long
  bool stale = false;   // four routers, each with its own ledger and loads polled every second
};
std::string cell_text(const StudyCell& cell);

struct StudyPolicy {
  std::string name;
  policy::DecodePolicyOptions options;
  bool cohorts = true;    // known to the router
  bool foresees = false;  // prompts' counts are replaced by those of what will be decoded: an oracle
  bool baseline = false;  // others are compared with the best of these
};
// All policies; marginal-cost with its variants.
std::vector<StudyPolicy> study_policies(bool variants);

inline constexpr size_t kStudyFigures = 3;  // TPOT: mean, median, 99th percentile
struct StudyRow {
  std::string policy;
  std::array<double, kStudyFigures> tpot_s{};  // mean over seeds
  std::array<double, kStudyFigures>
      change{};  // against the best baseline of the same seed, mean over seeds: -0.1 is 10 % less
  std::array<double, kStudyFigures> error{};  // standard error of `change` over seeds; 0 with one seed
  double active_experts = 0;                  // a layer
  double batch = 0;                           // mean of decode steps
};

// One row a policy. Error: that of run_cluster, of fitting cohorts.
Result<std::vector<StudyRow>> run_study_cell(const StudyPool& pool, const StudyCell& cell,
                                             std::span<const StudyPolicy> policies, std::span<const uint64_t> seeds);

}  // namespace kindred::sim

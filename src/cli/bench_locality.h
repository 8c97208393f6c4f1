// `kindred bench locality`, in parts: what is asked for, what was measured, and what is said of it.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "cli/bench.h"
#include "cli/local_cluster.h"
#include "cli/prompts.h"
#include "expert/activations.h"

namespace kindred::cli {

struct LocalityOptions {
  std::string mix = "language";
  std::string prompts;  // a file in place of the mix
  std::string model, pace;
  std::vector<std::string> policies;
  std::string cache = "off";
  int64_t workers = 4, rounds = 2, tokens = 128, pool = 0, seed = 1;
  // tau 0: no second-nearest worker joins a band of one, which among four would be a quarter of the cluster.
  double rate = 6, seconds = 40, tau = 0, load_cap = 1.25;
  bool shuffle_signatures = false, unpaced = false;
  BenchOutput output;
};

// One policy, with the prefix cache on or off.
struct Arm {
  std::string policy;
  bool cache = false;
  LocalCluster::Server router = 0;

  std::string name(bool say_cache) const { return say_cache ? policy + (cache ? ", cache" : ", no cache") : policy; }
};

// What one arm did, in one round or in all.
struct ArmResult {
  DecodeWork work;
  std::vector<double> ttft_s, tpot_s;
  size_t requests = 0, failed = 0;
  std::string first_error;

  ArmResult& operator+=(const ArmResult& other);
};

struct LocalityResult {
  std::vector<Arm> arms;
  std::vector<std::vector<ArmResult>> rounds;  // [round][arm]
  std::map<std::string, size_t> domains;       // prompts measured with
  expert::Activations recorded;                // of the calibration prompts
  expert::Activations by_cohort;               // the same, each labelled with its cohort
  double rho = 0, purity = 0;                  // of the fit
  size_t kept_layers = 0, layers = 0;
  size_t signatures = 0, equal_signatures = 0;  // with a prefix cache against without; 0: not compared
  std::string paced;                            // the profile's name; empty: not paced
  double seconds = 0;

  ArmResult total(size_t arm) const;
  // The arm that the others of its cache mode are compared with: the first policy.
  size_t base_of(size_t arm) const;
};

Result<LocalityResult> run_locality(const LocalityOptions& options);

std::string locality_text(const LocalityOptions& options, const LocalityResult& result, const Machine& machine);
Json locality_json(const LocalityOptions& options, const LocalityResult& result, const Machine& machine);
Status locality_plots(const LocalityOptions& options, const LocalityResult& result, const Machine& machine);

}  // namespace kindred::cli

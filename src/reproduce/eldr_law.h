// How long a step takes on ELDR's workers (one MI300X, vLLM 0.21): a law with few constants, fitted to round-robin.
//
// Decode runs captured graphs, padded to the next captured size g of vLLM's default list, so a step's kernels are
// those of g tokens, whatever the batch:
//   step = fixed + token * g + sum over layers of expert * |U_l| * kernel(g)
// `expert` is fetching an expert's weights (ELDR's law; its figure 2: a layer's time follows |U| and not the batch), by
// the memory's bandwidth: how it and how the batch grow with the rate cannot be told apart in round-robin's rows.
// kernel(g), about 1, says how well the experts' kernel is tuned for g tokens: vLLM picks its tile sizes by the nearest
// of a few numbers of tokens (kTunedSizes). A TPOT that falls while the rate rises is what such a choice looks like:
// the batch, and with it |U|, is larger all the same.
// Prefill: fixed + token * prompt tokens (eager kernels, no graphs).
//
// Thread-safety: const after construction.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "reproduce/eldr_rows.h"
#include "sim/expert_process.h"
#include "sim/step_cost.h"

namespace kindred::reproduce {

struct EldrModel {
  std::string key, name;
  uint32_t layers = 0, experts = 0, top_k = 0;
  double expert_bytes = 0;     // of one expert of one layer
  double bandwidth_share = 0;  // of the memory's peak, that the kernels of such weights reach
};
// The three of the main tables. Layers and experts are the artifact's; top-k and sizes are the models' own.
std::span<const EldrModel> eldr_models();
// Qwen3-235B-A22B at 2P8D, each worker four GPUs with tensor and expert parallelism. No row of it was published, so its
// law is another model's, stretched (large_law()).
const EldrModel& large_model();
inline constexpr uint32_t kLargeRanks = 4, kLargePrefillWorkers = 2, kLargeDecodeWorkers = 8;
inline constexpr std::array<uint32_t, 4> kLargeRates = {5, 10, 15, 20};  // requests a second; the paper's are not known

inline constexpr uint32_t kOutputTokens = 512;  // of every request, the first one made by the prefill worker
inline constexpr uint32_t kDecodeWorkers = 16, kPrefillWorkers = 8;

// vLLM's default captured sizes: 1, 2, 4, then every 8 to 256, then every 16 to 512. Above them nothing is padded.
uint32_t captured_size(uint32_t tokens);

// Numbers of tokens for which kernels are tuned; a graph runs the kernel of the nearest, the smaller one of two.
inline constexpr std::array<uint32_t, 14> kTunedSizes = {1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024};
size_t tuned_class(uint32_t tokens);

struct DecodeLaw {
  double fixed_ms = 0, token_us = 0, expert_us = 0;  // expert_us: an expert of a layer
  std::array<double, kTunedSizes.size()> kernel = {};

  // `experts`: distinct, summed over layers.
  double step_ms(uint32_t batch, double experts) const;
};
struct PrefillLaw {
  double fixed_ms = 0, token_us = 0;
};

// Of large_model(), from the law of `from`: fixed by layers, and two all-reduces for each; a token by the parameters
// that it activates on one GPU; an expert by its bytes; the same kernels.
DecodeLaw large_law(const EldrModel& from, const DecodeLaw& law);
PrefillLaw large_law(const EldrModel& from, const PrefillLaw& law);

class EldrCost final : public sim::StepCost {
 public:
  EldrCost(const DecodeLaw& decode, const PrefillLaw& prefill) : decode_(decode), prefill_(prefill) {}
  double step_s(const sim::StepShape& shape) const override;
  double kv_transfer_s(double tokens) const override;

 private:
  DecodeLaw decode_;
  PrefillLaw prefill_;
};

// Expected distinct experts in a batch of any requests of a workload: [n] for n = 0 .. most_batch, mean over layers.
std::vector<double> mixed_experts(sim::ExpertProcess& process, uint32_t most_batch, uint64_t seed);

struct LawFit {
  DecodeLaw law;
  std::vector<EldrRow> rows;         // that it was fitted to
  std::vector<double> predicted_ms;  // of each, by the law alone
  double rms = 0;                    // of predicted / measured - 1
};
// To the median TPOT of round-robin rows of one model. `mixed` by workload. A worker holds rate / 16 * 511 * TPOT
// requests (Little), a number that scatters as round-robin of Poisson arrivals does; so each row says what a step takes
// at a known batch and |U|. expert is known; fixed and token are the straight line through the rest (least squares of
// relative errors); what a row is off is its kernels'. Error: kInvalid without rows at three rates or more.
Result<LawFit> fit_law(const EldrModel& model, std::span<const EldrRow> round_robin,
                       const std::array<std::vector<double>, 2>& mixed);
// What the law says of round-robin's median TPOT.
double round_robin_tpot_ms(const DecodeLaw& law, const EldrModel& model, double rate, std::span<const double> mixed);

}  // namespace kindred::reproduce

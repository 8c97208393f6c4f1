// The synthetic process. Recorded ones are in recorded_process.cpp.
#include "sim/expert_process.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <span>
#include <unordered_map>

#include "base/rng.h"
#include "sim/synthetic_gates.h"

namespace kindred::sim {
namespace {

constexpr double kMostDeviation = 20;
constexpr uint32_t kMostPrototypes = 1 << 16, kMostTapeTokens = 1 << 20;
constexpr size_t kMostProcessDomains = 256;
constexpr uint32_t kCheckpointTokens = 16;
constexpr uint32_t kGateCheckpointTokens = 8;  // gates of tokens in between are the mean of their eight
// A draw of an expert that the token already has is repeated; with a very skewed gate for long. From here on the
// likeliest of those left are taken, which is what further draws would nearly always give.
constexpr int kMostRepeats = 200;

// The sum of twelve uniform numbers of 16 bits, four from a word: mean 0, variance 1, and the same on every machine,
// which logarithms and cosines of the standard library are not.
double roughly_normal(uint64_t seed, uint64_t position) {
  uint32_t sum = 0;
  for (uint64_t i = 0; i < 3; ++i) {
    const uint64_t word = mix64(mix64(seed) ^ mix64(3 * position + i));
    sum += static_cast<uint32_t>(word >> 48) + static_cast<uint32_t>(word >> 32 & 0xffff) +
           static_cast<uint32_t>(word >> 16 & 0xffff) + static_cast<uint32_t>(word & 0xffff);
  }
  return (sum + 6) / 65536.0 - 6;
}

// Draws experts of one layer.
class Gate {
 public:
  explicit Gate(std::vector<double> weights) : cumulative_(std::move(weights)) {
    std::partial_sum(cumulative_.begin(), cumulative_.end(), cumulative_.begin());
  }

  // Adds to [E] what a token's softmax says that has chosen `chosen`, in this order. To choose without replacement,
  // each time in proportion to w = exp(utility), is to choose the highest of utility + Gumbel noise, or the earliest
  // of exponential times of rate w. Given the choice, the chosen ones' times follow each other, each with the rate of
  // all that were left, and the others come after them; the token's probabilities are in proportion to 1 / time.
  void add_probabilities(std::span<const uint32_t> chosen, Rng& rng, std::vector<double>& times,
                         std::span<float> sums) const {
    const auto weight = [this](size_t e) { return cumulative_[e] - (e > 0 ? cumulative_[e - 1] : 0); };
    constexpr double kNever = 0, kLeastRate = 1e-12;
    times.assign(cumulative_.size(), kNever);
    double elapsed = 0, left = cumulative_.back();
    for (const uint32_t e : chosen) {
      elapsed -= std::log1p(-rng.uniform()) / std::max(left, kLeastRate);
      times[e] = elapsed;
      left -= weight(e);
    }
    double all = 0;
    for (size_t e = 0; e < times.size(); ++e) {
      if (times[e] == kNever) times[e] = elapsed - std::log1p(-rng.uniform()) / std::max(weight(e), kLeastRate);
      all += times[e] = 1 / std::max(times[e], kLeastRate);
    }
    for (size_t e = 0; e < times.size(); ++e) sums[e] += static_cast<float>(times[e] / all);
  }

  // top_k different ones into `chosen`.
  void draw(uint32_t top_k, Rng& rng, std::vector<uint32_t>& chosen) const {
    chosen.clear();
    int repeats = 0;
    while (chosen.size() < top_k) {
      const auto at = std::upper_bound(cumulative_.begin(), cumulative_.end() - 1, rng.uniform() * cumulative_.back());
      const auto expert = static_cast<uint32_t>(at - cumulative_.begin());
      if (std::find(chosen.begin(), chosen.end(), expert) == chosen.end()) chosen.push_back(expert);
      else if (++repeats > kMostRepeats) return fill(top_k, chosen);
    }
  }

 private:
  void fill(uint32_t top_k, std::vector<uint32_t>& chosen) const {
    std::vector<uint32_t> order(cumulative_.size());
    std::iota(order.begin(), order.end(), 0);
    const auto weight = [this](uint32_t e) { return cumulative_[e] - (e > 0 ? cumulative_[e - 1] : 0); };
    std::stable_sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) { return weight(a) > weight(b); });
    for (const uint32_t expert : order) {
      if (chosen.size() == top_k) return;
      if (std::find(chosen.begin(), chosen.end(), expert) == chosen.end()) chosen.push_back(expert);
    }
  }

  std::vector<double> cumulative_;
};

struct Prototype {
  std::shared_ptr<const ExpertTape> decode;
  // [tape_tokens / kCheckpointTokens + 1, cells]: counts of the prompt tape's first tokens.
  std::vector<uint32_t> checkpoints;
  std::vector<uint16_t> prompt;  // [tape_tokens, L, top_k]
};

class Synthetic final : public ExpertProcess, public SyntheticGates {
 public:
  explicit Synthetic(SyntheticOptions options)
      : options_(std::move(options)),
        seed_(mix64(options_.seed)),
        prototypes_(options_.domains.size() * options_.prototypes) {
    if (options_.domain_share.empty()) options_.domain_share.assign(options_.domains.size(), 1);
    std::partial_sum(options_.domain_share.begin(), options_.domain_share.end(), options_.domain_share.begin());
  }

  const expert::ExpertShape& shape() const override { return options_.shape; }
  const std::vector<std::string>& domains() const override { return options_.domains; }

  RequestExperts experts(const TraceRequest& request, uint64_t number) override {
    RequestExperts out;
    out.domain = domain_of(request, number);
    const Prototype& prototype = get(out.domain, which_of(request, number));
    out.first = static_cast<uint32_t>(uniform_at(options_.seed ^ kPlace, number) * options_.tape_tokens);
    out.decode = prototype.decode;
    out.prompt = prompt_counts(prototype, request.prompt_tokens, start_of(number));
    return out;
  }

  std::vector<float> prompt_gates(const TraceRequest& request, uint64_t number) override {
    const uint32_t domain = domain_of(request, number), which = which_of(request, number);
    std::vector<float>& sums = gates_[uint64_t{domain} << 32 | which];
    if (sums.empty()) sums = gate_checkpoints(domain, which);
    const uint32_t start = start_of(number), tape = options_.tape_tokens;
    const uint64_t end = uint64_t{start} + request.prompt_tokens;
    std::vector<float> out(options_.shape.cells(), 0);
    const uint64_t whole = end / tape;
    add_gates(sums, tape, static_cast<float>(whole), out);
    add_gates(sums, static_cast<uint32_t>(end % tape), 1, out);
    add_gates(sums, start, -1, out);
    for (float& sum : out) sum = std::max(sum, 0.0F);  // a difference of rounded sums
    return out;
  }

 private:
  // What a seed is for, so that draws do not repeat each other.
  static constexpr uint64_t kBase = 0x6261, kDomain = 0x646f, kRequest = 0x7265, kPhase = 0x7068, kWhich = 0x7768,
                            kPlace = 0x706c, kStart = 0x7374, kMix = 0x6d69, kTokens = 0x746f, kPromptTape = 0x7074,
                            kDrift = 0x6472, kPromptDrift = 0x7064, kGates = 0x6761;

  uint32_t domain_of(const TraceRequest& request, uint64_t number) const {
    const auto count = static_cast<uint32_t>(options_.domains.size());
    if (request.domain >= 0) return static_cast<uint32_t>(request.domain) % count;
    const auto& shares = options_.domain_share;
    const double at = uniform_at(options_.seed ^ kMix, number) * shares.back();
    return static_cast<uint32_t>(std::upper_bound(shares.begin(), shares.end() - 1, at) - shares.begin());
  }

  uint32_t which_of(const TraceRequest& request, uint64_t number) const {
    const auto which = request.expert_profile >= 0
                           ? static_cast<uint64_t>(request.expert_profile)
                           : static_cast<uint64_t>(uniform_at(options_.seed ^ kWhich, number) * options_.prototypes);
    return static_cast<uint32_t>(which % options_.prototypes);
  }
  // Of the prompt, on its tape.
  uint32_t start_of(uint64_t number) const {
    return static_cast<uint32_t>(uniform_at(options_.seed ^ kStart, number) * options_.tape_tokens);
  }

  // [L, E], without drift.
  std::vector<double> utilities(uint32_t domain, uint32_t prototype, bool decode) const {
    const uint64_t of_domain = mix64(seed_ ^ kDomain) ^ domain;
    const uint64_t of_request = mix64(seed_ ^ kRequest) ^ (uint64_t{domain} << 32 | prototype);
    const uint64_t of_phase = mix64(seed_ ^ kPhase) ^ domain;
    std::vector<double> utility(options_.shape.cells());
    for (uint64_t cell = 0; cell < utility.size(); ++cell) {
      utility[cell] = options_.base * roughly_normal(seed_ ^ kBase, cell) +
                      options_.domain * roughly_normal(of_domain, cell) +
                      options_.request * roughly_normal(of_request, cell);
      if (decode) utility[cell] += options_.phase * roughly_normal(of_phase, cell);
    }
    return utility;
  }

  // Draws a tape: use(token, layer, gate, chosen) in order of tokens and layers.
  template <class Use>
  void draw_tape(uint32_t domain, uint32_t which, bool decode, Use use) const {
    const uint64_t id = uint64_t{domain} << 32 | which;
    const std::vector<double> utility = utilities(domain, which, decode);
    const uint32_t experts = options_.shape.experts;
    Rng rng(mix64(mix64(seed_ ^ (decode ? kTokens : kPromptTape)) ^ id));
    std::vector<Gate> gates;
    std::vector<uint32_t> chosen;
    for (uint32_t t = 0; t < options_.tape_tokens; ++t) {
      if (t % kDriftTokens == 0) {
        const uint64_t of_drift = mix64(mix64(seed_ ^ (decode ? kDrift : kPromptDrift)) ^ id) ^ t;
        gates.clear();
        for (size_t l = 0; l < options_.shape.layers.size(); ++l) {
          std::vector<double> weights(experts);
          for (uint32_t e = 0; e < experts; ++e) {
            const uint64_t cell = l * experts + e;
            weights[e] = std::exp(utility[cell] + options_.drift * roughly_normal(of_drift, cell));
          }
          gates.emplace_back(std::move(weights));
        }
      }
      for (uint32_t l = 0; l < gates.size(); ++l) {
        gates[l].draw(options_.shape.top_k, rng, chosen);
        use(t, l, gates[l], std::span<const uint32_t>(chosen));
      }
    }
  }

  const Prototype& get(uint32_t domain, uint32_t which) {
    std::unique_ptr<Prototype>& place = prototypes_[size_t{domain} * options_.prototypes + which];
    if (place) return *place;
    place = std::make_unique<Prototype>();
    auto tape = std::make_shared<ExpertTape>(options_.shape, options_.tape_tokens);
    draw_tape(domain, which, true, [&tape](uint32_t t, uint32_t l, const Gate&, std::span<const uint32_t> chosen) {
      for (const uint32_t expert : chosen) tape->set(t, l, expert);
    });
    place->decode = std::move(tape);

    std::vector<uint32_t>& prompt = place->checkpoints;
    std::vector<uint32_t> counts(options_.shape.cells(), 0);
    uint32_t kept = 0;  // checkpoints
    draw_tape(domain, which, false, [&](uint32_t t, uint32_t l, const Gate&, std::span<const uint32_t> chosen) {
      if (t == kept * kCheckpointTokens) {
        prompt.insert(prompt.end(), counts.begin(), counts.end());
        ++kept;
      }
      for (const uint32_t expert : chosen) {
        ++counts[l * options_.shape.experts + expert];
        place->prompt.push_back(static_cast<uint16_t>(expert));
      }
    });
    prompt.insert(prompt.end(), counts.begin(), counts.end());
    return *place;
  }

  // [checkpoints, cells]: sums of the first kGateCheckpointTokens * i tokens of the prompt tape; the last: of all.
  std::vector<float> gate_checkpoints(uint32_t domain, uint32_t which) const {
    const size_t cells = options_.shape.cells(), experts = options_.shape.experts;
    std::vector<float> out, sums(cells, 0);
    std::vector<double> times;
    Rng rng(mix64(mix64(seed_ ^ kGates) ^ (uint64_t{domain} << 32 | which)));
    draw_tape(domain, which, false, [&](uint32_t t, uint32_t l, const Gate& gate, std::span<const uint32_t> chosen) {
      if (l == 0 && t % kGateCheckpointTokens == 0) out.insert(out.end(), sums.begin(), sums.end());
      gate.add_probabilities(chosen, rng, times, std::span(sums).subspan(l * experts, experts));
    });
    out.insert(out.end(), sums.begin(), sums.end());
    return out;
  }

  // Adds `times` the sums of the prompt tape's first `tokens` tokens.
  void add_gates(std::span<const float> sums, uint32_t tokens, float times, std::span<float> out) const {
    const size_t below = tokens / kGateCheckpointTokens;
    const size_t begins = below * kGateCheckpointTokens;
    const size_t ends = std::min<size_t>(begins + kGateCheckpointTokens, options_.tape_tokens);
    // A tape may end between two checkpoints.
    const size_t last = sums.size() / out.size() - 1;
    const float part =
        tokens == options_.tape_tokens ? 1 : static_cast<float>(tokens - begins) / static_cast<float>(ends - begins);
    const size_t low = tokens == options_.tape_tokens ? last : below;
    const float* const from = sums.data() + low * out.size();
    const float* const to = sums.data() + std::min(low + 1, last) * out.size();
    for (size_t i = 0; i < out.size(); ++i) out[i] += times * std::lerp(from[i], to[i], part);
  }

  // Adds `times` the counts of the prompt tape's first `tokens` tokens.
  void add_prefix(const Prototype& prototype, uint32_t tokens, uint32_t times, std::vector<uint32_t>& counts) const {
    const size_t cells = options_.shape.cells();
    const bool whole = tokens == options_.tape_tokens;
    const uint32_t checkpoint =
        whole ? static_cast<uint32_t>(prototype.checkpoints.size() / cells) - 1 : tokens / kCheckpointTokens;
    const uint32_t* from = prototype.checkpoints.data() + checkpoint * cells;
    for (size_t i = 0; i < cells; ++i) counts[i] += times * from[i];
    if (whole) return;
    const size_t top_k = options_.shape.top_k;
    const size_t row = options_.shape.layers.size() * top_k;
    for (uint32_t t = checkpoint * kCheckpointTokens; t < tokens; ++t) {
      for (size_t i = 0; i < row; ++i) {
        counts[i / top_k * options_.shape.experts + prototype.prompt[t * row + i]] += times;
      }
    }
  }

  // `tokens` tokens of the prompt tape from `start` on, around its end as often as needed.
  std::shared_ptr<const expert::ExpertCounts> prompt_counts(const Prototype& prototype, uint32_t tokens,
                                                            uint32_t start) const {
    auto counts = std::make_shared<expert::ExpertCounts>(options_.shape);
    counts->tokens = tokens;
    const uint64_t end = uint64_t{start} + tokens;
    add_prefix(prototype, options_.tape_tokens, static_cast<uint32_t>(end / options_.tape_tokens), counts->data);
    add_prefix(prototype, static_cast<uint32_t>(end % options_.tape_tokens), 1, counts->data);
    // Unsigned arithmetic: minus what stands before the start.
    add_prefix(prototype, start, UINT32_MAX, counts->data);
    return counts;
  }

  SyntheticOptions options_;
  uint64_t seed_;
  std::vector<std::unique_ptr<Prototype>> prototypes_;
  std::unordered_map<uint64_t, std::vector<float>> gates_;  // by domain and prototype, made when first asked for
};

Error refused_option(const char* field, double got, const std::string& accepted) {
  return invalid(fmt::format("{}: got {}; accepted: {}", field, got, accepted), field);
}

Status check_synthetic(const SyntheticOptions& options) {
  const expert::ExpertShape& shape = options.shape;
  if (shape.layers.empty()) return refused_option("layers", 0, "at least one MoE layer");
  if (shape.experts == 0 || shape.experts > UINT16_MAX) return refused_option("experts", shape.experts, "1 to 65535");
  if (shape.top_k == 0 || shape.top_k > shape.experts) {
    return refused_option("top_k", shape.top_k, fmt::format("1 to {} (experts)", shape.experts));
  }
  if (options.domains.empty() || options.domains.size() > kMostProcessDomains) {
    return refused_option("domains", static_cast<double>(options.domains.size()),
                          fmt::format("1 to {} names", kMostProcessDomains));
  }
  if (!options.domain_share.empty() && options.domain_share.size() != options.domains.size()) {
    return refused_option("domain_share", static_cast<double>(options.domain_share.size()),
                          fmt::format("one share a domain ({}), or none", options.domains.size()));
  }
  for (const double share : options.domain_share) {
    if (!(share > 0 && share <= 1e9)) return refused_option("domain_share", share, "above 0");
  }
  for (const auto& [field, value] :
       {std::pair("base", options.base), std::pair("domain", options.domain), std::pair("request", options.request),
        std::pair("drift", options.drift), std::pair("phase", options.phase)}) {
    if (!(value >= 0 && value <= kMostDeviation)) {
      return refused_option(field, value, fmt::format("0 to {}", kMostDeviation));
    }
  }
  if (options.prototypes == 0 || options.prototypes > kMostPrototypes) {
    return refused_option("prototypes", options.prototypes, fmt::format("1 to {}", kMostPrototypes));
  }
  if (options.tape_tokens == 0 || options.tape_tokens > kMostTapeTokens) {
    return refused_option("tape_tokens", options.tape_tokens, fmt::format("1 to {}", kMostTapeTokens));
  }
  return {};
}

}  // namespace

Result<std::unique_ptr<ExpertProcess>> make_synthetic(SyntheticOptions options) {
  if (Status ok = check_synthetic(options); !ok) return std::move(ok).error();
  return std::unique_ptr<ExpertProcess>(std::make_unique<Synthetic>(std::move(options)));
}

Result<std::unique_ptr<SyntheticGates>> make_synthetic_gates(SyntheticOptions options) {
  if (Status ok = check_synthetic(options); !ok) return std::move(ok).error();
  return std::unique_ptr<SyntheticGates>(std::make_unique<Synthetic>(std::move(options)));
}

SyntheticOptions calibrated_synthetic(expert::ExpertShape shape) {
  SyntheticOptions options;
  options.shape = std::move(shape);
  options.base = 0.692;
  options.domain = 1.265;
  options.request = 0.949;
  options.drift = 0.805;
  options.phase = 0.831;
  return options;
}

Result<std::unique_ptr<ExpertProcess>> make_uniform(expert::ExpertShape shape, uint64_t seed) {
  SyntheticOptions options;
  options.shape = std::move(shape);
  options.domains = {"all"};
  options.seed = seed;
  return make_synthetic(std::move(options));
}

}  // namespace kindred::sim

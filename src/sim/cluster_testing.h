// Test only: small models and workloads whose results can be worked out by hand.
#pragma once

#include <cmath>
#include <memory>
#include <numeric>
#include <vector>

#include "base/rng.h"
#include "sim/cluster.h"

namespace kindred::sim::testing {

inline expert::ExpertShape small_shape(uint32_t layers = 2, uint32_t experts = 16, uint32_t top_k = 2) {
  expert::ExpertShape shape;
  shape.layers.resize(layers);
  std::iota(shape.layers.begin(), shape.layers.end(), 0U);
  shape.experts = experts;
  shape.top_k = top_k;
  return shape;
}

// Every token uses `top_k` different experts of each layer, all equally likely.
inline std::shared_ptr<const ExpertTape> uniform_tape(const expert::ExpertShape& shape, uint32_t tokens, Rng& rng) {
  auto tape = std::make_shared<ExpertTape>(shape, tokens);
  std::vector<uint32_t> order(shape.experts);
  for (uint32_t t = 0; t < tokens; ++t) {
    for (uint32_t l = 0; l < shape.layers.size(); ++l) {
      std::iota(order.begin(), order.end(), 0U);
      for (uint32_t k = 0; k < shape.top_k; ++k) {
        std::swap(order[k], order[k + rng.below(shape.experts - k)]);
        tape->set(t, l, order[k]);
      }
    }
  }
  return tape;
}

// A prompt that used the first top_k experts behind `from`, whatever its tokens.
inline std::shared_ptr<const expert::ExpertCounts> flat_counts(const expert::ExpertShape& shape, uint32_t tokens,
                                                               uint32_t from = 0) {
  auto counts = std::make_shared<expert::ExpertCounts>(shape);
  counts->tokens = tokens;
  for (size_t l = 0; l < shape.layers.size(); ++l) {
    for (uint32_t k = 0; k < shape.top_k; ++k) {
      counts->data[l * shape.experts + (from + k) % shape.experts] = tokens;
    }
  }
  return counts;
}

struct TestModel {
  expert::ExpertShape shape = small_shape();
  std::shared_ptr<const ExpertTape> tape;

  explicit TestModel(uint64_t seed = 1, uint32_t tokens = 4096) {
    Rng rng(seed);
    tape = uniform_tape(shape, tokens, rng);
  }
  SimRequest request(double arrival_s, uint32_t prompt, uint32_t output, uint32_t first = 0) const {
    return {.arrival_s = arrival_s,
            .prompt_tokens = prompt,
            .output_tokens = output,
            .experts = {.prompt = flat_counts(shape, prompt), .decode = tape, .first = first}};
  }
};

inline WorkerGroup group(Role role, uint32_t count, const LinearCost& cost, uint32_t kv_tokens = 1 << 20) {
  WorkerGroup out;
  out.name = std::string(to_string(role));
  out.role = role;
  out.count = count;
  out.cost = std::make_shared<LinearCost>(cost);
  out.engine.kv = {.blocks = kv_tokens / 16, .block_tokens = 16, .piece_tokens = 64, .cache = role != Role::kDecode};
  return out;
}

inline ClusterOptions pd(uint32_t prefill, uint32_t decode, const LinearCost& cost, uint32_t decode_kv = 1 << 20) {
  ClusterOptions options;
  options.groups = {group(Role::kPrefill, prefill, cost), group(Role::kDecode, decode, cost, decode_kv)};
  options.router.decode.name = "least-loaded";
  return options;
}

// Exponential gaps.
inline std::vector<double> poisson_arrivals(double rate, size_t count, uint64_t seed) {
  Rng rng(seed);
  std::vector<double> out;
  double at_s = 0;
  for (size_t i = 0; i < count; ++i) out.push_back(at_s += -std::log(1 - rng.uniform()) / rate);
  return out;
}

inline std::vector<SimRequest> poisson_load(const TestModel& model, double rate, size_t count, uint32_t prompt,
                                            uint32_t output, uint64_t seed) {
  std::vector<SimRequest> out;
  Rng rng(seed + 99);
  for (const double at_s : poisson_arrivals(rate, count, seed)) {
    out.push_back(model.request(at_s, prompt, output, static_cast<uint32_t>(rng.below(4096))));
  }
  return out;
}

}  // namespace kindred::sim::testing

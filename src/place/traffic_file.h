// Traffic from files. docs/placement.md describes the formats; which one a file has is seen from its content:
//   JSON     {"A": [L][S][E], ...} with optional "source_names", "placement", "ranks", "distance", "transitions"
//   JSON     {"physical_to_logical_map": [L][P], "expert_load": [L][P] or [windows][L][P]}: vLLM's EPLB state
//   CSV      layer,source,expert,tokens, with that header; cells that are not there are 0
//   safetensors  Kindred's activations (expert/activations.h): a source per domain, decode counts where recorded
//
// Thread-safety: pure functions.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "expert/activations.h"
#include "place/problem.h"

namespace kindred::place {

struct TrafficFile {
  Traffic traffic;
  std::vector<std::string> source_names = {};  // [S], or empty
  // What else the file says of the problem; 0 or empty where it does not.
  uint32_t ranks = 0;
  std::vector<double> distance = {};              // [S, R]
  std::vector<std::vector<uint32_t>> slots = {};  // [L][P]: the expert in each slot (vLLM)
  std::vector<float> transitions = {};            // [L - 1, E, E]
  Placement old = {};
};

struct TrafficFileOptions {
  uint32_t sources = 0;  // of activations: requests are dealt to so many by domain; 0: one per domain
};

// Error: kIo, or kInvalid naming the field and what is accepted. The traffic has passed its check().
Result<TrafficFile> load_traffic(const std::string& path, const TrafficFileOptions& options = {});

Result<TrafficFile> traffic_from_json(std::string_view text);
Result<TrafficFile> traffic_from_csv(std::string_view text);
// Domains in alphabetical order, domain d to source d mod S; without labels request i to source i mod S, S = 1 if 0.
// Transitions are estimated request by request, as if a request's tokens chose experts of two layers independently.
Result<TrafficFile> traffic_from_activations(const expert::Activations& activations, uint32_t sources);

}  // namespace kindred::place

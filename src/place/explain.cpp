#include "place/explain.h"

#include <fmt/format.h>

#include <algorithm>

#include "place/routing.h"

namespace kindred::place {
namespace {

void explain_layer(const Problem& problem, const Placement& placement, uint32_t layer, std::vector<MoveReason>& out) {
  LayerRouting routing(problem, layer);
  const auto before = problem.old.holders(layer), after = placement.holders(layer);
  routing.cost(before);
  const std::vector<double> load_before(routing.loads().begin(), routing.loads().end());
  routing.cost(after);
  const std::span<const double> load_after = routing.loads();
  const double mean = routing.mean_load() > 0 ? routing.mean_load() : 1;
  ExpertFlow was, is;
  for (uint32_t e = 0; e < before.size(); ++e) {
    if (before[e] == after[e]) continue;
    routing.route(e, before[e], was);
    routing.route(e, after[e], is);
    MoveReason reason{.layer = layer, .expert = e, .saved_communication = was.communication - is.communication};
    for (uint32_t s = 0; s < problem.traffic.sources; ++s) {
      const double tokens = routing.tokens_from(s, e);
      reason.tokens += tokens;
      if (tokens > reason.main_tokens) {
        reason.main_tokens = tokens;
        reason.main_source = s;
      }
    }
    std::vector<uint32_t> arriving, leaving;
    std::set_difference(after[e].begin(), after[e].end(), before[e].begin(), before[e].end(),
                        std::back_inserter(arriving));
    std::set_difference(before[e].begin(), before[e].end(), after[e].begin(), after[e].end(),
                        std::back_inserter(leaving));
    for (size_t i = 0; i < arriving.size(); ++i) {
      reason.copy = i >= leaving.size();
      reason.from = reason.copy ? before[e].front() : leaving[i];
      reason.to = arriving[i];
      reason.from_load = load_before[reason.from] / mean;
      reason.to_load = load_after[reason.to] / mean;
      out.push_back(reason);
    }
  }
}

}  // namespace

std::vector<MoveReason> explain_moves(const Problem& problem, const Placement& placement, size_t most) {
  std::vector<MoveReason> moves;
  if (problem.old.empty()) return moves;
  for (uint32_t l = 0; l < problem.traffic.layers; ++l) explain_layer(problem, placement, l, moves);
  std::stable_sort(moves.begin(), moves.end(), [](const MoveReason& a, const MoveReason& b) {
    if (a.saved_communication != b.saved_communication) return a.saved_communication > b.saved_communication;
    return a.tokens > b.tokens;
  });
  moves.resize(std::min(moves.size(), most));
  return moves;
}

std::string to_sentence(const MoveReason& move, const std::string& source_name) {
  const std::string source =
      source_name.empty() ? fmt::format("source {}", move.main_source) : fmt::format("'{}'", source_name);
  std::string text = fmt::format("layer {}, expert {}: {} rank {} to {}; {:.0f} of its {:.0f} tokens come from {}",
                                 move.layer, move.expert, move.copy ? "copied from" : "from", move.from, move.to,
                                 move.main_tokens, move.tokens, source);
  if (move.saved_communication > 0) {
    text += fmt::format(", which saves {:.0f}{}", move.saved_communication, move.copy ? " with all its copies" : "");
  } else if (move.saved_communication < 0) {
    text += fmt::format("; it costs {:.0f}, and makes room or balances", -move.saved_communication);
  } else {
    text += "; no nearer than before: it balances or makes room";
  }
  return text + fmt::format(" (rank {} was at {:.2f} of the mean load, rank {} is at {:.2f})", move.from,
                            move.from_load, move.to, move.to_load);
}

}  // namespace kindred::place

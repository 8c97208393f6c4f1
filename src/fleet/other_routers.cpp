#include "fleet/other_routers.h"

#include <algorithm>
#include <cmath>
#include <vector>

namespace kindred::fleet {
namespace {

constexpr double kWorthIt = 1.25;
constexpr int kMostPower = 8;

double used_of(std::span<const float> unused, const expert::RankMap* ranks) {
  if (ranks != nullptr) return expert::busiest_rank_used(*ranks, unused);
  double used = 0;
  for (const float q : unused) used += 1 - static_cast<double>(q);
  return used;
}

std::shared_ptr<const ExpertState> raised(const ExpertState& from, int power) {
  auto out = std::make_shared<ExpertState>(from);
  for (int i = 1; i < power; ++i) {
    for (size_t c = 0; c < from.unused.size(); ++c) out->unused[c] *= from.unused[c];
  }
  out->used = used_of(out->unused, from.ranks.get());
  return out;
}

}  // namespace

void estimate_requests(std::span<PartlyKnown> workers) {
  double known = 0, requests = 0;
  for (const PartlyKnown& worker : workers) {
    known += worker.known;
    requests += worker.requests;
  }
  if (!(known > 0)) return;
  for (PartlyKnown& worker : workers) worker.requests = (worker.requests + worker.known * requests / known) / 2;
}

void add_unknown(std::span<PartlyKnown> workers) {
  std::vector<float> mean;
  size_t summed = 0;
  for (PartlyKnown& worker : workers) {
    if (!worker.state) continue;
    if (worker.known > 0 && worker.requests >= kWorthIt * worker.known) {
      const double power = std::min<double>(std::round(worker.requests / worker.known), kMostPower);
      if (power > 1) worker.state = raised(*worker.state, static_cast<int>(power));
    }
    if (summed == 0) mean.assign(worker.state->unused.size(), 0);
    if (worker.state->unused.size() != mean.size()) continue;
    ++summed;
    for (size_t c = 0; c < mean.size(); ++c) mean[c] += worker.state->unused[c];
  }
  if (summed == 0) return;
  for (float& q : mean) q /= static_cast<float>(summed);
  auto usual = std::make_shared<ExpertState>();
  usual->used = used_of(mean, nullptr);
  usual->unused = std::move(mean);
  for (PartlyKnown& worker : workers) {
    if (worker.state || worker.requests < 1) continue;
    worker.state = usual;
    if (!worker.ranks || size_t{worker.ranks->layers()} * worker.ranks->experts() != usual->unused.size()) continue;
    auto by_rank = std::make_shared<ExpertState>(*usual);
    by_rank->ranks = worker.ranks;
    by_rank->used = used_of(by_rank->unused, worker.ranks.get());
    worker.state = std::move(by_rank);
  }
}

}  // namespace kindred::fleet

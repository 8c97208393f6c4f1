#include "policy/domain.h"

#include <algorithm>

#include "policy/band.h"

namespace kindred::policy {
namespace {

// Shares halve at this age: old enough to be steady, young enough to follow a change of traffic.
constexpr uint64_t kHalveEvery = 1024;
// A label moves only if the fuller of two workers gets down to this part of what it had.
constexpr double kWorthMoving = 0.9;

}  // namespace

std::optional<Decision> DomainPolicy::choose(const DecodeSnapshot& snapshot, const DecodeRequest& request) {
  const std::span<const WorkerView> workers = snapshot.workers;
  Decision decision;
  decision.policy = kDomainName;
  decision.candidates = available_workers(workers);
  if (decision.candidates.empty()) return std::nullopt;
  std::optional<uint32_t> own;
  if (request.label.empty()) decision.fallback = FallbackReason::kNoLabel;
  else if (own = home(workers, decision.candidates, request); !own) decision.fallback = FallbackReason::kTooManyLabels;
  if (own && workers[*own].load <= load_limit(workers, load_cap_, request.load)) {
    decision.reason = Reason::kDomain;
    decision.candidates = {*own};
    decision.worker = *own;
    return decision;
  }
  if (own) {
    decision.capped = 1;
    // The least loaded worker is within the cap, so the owner, which is not, has company.
    if (decision.candidates.size() > 1) std::erase(decision.candidates, *own);
  }
  decision.reason = own ? Reason::kSpill : Reason::kLeastLoaded;
  decision.worker = chooser_.least_loaded(workers, decision.candidates);
  return decision;
}

std::optional<uint32_t> DomainPolicy::home(std::span<const WorkerView> workers, std::span<const uint32_t> available,
                                           const DecodeRequest& request) {
  auto at = labels_.find(request.label);
  if (at == labels_.end()) {
    if (labels_.size() >= kMaxLabels) return std::nullopt;
    const uint32_t worker = least_share(workers, available);
    at = labels_.emplace(std::string(request.label), Label{.url = std::string(workers[worker].url)}).first;
  }
  at->second.share += request.load;
  if (++seen_ % kHalveEvery == 0) {
    for (auto& [name, label] : labels_) label.share /= 2;
  }
  if (seen_ % kLabelReviewEvery == 0) review(workers, available);
  const auto own = std::ranges::find(workers, at->second.url, &WorkerView::url);
  if (own != workers.end() && own->available) return static_cast<uint32_t>(own - workers.begin());
  const uint32_t other = least_share(workers, available);
  if (own == workers.end()) at->second.url = workers[other].url;
  return other;
}

std::vector<double> DomainPolicy::shares(std::span<const WorkerView> workers) const {
  // A label counts a little by itself, so that the first ones spread before they have any share.
  constexpr double kLabelItself = 1e-3;
  std::vector<double> out(workers.size(), 0);
  for (const auto& [name, label] : labels_) {
    const auto at = std::ranges::find(workers, label.url, &WorkerView::url);
    if (at != workers.end()) out[static_cast<size_t>(at - workers.begin())] += label.share + kLabelItself;
  }
  return out;
}

uint32_t DomainPolicy::least_share(std::span<const WorkerView> workers, std::span<const uint32_t> among) const {
  const std::vector<double> share = shares(workers);
  return *std::ranges::min_element(among, {}, [&](uint32_t w) { return share[w]; });
}

void DomainPolicy::review(std::span<const WorkerView> workers, std::span<const uint32_t> available) {
  const std::vector<double> share = shares(workers);
  const auto by_share = [&](uint32_t w) { return share[w]; };
  const uint32_t fullest = *std::ranges::max_element(available, {}, by_share);
  const uint32_t emptiest = *std::ranges::min_element(available, {}, by_share);
  double best = kWorthMoving * share[fullest];
  Label* moves = nullptr;
  for (auto& [name, label] : labels_) {
    if (label.url != workers[fullest].url) continue;
    const double larger = std::max(share[fullest] - label.share, share[emptiest] + label.share);
    if (larger >= best) continue;
    best = larger;
    moves = &label;
  }
  if (moves != nullptr) moves->url = workers[emptiest].url;
}

}  // namespace kindred::policy

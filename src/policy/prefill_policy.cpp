#include "policy/prefill_policy.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <vector>

#include "policy/chooser.h"
#include "policy/hash_ring.h"

namespace kindred::policy {
namespace {

constexpr std::string_view kPrefixHashName = "prefix-hash";
constexpr std::string_view kLeastLoadedName = "least-loaded";
constexpr std::string_view kRoundRobinName = "round-robin";
constexpr auto kNames = std::to_array<std::string_view>({kPrefixHashName, kLeastLoadedName, kRoundRobinName});
constexpr uint32_t kMaxVnodes = 4096;

class RoundRobin final : public PrefillPolicy {
 public:
  explicit RoundRobin(Chooser chooser) : chooser_(chooser) {}

  std::optional<Decision> choose(const PrefillSnapshot& snapshot, const PrefillRequest&) override {
    Decision decision;
    decision.policy = kRoundRobinName;
    decision.reason = Reason::kRoundRobin;
    decision.candidates = available_workers(snapshot.workers);
    if (decision.candidates.empty()) return std::nullopt;
    decision.worker = chooser_.next_in_turn(snapshot.workers, decision.candidates);
    return decision;
  }
  std::string_view name() const override { return kRoundRobinName; }

 private:
  Chooser chooser_;
};

class LeastLoaded final : public PrefillPolicy {
 public:
  explicit LeastLoaded(Chooser chooser) : chooser_(chooser) {}

  std::optional<Decision> choose(const PrefillSnapshot& snapshot, const PrefillRequest&) override {
    Decision decision;
    decision.policy = kLeastLoadedName;
    decision.reason = Reason::kLeastLoaded;
    decision.candidates = available_workers(snapshot.workers);
    if (decision.candidates.empty()) return std::nullopt;
    decision.worker = chooser_.least_loaded(snapshot.workers, decision.candidates);
    return decision;
  }
  std::string_view name() const override { return kLeastLoadedName; }

 private:
  Chooser chooser_;
};

// Consistent hashing with bounded load (Mirrokni, Thorup and Zadimoghaddam, SODA 2018), in ELDR's form:
// over the bound the request goes to the least loaded worker, not along the ring.
class PrefixHash final : public PrefillPolicy {
 public:
  PrefixHash(Chooser chooser, const PrefillPolicyOptions& options)
      : chooser_(chooser),
        prefix_bytes_(options.prefix_bytes),
        vnodes_(options.vnodes),
        load_factor_(options.load_factor) {}

  std::optional<Decision> choose(const PrefillSnapshot& snapshot, const PrefillRequest& request) override {
    const std::span<const WorkerView> workers = snapshot.workers;
    Decision decision;
    decision.policy = kPrefixHashName;
    decision.candidates = available_workers(workers);
    if (decision.candidates.empty()) return std::nullopt;
    if (request.key.empty()) {
      decision.reason = Reason::kEmptyKey;
      decision.worker = chooser_.least_loaded(workers, decision.candidates);
      return decision;
    }
    update_ring(workers);
    const uint32_t owner = ring_owner(workers, blake2b_64(request.key.substr(0, prefix_bytes_)));
    double sum = 1;  // with this request
    for (const uint32_t w : decision.candidates) sum += workers[w].load;
    const double threshold = sum / static_cast<double>(decision.candidates.size()) * load_factor_;
    if (workers[owner].load <= threshold) {
      decision.reason = Reason::kRing;
      decision.worker = owner;
      decision.candidates = {owner};
    } else {
      decision.reason = Reason::kSpill;
      decision.capped = 1;
      decision.worker = chooser_.least_loaded(workers, decision.candidates);
    }
    return decision;
  }
  std::string_view name() const override { return kPrefixHashName; }

 private:
  // The ring holds all workers, available or not, so that one that comes back finds its keys again.
  void update_ring(std::span<const WorkerView> workers) {
    const bool same = std::equal(workers.begin(), workers.end(), urls_.begin(), urls_.end(),
                                 [](const WorkerView& worker, const std::string& url) { return worker.url == url; });
    if (same) return;
    urls_.clear();
    for (const WorkerView& worker : workers) urls_.emplace_back(worker.url);
    ring_ = HashRing(std::vector<std::string_view>(urls_.begin(), urls_.end()), vnodes_);
  }

  // Of the first point at or behind `hash` whose worker is available; one is.
  uint32_t ring_owner(std::span<const WorkerView> workers, uint64_t hash) const {
    const std::span<const HashRing::Point> points = ring_.points();
    size_t at = ring_.locate(hash);
    for (size_t step = 0; step < points.size() && !workers[points[at].worker].available; ++step) {
      at = at + 1 == points.size() ? 0 : at + 1;
    }
    return points[at].worker;
  }

  Chooser chooser_;
  size_t prefix_bytes_;
  uint32_t vnodes_;
  double load_factor_;
  std::vector<std::string> urls_;  // those of ring_
  HashRing ring_;
};

Error wrong(std::string_view field, std::string_view given, std::string_view accepted) {
  return invalid(fmt::format("prefill policy: {} is '{}'; accepted: {}", field, given, accepted), std::string(field));
}

}  // namespace

std::span<const std::string_view> prefill_policy_names() { return kNames; }

Result<std::unique_ptr<PrefillPolicy>> make_prefill_policy(const PrefillPolicyOptions& options) {
  using Made = std::unique_ptr<PrefillPolicy>;
  const Result<TieBreak> tie_break = parse_tie_break(options.tie_break);
  if (!tie_break) return tie_break.error();
  if (options.prefix_bytes == 0) return wrong("prefix_bytes", "0", "1 or more");
  if (options.vnodes == 0 || options.vnodes > kMaxVnodes) {
    return wrong("vnodes", fmt::to_string(options.vnodes), fmt::format("1 to {}", kMaxVnodes));
  }
  if (!(options.load_factor >= 1)) return wrong("load_factor", fmt::to_string(options.load_factor), "1 or more");
  const Chooser chooser(*tie_break, options.seed);
  if (options.name == kPrefixHashName) return Made(std::make_unique<PrefixHash>(chooser, options));
  if (options.name == kLeastLoadedName) return Made(std::make_unique<LeastLoaded>(chooser));
  if (options.name == kRoundRobinName) return Made(std::make_unique<RoundRobin>(chooser));
  return wrong("name", options.name, fmt::format("{}", fmt::join(kNames, ", ")));
}

}  // namespace kindred::policy

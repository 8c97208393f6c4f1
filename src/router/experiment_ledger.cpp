#include "router/experiment_ledger.h"

namespace kindred::router {
namespace {

constexpr std::array<const char*, 4> kNames = {"ttft_s", "tpot_s", "tokens_per_s", "active_experts"};

}  // namespace

ExperimentLedger::Slice& ExperimentLedger::at(uint64_t slice) {
  if (!slices_.contains(slice) && slices_.size() >= kMaxSlices) slices_.erase(slices_.begin());
  return slices_[slice];
}

void ExperimentLedger::request(double began_s, double ended_s, std::optional<double> ttft_s,
                               std::optional<double> tpot_s) {
  if (in_seam(began_s)) {
    ++in_seams_;
    return;
  }
  const uint64_t slice = slice_at(began_s);
  Slice& into = at(slice);
  ++into.requests;
  into.crossed += slice_at(ended_s) != slice ? 1 : 0;
  if (ttft_s) into.measures[kTtft].add(*ttft_s);
  if (tpot_s) into.measures[kTpot].add(*tpot_s);
}

void ExperimentLedger::window(uint64_t slice, std::optional<double> tokens_per_s,
                              std::optional<double> active_experts) {
  Slice& into = at(slice);
  if (tokens_per_s) into.measures[kThroughput].add(*tokens_per_s);
  if (active_experts) into.measures[kActive].add(*active_experts);
}

std::optional<double> ExperimentLedger::value(uint64_t slice, Measure measure) const {
  const auto found = slices_.find(slice);
  if (found == slices_.end()) return std::nullopt;
  const Sum& sum = found->second.measures[measure];
  return sum.count == 0 ? std::nullopt : std::optional(sum.sum / static_cast<double>(sum.count));
}

std::vector<std::pair<double, double>> ExperimentLedger::pairs(Measure measure, uint32_t arm,
                                                               uint64_t slices_over) const {
  std::vector<std::pair<double, double>> out;
  if (slices_.empty()) return out;
  const uint64_t arms = schedule_.arms();
  for (uint64_t block = schedule_.block_of(slices_.begin()->first); (block + 1) * arms <= slices_over; ++block) {
    const std::vector<uint32_t> order = schedule_.order_of(block);
    std::optional<double> control, other;
    for (uint64_t i = 0; i < arms; ++i) {
      if (order[i] == 0) control = value(block * arms + i, measure);
      if (order[i] == arm) other = value(block * arms + i, measure);
    }
    if (control && other) out.emplace_back(*control, *other);
  }
  return out;
}

Json ExperimentLedger::report(double now_s) const {
  const uint64_t over = slice_at(now_s);
  Json arms = Json::array();
  for (uint32_t arm = 0; arm < schedule_.arms(); ++arm) {
    Slice all;
    for (const auto& [slice, of] : slices_) {
      if (slice >= over || schedule_.arm_of(slice) != arm) continue;
      all.requests += of.requests;
      all.crossed += of.crossed;
      for (size_t m = 0; m < kMeasures; ++m) {
        if (const auto mean = value(slice, static_cast<Measure>(m))) all.measures[m].add(*mean);
      }
    }
    Json means, against;
    for (size_t m = 0; m < kMeasures; ++m) {
      const Sum& sum = all.measures[m];
      means[kNames[m]] = sum.count == 0 ? Json(nullptr) : Json(sum.sum / static_cast<double>(sum.count));
      if (arm == 0) continue;
      const auto estimate = policy::paired_difference(pairs(static_cast<Measure>(m), arm, over), plan_.level);
      if (!estimate) {
        against[kNames[m]] = nullptr;
        continue;
      }
      against[kNames[m]] = {{"blocks", estimate->blocks},
                            {"control", estimate->control},
                            {"arm", estimate->arm},
                            {"difference", estimate->difference},
                            {"interval", {estimate->low, estimate->high}},
                            {"claimed", estimate->claimed}};
    }
    arms.push_back({{"name", plan_.arms[arm]},
                    {"requests", all.requests},
                    {"ended_in_a_later_slice", all.crossed},
                    {"means", std::move(means)},
                    {"against_control", std::move(against)}});
  }
  return {{"v", 1},
          {"level", plan_.level},
          {"slice_s", plan_.slice_s},
          {"seam_s", plan_.seam_s},
          {"seed", plan_.seed},
          {"running_s", now_s},
          {"slices_over", over},
          {"blocks_over", over / schedule_.arms()},
          {"in_force", plan_.arms[arm_at(now_s)]},
          {"in_seam", in_seam(now_s)},
          {"requests_in_seams", in_seams_},
          {"arms", std::move(arms)}};
}

}  // namespace kindred::router

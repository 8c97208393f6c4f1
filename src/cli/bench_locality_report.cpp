// What `kindred bench locality` says of its figures.

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "cli/bench_locality.h"
#include "cli/plot.h"
#include "cli/terminal.h"
#include "expert/prediction.h"

namespace kindred::cli {
namespace {

// A worker that misses its profile's times is slower than the machine it stands for.
constexpr double kMostOverruns = 0.05;

std::string percent(double share) { return std::isfinite(share) ? fmt::format("{:+.1f} %", 100 * share) : "-"; }

double median_change(const std::vector<double>& base, const std::vector<double>& other, double q) {
  const double from = quantile(base, q);
  return from > 0 ? quantile(other, q) / from - 1 : std::numeric_limits<double>::quiet_NaN();
}

// Of each round, against the base arm of the same round.
std::vector<double> round_changes(const LocalityResult& result, size_t arm) {
  std::vector<double> out;
  for (const std::vector<ArmResult>& round : result.rounds) {
    out.push_back(active_change(round[result.base_of(arm)].work, round[arm].work));
  }
  return out;
}

// What batches of one label (domain or cohort) would save at the measured batch size, by recorded decode counts.
std::optional<expert::BatchComparison> room(const LocalityResult& result, const expert::Activations& labelled) {
  const auto batch = static_cast<uint32_t>(std::lround(result.total(0).work.batch()));
  if (batch < 2) return std::nullopt;
  const uint32_t batches[] = {batch};
  const auto compared = expert::compare_batches(labelled, batches);
  if (!compared || compared->empty() || compared->front().domains == 0) return std::nullopt;
  return compared->front();
}

std::string caveats(const LocalityResult& result) {
  double overruns = 0;
  for (size_t arm = 0; arm < result.arms.size(); ++arm)
    overruns = std::max(overruns, result.total(arm).work.overrun_share());
  if (result.paced.empty())
    return "  not paced: the workers share this machine's cores, so times are not those of several\n";
  std::string out =
      fmt::format("  paced by '{}': experts and tokens are real, times are the profile's; {:.1f} % of steps over\n",
                  result.paced, 100 * overruns);
  if (overruns > kMostOverruns)
    out += fmt::format(
        "  ✗ more than {:.0f} % of some policy's steps took longer than the profile says: times do not count\n",
        100 * kMostOverruns);
  return out;
}

}  // namespace

ArmResult& ArmResult::operator+=(const ArmResult& other) {
  work += other.work;
  ttft_s.insert(ttft_s.end(), other.ttft_s.begin(), other.ttft_s.end());
  tpot_s.insert(tpot_s.end(), other.tpot_s.begin(), other.tpot_s.end());
  requests += other.requests;
  if (failed == 0) first_error = other.first_error;
  failed += other.failed;
  return *this;
}

ArmResult LocalityResult::total(size_t arm) const {
  ArmResult sum;
  for (const std::vector<ArmResult>& round : rounds) sum += round[arm];
  return sum;
}

size_t LocalityResult::base_of(size_t arm) const {
  for (size_t i = 0; i < arm; ++i) {
    if (arms[i].cache == arms[arm].cache) return i;
  }
  return arm;
}

std::string locality_text(const LocalityOptions& options, const LocalityResult& result, const Machine& machine) {
  std::string domains;
  for (const auto& [domain, n] : result.domains)
    domains += fmt::format("{}{} {}", domains.empty() ? "" : ", ", n, domain);
  std::string out = fmt::format(
      "{} decode workers, {} requests/s, {} output tokens, {} rounds of {} s each; prompts: {}{}\n"
      "cohorts from {} other prompts: rho {:.2f}, {} of {} layers kept\n\n",
      options.workers, options.rate, options.tokens, options.rounds, options.seconds, domains,
      options.pool > 0 ? fmt::format(", {} of them in turn", options.pool) : "", result.recorded.requests(), result.rho,
      result.kept_layers, result.layers);
  Table table(
      {"policy", "requests", "experts", "change", "batch", "TPOT p50 ms", "change", "p99 ms", "change", "TTFT p50 ms"});
  for (size_t arm = 0; arm < result.arms.size(); ++arm) {
    const ArmResult all = result.total(arm), base = result.total(result.base_of(arm));
    const bool first = result.base_of(arm) == arm;
    table.row({result.arms[arm].name(options.cache == "both"), std::to_string(all.requests),
               fmt::format("{:.2f}", all.work.active_per_step()),
               first ? "" : percent(active_change(base.work, all.work)), fmt::format("{:.1f}", all.work.batch()),
               fmt::format("{:.1f}", 1e3 * quantile(all.tpot_s, 0.5)),
               first ? "" : percent(median_change(base.tpot_s, all.tpot_s, 0.5)),
               fmt::format("{:.1f}", 1e3 * quantile(all.tpot_s, 0.99)),
               first ? "" : percent(median_change(base.tpot_s, all.tpot_s, 0.99)),
               fmt::format("{:.0f}", 1e3 * quantile(all.ttft_s, 0.5))});
  }
  out += table.text() +
         "\n  experts: distinct, a decode step and layer; their change is that in steps of equal batch size\n";
  for (size_t arm = 0; arm < result.arms.size(); ++arm) {
    if (result.base_of(arm) == arm) continue;
    const std::vector<double> changes = round_changes(result, arm);
    out += fmt::format("  {}: experts {} to {} over the rounds\n", result.arms[arm].name(options.cache == "both"),
                       percent(*std::min_element(changes.begin(), changes.end())),
                       percent(*std::max_element(changes.begin(), changes.end())));
  }
  if (const auto there = room(result, result.recorded))
    out += fmt::format(
        "  room: batches of {} of one domain touch {} of a mixed batch's experts (from {} recorded prompts)\n",
        there->batch, percent(-there->saved()), result.recorded.requests());
  if (const auto there = room(result, result.by_cohort))
    out += fmt::format(
        "  of it, the cohorts hold {} ({:.0f} % of a cohort's requests are of its main domain); the load cap, the\n"
        "  mix of the moment and prompts that were not fitted on take the rest\n",
        percent(-there->saved()), 100 * result.purity);
  if (result.signatures > 0)
    out += fmt::format(
        "  signatures: {} of {} prompts have equal counts with the prefix cache, cold and warm, and without\n",
        result.equal_signatures, result.signatures);
  if (options.shuffle_signatures) out += "  signatures were shuffled among requests: an ablation\n";
  return out + caveats(result) + fmt::format("  {}; took {:.0f} s\n", machine_text(machine), result.seconds);
}

Json locality_json(const LocalityOptions& options, const LocalityResult& result, const Machine& machine) {
  Json out = {{"bench", "locality"},
              {"machine", machine_json(machine)},
              {"paced", result.paced.empty() ? Json(nullptr) : Json(result.paced)},
              {"prompts", options.prompts},
              {"workers", options.workers},
              {"rate", options.rate},
              {"seconds", options.seconds},
              {"rounds", options.rounds},
              {"tokens", options.tokens},
              {"pool", options.pool},
              {"tau", options.tau},
              {"load_cap", options.load_cap},
              {"seed", options.seed},
              {"shuffled", options.shuffle_signatures},
              {"rho", result.rho},
              {"arms", Json::array()}};
  for (size_t arm = 0; arm < result.arms.size(); ++arm) {
    const ArmResult all = result.total(arm), base = result.total(result.base_of(arm));
    Json entry = {{"policy", result.arms[arm].policy},
                  {"prefix_cache", result.arms[arm].cache},
                  {"requests", all.requests},
                  {"failed", all.failed},
                  {"active_experts", all.work.active_per_step()},
                  {"batch", all.work.batch()},
                  {"tpot_p50_s", quantile(all.tpot_s, 0.5)},
                  {"tpot_p99_s", quantile(all.tpot_s, 0.99)},
                  {"ttft_p50_s", quantile(all.ttft_s, 0.5)},
                  {"decode_prompt_tokens", all.work.prompt_tokens},
                  {"overrun_share", all.work.overrun_share()}};
    if (result.base_of(arm) != arm) {
      entry["active_change"] = active_change(base.work, all.work);
      entry["active_change_by_round"] = round_changes(result, arm);
    }
    out["arms"].push_back(std::move(entry));
  }
  if (const auto there = room(result, result.recorded)) {
    out["room"] = {{"batch", there->batch}, {"saved", there->saved()}, {"purity", result.purity}};
    if (const auto held = room(result, result.by_cohort)) out["room"]["saved_by_cohorts"] = held->saved();
  }
  if (result.signatures > 0) out["signatures"] = {{"compared", result.signatures}, {"equal", result.equal_signatures}};
  return out;
}

Status locality_plots(const LocalityOptions& options, const LocalityResult& result, const Machine& machine) {
  const std::string note =
      (result.paced.empty() ? "Not paced. "
                            : fmt::format("Paced workers ({}): real experts, modelled times. ", result.paced)) +
      machine_text(machine);
  Chart tpot{"TPOT by policy", "ms", "share of requests", {}, note};
  Chart experts{"Experts by batch size", "decoding sequences in a step", "distinct experts a layer", {}, note};
  BarChart bars{"Experts a decode step touches", "distinct, a step and layer", {}, {"experts"}, {{}}, note};
  for (size_t arm = 0; arm < result.arms.size(); ++arm) {
    ArmResult all = result.total(arm);
    const std::string name = result.arms[arm].name(options.cache == "both");
    std::sort(all.tpot_s.begin(), all.tpot_s.end());
    Series times{name, {}, {}, true, false}, by_batch{name, {}, {}};
    for (size_t i = 0; i < all.tpot_s.size(); ++i) {
      times.x.push_back(1e3 * all.tpot_s[i]);
      times.y.push_back(static_cast<double>(i + 1) / static_cast<double>(all.tpot_s.size()));
    }
    for (const auto& [batch, steps] : all.work.by_batch) {
      if (steps.steps < 20) continue;  // too few for a mean
      by_batch.x.push_back(batch);
      by_batch.y.push_back(steps.active_experts / steps.steps);
    }
    tpot.series.push_back(std::move(times));
    experts.series.push_back(std::move(by_batch));
    bars.categories.push_back(name);
    bars.values[0].push_back(all.work.active_per_step());
  }
  if (Status saved = save_svg(options.output.plots, "locality_tpot", line_chart(tpot)); !saved) return saved;
  if (Status saved = save_svg(options.output.plots, "locality_batch", line_chart(experts)); !saved) return saved;
  return save_svg(options.output.plots, "locality_experts", bar_chart(bars));
}

}  // namespace kindred::cli

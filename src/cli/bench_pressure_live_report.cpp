// What `kindred bench pressure --live` says of its figures.

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "cli/bench_pressure_live.h"
#include "cli/terminal.h"

namespace kindred::cli {
namespace {

using LiveSlice = PressureGrid::Slice;
using LiveFigure = double PressureFigures::*;

constexpr double kMostOverruns = 0.05;  // more, and the figures are this machine's (docs/pace-profile.md)

// Against the first policy, of means over seeds.
double change_of_means(const PressureGrid& grid, const LiveSlice& slice, size_t arm, LiveFigure figure) {
  return grid.mean(slice, arm).*figure / (grid.mean(slice, 0).*figure) - 1;
}

struct LiveSpread {
  double least, most;
};

// Of the changes, seed by seed.
LiveSpread spread_of(const PressureGrid& grid, const LiveSlice& slice, size_t arm, LiveFigure figure) {
  LiveSpread out{HUGE_VAL, -HUGE_VAL};
  for (size_t seed = 0; seed < static_cast<size_t>(grid.seeds); ++seed) {
    const double base = grid.cells[grid.at(0, slice.mix, slice.load, seed, 0)].*figure;
    const double change = grid.cells[grid.at(0, slice.mix, slice.load, seed, arm)].*figure / base - 1;
    out.least = std::min(out.least, change);
    out.most = std::max(out.most, change);
  }
  return out;
}

std::string live_table(const PressureLive& live, size_t mix, size_t load) {
  const PressureGrid& grid = live.grid;
  const LiveSlice slice{.setup = 0, .mix = mix, .load = load};
  Table table({"policy", "TTFT ms", "change", "by seed", "p99 ms", "change", "by seed", "TPOT ms", "change", "by seed",
               "end-to-end s", "requests/s", "gap tokens/s", "running", "KV", "preempted", "late steps"});
  for (size_t arm = 0; arm < grid.arms.size(); ++arm) {
    const PressureFigures f = grid.mean(slice, arm);
    std::vector<std::string> row = {grid.arms[arm].name};
    for (const LiveFigure figure : {&PressureFigures::ttft_s, &PressureFigures::ttft_p99_s, &PressureFigures::tpot_s}) {
      row.push_back(fmt::format("{:.0f}", f.*figure * 1e3));
      if (arm == 0) {
        row.insert(row.end(), {"", ""});
        continue;
      }
      const LiveSpread spread = spread_of(grid, slice, arm, figure);
      row.push_back(fmt::format("{:+.1f} %", 100 * change_of_means(grid, slice, arm, figure)));
      row.push_back(fmt::format("{:+.0f} to {:+.0f} %", 100 * spread.least, 100 * spread.most));
    }
    row.insert(row.end(), {fmt::format("{:.2f}", f.total_s), fmt::format("{:.2f}", f.requests_per_s),
                           fmt::format("{:.0f}", f.gap_tokens_per_s), fmt::format("{:.1f}", f.running),
                           fmt::format("{:.1f} %", 100 * f.kv), fmt::format("{:.1f}", f.preemptions),
                           fmt::format("{:.1f} %", 100 * live.overrun_share(mix, load, arm))});
    table.row(std::move(row));
  }
  return table.text();
}

std::string pace_note(const PressureLive& live, const Machine& machine) {
  std::string out = fmt::format(
      "live and paced by '{}' on {} cores: {:.0f} of {:.0f} steps ({:.1f} %) took longer than "
      "their time\n",
      live.pace, machine.cores, live.pace_overruns, live.paced_steps, 100 * live.overrun_share());
  if (live.overrun_share() > kMostOverruns) {
    out += "too many: these figures are this machine's, not the profile's\n";
  }
  return out;
}

}  // namespace

std::string pressure_live_text(const PressureLive& live, const Machine& machine) {
  const PressureGrid& grid = live.grid;
  const uint32_t engines = grid.setups[0].engines;
  std::string out = fmt::format(
      "{} engines, live, of {} sequences each; a full step of {} tokens takes {:.0f} ms by the profile; {} output "
      "tokens, "
      "prefix cache off; seeds {} to {}\n\n",
      engines, kLiveSequences, live.token_budget, live.step_s * 1e3, kLiveOutputTokens, live.first_seed,
      live.first_seed + grid.seeds - 1);
  for (size_t mix = 0; mix < grid.mixes.size(); ++mix) {
    for (size_t load = 0; load < grid.loads.size(); ++load) {
      const double rate = live.rate(mix, load);
      out += fmt::format(
          "{}, {:.2f} requests/s: {:.0f} % of the {:.2f} that the engines can do ({:.0f} tokens a "
          "prompt)\n\n{}\n",
          sim::to_string(grid.mixes[mix]), rate, 100 * rate / live.capacity_per_s[mix], live.capacity_per_s[mix],
          live.mean_prompt_tokens[mix], live_table(live, mix, load));
    }
  }
  out += fmt::format(
      "change: against {}, of means over seeds; by seed: the least and the most of it\n"
      "what the engines can do: {} x {} tokens a full step that touches all experts, over the mean of prompt and "
      "output\n"
      "gap: prompt tokens a second, between the engines with the most and the least; gap, running and KV are looked at "
      "once a second\n"
      "lengths, and pressure's constants in tokens, are scaled by {:.3f}; prompts had {:.0f} tokens in the mean\n"
      "{} requests in {:.0f} s{}\n{}",
      grid.arms[0].name, engines, live.token_budget, live.token_scale, live.measured_prompt_tokens, live.requests,
      grid.took_s, grid.failed > 0 ? fmt::format("; {} failed: {}", grid.failed, live.first_error) : std::string(),
      pace_note(live, machine));
  return out;
}

Json pressure_live_json(const PressureLive& live) {
  const PressureGrid& grid = live.grid;
  Json out = {{"bench", "pressure"},
              {"live", true},
              {"paced", live.pace},
              {"paced_steps", live.paced_steps},
              {"pace_overruns", live.pace_overruns},
              {"engines", grid.setups[0].engines},
              {"token_budget", live.token_budget},
              {"sequences", kLiveSequences},
              {"first_seed", live.first_seed},
              {"full_step_s", live.step_s},
              {"output_tokens", kLiveOutputTokens},
              {"token_scale", live.token_scale},
              {"pressure",
               {{"kv_weight", live.pressure.kv_weight},
                {"expert_weight", live.pressure.expert_weight},
                {"epsilon_tokens", live.pressure.epsilon_tokens},
                {"epsilon_share", live.pressure.epsilon_share}}},
              {"mean_prompt_tokens", live.measured_prompt_tokens},
              {"requests", live.requests},
              {"failed", grid.failed},
              {"took_s", grid.took_s},
              {"rows", Json::array()}};
  for (size_t mix = 0; mix < grid.mixes.size(); ++mix) {
    for (size_t load = 0; load < grid.loads.size(); ++load) {
      for (size_t arm = 0; arm < grid.arms.size(); ++arm) {
        Json by_seed = Json::array();
        for (size_t seed = 0; seed < static_cast<size_t>(grid.seeds); ++seed) {
          by_seed.push_back(pressure_figures_json(grid.cells[grid.at(0, mix, load, seed, arm)]));
        }
        out["rows"].push_back({{"setup", grid.setups[0].name},
                               {"mix", sim::to_string(grid.mixes[mix])},
                               {"rate", live.rate(mix, load)},
                               {"capacity", live.capacity_per_s[mix]},
                               {"policy", grid.arms[arm].name},
                               {"mean", pressure_figures_json(grid.mean({.setup = 0, .mix = mix, .load = load}, arm))},
                               {"overrun_share", live.overrun_share(mix, load, arm)},
                               {"by_seed", std::move(by_seed)}});
      }
    }
  }
  return out;
}

}  // namespace kindred::cli

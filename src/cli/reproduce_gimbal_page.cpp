// What `kindred reproduce gimbal` shows: tables on the terminal, and a page with plots.

#include <fmt/format.h>

#include <cmath>

#include "cli/plot.h"
#include "cli/reproduce.h"
#include "reproduce/gimbal_paper.h"

namespace kindred::cli {
namespace {

using reproduce::GimbalCell;
using reproduce::GimbalReproduction;
using Rows = std::vector<std::vector<std::string>>;
constexpr double kSignalRate = 4;

// Predicted / published; a dash where there is none.
std::string beside(double predicted, double published) {
  return fmt::format("{} / {}", std::isnan(predicted) ? "-" : signed_percent(predicted),
                     published == 0 ? "-" : signed_percent(published));
}

Rows change_rows(const GimbalReproduction& run, std::span<const reproduce::GimbalChange> published) {
  Rows out = {{"system", "against", "TTFT", "TPOT", "end to end", "p99 TTFT", "throughput at 4/s"}};
  for (const reproduce::GimbalChange& paper : published) {
    const auto change = [&](double GimbalCell::*figure) {
      return run.change({.arm = std::string(paper.what)}, paper.against, figure);
    };
    out.push_back({std::string(paper.what), std::string(paper.against), beside(change(&GimbalCell::ttft_s), paper.ttft),
                   beside(change(&GimbalCell::tpot_s), paper.tpot), beside(change(&GimbalCell::e2e_s), paper.e2e),
                   beside(change(&GimbalCell::ttft_p99_s), paper.ttft_p99),
                   beside(run.change({.arm = std::string(paper.what), .rate = kSignalRate}, paper.against,
                                     &GimbalCell::requests_per_s),
                          paper.throughput)});
  }
  return out;
}

Rows rate_rows(const GimbalReproduction& run) {
  Rows out = {{"requests a second", "TTFT", "TPOT", "end to end", "throughput", "kindred: TTFT", "TPOT"}};
  for (const reproduce::GimbalRateChange& paper : reproduce::kGimbalByRate) {
    const auto change = [&](std::string_view arm, double GimbalCell::*figure) {
      return run.change({.arm = std::string(arm), .rate = paper.rate}, "vllm", figure);
    };
    if (std::isnan(change("gimbal", &GimbalCell::ttft_s))) continue;
    out.push_back({fmt::format("{}", paper.rate), beside(change("gimbal", &GimbalCell::ttft_s), paper.ttft),
                   beside(change("gimbal", &GimbalCell::tpot_s), paper.tpot),
                   beside(change("gimbal", &GimbalCell::e2e_s), paper.e2e),
                   beside(change("gimbal", &GimbalCell::requests_per_s), paper.throughput),
                   signed_percent(change("kindred", &GimbalCell::ttft_s)),
                   signed_percent(change("kindred", &GimbalCell::tpot_s))});
  }
  return out;
}

Rows arm_rows(const GimbalReproduction& run) {
  Rows out = {{"system", "TTFT s", "p99 s", "TPOT ms", "TTFT against vllm", "TPOT", "running", "gap tokens/s",
               "remote copies", "max/mean load", "experts of the worst rank", "moves"}};
  for (const std::string_view arm : reproduce::kGimbalArms) {
    const GimbalReproduction::Slice at_4 = {.arm = std::string(arm), .rate = kSignalRate};
    const GimbalCell cell = run.mean(at_4);
    out.push_back({std::string(arm), fmt::format("{:.2f}", cell.ttft_s), fmt::format("{:.2f}", cell.ttft_p99_s),
                   fmt::format("{:.0f}", 1e3 * cell.tpot_s),
                   signed_percent(run.change({.arm = std::string(arm)}, "vllm", &GimbalCell::ttft_s)),
                   signed_percent(run.change({.arm = std::string(arm)}, "vllm", &GimbalCell::tpot_s)),
                   fmt::format("{:.1f}", cell.running), fmt::format("{:.0f}", cell.gap_tokens_per_s),
                   fmt::format("{:.1f} %", 100 * cell.remote_share), fmt::format("{:.2f}", cell.max_over_mean),
                   fmt::format("{:.1f}", cell.worst_rank_experts), fmt::format("{:.1f}", cell.migrations)});
  }
  return out;
}

Rows signal_rows(const GimbalReproduction& run) {
  const auto at_4 = [&](std::string_view arm) { return run.mean({.arm = std::string(arm), .rate = kSignalRate}); };
  const auto pair = [](double predicted, double published) {
    return fmt::format("{:.1f} / {:.1f}", predicted, published);
  };
  const reproduce::GimbalBaseline& base = reproduce::kGimbalBaseline;
  return {{"signal at 4/s, mean over mixes", "vllm", "changed by", "to"},
          {"running requests an engine", pair(at_4("vllm").running, base.running), "ep",
           pair(at_4("ep").running, reproduce::kGimbalEpRunning)},
          {"prompts' gap, tokens/s", pair(at_4("vllm").gap_tokens_per_s, base.gap_tokens_per_s), "dp",
           pair(at_4("dp").gap_tokens_per_s, reproduce::kGimbalDpGap)}};
}

Rows random_rows(const GimbalReproduction& run) {
  GimbalCell vllm, gimbal;
  double seeds = 0;
  for (const reproduce::GimbalResult& result : run.results) {
    if (!result.variant.empty() || result.rate != kSignalRate || result.mix != sim::LengthMix::kRandom) continue;
    GimbalCell* into = result.arm == "vllm" ? &vllm : result.arm == "gimbal" ? &gimbal : nullptr;
    if (into == nullptr) continue;
    seeds += result.arm == "vllm" ? 1 : 0;
    into->running += result.cell.running;
    into->kv += result.cell.kv;
    into->gap_tokens_per_s += result.cell.gap_tokens_per_s;
  }
  const reproduce::GimbalBaseline& base = reproduce::kGimbalBaseline;
  const auto pair = [&](double predicted, double published, double scale, const char* unit) {
    return fmt::format("{:.1f}{} / {:.1f}{}", scale * predicted / seeds, unit, scale * published, unit);
  };
  return {
      {"random mix at 4/s", "vllm", "gimbal"},
      {"running requests an engine", pair(vllm.running, base.random_running, 1, ""),
       pair(gimbal.running, reproduce::kGimbalRandomRunning, 1, "")},
      {"KV in use", pair(vllm.kv, base.random_kv, 100, " %"), pair(gimbal.kv, reproduce::kGimbalRandomKv, 100, " %")},
      {"prompts' gap, tokens/s", pair(vllm.gap_tokens_per_s, base.random_gap_tokens_per_s, 1, ""),
       pair(gimbal.gap_tokens_per_s, reproduce::kGimbalRandomGap, 1, "")}};
}

std::string dial_of(const reproduce::GimbalFit& fit) {
  switch (fit.slow) {
    case reproduce::GimbalSlow::kAll: return fmt::format("{:.2f} x", fit.law.all);
    case reproduce::GimbalSlow::kHost: return fmt::format("{:.0f} us a layer more", fit.law.host_layer_us);
    case reproduce::GimbalSlow::kExperts: return fmt::format("{:.1f} x", fit.law.experts);
    case reproduce::GimbalSlow::kLinks: return fmt::format("{:.1f} x", fit.law.links);
  }
  return "?";
}

Rows fit_rows(const GimbalReproduction& run) {
  Rows out = {
      {"slow", "by", "lengths", "running (paper 87.6)", "gap (paper 1,486)", "p99 TTFT (paper: below 4.9 s)", "TPOT"}};
  for (const reproduce::GimbalFit& fit : run.fits) {
    out.push_back({std::string(to_string(fit.slow)), dial_of(fit), fmt::format("{:.2f} x", fit.law.lengths),
                   fmt::format("{:.1f}", fit.baseline.running), fmt::format("{:.0f}", fit.baseline.gap_tokens_per_s),
                   fmt::format("{:.2f} s", fit.baseline.ttft_p99_s),
                   fmt::format("{:.0f} ms", 1e3 * fit.baseline.tpot_s)});
  }
  return out;
}

std::string scan_cell(const GimbalReproduction& run, const std::string& variant, std::string_view arm) {
  const GimbalReproduction::Slice slice = {.arm = std::string(arm), .variant = variant};
  const double ttft = run.change(slice, "vllm", &GimbalCell::ttft_s);
  if (std::isnan(ttft)) return "-";
  return fmt::format("{} / {}", signed_percent(ttft), signed_percent(run.change(slice, "vllm", &GimbalCell::tpot_s)));
}

Rows scan_rows(const GimbalReproduction& run) {
  Rows out = {
      {"at 4/s, TTFT / TPOT against vllm", "no-eplb", "dp", "ep", "both", "gimbal", "remote copies: vllm", "ep"}};
  for (const std::string& variant : run.variants) {
    std::vector<std::string> row = {variant};
    for (const std::string_view arm : {"no-eplb", "dp", "ep", "both", "gimbal"}) {
      row.push_back(scan_cell(run, variant, arm));
    }
    for (const std::string_view arm : {"vllm", "ep"}) {
      const GimbalCell cell = run.mean({.arm = std::string(arm), .variant = variant});
      row.push_back(fmt::format("{:.1f} %", 100 * cell.remote_share));
    }
    out.push_back(std::move(row));
  }
  return out;
}

std::string ablation_chart(const GimbalReproduction& run) {
  BarChart chart{.title = "Change of mean TTFT and TPOT against vllm",
                 .y_label = "%",
                 .categories = {},
                 .groups = {"TTFT, predicted", "TTFT, paper", "TPOT, predicted", "TPOT, paper"},
                 .values = {}};
  chart.values.resize(chart.groups.size());
  for (const reproduce::GimbalChange& paper : reproduce::kGimbalAblation) {
    const GimbalReproduction::Slice slice = {.arm = std::string(paper.what)};
    chart.categories.emplace_back(paper.what);
    chart.values[0].push_back(100 * run.change(slice, "vllm", &GimbalCell::ttft_s));
    chart.values[1].push_back(100 * paper.ttft);
    chart.values[2].push_back(100 * run.change(slice, "vllm", &GimbalCell::tpot_s));
    chart.values[3].push_back(100 * paper.tpot);
  }
  return bar_chart(chart);
}

std::string rate_chart(const GimbalReproduction& run) {
  Chart chart{.title = "Mean TPOT by rate",
              .x_label = "requests a second",
              .y_label = "ms",
              .series = {},
              .note = "simulated, mean over five mixes",
              .y_from_zero = true};
  for (const std::string_view arm : reproduce::kGimbalArms) {
    Series series{.name = std::string(arm), .x = {}, .y = {}};
    for (const double rate : reproduce::kGimbalRates) {
      const double ms = 1e3 * run.mean({.arm = std::string(arm), .rate = rate}).tpot_s;
      if (!std::isfinite(ms)) continue;
      series.x.push_back(rate);
      series.y.push_back(ms);
    }
    chart.series.push_back(std::move(series));
  }
  return line_chart(chart);
}

std::string gimbal_assumptions() {
  return "- **Fitted, to the baseline alone.** At 4 requests a second the paper's vLLM holds 87.6 requests an engine, "
         "and the prompts that its two engines compute differ by 1,486 tokens a second. A profile of H100 kernels at "
         "their best holds two or three. So two numbers are fitted on a seed that the grid does not use: all of a step "
         "takes so many times the profile's time, and lengths are so many times the trace's. Where the slowness lies "
         "is "
         "not known, so the same fit is made with all of it in one place (table above); the grid "
         "takes all parts to be alike slow. (With a fixed time a layer, the fit finds as many requests only where it "
         "is overloaded, "
         "which the paper's p99 rules out.) No figure of Gimbal's was looked at.\n"
         "- **Lengths.** BurstGPT is not to be had. Prompts and outputs are pairs of the Azure 2023 conversation trace "
         "(`data/traces`), drawn into the paper's five mixes (`src/sim/length_mix.h`); shapes are the paper's, which "
         "draws them without a formula. Arrivals are Poisson.\n"
         "- **Test bed.** Two engines in lockstep, each two GPUs with tensor parallelism (attention and dense products "
         "halved, two all-reduces a layer), 128 experts a layer on four ranks. A layer waits for its slowest rank and "
         "for the busiest link; what an engine sends to its own two ranks needs none. 8,192 tokens a step, no prefix "
         "cache, no redundant experts.\n"
         "- **Experts.** The synthetic process that `kindred simulate calibrate` fitted to published figures, eight "
         "domains in equal shares. The paper does not say which prompts it had: BurstGPT has lengths only.\n"
         "- **Placement.** Every 30 s from the traffic of the last 30 s, linear at first. A rearrangement stops the "
         "worker for 1.08 s the first time and for 0.72 s later, as the paper measured, whoever decides on it. "
         "The paper does not say how often it rearranges. `kindred` moves only if that pays (`place/rebalance.h`).\n"
         "- **Baselines.** MoETuner's and Sem-MoE's placements come from 400 requests of the same mix that are not "
         "simulated, by their objectives and our solvers, and stay; Sem-MoE's engine for each request is found "
         "beforehand, from the experts of its prompt, as many requests for each.\n"
         "- **Pressure** is `policy/engine_policy.h`'s formula, since the paper gives none: 2,048 tokens for each "
         "multiple of the mean expert pressure.\n"
         "- Changes are geometric means over mixes, rates and seeds of the same requests; other figures are means.\n";
}

std::string gimbal_findings(const GimbalReproduction& run) {
  const auto tpot = [&](std::string_view arm, const std::string& variant, std::string_view against) {
    return signed_percent(run.change({.arm = std::string(arm), .variant = variant}, against, &GimbalCell::tpot_s));
  };
  const auto all = [&](std::string_view arm, std::string_view against) { return tpot(arm, "", against); };
  std::string out = fmt::format(
      "- *The upper level.* Engines by pressure, shortest prompt first, change TTFT by {} and TPOT by {} (paper: "
      "-25.1, "
      "-13.4 %), and the gap of prompts from {:.0f} to {:.0f} tokens a second (1,486 to 768).\n",
      signed_percent(run.change({.arm = "dp"}, "vllm", &GimbalCell::ttft_s)), all("dp", "vllm"),
      run.mean({.arm = "vllm", .rate = kSignalRate}).gap_tokens_per_s,
      run.mean({.arm = "dp", .rate = kSignalRate}).gap_tokens_per_s);
  out += fmt::format(
      "- *The lower level.* Gimbal's greedy in place of EPLB changes TPOT by {} (paper: -22.7 %). With requests dealt "
      "to "
      "engines by load, both engines send their tokens to much the same experts, and half of the copies are remote "
      "whatever the placement; what is left is balance, which EPLB does better: max/mean {:.2f} against {:.2f}. "
      "EPLB does not pay here either: TPOT changes by {} with it, against experts that stay where they are, since each "
      "rearrangement holds up the worker.\n",
      all("ep", "vllm"), run.mean({.arm = "vllm", .rate = kSignalRate}).max_over_mean,
      run.mean({.arm = "ep", .rate = kSignalRate}).max_over_mean, all("vllm", "no-eplb"));
  out += fmt::format(
      "- *Calibration.* The weights (1, 0.0025, 1) against (1, 1, 0): TTFT {}, TPOT {} (paper: -10.8, -9.2 %). They "
      "give "
      "up balance for copies that stay at home, and here few do.\n",
      signed_percent(run.change({.arm = "gimbal"}, "uncalibrated", &GimbalCell::ttft_s)),
      all("gimbal", "uncalibrated"));
  out += fmt::format(
      "- *Feedback.* Against both without it: TTFT {}, TPOT {} (paper: -16.5, -6.5 %). The engine whose ranks are less "
      "loaded gets the requests; its traffic then draws experts to it, which turns the pressure round a window "
      "later.\n",
      signed_percent(run.change({.arm = "gimbal"}, "both", &GimbalCell::ttft_s)), all("gimbal", "both"));
  out +=
      fmt::format("- *Ours* (pressure with feedback, `flow`, moves only if they pay): TTFT {}, TPOT {} against vllm.\n",
                  signed_percent(run.change({.arm = "kindred"}, "vllm", &GimbalCell::ttft_s)), all("kindred", "vllm"));
  return out;
}

std::string gimbal_needs(const GimbalReproduction& run) {
  if (run.variants.empty()) return "";
  const auto change = [&](std::string_view arm, const std::string& variant, double GimbalCell::*figure) {
    return signed_percent(run.change({.arm = std::string(arm), .variant = variant}, "vllm", figure));
  };
  const auto tpot = [&](std::string_view arm, const std::string& variant) {
    return change(arm, variant, &GimbalCell::tpot_s);
  };
  return fmt::format(
      "None of the worlds below gives the paper's gains. What moves towards them:\n\n"
      "- *Sources that differ, and an exchange that is a large part of a step.* Source-aware placement alone changes "
      "TPOT by {} as fitted, by {} where each domain's requests go to one engine, and by {} (TTFT {}) where, beside "
      "that, the exchange is ten times slower still. Nothing in Gimbal's dispatch makes sources differ; sessions or "
      "tenants that stay with an engine would.\n"
      "- *A slow exchange* for dispatch by pressure: TTFT {}, TPOT {} where all the slowness is there (paper: -25.1, "
      "-13.4 %).\n"
      "- *A baseline that rearranges too often.* Against EPLB, TPOT changes by {} if experts stay, with windows of 30 "
      "s, and by {} "
      "with 10 s; where moves are free, {}. vLLM's default is 3,000 steps, longer than these runs.\n"
      "- *Weaker feedback.* With a sixteenth of its weight `gimbal` changes TPOT by {} instead of {}.\n",
      tpot("ep", "as fitted"), tpot("ep", "a domain, an engine"), tpot("ep", "a domain, an engine; links 10 x slower"),
      change("ep", "a domain, an engine; links 10 x slower", &GimbalCell::ttft_s),
      change("dp", "slow: the exchange between ranks", &GimbalCell::ttft_s),
      tpot("dp", "slow: the exchange between ranks"), tpot("no-eplb", "as fitted"), tpot("no-eplb", "windows of 10 s"),
      tpot("no-eplb", "moves are free"), tpot("gimbal", "feedback of 1/16"), tpot("gimbal", "as fitted"));
}

}  // namespace

std::string gimbal_text(const GimbalReproduction& run) {
  std::string out = "fitted to the baseline at 4 requests a second\n\n" + plain_table(fit_rows(run));
  out += "\npredicted / published\n\n" + plain_table(change_rows(run, reproduce::kGimbalChanges));
  out += "\nablation\n\n" + plain_table(change_rows(run, reproduce::kGimbalAblation));
  out += "\ngimbal against vllm, by rate\n\n" + plain_table(rate_rows(run));
  out += "\nall systems at 4 a second; changes over all rates\n\n" + plain_table(arm_rows(run));
  out += "\n" + plain_table(signal_rows(run)) + "\n" + plain_table(random_rows(run));
  if (!run.variants.empty()) out += "\nscans\n\n" + plain_table(scan_rows(run));
  return out + "\n" + gimbal_findings(run) + gimbal_needs(run);
}

Status write_gimbal_page(const std::string& folder, const std::string& command, const GimbalReproduction& run) {
  if (Status ok = save_svg(folder, "gimbal-ablation", ablation_chart(run)); !ok) return ok;
  if (Status ok = save_svg(folder, "gimbal-tpot", rate_chart(run)); !ok) return ok;
  std::string page = fmt::format(
      "# Gimbal's results, in the simulator\n\nMade by `{} --page {}`. The paper's figures are those of its text; "
      "nothing "
      "on its test bed was measured by us. Every pair is predicted / published.\n\n{}\n",
      command, folder, markdown_table(change_rows(run, reproduce::kGimbalChanges)));
  page += "Ablation, all against vllm:\n\n" + markdown_table(change_rows(run, reproduce::kGimbalAblation)) +
          "\n![ablation](gimbal-ablation.svg)\n\n## What it says\n\n" + gimbal_findings(run) +
          "\n## What would have to be true\n\n" + gimbal_needs(run);
  if (!run.variants.empty()) {
    page += "\nOf the random and the two-end mix, with the fit's own seed, against vllm in the same world:\n\n" +
            markdown_table(scan_rows(run));
  }
  page +=
      "\n## By rate\n\nGimbal against vllm, and ours.\n\n" + markdown_table(rate_rows(run)) +
      "\n![TPOT by rate](gimbal-tpot.svg)\n\n## Signals\n\n" + markdown_table(signal_rows(run)) + "\n" +
      markdown_table(random_rows(run)) +
      "\n## All systems\n\nAt 4 requests a second, mean over mixes and seeds; changes over all rates. What the names "
      "stand for: `src/reproduce/gimbal_cluster.h`.\n\n" +
      markdown_table(arm_rows(run)) + "\n## The fit\n\n" + markdown_table(fit_rows(run)) +
      "\nThe first is that of the grid, fitted to all mixes; the others to the random and the two-end mix.\n\n## "
      "Assumptions\n\n" +
      gimbal_assumptions();
  return write_page(folder, "gimbal.md", page);
}

}  // namespace kindred::cli

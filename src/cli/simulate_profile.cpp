// `kindred simulate profile`: hardware profiles from measured kernels, and how well their laws foretell rows that
// they were not fitted to.

#include <fmt/format.h>

#include <filesystem>
#include <optional>

#include "base/config.h"
#include "base/json.h"
#include "cli/commands.h"
#include "cli/terminal.h"
#include "sim/profile_build.h"

namespace kindred::cli {
namespace {

struct ProfileArguments {
  std::string from, output;
  bool json = false;
};

std::string percent(double share) { return fmt::format("{:.1f} %", 100 * share); }

void print_profile_fits(const sim::BuiltProfiles& built) {
  fmt::print(
      "Experts, one layer: time = a + b |U| where no expert has more than one tile; errors of the whole law\n"
      "(sim/profile.h) on the rows it was fitted to, on those held out, and on those up to {} tokens.\n\n",
      sim::kDecodeTokens);
  Table moe({"profile", "dtype", "a us", "b us", "r2", "fitted", "held out", "worst", "decode", "worst", "rows"});
  for (const sim::BuiltProfile& one : built.profiles) {
    const sim::MoeFit& fit = one.moe;
    moe.row({one.profile.name, one.profile.dtype, fmt::format("{:.1f}", fit.a_us), fmt::format("{:.2f}", fit.b_us),
             fmt::format("{:.4f}", fit.r2), percent(fit.fitted.mean), percent(fit.held_out.mean),
             percent(fit.held_out.worst), percent(fit.held_out_decode.mean), percent(fit.held_out_decode.worst),
             fmt::format("{}", fit.held_out.rows)});
  }
  fmt::print("{}\nAttention in decode, one layer, H200: launch + requests x request + cached tokens x token\n\n",
             moe.text());
  Table attention({"profile", "launch us", "request us", "token ns", "fitted", "held out", "worst", "rows"});
  Table exchange({"profile", "dispatch us", "GB/s", "combine us", "GB/s", "fitted", "held out", "worst", "rows"});
  for (const sim::BuiltProfile& one : built.profiles) {
    if (one.profile.gpu != "H200") continue;
    if (const sim::AttentionFit& fit = one.attention; fit.fitted.rows > 0) {
      attention.row({one.profile.name, fmt::format("{:.1f}", fit.law.launch_us),
                     fmt::format("{:.3f}", fit.law.request_us), fmt::format("{:.3f}", 1e3 * fit.law.token_us),
                     percent(fit.fitted.mean), percent(fit.held_out.mean), percent(fit.held_out.worst),
                     fmt::format("{}", fit.held_out.rows)});
    }
    const sim::AllToAllFit& fit = one.all_to_all;
    exchange.row({one.profile.name, fmt::format("{:.1f}", fit.figures.dispatch_us),
                  fmt::format("{:.0f}", fit.figures.dispatch_bytes_per_us / 1e3),
                  fmt::format("{:.1f}", fit.figures.combine_us),
                  fmt::format("{:.0f}", fit.figures.combine_bytes_per_us / 1e3), percent(fit.fitted.mean),
                  percent(fit.held_out.mean), percent(fit.held_out.worst), fmt::format("{}", fit.held_out.rows)});
  }
  fmt::print("{}\nAll-to-all between ranks, H200: launch + bytes / bandwidth\n\n{}\n", attention.text(),
             exchange.text());
  const sim::GemmFit& gemm = built.gemm;
  fmt::print(
      "Dense products, H200: {:.1f} us + the longer of {:.2f} TB/s and {:.0f} TFLOPS (softly, p = {:.1f}); fitted "
      "{}, held out {} (worst {}, {} rows)\n",
      gemm.figures.launch_us, gemm.figures.bytes_per_us / 1e6, gemm.figures.flops_per_us / 1e6, gemm.figures.power,
      percent(gemm.fitted.mean), percent(gemm.held_out.mean), percent(gemm.held_out.worst), gemm.held_out.rows);
}

// Over all profiles whose held-out rows are of distributions that no row was fitted to.
void print_held_out(const sim::BuiltProfiles& built) {
  double sum = 0, decode = 0;
  size_t rows = 0, decode_rows = 0;
  for (const sim::BuiltProfile& one : built.profiles) {
    if (one.profile.dtype == "fp8_block") continue;
    sum += one.moe.held_out.mean * static_cast<double>(one.moe.held_out.rows);
    rows += one.moe.held_out.rows;
    decode += one.moe.held_out_decode.mean * static_cast<double>(one.moe.held_out_decode.rows);
    decode_rows += one.moe.held_out_decode.rows;
  }
  if (rows == 0 || decode_rows == 0) return;
  fmt::print(
      "\nmoe_kernels, bfloat16 and mxfp4, held out: mean absolute error {} over {} rows; {} over the {} rows of "
      "up to {} tokens\n",
      percent(sum / static_cast<double>(rows)), rows, percent(decode / static_cast<double>(decode_rows)), decode_rows,
      sim::kDecodeTokens);
}

Json error_json(const sim::FitError& error) {
  return {{"rows", error.rows}, {"mean", error.mean}, {"worst", error.worst}};
}

Json profiles_json(const sim::BuiltProfiles& built) {
  Json out = Json::object();
  out["gemm"] = {{"fitted", error_json(built.gemm.fitted)}, {"held_out", error_json(built.gemm.held_out)}};
  for (const sim::BuiltProfile& one : built.profiles) {
    Json item = {{"name", one.profile.name}};
    item["moe"] = {{"a_us", one.moe.a_us},
                   {"b_us", one.moe.b_us},
                   {"r2", one.moe.r2},
                   {"fitted", error_json(one.moe.fitted)},
                   {"held_out", error_json(one.moe.held_out)},
                   {"held_out_decode", error_json(one.moe.held_out_decode)}};
    item["attention"] = {{"fitted", error_json(one.attention.fitted)},
                         {"held_out", error_json(one.attention.held_out)}};
    item["all_to_all"] = {{"fitted", error_json(one.all_to_all.fitted)},
                          {"held_out", error_json(one.all_to_all.held_out)}};
    out["profiles"].push_back(std::move(item));
  }
  return out;
}

Status write_profiles(const sim::BuiltProfiles& built, const std::string& folder) {
  std::error_code made;
  std::filesystem::create_directories(folder, made);
  if (made) return Error{ErrorCode::kIo, fmt::format("cannot make folder {}: {}", folder, made.message()), "output"};
  for (const sim::BuiltProfile& one : built.profiles) {
    const std::string path = (std::filesystem::path(folder) / (one.profile.name + ".json")).string();
    if (Status saved = sim::save_profile(one.profile, path); !saved) return saved;
  }
  return {};
}

}  // namespace

int run_simulate_profile(Args args) {
  ProfileArguments options;
  ConfigSchema schema("simulate profile --from FOLDER [--output profiles]",
                      "Fits hardware profiles to measured kernels and says how well they foretell rows that they were "
                      "not fitted to. docs/simulator.md lists the files that the folder has to hold.");
  schema.text("from", &options.from, "folder of CSV files, each plain or .xz");
  schema.text("output", &options.output, "folder to write a JSON file for each GPU and model to");
  schema.flag("json", &options.json, "print the fit as JSON");
  if (const Status parsed = schema.parse_flags(args); !parsed) return fail("simulate profile", parsed.error(), 2);
  if (schema.help_requested()) {
    fmt::print("{}", schema.help());
    return 0;
  }
  if (options.from.empty()) {
    return fail("simulate profile", invalid("--from is missing: which folder holds the measured kernels?"), 2);
  }
  const Result<sim::KernelData> data = sim::load_kernels(options.from);
  if (!data) return fail("simulate profile", data.error());
  std::optional<Progress> progress;
  const Result<sim::BuiltProfiles> built = sim::build_profiles(*data, [&](size_t done, size_t of) {
    if (!progress) progress.emplace("fitting profiles", of);
    progress->set(done);
  });
  progress.reset();
  if (!built) return fail("simulate profile", built.error());
  if (!options.output.empty()) {
    if (const Status written = write_profiles(*built, options.output); !written) {
      return fail("simulate profile", written.error());
    }
  }
  if (options.json) {
    fmt::print("{}\n", dump_json(profiles_json(*built), 2));
  } else {
    print_profile_fits(*built);
    print_held_out(*built);
  }
  return 0;
}

}  // namespace kindred::cli

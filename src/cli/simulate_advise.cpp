// `kindred simulate advise`: what routing by experts would gain, before anything is installed.

#include <fmt/format.h>

#include <bit>
#include <charconv>
#include <filesystem>
#include <limits>
#include <map>

#include "base/config.h"
#include "base/json.h"
#include "cli/commands.h"
#include "cli/simulate.h"
#include "cli/terminal.h"
#include "expert/activations.h"
#include "sim/advise.h"
#include "sim/expert_process.h"

namespace kindred::cli {
namespace {

constexpr double kWorthTrying = 0.03;  // of a step's time; less drowns in how workers differ anyway

struct AdviseArguments {
  std::vector<std::string> input;
  std::string profile;
  int64_t workers = 16, context_tokens = 1024, seed = 1;
  std::vector<std::string> batch = {"8", "16", "32", "64", "128", "256"}, ranks = {"1", "8"};
  bool json = false;
};

Result<std::vector<uint32_t>> whole_numbers(const char* field, const std::vector<std::string>& texts) {
  std::vector<uint32_t> numbers;
  for (const std::string& text : texts) {
    uint32_t number = 0;
    const auto [rest, code] = std::from_chars(text.data(), text.data() + text.size(), number);
    if (code != std::errc() || rest != text.data() + text.size() || number == 0) {
      return invalid(fmt::format("--{}: got '{}'; accepted: whole numbers from 1", field, text), field);
    }
    numbers.push_back(number);
  }
  return numbers;
}

// A process of recorded tokens as the counts that `record` would have kept.
Result<expert::Activations> counts_of(sim::ExpertProcess& process) {
  expert::Activations activations;
  const uint32_t experts = process.shape().experts;
  for (uint32_t row = 0; row < process.recorded(); ++row) {
    const sim::RequestExperts request = process.experts({.expert_profile = static_cast<int32_t>(row)}, row);
    expert::ExpertCounts decode(process.shape());
    decode.tokens = request.decode->tokens();
    for (uint32_t t = 0; t < request.decode->tokens(); ++t) {
      const auto words = request.decode->token(t);
      for (size_t w = 0; w < words.size(); ++w) {
        for (uint64_t left = words[w]; left != 0; left &= left - 1) {
          const size_t expert = w % request.decode->words() * 64 + static_cast<size_t>(std::countr_zero(left));
          ++decode.data[w / request.decode->words() * experts + expert];
        }
      }
    }
    if (Status added = activations.append(*request.prompt, &decode, process.domains()[request.domain]); !added) {
      return std::move(added).error();
    }
  }
  return activations;
}

// A file of `kindred record`, or a folder of token decisions.
Result<expert::Activations> load_recorded(const std::string& path, const sim::Profile& profile) {
  std::error_code ignored;
  if (!std::filesystem::is_directory(path, ignored)) return expert::load_activations(path);
  const sim::TokenFileShape shape{
      .layers = profile.dims.moe_layers, .experts = profile.dims.experts, .top_k = profile.dims.top_k};
  const Result<std::unique_ptr<sim::ExpertProcess>> process = sim::load_token_decisions(path, shape, 1);
  if (!process) return process.error();
  return counts_of(**process);
}

std::string verdict(const sim::Advice& advice) {
  const sim::AdviceRow* best = advice.best();
  if (best == nullptr) return "Nothing was looked at: the profile rules out every topology.";
  const auto where = [](const sim::AdviceRow& row) {
    return row.ranks == 1 ? fmt::format("workers of one GPU at batch {}", row.batch)
                          : fmt::format("expert parallelism over {} GPUs at batch {} each", row.ranks, row.batch);
  };
  if (best->time_saved() < kWorthTrying) {
    return fmt::format("Nothing to gain: {:.1f} % of a step at most, with {}. Balance load, and leave experts alone.",
                       100 * best->time_saved(), where(*best));
  }
  std::string text =
      fmt::format("Worth trying: up to {:.1f} % of a decode step, with {}.", 100 * best->time_saved(), where(*best));
  // By GPUs of a worker: batches where it would do next to nothing.
  std::map<uint32_t, std::vector<uint32_t>> poor;
  for (const sim::AdviceRow& row : advice.rows) {
    if (row.time_saved() < kWorthTrying) poor[row.ranks].push_back(row.batch);
  }
  for (const auto& [ranks, batches] : poor) {
    text += fmt::format(" Less than {:.0f} % with {} at a batch of {}.", 100 * kWorthTrying,
                        ranks == 1 ? "workers of one GPU" : fmt::format("expert parallelism over {} GPUs", ranks),
                        fmt::join(batches, ", "));
  }
  return text;
}

void print_advice(const AdviseArguments& arguments, const sim::Profile& profile, const sim::Advice& advice) {
  fmt::print(
      "{} on {}: {} recorded requests in {} cohorts (the smallest has {}), which others made; contexts of {} "
      "tokens\n\n",
      profile.model, profile.gpu, advice.requests, advice.cohorts, advice.smallest, arguments.context_tokens);
  Table table(
      {"GPUs", "batch each", "experts, mixed", "one cohort", "fewer", "step ms, mixed", "one cohort", "less", ""});
  for (const sim::AdviceRow& row : advice.rows) {
    table.row({fmt::format("{}", row.ranks), fmt::format("{}", row.batch), fmt::format("{:.1f}", row.mixed),
               fmt::format("{:.1f}", row.cohort), fmt::format("{:.1f} %", 100 * row.experts_saved()),
               fmt::format("{:.2f}", row.mixed_us / 1e3), fmt::format("{:.2f}", row.cohort_us / 1e3),
               fmt::format("{:.1f} %", 100 * row.time_saved()), row.repeats ? "*" : ""});
  }
  fmt::print(
      "{}\nDistinct experts a layer, on the GPU with the most. Each request at its own cohort's worker: an upper "
      "bound, since load has\nto be balanced, too.\n",
      table.text());
  for (const sim::AdviceRow& row : advice.rows) {
    if (!row.repeats) continue;
    fmt::print(
        "* more requests than the smallest cohort has: drawn with repeats on both sides. Record more for better "
        "figures.\n");
    break;
  }
  for (const std::string& why : advice.skipped) fmt::print("Left out: {}\n", why);
  fmt::print("\n{}\n", verdict(advice));
}

Json advice_json(const sim::Advice& advice) {
  Json out = {{"requests", advice.requests},
              {"cohorts", advice.cohorts},
              {"skipped", advice.skipped},
              {"verdict", verdict(advice)},
              {"rows", Json::array()}};
  for (const sim::AdviceRow& row : advice.rows) {
    Json item = {{"ranks", row.ranks},
                 {"batch", row.batch},
                 {"mixed", row.mixed},
                 {"cohort", row.cohort},
                 {"mixed_us", row.mixed_us},
                 {"cohort_us", row.cohort_us},
                 {"time_saved", row.time_saved()},
                 {"repeats", row.repeats}};
    out["rows"].push_back(std::move(item));
  }
  return out;
}

ConfigSchema advise_schema(AdviseArguments& arguments) {
  ConfigSchema schema("simulate advise ACTIVATIONS --profile NAME",
                      "Says what routing by experts would gain for a model, a mix of requests and a GPU, also when the "
                      "answer is nothing.");
  schema.positional("ACTIVATIONS", &arguments.input, 1, "file of `kindred record`, or a folder of token decisions");
  schema.text("profile", &arguments.profile, "hardware of that model: a name of profiles/ or a file");
  schema.integer("workers", &arguments.workers, 1, 4096, "that decode, one cohort each");
  schema.list("batch", &arguments.batch, "decoding requests of each GPU");
  schema.list("ranks", &arguments.ranks, "GPUs of a worker, with expert parallelism above 1");
  schema.integer("context_tokens", &arguments.context_tokens, 1, 10'000'000, "of a request, on average");
  schema.integer("seed", &arguments.seed, 0, std::numeric_limits<int64_t>::max(), "of the cohorts");
  schema.flag("json", &arguments.json, "print it as JSON");
  return schema;
}

}  // namespace

int run_simulate_advise(Args args) {
  constexpr const char* kName = "simulate advise";
  AdviseArguments arguments;
  ConfigSchema schema = advise_schema(arguments);
  if (const Status parsed = schema.parse_flags(args); !parsed) return fail(kName, parsed.error(), 2);
  if (schema.help_requested()) {
    fmt::print("{}", schema.help());
    return 0;
  }
  if (arguments.input.empty() || arguments.profile.empty()) {
    return fail(kName,
                invalid("which recording, on which GPU? usage: kindred simulate advise ACTIVATIONS --profile NAME"), 2);
  }
  const Result<std::vector<uint32_t>> batches = whole_numbers("batch", arguments.batch);
  if (!batches) return fail(kName, batches.error(), 2);
  const Result<std::vector<uint32_t>> ranks = whole_numbers("ranks", arguments.ranks);
  if (!ranks) return fail(kName, ranks.error(), 2);
  const Result<sim::Profile> profile = find_profile(arguments.profile);
  if (!profile) return fail(kName, profile.error(), profile.error().code == ErrorCode::kInvalid ? 2 : 1);
  const Result<expert::Activations> activations = load_recorded(arguments.input.front(), *profile);
  if (!activations) return fail(kName, activations.error());
  const Result<sim::Advice> advice = sim::advise(*activations, *profile,
                                                 {.workers = static_cast<uint32_t>(arguments.workers),
                                                  .batches = *batches,
                                                  .ranks = *ranks,
                                                  .context_tokens = static_cast<double>(arguments.context_tokens),
                                                  .seed = static_cast<uint64_t>(arguments.seed)});
  if (!advice) return fail(kName, advice.error());
  if (arguments.json) fmt::print("{}\n", dump_json(advice_json(*advice), 2));
  else print_advice(arguments, *profile, *advice);
  return 0;
}

}  // namespace kindred::cli

#include "cli/router_experiment.h"

#include <fmt/format.h>

#include <chrono>
#include <sstream>

#include "cli/router_limits.h"

namespace kindred::cli {
namespace {

std::vector<std::string> names(std::span<const std::string_view> of) { return {of.begin(), of.end()}; }

Error bad_arm(const std::string& text, std::string why) {
  return invalid(fmt::format("experiment: '{}': {}", text, why), "experiment");
}

}  // namespace

void ExperimentArguments::add_to(ConfigSchema& schema) {
  schema.list("experiment", &experiment,
              "switchback: an arm, 'NAME: decode_policy=… tau=…', the first is the control; or a file with arms");
  schema.integer("experiment_slice_ms", &experiment_slice_ms, 10, kDayMs, "switchback: how long an arm is in force");
  schema.integer("experiment_seam_ms", &experiment_seam_ms, 0, kDayMs,
                 "switchback: start of each slice that is not looked at");
  std::vector<std::string> shadows = names(policy::decode_policy_names());
  shadows.emplace_back("");
  schema.choice("shadow_policy", &shadow_policy, std::move(shadows),
                "a decode policy that decides and is logged, but does not act");
}

Result<router::ExperimentArm> parse_arm(const std::string& text, const router::RouterOptions& base) {
  const size_t colon = text.find(':');
  router::ExperimentArm arm;
  arm.name = text.substr(0, colon);
  const bool named = !arm.name.empty() && arm.name.size() <= 64 && arm.name.find_first_of(" \t=") == std::string::npos;
  if (colon == std::string::npos || !named) {
    return bad_arm(text, "accepted: 'NAME: option=value option=value', a name without spaces, at most 64 bytes");
  }
  arm.prefill = base.prefill_policy;
  arm.decode = base.decode_policy;
  int64_t prefix_bytes = arm.prefill.prefix_bytes;
  ConfigSchema schema("router --experiment", "");
  schema.choice("decode_policy", &arm.decode.name, names(policy::decode_policy_names()), "");
  schema.choice("prefill_policy", &arm.prefill.name, names(policy::prefill_policy_names()), "");
  schema.real("tau", &arm.decode.tau, 0, 2, "");
  schema.real("load_cap", &arm.decode.load_cap, 0, 1e9, "");
  schema.real("held_weight", &arm.decode.held_weight, 0, 1e9, "");
  schema.choice("tie_break", &arm.decode.tie_break, {"rotate", "lowest-index", "random"}, "");
  schema.flag("shuffle_signatures", &arm.decode.shuffle_signatures, "");
  schema.integer("prefix_bytes", &prefix_bytes, 1, 1 << 30, "");
  std::string yaml;
  std::istringstream words(text.substr(colon + 1));
  for (std::string word; words >> word;) {
    const size_t equals = word.find('=');
    if (equals == std::string::npos) return bad_arm(text, fmt::format("'{}'; accepted: option=value", word));
    yaml += fmt::format("{}: {}\n", word.substr(0, equals), word.substr(equals + 1));
  }
  if (!yaml.empty()) {
    if (Status parsed = schema.parse_yaml(yaml, "the arm"); !parsed) return bad_arm(text, parsed.error().message);
  }
  arm.prefill.prefix_bytes = static_cast<uint32_t>(prefix_bytes);
  return arm;
}

Status ExperimentArguments::apply(router::RouterOptions& out) {
  if (!shadow_policy.empty()) {
    out.shadow_policy = out.decode_policy;
    out.shadow_policy->name = shadow_policy;
  }
  int64_t seed = static_cast<int64_t>(out.decode_policy.seed);
  std::vector<std::string> arms = experiment;
  if (arms.size() == 1 && (arms[0].ends_with(".yaml") || arms[0].ends_with(".yml"))) {
    const std::string path = arms[0];
    const Result<std::string> yaml = read_file(path);
    if (!yaml) return yaml.error();
    ConfigSchema schema("router --experiment FILE", "");
    arms.clear();
    schema.list("arms", &arms, "");
    schema.integer("slice_ms", &experiment_slice_ms, 10, kDayMs, "");
    schema.integer("seam_ms", &experiment_seam_ms, 0, kDayMs, "");
    schema.integer("seed", &seed, 0, INT64_MAX, "");
    if (Status parsed = schema.parse_yaml(*yaml, path); !parsed) return parsed;
    if (arms.empty()) return bad_arm(path, "no arms");
  }
  for (const std::string& text : arms) {
    Result<router::ExperimentArm> arm = parse_arm(text, out);
    if (!arm) return std::move(arm).error();
    out.experiment.arms.push_back(*std::move(arm));
  }
  out.experiment.slice_ms = std::chrono::milliseconds(experiment_slice_ms);
  out.experiment.seam_ms = std::chrono::milliseconds(experiment_seam_ms);
  out.experiment.seed = static_cast<uint64_t>(seed);
  return {};
}

}  // namespace kindred::cli

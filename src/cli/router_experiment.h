// The options of `kindred router` that compare policies: switchback experiments and the shadow policy.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/config.h"
#include "router/options.h"

namespace kindred::cli {

struct ExperimentArguments {
  std::vector<std::string> experiment;
  int64_t experiment_slice_ms = 30'000, experiment_seam_ms = 5'000;
  std::string shadow_policy;

  // The arguments must outlive the schema.
  void add_to(ConfigSchema& schema);
  // Arms and shadow begin as what `out` says already and change what they name. Error: kInvalid, or that of
  // reading the file.
  Status apply(router::RouterOptions& out);
};

// One arm: "NAME: option=value option=value", over `base`. Error: kInvalid, naming the arm and the option.
Result<router::ExperimentArm> parse_arm(const std::string& text, const router::RouterOptions& base);

}  // namespace kindred::cli

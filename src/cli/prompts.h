// Prompt files: one JSON object a line, {"domain": …, "source": …, "prompt": …}; domain and source
// are optional.
#pragma once

#include <string>
#include <vector>

#include "base/result.h"

namespace kindred::cli {

struct Prompt {
  std::string domain;
  std::string text;
};

// Errors name the file, the line and the field.
Result<std::vector<Prompt>> load_prompts(const std::string& path);

}  // namespace kindred::cli

#include "cli/prompts.h"

#include <fmt/format.h>

#include <sstream>

#include "base/config.h"
#include "base/json.h"

namespace kindred::cli {

Result<std::vector<Prompt>> load_prompts(const std::string& path) {
  Result<std::string> text = read_file(path);
  if (!text) return std::move(text).error();

  std::vector<Prompt> prompts;
  std::istringstream lines(*text);
  std::string line;
  for (size_t number = 1; std::getline(lines, line); ++number) {
    if (line.find_first_not_of(" \t\r") == std::string::npos) continue;
    const auto wrong = [&](std::string_view what) {
      return invalid(fmt::format("{}:{}: {}", path, number, what), "prompt");
    };
    const Json object = parse_json(line);
    if (!object.is_object()) return wrong("not a JSON object");
    const auto prompt = object.find("prompt");
    if (prompt == object.end() || !prompt->is_string() || prompt->get_ref<const std::string&>().empty()) {
      return wrong("'prompt' must be a non-empty string");
    }
    const auto domain = object.find("domain");
    if (domain != object.end() && !domain->is_string()) return wrong("'domain' must be a string");
    prompts.push_back({domain == object.end() ? "" : domain->get<std::string>(), prompt->get<std::string>()});
  }
  if (prompts.empty()) return invalid(fmt::format("{}: no prompts in it", path), "prompts");
  return prompts;
}

}  // namespace kindred::cli

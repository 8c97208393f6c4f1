#include "fleet/worker_list.h"

#include <fmt/format.h>
#include <yaml-cpp/yaml.h>

#include <algorithm>

namespace kindred::fleet {
namespace {

constexpr std::string_view kFields = "url, role, dialect, drain";
constexpr size_t kMaxProblems = 16;  // enough to mend a file by

class Reader {
 public:
  std::vector<WantedWorker> workers;
  std::vector<std::string> problems;

  void read(const YAML::Node& node) {
    if (!node.IsMap()) return wrong(node, "", "expected a worker with a url");
    WantedWorker worker;
    for (const auto& entry : node) {
      const std::string name = entry.first.IsScalar() ? entry.first.Scalar() : "?";
      if (!entry.second.IsScalar()) wrong(entry.second, name, "expected a single value");
      else read_field(worker, name, entry.second);
    }
    if (worker.url.empty()) wrong(node, "url", "is required, as http://host:port");
    const auto same = [&](const WantedWorker& other) { return other.url == worker.url; };
    if (std::ranges::any_of(workers, same)) wrong(node, "url", fmt::format("'{}' is listed twice", worker.url));
    workers.push_back(std::move(worker));
  }

 private:
  void read_field(WantedWorker& worker, const std::string& name, const YAML::Node& node) {
    const std::string& value = node.Scalar();
    if (name == "url") {
      worker.url = value;
    } else if (name == "role") {
      const auto role = parse_role(value);
      if (!role) return wrong(node, name, fmt::format("got '{}', accepted: prefill, decode, both", value));
      worker.role = *role;
    } else if (name == "dialect") {
      worker.dialect = parse_dialect(value);
      if (!worker.dialect) wrong(node, name, fmt::format("got '{}', accepted: {}", value, kDialectNames));
    } else if (name == "drain") {
      if (value != "true" && value != "false")
        return wrong(node, name, fmt::format("got '{}', accepted: true, false", value));
      worker.draining = value == "true";
    } else {
      wrong(node, name, fmt::format("is not a field; accepted: {}", kFields));
    }
  }

  void wrong(const YAML::Node& node, std::string_view field, std::string_view why) {
    if (problems.size() >= kMaxProblems) return;
    problems.push_back(fmt::format("line {}: {}{}{}", node.Mark().line + 1, field, field.empty() ? "" : ": ", why));
  }
};

}  // namespace

Result<std::vector<WantedWorker>> parse_worker_list(std::string_view text, size_t most) {
  if (text.size() > kMaxWorkerListBytes) {
    return Error{ErrorCode::kTooLarge, fmt::format("{} bytes; at most {}", text.size(), kMaxWorkerListBytes)};
  }
  try {
    YAML::Node root = YAML::Load(std::string(text));
    if (root.IsMap()) {
      if (root.size() != 1 || !root["workers"]) return invalid("expected one key, 'workers'", "workers");
      root.reset(root["workers"]);
    }
    // An empty file may be one that is being written; a fleet is emptied by an empty list.
    if (!root.IsSequence()) return invalid("expected a list of workers", "workers");
    if (root.size() > most) {
      return Error{ErrorCode::kTooLarge, fmt::format("{} workers; at most {}", root.size(), most), "workers"};
    }
    Reader reader;
    for (const auto& node : root) reader.read(node);
    if (!reader.problems.empty()) return invalid(fmt::format("{}", fmt::join(reader.problems, "; ")), "workers");
    return std::move(reader.workers);
  } catch (const YAML::Exception& error) {
    return invalid(fmt::format("line {}: {}", error.mark.line + 1, error.msg), "workers");
  }
}

}  // namespace kindred::fleet

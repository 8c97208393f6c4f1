#include "live/faults.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <yaml-cpp/yaml.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <optional>

namespace kindred::live {
namespace {

constexpr auto kFaultKinds =
    std::to_array<std::string_view>({"kill", "restart", "stall", "slow", "reset", "wrong_counts"});
constexpr size_t kMostFaults = 10'000;
constexpr size_t kMostScriptBytes = 4UL << 20;
constexpr size_t kMostProblems = 16;  // enough to mend a file by
constexpr double kMostSeconds = 1e6;
constexpr double kMostFactor = 1e6;

std::optional<double> number_of(const std::string& text) {
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || !std::isfinite(value)) return std::nullopt;
  return value;
}

class ScriptReader {
 public:
  explicit ScriptReader(size_t workers) : workers_(workers) {}

  void read(const YAML::Node& node) {
    if (!node.IsMap()) return wrong(node, "", "expected a fault with at_s, worker and kind");
    Fault fault;
    seen_ = {};
    for (const auto& entry : node) {
      const std::string name = entry.first.IsScalar() ? entry.first.Scalar() : "?";
      if (!entry.second.IsScalar()) wrong(entry.second, name, "expected a single value");
      else read_field(fault, name, entry.second);
    }
    if (!seen_.at_s) wrong(node, "at_s", "is required: seconds since the start");
    if (!seen_.worker) wrong(node, "worker", fmt::format("is required: 0 to {}", workers_ - 1));
    if (!seen_.kind) wrong(node, "kind", fmt::format("is required: {}", fmt::join(kFaultKinds, ", ")));
    else check(node, fault);
    faults.push_back(fault);
  }

  std::vector<Fault> faults;
  std::vector<std::string> problems;

 private:
  void read_field(Fault& fault, const std::string& name, const YAML::Node& node) {
    if (name == "kind") {
      seen_.kind = true;
      const auto* const found = std::ranges::find(kFaultKinds, node.Scalar());
      if (found == kFaultKinds.end()) {
        return wrong(node, name, fmt::format("got '{}', accepted: {}", node.Scalar(), fmt::join(kFaultKinds, ", ")));
      }
      fault.kind = static_cast<FaultKind>(found - kFaultKinds.begin());
      return;
    }
    const std::optional<double> value = number_of(node.Scalar());
    const auto within = [&](double least, double most) {
      if (value && *value >= least && *value <= most) return true;
      wrong(node, name, fmt::format("got '{}', accepted: {} to {}", node.Scalar(), least, most));
      return false;
    };
    if (name == "at_s") {
      seen_.at_s = true;
      if (within(0, kMostSeconds)) fault.at_s = *value;
    } else if (name == "for_s") {
      seen_.for_s = true;
      if (within(0, kMostSeconds)) fault.for_s = *value;
    } else if (name == "factor") {
      seen_.factor = true;
      if (within(0.01, kMostFactor)) fault.factor = *value;
    } else if (name == "worker") {
      seen_.worker = true;
      if (!within(0, static_cast<double>(workers_ - 1))) return;
      if (*value != std::floor(*value))
        return wrong(node, name, fmt::format("got '{}', accepted: whole numbers", *value));
      fault.worker = static_cast<uint32_t>(*value);
    } else {
      wrong(node, name, "is not a field; accepted: at_s, worker, kind, for_s, factor");
    }
  }

  // What the kind has no use for is a slip of the pen.
  void check(const YAML::Node& node, const Fault& fault) {
    const bool moment = fault.kind == FaultKind::kReset || fault.kind == FaultKind::kRestart;
    if (moment && seen_.for_s) wrong(node, "for_s", fmt::format("{} has no length", to_string(fault.kind)));
    const bool slow = fault.kind == FaultKind::kSlow;
    if (slow && !seen_.factor) wrong(node, "factor", "is required with slow: how many times as long a step takes");
    if (!slow && seen_.factor) wrong(node, "factor", "goes with slow only");
  }

  void wrong(const YAML::Node& node, std::string_view field, std::string_view why) {
    if (problems.size() >= kMostProblems) return;
    problems.push_back(fmt::format("line {}: {}{}{}", node.Mark().line + 1, field, field.empty() ? "" : ": ", why));
  }

  struct Seen {
    bool at_s = false, worker = false, kind = false, for_s = false, factor = false;
  };
  const size_t workers_;
  Seen seen_;
};

}  // namespace

std::string_view to_string(FaultKind kind) { return kFaultKinds.at(static_cast<size_t>(kind)); }

Result<std::vector<Fault>> parse_faults(std::string_view text, size_t workers) {
  if (text.size() > kMostScriptBytes) {
    return Error{ErrorCode::kTooLarge, fmt::format("{} bytes; at most {}", text.size(), kMostScriptBytes), "faults"};
  }
  try {
    const YAML::Node root = YAML::Load(std::string(text));
    if (!root.IsSequence()) return invalid("expected a list of faults", "faults");
    if (root.size() > kMostFaults) {
      return Error{ErrorCode::kTooLarge, fmt::format("{} faults; at most {}", root.size(), kMostFaults), "faults"};
    }
    ScriptReader reader(workers);
    for (const auto& node : root) reader.read(node);
    if (!reader.problems.empty()) return invalid(fmt::format("{}", fmt::join(reader.problems, "; ")), "faults");
    return std::move(reader.faults);
  } catch (const YAML::Exception& error) {
    return invalid(fmt::format("line {}: {}", error.mark.line + 1, error.msg), "faults");
  }
}

}  // namespace kindred::live

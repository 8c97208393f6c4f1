#include "cli/experiment_text.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "cli/terminal.h"

namespace kindred::cli {
namespace {

struct Measure {
  const char* name;
  const char* title;
  double scale;
  int digits;
};
constexpr std::array<Measure, 4> kMeasures = {{{"ttft_s", "TTFT ms", 1e3, 1},
                                               {"tpot_s", "TPOT ms", 1e3, 2},
                                               {"tokens_per_s", "events/s", 1, 1},
                                               {"active_experts", "active experts", 1, 2}}};

double number_of(const Json& object, const char* name) {
  const auto it = object.find(name);
  return it != object.end() && it->is_number() ? it->get<double>() : 0;
}

// Names are the operator's own, but come over the network.
std::string text_of(const Json& object, const char* name) {
  const auto it = object.find(name);
  std::string text = it != object.end() && it->is_string() ? it->get<std::string>() : "?";
  std::replace_if(text.begin(), text.end(), [](unsigned char c) { return c < 0x20 || c == 0x7f; }, '?');
  return text;
}

Json part_of(const Json& object, const char* name) {
  const auto it = object.find(name);
  return it == object.end() ? Json(nullptr) : *it;
}

// "+1.20 [-0.10, +2.50]", and in per cent of the control.
std::string difference_text(const Json& against, const Measure& measure) {
  const Json one = part_of(against, measure.name);
  const Json interval = part_of(one, "interval");
  if (!one.is_object() || !interval.is_array() || interval.size() != 2 || !interval[0].is_number() ||
      !interval[1].is_number()) {
    return "too few blocks";
  }
  const double control = number_of(one, "control"), difference = number_of(one, "difference");
  std::string out = fmt::format("{:+.{}f} [{:+.{}f}, {:+.{}f}]", difference * measure.scale, measure.digits,
                                interval[0].get<double>() * measure.scale, measure.digits,
                                interval[1].get<double>() * measure.scale, measure.digits);
  if (control != 0) out += fmt::format(" {:+.1f} %", 100 * difference / control);
  return out;
}

}  // namespace

std::string experiment_text(const Json& report) {
  const Json arms = part_of(report, "arms");
  if (!arms.is_array() || arms.empty()) return "no experiment\n";
  std::string out = fmt::format(
      "switchback experiment: {:.0f} s, {:.0f} blocks over; slices of {:g} s, seams of {:g} s\nin force: {}{}\n\n",
      number_of(report, "running_s"), number_of(report, "blocks_over"), number_of(report, "slice_s"),
      number_of(report, "seam_s"), text_of(report, "in_force"), part_of(report, "in_seam") == true ? " (seam)" : "");
  std::vector<std::string> header = {"arm", "requests"};
  for (const Measure& measure : kMeasures) header.emplace_back(measure.title);
  Table means(header);
  for (const Json& arm : arms) {
    std::vector<std::string> row = {text_of(arm, "name"), fmt::format("{:.0f}", number_of(arm, "requests"))};
    const Json of = part_of(arm, "means");
    for (const Measure& measure : kMeasures) {
      const Json value = part_of(of, measure.name);
      row.push_back(value.is_number() ? fmt::format("{:.{}f}", value.get<double>() * measure.scale, measure.digits)
                                      : "-");
    }
    means.row(std::move(row));
  }
  out += means.text();
  const std::string control = text_of(arms[0], "name");
  for (size_t a = 1; a < arms.size(); ++a) {
    out += fmt::format("\n{} against {}, {:g} % intervals\n", text_of(arms[a], "name"), control,
                       100 * number_of(report, "level"));
    const Json against = part_of(arms[a], "against_control");
    Table differences({"measure", "difference", "blocks", "claim"});
    for (const Measure& measure : kMeasures) {
      const Json one = part_of(against, measure.name);
      const bool claimed = part_of(one, "claimed") == true;
      const bool less = number_of(one, "difference") < 0;
      differences.row({measure.title, difference_text(against, measure),
                       fmt::format("{:.0f}", number_of(one, "blocks")), claimed ? (less ? "less" : "more") : "none"});
    }
    out += differences.text();
  }
  return out;
}

}  // namespace kindred::cli

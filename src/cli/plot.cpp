#include "cli/plot.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <filesystem>
#include <system_error>

#include "base/config.h"

namespace kindred::cli {
namespace {

constexpr double kWidth = 720, kHeight = 440;
constexpr double kLeft = 72, kRight = 24, kTop = 44, kBottom = 56, kLegendLine = 18, kNoteLine = 16;

// Okabe and Ito's colours: told apart by people with any colour vision.
constexpr std::array<std::string_view, 8> kColours{"#0072b2", "#d55e00", "#009e73", "#cc79a7",
                                                   "#e69f00", "#56b4e9", "#5b5b5b", "#b8a800"};

std::string_view colour(size_t i) { return kColours[i % kColours.size()]; }

std::string escaped(std::string_view text) {
  std::string out;
  for (const char c : text) {
    switch (c) {
      case '&': out += "&amp;"; break;
      case '<': out += "&lt;"; break;
      case '>': out += "&gt;"; break;
      case '"': out += "&quot;"; break;
      default: out.push_back(c);
    }
  }
  return out;
}

std::string text_at(double x, double y, std::string_view anchor, std::string_view text, std::string_view more = "") {
  return fmt::format("<text x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"{}\"{}>{}</text>\n", x, y, anchor, more,
                     escaped(text));
}

std::string upright(double x, double y, std::string_view text) {
  return fmt::format("<text transform=\"translate({:.1f} {:.1f}) rotate(-90)\" text-anchor=\"middle\">{}</text>\n", x,
                     y, escaped(text));
}

// A range and its round steps: 1, 2 or 5 times a power of ten, about `wanted` of them.
struct Axis {
  double low = 0, high = 1, step = 1;

  double share(double value) const { return (value - low) / (high - low); }
};

Axis axis_for(double low, double high, bool from_zero, int wanted = 6) {
  if (!(low <= high)) low = 0, high = 1;  // nothing to show
  if (from_zero) low = std::min(low, 0.0), high = std::max(high, 0.0);
  if (low == high) {
    const double half = low == 0 ? 0.5 : std::abs(low) / 10;
    low -= half, high += half;
  }
  const double rough = (high - low) / wanted;
  const double power = std::pow(10, std::floor(std::log10(rough)));
  const double ratio = rough / power;
  const double step = power * (ratio > 5 ? 10 : ratio > 2 ? 5 : ratio > 1 ? 2 : 1);
  return {std::floor(low / step) * step, std::ceil(high / step) * step, step};
}

std::string tick_text(double value, double step) {
  const int digits = std::clamp(static_cast<int>(std::ceil(-std::log10(step) - 1e-9)), 0, 6);
  return fmt::format("{:.{}f}", std::abs(value) < step / 1e6 ? 0.0 : value, digits);
}

// The drawing area, and where a value lies in it.
struct Frame {
  double left = kLeft, top = kTop, width = kWidth - kLeft - kRight, height = kHeight - kTop - kBottom;
  Axis x, y;

  double at_x(double value) const { return left + x.share(value) * width; }
  double at_y(double value) const { return top + (1 - y.share(value)) * height; }
};

std::string y_grid(const Frame& frame) {
  std::string out;
  for (double value = frame.y.low; value <= frame.y.high + frame.y.step / 2; value += frame.y.step) {
    const double y = frame.at_y(value);
    out += fmt::format("<path d=\"M{:.1f} {:.1f}h{:.1f}\" stroke=\"#e3e3e3\"/>\n", frame.left, y, frame.width);
    out += text_at(frame.left - 8, y + 4, "end", tick_text(value, frame.y.step));
  }
  return out;
}

std::string x_ticks(const Frame& frame) {
  std::string out;
  const double bottom = frame.top + frame.height;
  for (double value = frame.x.low; value <= frame.x.high + frame.x.step / 2; value += frame.x.step) {
    const double x = frame.at_x(value);
    out += fmt::format("<path d=\"M{:.1f} {:.1f}v5\" stroke=\"#444\"/>\n", x, bottom);
    out += text_at(x, bottom + 18, "middle", tick_text(value, frame.x.step));
  }
  return out;
}

std::vector<std::string> note_lines(std::string_view note) {
  constexpr size_t kColumns = 112;
  std::vector<std::string> lines;
  while (!note.empty()) {
    size_t end = std::min(note.size(), kColumns);
    if (end < note.size()) {
      const size_t space = note.rfind(' ', end);
      if (space != std::string_view::npos && space > 0) end = space;
    }
    lines.emplace_back(note.substr(0, end));
    note.remove_prefix(std::min(note.size(), end + (end < note.size() ? 1 : 0)));
  }
  return lines;
}

// The page around `body`: title above, legend and note below a plot that ends at `bottom`.
std::string page(std::string_view title, std::string_view body, const std::vector<std::string>& legend,
                 std::string_view note, double bottom) {
  std::string below;
  double x = kLeft, y = bottom + 10;
  if (!legend.empty()) y += kLegendLine;
  for (size_t i = 0; i < legend.size(); ++i) {
    const double width = 30 + 7.2 * static_cast<double>(legend[i].size());
    if (x + width > kWidth - 8 && x > kLeft) x = kLeft, y += kLegendLine;
    below +=
        fmt::format("<rect x=\"{:.1f}\" y=\"{:.1f}\" width=\"12\" height=\"12\" fill=\"{}\"/>\n", x, y - 10, colour(i));
    below += text_at(x + 18, y, "start", legend[i]);
    x += width;
  }
  for (const std::string& line : note_lines(note)) {
    y += kNoteLine;
    below += text_at(kLeft, y, "start", line, " font-size=\"11\" fill=\"#666\"");
  }
  return fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{0:.0f}\" height=\"{1:.0f}\" viewBox=\"0 0 {0:.0f} {1:.0f}\" "
      "font-family=\"Helvetica, Arial, sans-serif\" font-size=\"12\" fill=\"#222\">\n"
      "<rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>\n{2}{3}{4}</svg>\n",
      kWidth, y + 16, text_at(kLeft, 24, "start", title, " font-size=\"15\" font-weight=\"bold\""), body, below);
}

struct Range {
  double low = INFINITY, high = -INFINITY;

  void cover(double value) {
    if (!std::isfinite(value)) return;
    low = std::min(low, value), high = std::max(high, value);
  }
};

std::string series_paths(const Series& series, const Frame& frame, std::string_view with) {
  std::string path, marks;
  bool pen_down = false;
  for (size_t i = 0; i < series.x.size(); ++i) {
    if (!std::isfinite(series.x[i]) || !std::isfinite(series.y[i])) {
      pen_down = false;
      continue;
    }
    const double x = frame.at_x(series.x[i]), y = frame.at_y(series.y[i]);
    path += fmt::format("{}{:.1f} {:.1f}", pen_down ? 'L' : 'M', x, y);
    pen_down = true;
    if (series.markers) {
      marks += fmt::format("<circle cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"{}\" fill=\"{}\" fill-opacity=\"{}\"/>\n", x, y,
                           series.marker_px, with, series.line ? "1" : "0.55");
    }
    if (i < series.error.size() && series.error[i] > 0) {
      marks += fmt::format("<path d=\"M{:.1f} {:.1f}V{:.1f}\" stroke=\"{}\"/>\n", x,
                           frame.at_y(series.y[i] - series.error[i]), frame.at_y(series.y[i] + series.error[i]), with);
    }
  }
  if (!series.line) return marks;
  return fmt::format("<path d=\"{}\" fill=\"none\" stroke=\"{}\" stroke-width=\"2\"/>\n", path, with) + marks;
}

std::string border(const Frame& frame) {
  return fmt::format(
      "<rect x=\"{:.1f}\" y=\"{:.1f}\" width=\"{:.1f}\" height=\"{:.1f}\" fill=\"none\" stroke=\"#444\"/>\n",
      frame.left, frame.top, frame.width, frame.height);
}

}  // namespace

std::string line_chart(const Chart& chart) {
  Range xs, ys;
  for (const Series& series : chart.series) {
    KINDRED_CHECK(series.x.size() == series.y.size());
    for (const double x : series.x) xs.cover(x);
    for (size_t i = 0; i < series.y.size(); ++i) {
      const double error = i < series.error.size() ? series.error[i] : 0;
      ys.cover(series.y[i] - error), ys.cover(series.y[i] + error);
    }
  }
  Frame frame;
  frame.x = axis_for(xs.low, xs.high, chart.x_from_zero);
  frame.y = axis_for(ys.low, ys.high, chart.y_from_zero);
  const double bottom = frame.top + frame.height;
  std::string body = y_grid(frame) + x_ticks(frame) + border(frame);
  std::vector<std::string> legend;
  for (size_t i = 0; i < chart.series.size(); ++i) {
    body += series_paths(chart.series[i], frame, colour(i));
    legend.push_back(chart.series[i].name);
  }
  body += text_at(frame.left + frame.width / 2, bottom + 38, "middle", chart.x_label);
  body += upright(20, frame.top + frame.height / 2, chart.y_label);
  if (legend.size() == 1 && legend[0].empty()) legend.clear();
  return page(chart.title, body, legend, chart.note, bottom + 38);
}

std::string bar_chart(const BarChart& chart) {
  KINDRED_CHECK(chart.values.size() == chart.groups.size());
  Range range;
  for (const auto& group : chart.values) {
    for (const double value : group) range.cover(value);
  }
  Frame frame;
  frame.y = axis_for(range.low, range.high, /*from_zero=*/true);
  const double bottom = frame.top + frame.height;
  std::string body = y_grid(frame) + border(frame);
  const double slot = frame.width / static_cast<double>(std::max<size_t>(chart.categories.size(), 1));
  const double bar = slot * 0.8 / static_cast<double>(std::max<size_t>(chart.groups.size(), 1));
  for (size_t c = 0; c < chart.categories.size(); ++c) {
    const double begin = frame.left + slot * static_cast<double>(c);
    body += text_at(begin + slot / 2, bottom + 18, "middle", chart.categories[c]);
    for (size_t g = 0; g < chart.groups.size(); ++g) {
      const double value = c < chart.values[g].size() ? chart.values[g][c] : NAN;
      if (!std::isfinite(value)) continue;
      const double top = frame.at_y(std::max(value, 0.0)), end = frame.at_y(std::min(value, 0.0));
      body += fmt::format("<rect x=\"{:.1f}\" y=\"{:.1f}\" width=\"{:.1f}\" height=\"{:.1f}\" fill=\"{}\"/>\n",
                          begin + slot * 0.1 + bar * static_cast<double>(g), top, std::max(bar - 1, 0.5), end - top,
                          colour(g));
    }
  }
  body += upright(20, frame.top + frame.height / 2, chart.y_label);
  return page(chart.title, body, chart.groups.size() > 1 ? chart.groups : std::vector<std::string>{}, chart.note,
              bottom + 24);
}

std::string heat_map(const HeatMap& map) {
  Range range;
  size_t columns = 0, longest = 0;
  for (const auto& row : map.values) {
    columns = std::max(columns, row.size());
    for (const double value : row) range.cover(value);
  }
  for (const std::string& name : map.rows) longest = std::max(longest, name.size());
  Frame frame;
  frame.left = 36 + 7 * static_cast<double>(std::min<size_t>(longest, 24));
  frame.width = kWidth - kRight - frame.left;
  const double cell_height = std::clamp(300.0 / static_cast<double>(std::max<size_t>(map.rows.size(), 1)), 10.0, 26.0);
  frame.height = cell_height * static_cast<double>(map.rows.size());
  const double cell_width = frame.width / static_cast<double>(std::max<size_t>(columns, 1));
  const double span = range.high > range.low ? range.high - range.low : 1;
  std::string body;
  for (size_t r = 0; r < map.values.size(); ++r) {
    const double y = frame.top + cell_height * static_cast<double>(r);
    if (r < map.rows.size()) body += text_at(frame.left - 8, y + cell_height / 2 + 4, "end", map.rows[r]);
    for (size_t c = 0; c < map.values[r].size(); ++c) {
      if (!std::isfinite(map.values[r][c])) continue;
      body += fmt::format(
          "<rect x=\"{:.2f}\" y=\"{:.2f}\" width=\"{:.2f}\" height=\"{:.2f}\" fill=\"#08306b\" "
          "fill-opacity=\"{:.3f}\"/>\n",
          frame.left + cell_width * static_cast<double>(c), y, cell_width, cell_height,
          (map.values[r][c] - range.low) / span);
    }
  }
  body += border(frame);
  const double bottom = frame.top + frame.height;
  body += text_at(frame.left + frame.width / 2, bottom + 20, "middle", map.x_label);
  body += upright(14, frame.top + frame.height / 2, map.y_label);
  return page(map.title, body, {}, map.note, bottom + 24);
}

Status save_svg(const std::string& folder, std::string_view name, std::string_view svg) {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (error) return Error{ErrorCode::kIo, fmt::format("cannot make {}: {}", folder, error.message())};
  return write_file(fmt::format("{}/{}.svg", folder, name), svg);
}

}  // namespace kindred::cli

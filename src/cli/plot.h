// Charts as stand-alone SVG files: no scripts, no fonts to fetch, readable on white and in print.
//
// Thread-safety: pure functions.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"

namespace kindred::cli {

struct Series {
  std::string name;
  std::vector<double> x, y;  // of one length; a point that is not finite is left out
  bool line = true;
  bool markers = true;
  // Vertical bars around the points, or empty.
  std::vector<double> error = {};
  double marker_px = 3;  // radius
};

struct Chart {
  std::string title, x_label, y_label;
  std::vector<Series> series;
  std::string note = {};  // below the chart: the caveat that belongs to it
  bool x_from_zero = false, y_from_zero = false;
};

// Lines, scatter, or both.
std::string line_chart(const Chart& chart);

struct BarChart {
  std::string title, y_label;
  std::vector<std::string> categories;      // along x
  std::vector<std::string> groups;          // bars of a category, named in the legend
  std::vector<std::vector<double>> values;  // [group][category]; not finite: no bar
  std::string note = {};
};
std::string bar_chart(const BarChart& chart);

struct HeatMap {
  std::string title, x_label, y_label;
  std::vector<std::string> rows;            // names, top to bottom
  std::vector<std::vector<double>> values;  // [row][column]; the darkest is the highest
  std::string note = {};
};
std::string heat_map(const HeatMap& map);

// Writes `svg` to `folder`/`name`.svg, making the folder. Error: kIo.
Status save_svg(const std::string& folder, std::string_view name, std::string_view svg);

}  // namespace kindred::cli

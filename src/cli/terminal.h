// What people see: tables, progress, and a picture of either.
//
// Thread-safety: none; one per command.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"

namespace kindred::cli {

// Says on stderr what went wrong in `kindred COMMAND`, and returns `status`.
int fail(std::string_view command, const Error& error, int status = 1);

// Columns a terminal gives to UTF-8 `text`: two for East Asian wide characters, one otherwise.
size_t display_width(std::string_view text);

// Rows of cells, aligned: the first column to the left, numbers to the right.
class Table {
 public:
  explicit Table(std::vector<std::string> header) : header_(std::move(header)) {}
  void row(std::vector<std::string> cells) { rows_.push_back(std::move(cells)); }
  std::string text(size_t indent = 2) const;

 private:
  std::vector<std::string> header_;
  std::vector<std::vector<std::string>> rows_;
};

// A progress bar on stderr: redrawn in place on a terminal, a line every tenth elsewhere.
class Progress {
 public:
  Progress(std::string label, size_t total);
  ~Progress();  // ends the line
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;
  void set(size_t done);

 private:
  std::string label_;
  size_t total_, shown_tenth_ = 0, done_ = 0;
  bool terminal_;
};

// A stand-alone SVG that shows `text` as a terminal would.
std::string text_as_svg(std::string_view text, std::string_view title);

}  // namespace kindred::cli

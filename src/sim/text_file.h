// Whole text files, plain or compressed by xz, and tables of comma-separated values in them.
//
// Thread-safety: plain values and pure functions.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"

namespace kindred::sim {

// More is refused, compressed or not.
inline constexpr size_t kMostTextBytes = size_t{1} << 30;

// The bytes of `path`, decompressed if its name ends in .xz. Error: kIo, kNotFound, kCorrupt (not xz, or cut short),
// kTooLarge; the message names the path.
Result<std::string> read_text(const std::string& path, size_t most_bytes = kMostTextBytes);
Result<std::string> unpack_xz(std::string_view packed, size_t most_bytes = kMostTextBytes);

// A table with a header line. Quoted fields are not supported: none of the formats that are read has any.
class CsvTable {
 public:
  // `origin` names the file in errors. Error: kInvalid: no header, or a line with another number of fields.
  static Result<CsvTable> parse(std::string text, std::string origin);

  size_t rows() const { return lines_.size(); }
  // Error: kInvalid, naming the column and those that there are.
  Result<size_t> column(std::string_view name) const;
  std::string_view cell(size_t row, size_t column) const;
  uint32_t line(size_t row) const { return lines_[row]; }  // counted from 1
  // Error: kInvalid, naming line and column: not a number, or outside [least, most].
  Result<double> number(size_t row, size_t column, double least, double most) const;
  Result<uint32_t> whole(size_t row, size_t column, uint32_t least) const;

 private:
  struct Field {
    size_t begin, length;
  };
  std::string text_, origin_;
  std::vector<std::string> names_;
  std::vector<Field> fields_;  // [rows, columns]
  std::vector<uint32_t> lines_;
};

}  // namespace kindred::sim

#include "sim/text_file.h"

#include <fmt/format.h>
#include <lzma.h>

#include <algorithm>
#include <array>
#include <charconv>

#include "base/config.h"

namespace kindred::sim {
namespace {

constexpr uint64_t kXzMemoryBytes = uint64_t{256} << 20;

Error at(Error error, const std::string& path) {
  return Error{error.code, fmt::format("{}: {}", path, error.message), std::move(error.field)};
}

}  // namespace

Result<std::string> unpack_xz(std::string_view packed, size_t most_bytes) {
  lzma_stream stream = LZMA_STREAM_INIT;
  if (lzma_stream_decoder(&stream, kXzMemoryBytes, LZMA_CONCATENATED) != LZMA_OK) {
    return Error{ErrorCode::kInternal, "cannot start the xz decoder"};
  }
  std::string out;
  std::array<uint8_t, 1 << 16> buffer;
  stream.next_in = reinterpret_cast<const uint8_t*>(packed.data());
  stream.avail_in = packed.size();
  lzma_ret result = LZMA_OK;
  while (result == LZMA_OK && out.size() <= most_bytes) {
    stream.next_out = buffer.data();
    stream.avail_out = buffer.size();
    result = lzma_code(&stream, LZMA_FINISH);
    out.append(reinterpret_cast<const char*>(buffer.data()), buffer.size() - stream.avail_out);
  }
  lzma_end(&stream);
  if (out.size() > most_bytes) {
    return Error{ErrorCode::kTooLarge, fmt::format("more than {} bytes when unpacked", most_bytes)};
  }
  if (result != LZMA_STREAM_END) {
    return Error{ErrorCode::kCorrupt, fmt::format("not a whole xz file (liblzma says {})", static_cast<int>(result))};
  }
  return out;
}

Result<std::string> read_text(const std::string& path, size_t most_bytes) {
  Result<std::string> bytes = read_file(path);
  if (!bytes) return bytes;
  if (bytes->size() > most_bytes) {
    return Error{ErrorCode::kTooLarge, fmt::format("{}: more than {} bytes", path, most_bytes)};
  }
  if (!path.ends_with(".xz")) return bytes;
  Result<std::string> text = unpack_xz(*bytes, most_bytes);
  if (!text) return at(text.error(), path);
  return text;
}

Result<CsvTable> CsvTable::parse(std::string text, std::string origin) {
  CsvTable table;
  table.text_ = std::move(text);
  table.origin_ = std::move(origin);
  const std::string_view all = table.text_;
  uint32_t line = 0;
  for (size_t begin = 0; begin < all.size();) {
    ++line;
    const size_t end = std::min(all.find('\n', begin), all.size());
    size_t length = end - begin;
    if (length > 0 && all[begin + length - 1] == '\r') --length;
    // Azure's files begin with a byte order mark.
    if (line == 1 && all.starts_with("\xef\xbb\xbf")) begin += 3, length -= 3;
    if (length > 0) {
      const size_t before = table.fields_.size();
      for (size_t at = begin; at <= begin + length;) {
        const size_t comma = std::min(all.find(',', at), begin + length);
        if (table.names_.empty() || line > 1) table.fields_.push_back({at, comma - at});
        at = comma + 1;
      }
      if (table.names_.empty()) {
        for (const Field& field : table.fields_) table.names_.emplace_back(all.substr(field.begin, field.length));
        table.fields_.clear();
      } else {
        const size_t got = table.fields_.size() - before;
        if (got != table.names_.size()) {
          return invalid(fmt::format("{}: line {} has {} fields; the header has {}", table.origin_, line, got,
                                     table.names_.size()));
        }
        table.lines_.push_back(line);
      }
    }
    begin = end + 1;
  }
  if (table.names_.empty()) return invalid(fmt::format("{}: empty; a header line was expected", table.origin_));
  return table;
}

Result<size_t> CsvTable::column(std::string_view name) const {
  const auto found = std::find(names_.begin(), names_.end(), name);
  if (found != names_.end()) return static_cast<size_t>(found - names_.begin());
  return invalid(fmt::format("{}: line 1: no column '{}'; there are: {}", origin_, name, fmt::join(names_, ", ")),
                 std::string(name));
}

std::string_view CsvTable::cell(size_t row, size_t column) const {
  const Field& field = fields_[row * names_.size() + column];
  return std::string_view(text_).substr(field.begin, field.length);
}

Result<double> CsvTable::number(size_t row, size_t column, double least, double most) const {
  const std::string_view text = cell(row, column);
  double value = 0;
  const auto [rest, code] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (code == std::errc() && rest == text.data() + text.size() && value >= least && value <= most) return value;
  return invalid(fmt::format("{}: line {}: {} is '{}'; accepted: a number from {} to {}", origin_, line(row),
                             names_[column], text.substr(0, 40), least, most),
                 names_[column]);
}

Result<uint32_t> CsvTable::whole(size_t row, size_t column, uint32_t least) const {
  const std::string_view text = cell(row, column);
  uint32_t value = 0;
  const auto [rest, code] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (code == std::errc() && rest == text.data() + text.size() && value >= least) return value;
  return invalid(fmt::format("{}: line {}: {} is '{}'; accepted: a whole number from {} to 4294967295", origin_,
                             line(row), names_[column], text.substr(0, 40), least),
                 names_[column]);
}

}  // namespace kindred::sim

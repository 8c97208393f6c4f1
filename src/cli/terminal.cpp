#include "cli/terminal.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>

namespace kindred::cli {
namespace {

// Decodes one code point of valid UTF-8 and moves `at` past it; malformed bytes count as themselves.
uint32_t next_code_point(std::string_view text, size_t& at) {
  const auto lead = static_cast<unsigned char>(text[at++]);
  const size_t more = lead >= 0xf0 ? 3 : lead >= 0xe0 ? 2 : lead >= 0xc0 ? 1 : 0;
  uint32_t code = more == 0 ? lead : lead & (0x3fU >> more);
  for (size_t i = 0; i < more && at < text.size(); ++i)
    code = code << 6 | (static_cast<unsigned char>(text[at++]) & 0x3f);
  return code;
}

// East Asian Wide blocks (Unicode TR 11), coarse: enough for aligned tables.
bool is_wide(uint32_t code) {
  return (code >= 0x1100 && code <= 0x115f) || (code >= 0x2e80 && code <= 0xa4cf) ||
         (code >= 0xac00 && code <= 0xd7a3) || (code >= 0xf900 && code <= 0xfaff) ||
         (code >= 0xfe30 && code <= 0xfe6f) || (code >= 0xff00 && code <= 0xff60) ||
         (code >= 0x1f300 && code <= 0x1faff) || (code >= 0x20000 && code <= 0x3fffd);
}

bool looks_numeric(std::string_view cell) {
  return !cell.empty() && cell.find_first_of("0123456789") <= 1 &&
         cell.find_first_not_of("0123456789.,+-−%×/ msµk") == std::string_view::npos;
}

}  // namespace

int fail(std::string_view command, const Error& error, int status) {
  fmt::print(stderr, "kindred {}: {}\n", command, error.message);
  return status;
}

size_t display_width(std::string_view text) {
  size_t width = 0;
  for (size_t at = 0; at < text.size();) width += is_wide(next_code_point(text, at)) ? 2 : 1;
  return width;
}

std::string Table::text(size_t indent) const {
  std::vector<size_t> width(header_.size());
  std::vector<bool> right(header_.size(), true);
  for (size_t c = 0; c < header_.size(); ++c) {
    width[c] = display_width(header_[c]);
    for (const auto& row : rows_) {
      if (c >= row.size()) continue;
      width[c] = std::max(width[c], display_width(row[c]));
      if (!row[c].empty() && row[c] != "-" && !looks_numeric(row[c])) right[c] = false;
    }
  }
  right[0] = false;

  std::string out;
  const auto line = [&](const std::vector<std::string>& cells) {
    std::string text(indent, ' ');
    for (size_t c = 0; c < header_.size(); ++c) {
      const std::string cell = c < cells.size() ? cells[c] : "";
      const std::string pad(width[c] - std::min(width[c], display_width(cell)), ' ');
      text += right[c] ? pad + cell : cell + pad;
      if (c + 1 < header_.size()) text += "  ";
    }
    while (!text.empty() && text.back() == ' ') text.pop_back();
    out += text + "\n";
  };
  line(header_);
  std::vector<std::string> rule;
  for (const size_t w : width) {
    std::string dashes;
    for (size_t i = 0; i < w; ++i) dashes += "─";
    rule.push_back(std::move(dashes));
  }
  line(rule);
  for (const auto& row : rows_) line(row);
  return out;
}

Progress::Progress(std::string label, size_t total)
    : label_(std::move(label)), total_(std::max<size_t>(total, 1)), terminal_(isatty(STDERR_FILENO) == 1) {
  set(0);
}

Progress::~Progress() {
  if (terminal_) fmt::print(stderr, "\n");
}

void Progress::set(size_t done) {
  done_ = std::min(done, total_);
  const size_t tenth = done_ * 10 / total_;
  if (terminal_) {
    constexpr size_t kWidth = 30;
    std::string bar;
    for (size_t i = 0; i < kWidth; ++i) bar += i < done_ * kWidth / total_ ? "█" : "░";
    fmt::print(stderr, "\r  {:<34} {} {}/{}", label_, bar, done_, total_);
    std::fflush(stderr);
  } else if (tenth > shown_tenth_) {
    shown_tenth_ = tenth;
    if (tenth % 5 == 0) fmt::print(stderr, "  {}: {}/{}\n", label_, done_, total_);
  }
}

std::string text_as_svg(std::string_view text, std::string_view title) {
  constexpr int kFont = 14, kLine = 20, kMargin = 20, kTop = 52;
  std::vector<std::string> lines(1);
  size_t columns = display_width(title) + 12;
  for (const char c : text) {
    if (c == '\n') lines.emplace_back();
    else if (c == '&') lines.back() += "&amp;";
    else if (c == '<') lines.back() += "&lt;";
    else lines.back().push_back(c);
  }
  while (!lines.empty() && lines.back().empty()) lines.pop_back();
  for (const std::string& line : lines) columns = std::max(columns, display_width(line));

  const int width = static_cast<int>(static_cast<double>(columns) * kFont * 0.602) + 2 * kMargin;
  const int height = kTop + static_cast<int>(lines.size()) * kLine + kMargin / 2;
  std::string out = fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{0}\" height=\"{1}\" viewBox=\"0 0 {0} {1}\">\n"
      "<rect width=\"{0}\" height=\"{1}\" rx=\"8\" fill=\"#0f172a\"/>\n"
      "<g fill=\"#475569\"><circle cx=\"22\" cy=\"20\" r=\"6\"/><circle cx=\"42\" cy=\"20\" r=\"6\"/>"
      "<circle cx=\"62\" cy=\"20\" r=\"6\"/></g>\n"
      "<g font-family=\"DejaVu Sans Mono, Menlo, Consolas, monospace\" font-size=\"{2}\" xml:space=\"preserve\">\n"
      "<text x=\"84\" y=\"25\" fill=\"#94a3b8\">{3}</text>\n",
      width, height, kFont, title);
  for (size_t i = 0; i < lines.size(); ++i) {
    out += fmt::format("<text x=\"{}\" y=\"{}\" fill=\"#e2e8f0\">{}</text>\n", kMargin,
                       kTop + static_cast<int>(i) * kLine, lines[i]);
  }
  return out + "</g>\n</svg>\n";
}

}  // namespace kindred::cli

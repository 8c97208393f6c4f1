#include "base/log.h"

#include <unistd.h>

#include <array>
#include <ctime>

namespace kindred {

void Logger::write(LogLevel level, fmt::string_view text, fmt::format_args args) const {
  static constexpr std::array<const char*, 4> kNames = {"debug", "info", "warn", "error"};
  if (level < least_) return;

  const std::time_t now = std::time(nullptr);
  std::tm utc{};
  gmtime_r(&now, &utc);
  std::array<char, 24> stamp{};
  std::strftime(stamp.data(), stamp.size(), "%Y-%m-%dT%H:%M:%SZ", &utc);

  std::string line = fmt::format("{} {} {}: ", stamp.data(), kNames[static_cast<size_t>(level)], part_);
  line += fmt::vformat(text, args);
  for (char& c : line) {
    if (static_cast<unsigned char>(c) < 0x20) c = ' ';  // a log line is one line, whatever it quotes
  }
  line.push_back('\n');
  // A log that cannot be written has nowhere to complain to.
  [[maybe_unused]] const ssize_t written = ::write(STDERR_FILENO, line.data(), line.size());
}

}  // namespace kindred

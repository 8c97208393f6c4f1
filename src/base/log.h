// Log lines on stderr: `2026-01-31T12:00:00Z level part: text`. Never prompt or output content.
//
// Thread-safe: each call writes one line with one write().
#pragma once

#include <fmt/format.h>

#include <string_view>

namespace kindred {

enum class LogLevel { kDebug, kInfo, kWarn, kError };

class Logger {
 public:
  // `part` names the speaker ("router", "worker d0") and is copied.
  explicit Logger(std::string part, LogLevel least = LogLevel::kInfo) : part_(std::move(part)), least_(least) {}

  template <class... Args>
  void debug(fmt::format_string<Args...> text, Args&&... args) const {
    write(LogLevel::kDebug, text, fmt::make_format_args(args...));
  }
  template <class... Args>
  void info(fmt::format_string<Args...> text, Args&&... args) const {
    write(LogLevel::kInfo, text, fmt::make_format_args(args...));
  }
  template <class... Args>
  void warn(fmt::format_string<Args...> text, Args&&... args) const {
    write(LogLevel::kWarn, text, fmt::make_format_args(args...));
  }
  template <class... Args>
  void error(fmt::format_string<Args...> text, Args&&... args) const {
    write(LogLevel::kError, text, fmt::make_format_args(args...));
  }

 private:
  void write(LogLevel level, fmt::string_view text, fmt::format_args args) const;

  std::string part_;
  LogLevel least_;
};

}  // namespace kindred

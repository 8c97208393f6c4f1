// One line per request, to standard error or a file: what came, what became of it, who served it. Never a
// prompt, an output or a key.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>

#include "base/result.h"

namespace kindred::router {

enum class AccessLogFormat { kNone, kText, kJson };

struct AccessRecord {
  int64_t unix_ms = 0;  // of the end
  std::string_view id, peer, key_name, method;
  std::string_view path;  // without the query, which may hold anything
  std::string_view model;
  std::string_view outcome;
  int status = 0;
  uint64_t bytes_in = 0, bytes_out = 0;  // of the body; of the whole answer
  double duration_ms = 0;
  std::optional<double> ttft_ms;
  std::string_view prefill_worker, decode_worker, policy, reason;
  std::optional<uint64_t> prompt_tokens, output_tokens;
  std::string_view trace_id;
};

// The line, with its LF. Text: `key=value` words, those that are not plain in JSON's quotes; what is empty is
// left out. JSON: one object.
std::string access_line(const AccessRecord& record, AccessLogFormat format);

// Thread-safe: a line is one write to a descriptor opened for appending.
class AccessLog {
 public:
  // `file` empty: standard error. Error kIo where it cannot be opened.
  static Result<std::unique_ptr<AccessLog>> open(AccessLogFormat format, std::string file);
  ~AccessLog();
  AccessLog(const AccessLog&) = delete;
  AccessLog& operator=(const AccessLog&) = delete;

  void write(const AccessRecord& record);
  // After the file was moved away: the next line goes into a new one. After an error the old one stays.
  Status reopen();
  uint64_t lost() const { return lost_.load(std::memory_order_relaxed); }  // lines that could not be written

 private:
  AccessLog(AccessLogFormat format, std::string file) : format_(format), file_(std::move(file)) {}

  const AccessLogFormat format_;
  const std::string file_;
  std::mutex mutex_;  // guards fd_
  int fd_ = 2;
  std::atomic<uint64_t> lost_{0};
};

}  // namespace kindred::router

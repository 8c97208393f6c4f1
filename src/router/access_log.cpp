#include "router/access_log.h"

#include <fcntl.h>
#include <fmt/chrono.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <iterator>

#include "base/bytes.h"

namespace kindred::router {
namespace {

constexpr size_t kLongest = 256;  // of what a client chose: path, id, model

bool is_plain(std::string_view text) {
  return std::all_of(text.begin(), text.end(),
                     [](char c) { return c > ' ' && c <= '~' && c != '"' && c != '\\' && c != '='; });
}

std::string timestamp(int64_t unix_ms) {
  const auto seconds = static_cast<std::time_t>(unix_ms / 1000);
  return fmt::format("{:%Y-%m-%dT%H:%M:%S}.{:03}Z", fmt::gmtime(seconds), unix_ms % 1000);
}

// Both formats from one list of fields.
class Line {
 public:
  explicit Line(AccessLogFormat format) : json_(format == AccessLogFormat::kJson) {}

  void text(std::string_view name, std::string_view value) {
    if (value.empty()) return;
    value = value.substr(0, kLongest);
    begin(name);
    if (!json_ && is_plain(value)) out_ += value;
    else out_ += json_string(value);
  }
  void number(std::string_view name, uint64_t value) {
    begin(name);
    fmt::format_to(std::back_inserter(out_), "{}", value);
  }
  void number(std::string_view name, std::optional<uint64_t> value) {
    if (value) number(name, *value);
  }
  void ms(std::string_view name, double value) {
    begin(name);
    fmt::format_to(std::back_inserter(out_), "{:.3f}", value);
  }
  std::string take() {
    out_ += json_ ? "}\n" : "\n";
    return std::move(out_);
  }

 private:
  void begin(std::string_view name) {
    if (json_) fmt::format_to(std::back_inserter(out_), "{}\"{}\":", out_.empty() ? "{" : ",", name);
    else fmt::format_to(std::back_inserter(out_), "{}{}=", out_.empty() ? "" : " ", name);
  }

  bool json_;
  std::string out_;
};

}  // namespace

std::string access_line(const AccessRecord& record, AccessLogFormat format) {
  Line line(format);
  line.text("time", timestamp(record.unix_ms));
  line.text("id", record.id);
  line.text("peer", record.peer);
  line.text("key", record.key_name);
  line.text("method", record.method);
  line.text("path", record.path);
  line.text("model", record.model);
  line.number("status", static_cast<uint64_t>(record.status));
  line.text("outcome", record.outcome);
  line.number("bytes_in", record.bytes_in);
  line.number("bytes_out", record.bytes_out);
  line.ms("duration_ms", record.duration_ms);
  if (record.ttft_ms) line.ms("ttft_ms", *record.ttft_ms);
  line.text("prefill_worker", record.prefill_worker);
  line.text("decode_worker", record.decode_worker);
  line.text("policy", record.policy);
  line.text("reason", record.reason);
  line.number("prompt_tokens", record.prompt_tokens);
  line.number("output_tokens", record.output_tokens);
  line.text("trace", record.trace_id);
  return line.take();
}

Result<std::unique_ptr<AccessLog>> AccessLog::open(AccessLogFormat format, std::string file) {
  std::unique_ptr<AccessLog> log(new AccessLog(format, std::move(file)));  // the constructor is private
  if (Status opened = log->reopen(); !opened) return std::move(opened).error();
  return log;
}

AccessLog::~AccessLog() {
  if (fd_ > STDERR_FILENO) ::close(fd_);
}

Status AccessLog::reopen() {
  if (file_.empty()) return {};
  const int fd = ::open(file_.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0640);
  if (fd < 0) {
    return Error{ErrorCode::kIo, fmt::format("access_log_file: cannot open {}: {}", file_, std::strerror(errno)),
                 "access_log_file"};
  }
  const std::lock_guard lock(mutex_);
  if (fd_ > STDERR_FILENO) ::close(fd_);
  fd_ = fd;
  return {};
}

void AccessLog::write(const AccessRecord& record) {
  if (format_ == AccessLogFormat::kNone) return;
  const std::string line = access_line(record, format_);
  const std::lock_guard lock(mutex_);
  const ssize_t written = ::write(fd_, line.data(), line.size());
  if (written != static_cast<ssize_t>(line.size())) lost_.fetch_add(1, std::memory_order_relaxed);
}

}  // namespace kindred::router

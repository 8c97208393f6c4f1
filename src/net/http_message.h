// HTTP/1.1 message heads (RFC 9112), parsed within bounds.
//
// Thread-safety: plain values and pure functions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"

namespace kindred::net {

// Views into the Headers that it belongs to.
struct Header {
  std::string_view name;  // as received; compared without case
  std::string_view value;
};

// Names and values lie one behind the other in memory that never moves: a view into it is valid as long as the
// object it was moved into last, whatever is added and erased meanwhile.
class Headers {
 public:
  Headers() = default;
  Headers(const Headers& other) { *this = other; }
  Headers& operator=(const Headers& other);
  Headers(Headers&& other) noexcept { swap(other); }
  Headers& operator=(Headers&& other) noexcept {
    Headers old;
    swap(old);
    swap(other);
    return *this;
  }
  ~Headers() = default;

  void add(std::string_view name, std::string_view value);
  void set(std::string_view name, std::string_view value);  // replaces all of that name
  void erase(std::string_view name);
  // Room for so much at once.
  void reserve(size_t count, size_t bytes);
  // For who has many at once: keeps a copy of `text`, of which headers may then be added without another.
  std::string_view hold(std::string_view text);
  void add_held(std::string_view name, std::string_view value) { entries_.push_back({name, value}); }
  // The first value of that name, or nullptr. Valid until the next change.
  const std::string_view* find(std::string_view name) const;
  size_t count(std::string_view name) const;
  // Drops those for which `unwanted(header)` is true.
  template <class Unwanted>
  void erase_if(Unwanted&& unwanted) {
    std::erase_if(entries_, unwanted);
  }

  auto begin() const { return entries_.begin(); }
  auto end() const { return entries_.end(); }
  size_t size() const { return entries_.size(); }
  size_t bytes() const;  // of all names and values

 private:
  void swap(Headers& other) noexcept;
  char* room(size_t bytes);

  std::vector<Header> entries_;
  std::unique_ptr<char[]> block_;
  size_t used_ = 0, capacity_ = 0;              // of the block
  std::vector<std::unique_ptr<char[]>> older_;  // that had no room for what came
};

struct RequestHead {
  std::string method;
  std::string target;  // origin form: path and query
  Headers headers;
  int minor_version = 1;  // of HTTP/1.x

  std::string_view path() const;                                        // before '?'
  std::string_view query() const;                                       // after '?', or empty
  std::optional<std::string> query_value(std::string_view name) const;  // %-decoded
};

struct ResponseHead {
  int status = 0;
  std::string reason;
  Headers headers;
  int minor_version = 1;  // of HTTP/1.x
};

// How the body of a message ends.
struct BodyFraming {
  enum class Kind { kNone, kLength, kChunked, kUntilClose };
  Kind kind = Kind::kNone;
  uint64_t length_bytes = 0;  // kLength only
};

struct HeadLimits {
  size_t head_bytes = 64 * 1024;
  size_t header_count = 128;
};

// Finds the end of a head in bytes that arrive in arbitrary pieces, looking at each byte once. A bare
// LF is found as soon as it arrives: waiting for CR LF CR LF would turn it into a timeout.
class HeadScanner {
 public:
  enum class State { kMore, kComplete, kBareLf };
  // `bytes` is the whole head so far, at each call the same with more behind it.
  State scan(std::string_view bytes);
  size_t size() const { return line_start_; }  // once kComplete: of the head, its empty line included

 private:
  size_t scanned_ = 0;
  size_t line_start_ = 0;
};

// Errors of both parsers: kInvalid, or kTooLarge where a limit was passed. Error::field is
// kFieldVersion for an HTTP version other than 1.0 and 1.1 (505), kFieldMethod for CONNECT and
// kFieldTransferEncoding for a transfer coding before `chunked` (501); empty otherwise.
inline constexpr std::string_view kFieldVersion = "version";
inline constexpr std::string_view kFieldMethod = "method";
inline constexpr std::string_view kFieldTransferEncoding = "transfer-encoding";

// `text`: everything up to and including the empty line, at most `limits.head_bytes`. Strict: bare LF,
// obs-fold, spaces before ':', control characters and HTTP versions other than 1.0/1.1 are errors.
// A request target in absolute form ("http://host/path") becomes origin form and its authority the Host.
Result<RequestHead> parse_request_head(std::string_view text, const HeadLimits& limits);
Result<ResponseHead> parse_response_head(std::string_view text, const HeadLimits& limits);

// Error where framing is ambiguous: both Content-Length and Transfer-Encoding, more than one length, a
// transfer coding other than chunked, one that does not end in it, or any in HTTP/1.0.
Result<BodyFraming> request_framing(const RequestHead& head);
Result<BodyFraming> response_framing(const ResponseHead& head, std::string_view request_method);

// Whether the connection stays open after this message.
bool keep_alive(const RequestHead& head);
bool keep_alive(const ResponseHead& head);

// Whether a header of that name always belongs to the one connection that it came on (RFC 9110 §7.6.1).
bool is_hop_by_hop(std::string_view name);
// The same for one that came with `headers`, and must not be forwarded: the ones named by `Connection` too.
bool is_hop_by_hop(const Headers& headers, std::string_view name);

// Appends "name: value CR LF". Control characters in either become spaces, so that a value made by
// mistake from foreign text cannot add a header or end the head.
void append_header_line(std::string& out, std::string_view name, std::string_view value);

void append_number(std::string& out, uint64_t number);  // decimal

std::string_view reason_phrase(int status);
bool same_ignoring_case(const char* a, const char* b, size_t size);
// Most names that are compared differ in length or in the first letter, which is seen without a call.
inline bool equals_ignore_case(std::string_view a, std::string_view b) {
  if (a.size() != b.size()) return false;
  if (a.empty()) return true;
  return ((a.front() ^ b.front()) & ~0x20) == 0 && same_ignoring_case(a.data(), b.data(), a.size());
}

// http://host:port or https://host:port without a path.
struct Endpoint {
  std::string host;
  uint16_t port = 0;
  bool tls = false;

  std::string text() const;  // "host:port", IPv6 in brackets
  std::string url() const { return (tls ? "https://" : "http://") + text(); }
  bool operator==(const Endpoint&) const = default;
};
// Accepts "http://host:port", "https://host:port", "host:port"; the port is required.
Result<Endpoint> parse_endpoint(std::string_view url);

}  // namespace kindred::net

// The head parser: strict where peers have disagreed about where a message ends.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>

#include "net/ascii.h"
#include "net/http_message.h"

namespace kindred::net {
namespace {

// RFC 9110 §5.6.2: what method and field names are made of.
constexpr std::array<bool, 256> token_table() {
  std::array<bool, 256> table{};
  for (unsigned c = '0'; c <= '9'; ++c) table[c] = true;
  for (unsigned c = 'a'; c <= 'z'; ++c) table[c] = true;
  for (unsigned c = 'A'; c <= 'Z'; ++c) table[c] = true;
  for (const char c : {'!', '#', '$', '%', '&', '\'', '*', '+', '-', '.', '^', '_', '`', '|', '~'}) {
    table[static_cast<unsigned char>(c)] = true;
  }
  return table;
}
constexpr std::array<bool, 256> kToken = token_table();

bool is_token(std::string_view text) {
  for (const char c : text) {
    if (!kToken[static_cast<unsigned char>(c)]) return false;
  }
  return !text.empty();
}

bool is_control(char c) { return static_cast<unsigned char>(c) < 0x20 || c == 0x7f; }

// Field values and reason phrases: no control characters but HTAB.
bool is_field_text(std::string_view text) {
  if (!has_control(text)) return true;
  return std::all_of(text.begin(), text.end(), [](char c) { return !is_control(c) || c == '\t'; });
}

bool is_target_text(std::string_view text) {
  if (text.empty() || has_control(text)) return false;
  return text.find(' ') == std::string_view::npos && text.find('#') == std::string_view::npos;
}

constexpr std::array<bool, 256> not_for_hosts_table() {
  std::array<bool, 256> table{};
  for (const char c : {' ', '\t', '/', '?', '#', '@', ','}) table[static_cast<unsigned char>(c)] = true;
  return table;
}
constexpr std::array<bool, 256> kNotForHosts = not_for_hosts_table();

// Takes one line, without its CR LF, off the front. False where there is none.
bool take_line(std::string_view& text, std::string_view& line) {
  const size_t lf = text.find('\n');
  if (lf == std::string_view::npos || lf == 0 || text[lf - 1] != '\r') return false;
  line = text.substr(0, lf - 1);
  text.remove_prefix(lf + 1);
  return true;
}

Result<int> parse_version(std::string_view text) {
  if (text == "HTTP/1.1") return 1;
  if (text == "HTTP/1.0") return 0;
  const bool looks_like_one = text.size() == 8 && text.starts_with("HTTP/") && text[6] == '.';
  return invalid("the HTTP version must be 1.1 or 1.0", looks_like_one ? std::string(kFieldVersion) : std::string());
}

// For headers that are added to those of a head on its way through a router.
constexpr size_t kHeadersAtOnce = 16, kMoreBytes = 256;

Status parse_headers(std::string_view text, const HeadLimits& limits, Headers& headers) {
  headers.reserve(kHeadersAtOnce, text.size() + kMoreBytes);
  text = headers.hold(text);
  std::string_view line;
  for (;;) {
    if (!take_line(text, line)) return invalid("a header line does not end in CR LF");
    if (line.empty()) break;
    if (headers.size() == limits.header_count) {
      return Error{ErrorCode::kTooLarge, fmt::format("more than {} headers", limits.header_count)};
    }
    if (line.front() == ' ' || line.front() == '\t') return invalid("a header line begins with white space");
    const size_t colon = line.find(':');
    if (colon == std::string_view::npos) return invalid("a header line has no colon");
    const std::string_view name = line.substr(0, colon);
    if (!is_token(name)) return invalid("a header name is empty or has a character that is not allowed");
    const std::string_view value = trim(line.substr(colon + 1));
    if (!is_field_text(value)) return invalid("a header value has a control character");
    headers.add_held(name, value);
  }
  if (!text.empty()) return invalid("bytes follow the end of the head");
  return {};
}

Status check_size(std::string_view text, const HeadLimits& limits) {
  if (text.size() <= limits.head_bytes) return {};
  return Error{ErrorCode::kTooLarge, fmt::format("the head is larger than {} bytes", limits.head_bytes)};
}

// RFC 9112 §3.2: origin form, or absolute form turned into it, or '*' for OPTIONS.
Status normalise_target(RequestHead& head) {
  if (head.method == "CONNECT") return invalid("CONNECT is not supported", std::string(kFieldMethod));
  if (head.target.starts_with('/')) return {};
  if (head.target == "*" && head.method == "OPTIONS") return {};
  const std::string_view target = head.target;
  size_t authority = 0;
  if (target.starts_with("http://")) authority = 7;
  if (target.starts_with("https://")) authority = 8;
  if (authority == 0) return invalid("the request target must begin with '/'");
  const size_t path = std::min(target.find_first_of("/?", authority), target.size());
  const std::string_view host = target.substr(authority, path - authority);
  if (host.empty() || host.find('@') != std::string_view::npos) return invalid("the request target has no valid host");
  head.headers.set("Host", host);
  std::string origin(target.substr(path));
  if (!origin.starts_with('/')) origin.insert(0, 1, '/');
  head.target = std::move(origin);
  return {};
}

Status check_host(const RequestHead& head) {
  const size_t hosts = head.headers.count("Host");
  if (hosts > 1) return invalid("more than one Host header is given");
  if (hosts == 0) {
    if (head.minor_version >= 1) return invalid("the Host header is missing");
    return {};
  }
  const std::string_view host = *head.headers.find("Host");
  if (std::any_of(host.begin(), host.end(), [](char c) { return kNotForHosts[static_cast<unsigned char>(c)]; })) {
    return invalid("the Host header has a character that is not allowed");
  }
  return {};
}

}  // namespace

HeadScanner::State HeadScanner::scan(std::string_view bytes) {
  while (scanned_ < bytes.size()) {
    const void* found = std::memchr(bytes.data() + scanned_, '\n', bytes.size() - scanned_);
    if (found == nullptr) {
      scanned_ = bytes.size();
      break;
    }
    const auto lf = static_cast<size_t>(static_cast<const char*>(found) - bytes.data());
    if (lf == 0 || bytes[lf - 1] != '\r') return State::kBareLf;
    const bool empty_line = lf == line_start_ + 1;
    scanned_ = line_start_ = lf + 1;
    if (empty_line) return State::kComplete;
  }
  return State::kMore;
}

Result<RequestHead> parse_request_head(std::string_view text, const HeadLimits& limits) {
  if (Status size = check_size(text, limits); !size) return std::move(size).error();
  std::string_view line;
  if (!take_line(text, line)) return invalid("the request line does not end in CR LF");
  const size_t first = line.find(' ');
  const size_t last = line.rfind(' ');
  if (first == std::string_view::npos || first == last) {
    return invalid("the request line is not \"METHOD target HTTP/1.1\"");
  }
  RequestHead head;
  head.method = line.substr(0, first);
  head.target = line.substr(first + 1, last - first - 1);
  if (!is_token(head.method)) return invalid("the method has a character that is not allowed");
  auto version = parse_version(line.substr(last + 1));
  if (!version) return std::move(version).error();
  head.minor_version = *version;
  if (!is_target_text(head.target)) return invalid("the request target has a character that is not allowed");
  if (Status headers = parse_headers(text, limits, head.headers); !headers) return std::move(headers).error();
  if (Status host = check_host(head); !host) return std::move(host).error();
  if (head.target.starts_with('/') && head.method != "CONNECT") return head;
  if (Status target = normalise_target(head); !target) return std::move(target).error();
  // Once more: an absolute target has put its own authority there.
  if (Status host = check_host(head); !host) return std::move(host).error();
  return head;
}

Result<ResponseHead> parse_response_head(std::string_view text, const HeadLimits& limits) {
  if (Status size = check_size(text, limits); !size) return std::move(size).error();
  std::string_view line;
  if (!take_line(text, line)) return invalid("the status line does not end in CR LF");
  // "HTTP/1.1 200 OK"; the reason may be empty, and some leave out the space before it.
  if (line.size() < 12 || line[8] != ' ' || (line.size() > 12 && line[12] != ' ')) {
    return invalid("the status line is not \"HTTP/1.1 200 reason\"");
  }
  auto version = parse_version(line.substr(0, 8));
  if (!version) return std::move(version).error();
  ResponseHead head;
  head.minor_version = *version;
  for (const char digit : line.substr(9, 3)) {
    if (digit < '0' || digit > '9') return invalid("the status is not a number");
    head.status = head.status * 10 + (digit - '0');
  }
  if (head.status < 100 || head.status > 599) return invalid("the status is not from 100 to 599");
  head.reason = line.substr(std::min<size_t>(13, line.size()));
  if (!is_field_text(head.reason)) return invalid("the reason phrase has a control character");
  if (Status headers = parse_headers(text, limits, head.headers); !headers) return std::move(headers).error();
  return head;
}

}  // namespace kindred::net

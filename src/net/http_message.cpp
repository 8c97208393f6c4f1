#include "net/http_message.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cstring>

#include "net/ascii.h"
#include "net/percent.h"

namespace kindred::net {
namespace {

// Room for so many at once: what clients and workers send.
constexpr size_t kUsualHeaders = 12;
constexpr size_t kBlockBytes = 512;
// More than is asked for, for what is added later.
constexpr size_t kFewMore = 4, kSpareBytes = 256;

char lower(char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c + ('a' - 'A')) : c; }

// Calls `visit` for each element of all comma-separated lists under `name`.
template <class Visit>
void for_each_token(const Headers& headers, std::string_view name, Visit&& visit) {
  for (const Header& header : headers) {
    if (!equals_ignore_case(header.name, name)) continue;
    std::string_view rest = header.value;
    while (!rest.empty()) {
      const size_t comma = std::min(rest.find(','), rest.size());
      const std::string_view token = trim(rest.substr(0, comma));
      if (!token.empty()) visit(token);
      rest.remove_prefix(std::min(comma + 1, rest.size()));
    }
  }
}

bool has_token(const Headers& headers, std::string_view name, std::string_view wanted) {
  bool found = false;
  for_each_token(headers, name, [&](std::string_view token) { found = found || equals_ignore_case(token, wanted); });
  return found;
}

bool not_for_a_line(char c) {
  const auto byte = static_cast<unsigned char>(c);
  return (byte < 0x20 && byte != '\t') || byte == 0x7f;
}

// RFC 9112 §6.3: a request whose last coding is not `chunked` has no end that could be known, which is the
// client's fault; other codings before it are merely not implemented here.
Error wrong_coding(const Headers& headers) {
  std::vector<std::string> codings;
  for_each_token(headers, "Transfer-Encoding", [&](std::string_view token) { codings.emplace_back(token); });
  const auto is_chunked = [](const std::string& coding) { return equals_ignore_case(coding, "chunked"); };
  const bool ends_chunked = !codings.empty() && is_chunked(codings.back());
  if (ends_chunked && std::count_if(codings.begin(), codings.end(), is_chunked) == 1) {
    return invalid("the only transfer coding accepted is \"chunked\"", std::string(kFieldTransferEncoding));
  }
  return invalid("Transfer-Encoding does not end in \"chunked\", given once");
}

// The framing that the length headers give, or nothing where there are none.
Result<std::optional<BodyFraming>> declared_framing(const Headers& headers, int minor_version) {
  size_t codings = 0, lengths = 0;
  const std::string_view* first_coding = nullptr;
  const std::string_view* first_length = nullptr;
  for (const Header& header : headers) {
    if (equals_ignore_case(header.name, "Transfer-Encoding") && codings++ == 0) first_coding = &header.value;
    if (equals_ignore_case(header.name, "Content-Length") && lengths++ == 0) first_length = &header.value;
  }
  if (codings > 0 && lengths > 0) return invalid("both Content-Length and Transfer-Encoding are given");
  if (codings > 0) {
    if (minor_version == 0) return invalid("Transfer-Encoding is not part of HTTP/1.0");
    const std::string_view coding = *first_coding;
    if (codings > 1 || !equals_ignore_case(coding, "chunked")) return wrong_coding(headers);
    return std::optional(BodyFraming{BodyFraming::Kind::kChunked, 0});
  }
  if (lengths == 0) return std::optional<BodyFraming>();
  if (lengths > 1) return invalid("more than one Content-Length is given");
  const std::string_view text = *first_length;
  uint64_t length = 0;
  // from_chars takes neither sign nor white space for an unsigned number, and reports overflow.
  const auto [end, fault] = std::from_chars(text.data(), text.data() + text.size(), length);
  if (fault != std::errc() || end != text.data() + text.size()) return invalid("Content-Length is not a number");
  return std::optional(BodyFraming{BodyFraming::Kind::kLength, length});
}

bool stays_open(const Headers& headers, int minor_version) {
  if (has_token(headers, "Connection", "close")) return false;
  return minor_version >= 1 || has_token(headers, "Connection", "keep-alive");
}

}  // namespace

bool same_ignoring_case(const char* a, const char* b, size_t size) {
  size_t i = 0;
  // Names are nearly always spelt alike.
  for (; i + 8 <= size; i += 8) {
    uint64_t x = 0, y = 0;
    std::memcpy(&x, a + i, 8);
    std::memcpy(&y, b + i, 8);
    if (x != y) break;
  }
  for (; i < size; ++i) {
    if (a[i] != b[i] && lower(a[i]) != lower(b[i])) return false;
  }
  return true;
}

Headers& Headers::operator=(const Headers& other) {
  if (this == &other) return *this;
  entries_.clear();
  used_ = 0;
  older_.clear();
  reserve(other.size() + kFewMore, other.bytes() + kSpareBytes);
  for (const Header& header : other) add(header.name, header.value);
  return *this;
}

void Headers::swap(Headers& other) noexcept {
  entries_.swap(other.entries_);
  block_.swap(other.block_);
  std::swap(used_, other.used_);
  std::swap(capacity_, other.capacity_);
  older_.swap(other.older_);
}

void Headers::reserve(size_t count, size_t bytes) {
  entries_.reserve(count);
  if (capacity_ - used_ >= bytes) return;
  if (used_ > 0) older_.push_back(std::move(block_));
  block_ = std::make_unique_for_overwrite<char[]>(bytes);
  used_ = 0;
  capacity_ = bytes;
}

char* Headers::room(size_t bytes) {
  if (capacity_ - used_ < bytes) reserve(entries_.capacity(), std::max(bytes + kSpareBytes, kBlockBytes));
  char* const out = block_.get() + used_;
  used_ += bytes;
  return out;
}

std::string_view Headers::hold(std::string_view text) {
  char* const at = room(text.size());
  std::copy(text.begin(), text.end(), at);
  return {at, text.size()};
}

void Headers::add(std::string_view name, std::string_view value) {
  if (entries_.empty()) entries_.reserve(kUsualHeaders);
  char* const at = room(name.size() + value.size());
  std::copy(name.begin(), name.end(), at);
  std::copy(value.begin(), value.end(), at + name.size());
  entries_.push_back({{at, name.size()}, {at + name.size(), value.size()}});
}

void Headers::set(std::string_view name, std::string_view value) {
  // Both may be views of the entry that goes: its bytes stay where they are.
  erase(name);
  add(name, value);
}

void Headers::erase(std::string_view name) {
  if (find(name) == nullptr) return;
  std::erase_if(entries_, [&](const Header& header) { return equals_ignore_case(header.name, name); });
}

const std::string_view* Headers::find(std::string_view name) const {
  for (const Header& header : entries_) {
    if (equals_ignore_case(header.name, name)) return &header.value;
  }
  return nullptr;
}

size_t Headers::bytes() const {
  size_t sum = 0;
  for (const Header& header : entries_) sum += header.name.size() + header.value.size();
  return sum;
}

size_t Headers::count(std::string_view name) const {
  return static_cast<size_t>(std::count_if(
      entries_.begin(), entries_.end(), [&](const Header& header) { return equals_ignore_case(header.name, name); }));
}

std::string_view RequestHead::path() const { return std::string_view(target).substr(0, target.find('?')); }

std::string_view RequestHead::query() const {
  const size_t mark = target.find('?');
  return mark == std::string::npos ? std::string_view() : std::string_view(target).substr(mark + 1);
}

std::optional<std::string> RequestHead::query_value(std::string_view name) const {
  std::string_view rest = query();
  while (!rest.empty()) {
    const std::string_view pair = rest.substr(0, rest.find('&'));
    const size_t equals = std::min(pair.find('='), pair.size());
    if (percent_decoded(pair.substr(0, equals)) == name) {
      return percent_decoded(pair.substr(std::min(equals + 1, pair.size())));
    }
    rest.remove_prefix(std::min(pair.size() + 1, rest.size()));
  }
  return std::nullopt;
}

Result<BodyFraming> request_framing(const RequestHead& head) {
  auto declared = declared_framing(head.headers, head.minor_version);
  if (!declared) return std::move(declared).error();
  return declared->value_or(BodyFraming{});
}

Result<BodyFraming> response_framing(const ResponseHead& head, std::string_view request_method) {
  auto declared = declared_framing(head.headers, head.minor_version);
  if (!declared) return std::move(declared).error();
  if (request_method == "HEAD" || head.status < 200 || head.status == 204 || head.status == 304) return BodyFraming{};
  return declared->value_or(BodyFraming{BodyFraming::Kind::kUntilClose, 0});
}

bool keep_alive(const RequestHead& head) { return stays_open(head.headers, head.minor_version); }
bool keep_alive(const ResponseHead& head) { return stays_open(head.headers, head.minor_version); }

bool is_hop_by_hop(std::string_view name) {
  constexpr auto kAlways =
      std::to_array<std::string_view>({"Connection", "Proxy-Connection", "Keep-Alive", "TE", "Trailer",
                                       "Transfer-Encoding", "Upgrade", "Proxy-Authenticate", "Proxy-Authorization"});
  for (const std::string_view other : kAlways) {
    if (equals_ignore_case(name, other)) return true;
  }
  return false;
}

bool is_hop_by_hop(const Headers& headers, std::string_view name) {
  return is_hop_by_hop(name) || has_token(headers, "Connection", name);
}

void append_header_line(std::string& out, std::string_view name, std::string_view value) {
  // One change of the string's size instead of four.
  const size_t from = out.size(), line_bytes = name.size() + 2 + value.size();
  out.resize(from + line_bytes + 2);
  char* const line = out.data() + from;
  std::copy(name.begin(), name.end(), line);
  line[name.size()] = ':';
  line[name.size() + 1] = ' ';
  std::copy(value.begin(), value.end(), line + name.size() + 2);
  if (has_control({line, line_bytes})) std::replace_if(line, line + line_bytes, not_for_a_line, ' ');
  line[line_bytes] = '\r';
  line[line_bytes + 1] = '\n';
}

void append_number(std::string& out, uint64_t number) {
  std::array<char, 20> digits;
  const auto end = std::to_chars(digits.data(), digits.data() + digits.size(), number).ptr;
  out.append(digits.data(), end);
}

std::string_view reason_phrase(int status) {
  switch (status) {
    case 100: return "Continue";
    case 200: return "OK";
    case 201: return "Created";
    case 202: return "Accepted";
    case 204: return "No Content";
    case 206: return "Partial Content";
    case 301: return "Moved Permanently";
    case 302: return "Found";
    case 303: return "See Other";
    case 304: return "Not Modified";
    case 307: return "Temporary Redirect";
    case 308: return "Permanent Redirect";
    case 400: return "Bad Request";
    case 401: return "Unauthorized";
    case 403: return "Forbidden";
    case 404: return "Not Found";
    case 405: return "Method Not Allowed";
    case 408: return "Request Timeout";
    case 409: return "Conflict";
    case 410: return "Gone";
    case 413: return "Content Too Large";
    case 415: return "Unsupported Media Type";
    case 417: return "Expectation Failed";
    case 422: return "Unprocessable Content";
    case 429: return "Too Many Requests";
    case 431: return "Request Header Fields Too Large";
    case 500: return "Internal Server Error";
    case 501: return "Not Implemented";
    case 502: return "Bad Gateway";
    case 503: return "Service Unavailable";
    case 504: return "Gateway Timeout";
    case 505: return "HTTP Version Not Supported";
    default: return "Status";
  }
}

std::string Endpoint::text() const {
  const bool brackets = host.find(':') != std::string::npos;
  std::string out;
  out.reserve(host.size() + 8);
  if (brackets) out += '[';
  out += host;
  if (brackets) out += ']';
  out += ':';
  return out += std::to_string(port);
}

Result<Endpoint> parse_endpoint(std::string_view url) {
  const auto wrong = [&](std::string_view why) {
    return invalid(
        fmt::format("\"{}\" is not an endpoint: {}; expected http://host:port or https://host:port", url, why));
  };
  std::string_view rest = url;
  const bool tls = rest.starts_with("https://");
  if (tls) rest.remove_prefix(8);
  else if (rest.starts_with("http://")) rest.remove_prefix(7);
  if (rest.ends_with('/')) rest.remove_suffix(1);
  const size_t colon = rest.rfind(':');
  if (colon == std::string_view::npos) return wrong("the port is missing");
  std::string_view host = rest.substr(0, colon);
  const std::string_view port = rest.substr(colon + 1);
  if (host.starts_with('[') && host.ends_with(']')) {
    host = host.substr(1, host.size() - 2);
  } else if (host.find(':') != std::string_view::npos) {
    return wrong("an IPv6 address stands in brackets");
  }
  if (host.empty()) return wrong("the host is missing");
  if (host.find_first_of("/?#@[] \t\r\n") != std::string_view::npos) return wrong("the host has a wrong character");
  uint16_t number = 0;
  const auto [end, fault] = std::from_chars(port.data(), port.data() + port.size(), number);
  if (fault != std::errc() || end != port.data() + port.size() || number == 0) {
    return wrong("the port is not a number from 1 to 65535");
  }
  return Endpoint{std::string(host), number, tls};
}

}  // namespace kindred::net

// The head parser: what it accepts, it accepts however it is cut, and once more when written out again.
#include <string>

#include "fuzz.h"
#include "net/http_message.h"

using namespace kindred;
using namespace kindred::net;

namespace {

HeadScanner::State scan_in_pieces(std::string_view text, uint8_t step, size_t& size) {
  HeadScanner scanner;
  HeadScanner::State state = HeadScanner::State::kMore;
  size_t seen = 0;
  for (const std::string_view piece : fuzz::pieces(text, step)) {
    seen += piece.size();
    state = scanner.scan(text.substr(0, seen));
    if (state != HeadScanner::State::kMore) break;
  }
  size = scanner.size();
  return state;
}

void check_request(std::string_view text) {
  HeadLimits limits;
  limits.head_bytes = 4096;
  limits.header_count = 32;
  const auto head = parse_request_head(text, limits);
  if (!head) return;
  KINDRED_CHECK(head->target.starts_with('/') || head->target == "*");
  KINDRED_CHECK(head->headers.size() <= limits.header_count + 1);  // an absolute target may add Host
  (void)head->query_value("url");
  (void)keep_alive(*head);
  const auto framing = request_framing(*head);
  if (framing && framing->kind != BodyFraming::Kind::kNone) {
    // One length header and no other: the request cannot be read in two ways.
    KINDRED_CHECK(head->headers.count("Content-Length") + head->headers.count("Transfer-Encoding") == 1);
  }
  std::string again = head->method + " " + head->target + " HTTP/1.1\r\n";
  for (const Header& header : head->headers) append_header_line(again, header.name, header.value);
  if (head->headers.find("Host") == nullptr) again += "Host: h\r\n";
  again += "\r\n";
  limits = {1 << 20, 64};
  const auto second = parse_request_head(again, limits);
  KINDRED_CHECK(second.ok());
  KINDRED_CHECK(second->target == head->target && second->method == head->method);
  for (const Header& header : head->headers) {
    const bool stays = !is_hop_by_hop(head->headers, header.name);
    KINDRED_CHECK(!stays || !equals_ignore_case(header.name, "Connection"));
  }
}

void check_response(std::string_view text) {
  const auto head = parse_response_head(text, {4096, 32});
  if (!head) return;
  KINDRED_CHECK(head->status >= 100 && head->status <= 599);
  (void)response_framing(*head, "GET");
  (void)keep_alive(*head);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  fuzz::Input input(data, size);
  const uint8_t step = input.byte();
  const std::string_view text = input.rest();
  size_t whole = 0, cut = 0;
  const HeadScanner::State state = scan_in_pieces(text, 0, whole);
  KINDRED_CHECK(scan_in_pieces(text, step, cut) == state);
  if (state == HeadScanner::State::kComplete) {
    KINDRED_CHECK(whole == cut && whole <= text.size());
    check_request(text.substr(0, whole));
    check_response(text.substr(0, whole));
  }
  check_request(text);
  check_response(text);
  (void)parse_endpoint(text);
  return 0;
}

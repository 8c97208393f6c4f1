#include "router/headers.h"

#include <algorithm>
#include <array>

namespace kindred::router {
namespace {

constexpr std::string_view kPrivatePrefix = "x-kindred-";
constexpr std::array<std::string_view, 5> kFraming = {"Host", "Content-Length", "Transfer-Encoding", "Expect",
                                                      kRequestIdHeader};

bool is_private(std::string_view name) {
  return name.size() > kPrivatePrefix.size() &&
         net::equals_ignore_case(name.substr(0, kPrivatePrefix.size()), kPrivatePrefix);
}

net::Headers crossing(net::Headers headers, std::string_view request_id) {
  net::remove_hop_by_hop(headers);
  net::Headers out;
  for (const net::Header& header : headers) {
    const bool framing = std::any_of(kFraming.begin(), kFraming.end(),
                                     [&](std::string_view name) { return net::equals_ignore_case(name, header.name); });
    if (!framing && !is_private(header.name)) out.add(header.name, header.value);
  }
  out.add(kRequestIdHeader, request_id);
  return out;
}

}  // namespace

bool is_sane_request_id(std::string_view id) {
  return !id.empty() && id.size() <= 128 &&
         std::all_of(id.begin(), id.end(), [](char c) { return c > ' ' && c <= '~'; });
}

net::Headers to_worker(const net::Headers& from_client, std::string_view request_id) {
  return crossing(from_client, request_id);
}

net::Headers to_client(const net::Headers& from_worker, std::string_view request_id) {
  return crossing(from_worker, request_id);
}

}  // namespace kindred::router

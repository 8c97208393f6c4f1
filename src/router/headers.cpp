#include "router/headers.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "policy/domain.h"

namespace kindred::router {
namespace {

// What a request for a worker has besides the client's: id, trace, leg.
constexpr size_t kAdded = 6, kAddedBytes = 256;
constexpr std::string_view kPrivatePrefix = "x-kindred-";
constexpr std::array<std::string_view, 5> kFraming = {"Host", "Content-Length", "Transfer-Encoding", "Expect",
                                                      kRequestIdHeader};

bool is_private(std::string_view name) {
  if (net::equals_ignore_case(name, kRankHeader)) return true;
  return name.size() > kPrivatePrefix.size() &&
         net::equals_ignore_case(name.substr(0, kPrivatePrefix.size()), kPrivatePrefix);
}

bool stays_behind(std::string_view name) {
  const bool framing = std::any_of(kFraming.begin(), kFraming.end(),
                                   [&](std::string_view other) { return net::equals_ignore_case(other, name); });
  return framing || is_private(name) || net::is_hop_by_hop(name);
}

}  // namespace

Result<std::string> domain_label(const net::Headers& from_client) {
  const std::string_view* given = from_client.find(kDomainHeader);
  if (given == nullptr) return std::string();
  const bool printable = std::ranges::all_of(*given, [](char c) { return c >= ' ' && c <= '~'; });
  if (given->size() <= policy::kMaxLabelBytes && printable) return std::string(*given);
  return invalid(fmt::format("{} holds {} bytes; accepted: at most {} of printable ASCII", kDomainHeader, given->size(),
                             policy::kMaxLabelBytes),
                 std::string(kDomainHeader));
}

bool is_sane_request_id(std::string_view id) {
  return !id.empty() && id.size() <= 128 &&
         std::all_of(id.begin(), id.end(), [](char c) { return c > ' ' && c <= '~'; });
}

net::Headers to_worker(const net::Headers& from_client, std::string_view request_id) {
  net::Headers out;
  out.reserve(from_client.size() + kAdded, from_client.bytes() + kAddedBytes);
  // Nearly no client names others in Connection.
  const bool names_others = from_client.find("Connection") != nullptr;
  for (const net::Header& header : from_client) {
    if (stays_behind(header.name) || (names_others && net::is_hop_by_hop(from_client, header.name))) continue;
    out.add(header.name, header.value);
  }
  out.add(kRequestIdHeader, request_id);
  return out;
}

net::Headers to_client(net::Headers from_worker, std::string_view request_id) {
  if (from_worker.find("Connection") != nullptr) {
    const net::Headers all = from_worker;  // which name others that stay behind, and go themselves
    from_worker.erase_if([&](const net::Header& header) { return net::is_hop_by_hop(all, header.name); });
  }
  from_worker.erase_if([](const net::Header& header) { return stays_behind(header.name); });
  from_worker.add(kRequestIdHeader, request_id);
  return from_worker;
}

}  // namespace kindred::router

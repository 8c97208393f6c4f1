// Which headers cross the router, and under which request id.
//
// Thread-safety: pure functions.
#pragma once

#include <string>
#include <string_view>

#include "base/result.h"
#include "net/http_message.h"

namespace kindred::router {

inline constexpr std::string_view kRequestIdHeader = "X-Request-Id";

// The label that the decode policy `domain` goes by. The client's; workers do not get it.
inline constexpr std::string_view kDomainHeader = "X-Kindred-Domain";

// With it vLLM and kindred workers run a request on the data-parallel engine that it names, whatever the balance
// between them: like the body's `data_parallel_rank`, nothing that a client may choose.
inline constexpr std::string_view kRankHeader = "X-data-parallel-rank";

// Empty without one. Error: kInvalid, naming the header: longer than policy::kMaxLabelBytes, or not
// printable ASCII.
Result<std::string> domain_label(const net::Headers& from_client);

// An id may be kept if it is 1 to 128 printable ASCII characters without spaces.
bool is_sane_request_id(std::string_view id);

// The client's headers as a worker gets them: without hop-by-hop headers, without framing, which the
// client pool sets, and without X-Kindred-* and X-data-parallel-rank, which only the router may say. `request_id`
// replaces the client's.
net::Headers to_worker(const net::Headers& from_client, std::string_view request_id);

// A worker's headers as the client gets them, with the same exceptions.
net::Headers to_client(net::Headers from_worker, std::string_view request_id);

}  // namespace kindred::router

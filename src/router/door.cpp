#include "router/door.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>

#include "router/edge.h"
#include "router/errors.h"
#include "router/headers.h"

namespace kindred::router {
namespace {

// About four thousand tokens of prompt count as one more request in the turns of keys.
constexpr uint64_t kBytesPerCost = 16 * 1024;

ApiError turned_away(const Error& error) {
  ApiError out = api_error(error);
  if (error.code == ErrorCode::kTimeout) {
    out = api_error({ErrorCode::kUnavailable, error.message});
    out.code = "queue_timeout";
    out.retry_after_s = 1;
    out.shed = true;
  }
  return out;
}

uint32_t cost_of(const net::RequestHead& head) {
  const auto framing = net::request_framing(head);
  const uint64_t bytes = framing ? framing->length_bytes : 0;
  return static_cast<uint32_t>(std::min<uint64_t>(1 + bytes / kBytesPerCost, Admission::kMaxCost));
}

}  // namespace

std::string request_id_of(Core& core, const net::RequestHead& head) {
  const std::string* given = head.headers.find(kRequestIdHeader);
  return given != nullptr && is_sane_request_id(*given) ? *given : core.new_request_id();
}

Result<Claim> read_claim(const net::RequestHead& head, std::string key) {
  Claim claim;
  claim.key = std::move(key);
  claim.cost = cost_of(head);
  if (const std::string* lane = head.headers.find(kLaneHeader)) {
    if (*lane != "interactive" && *lane != "batch") {
      return invalid(fmt::format("{} is neither 'interactive' nor 'batch'", kLaneHeader), std::string(kLaneHeader));
    }
    if (*lane == "batch") claim.lane = Lane::kBatch;
  }
  if (const std::string* priority = head.headers.find(kPriorityHeader)) {
    const char* end = priority->data() + priority->size();
    const auto [at, error] = std::from_chars(priority->data(), end, claim.priority);
    if (error != std::errc{} || at != end || claim.priority < -kMostPriority || claim.priority > kMostPriority) {
      return invalid(
          fmt::format("{} must be a whole number from {} to {}", kPriorityHeader, -kMostPriority, kMostPriority),
          std::string(kPriorityHeader));
    }
  }
  return claim;
}

Admitted::Admitted(CorePtr its_core, Loop& loop, net::Request& request, net::ResponseWriter& writer)
    : core(std::move(its_core)),
      exchange(loop, core->settings(), request, writer, request_id_of(*core, request.head), core->clock.now()),
      visit(*core, exchange) {}

net::Task<std::shared_ptr<void>> admit(CorePtr core, Loop& loop, net::Request& request, net::ResponseWriter& writer) {
  const auto admitted = std::make_shared<Admitted>(core, loop, request, writer);
  Exchange& exchange = admitted->exchange;
  std::optional<ApiError> refused = admitted->visit.admit_caller();
  Result<Claim> claim = read_claim(request.head, exchange.key_name);
  if (!refused && !claim) refused = api_error(claim.error());
  if (!refused) {
    admitted->lane = claim->lane;
    auto permit = co_await core->gate->enter(loop.executor, *std::move(claim), request.cancel);
    if (permit) {
      admitted->permit = *std::move(permit);
      co_return admitted;
    }
    refused = turned_away(permit.error());
  }
  co_await exchange.fail(*std::move(refused));
  core->metrics.request_done(exchange.outcome, exchange.status);
  co_return nullptr;
}

}  // namespace kindred::router

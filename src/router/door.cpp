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

net::Task<std::shared_ptr<void>> turn_away(std::shared_ptr<Admitted> request, ApiError error) {
  Exchange& exchange = request->exchange;
  co_await exchange.fail(std::move(error));
  request->core->metrics.request_done(exchange.outcome, exchange.status);
  co_return nullptr;
}

net::Task<std::shared_ptr<void>> wait_for_place(std::shared_ptr<Admitted> request, Claim claim) {
  const Exchange& exchange = request->exchange;
  auto permit = co_await request->core->gate->enter(exchange.loop.executor, std::move(claim), exchange.request.cancel);
  if (!permit) {
    ApiError error = turned_away(permit.error());
    co_return co_await turn_away(std::move(request), std::move(error));
  }
  request->permit = *std::move(permit);
  co_return std::shared_ptr<void>(std::move(request));
}

uint32_t cost_of(const net::RequestHead& head) {
  const auto framing = net::request_framing(head);
  const uint64_t bytes = framing ? framing->length_bytes : 0;
  return static_cast<uint32_t>(std::min<uint64_t>(1 + bytes / kBytesPerCost, Admission::kMaxCost));
}

}  // namespace

std::string request_id_of(Core& core, const net::RequestHead& head) {
  const std::string_view* given = head.headers.find(kRequestIdHeader);
  return given != nullptr && is_sane_request_id(*given) ? std::string(*given) : core.new_request_id();
}

Result<Claim> read_claim(const net::RequestHead& head, std::string key) {
  Claim claim;
  claim.key = std::move(key);
  claim.cost = cost_of(head);
  if (const std::string_view* lane = head.headers.find(kLaneHeader)) {
    if (*lane != "interactive" && *lane != "batch") {
      return invalid(fmt::format("{} is neither 'interactive' nor 'batch'", kLaneHeader), std::string(kLaneHeader));
    }
    if (*lane == "batch") claim.lane = Lane::kBatch;
  }
  if (const std::string_view* priority = head.headers.find(kPriorityHeader)) {
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

net::Entrance admit(CorePtr core, Loop& loop, net::Request& request, net::ResponseWriter& writer) {
  auto admitted = std::make_shared<Admitted>(std::move(core), loop, request, writer);
  std::optional<ApiError> refused = admitted->visit.admit_caller();
  Result<Claim> claim = read_claim(request.head, admitted->exchange.key_name);
  if (!refused && !claim) refused = api_error(claim.error());
  if (refused) return turn_away(std::move(admitted), *std::move(refused));
  admitted->lane = claim->lane;
  // Nearly always there is a place, and no need of a coroutine.
  admitted->permit = admitted->core->gate->enter_now(*claim);
  if (admitted->permit) return std::shared_ptr<void>(std::move(admitted));
  return wait_for_place(std::move(admitted), *std::move(claim));
}

}  // namespace kindred::router

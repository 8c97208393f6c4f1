#include "router/decode_room.h"

#include <algorithm>
#include <charconv>
#include <chrono>
#include <vector>

#include "router/leg_load.h"

namespace kindred::router {

std::optional<ApiError> reserve_decode_room(Core& core, Exchange& exchange) {
  const fleet::Snapshot pool = core.fleet.snapshot({.role = Role::kDecode, .model = exchange.model});
  std::vector<fleet::WorkerId> up;
  for (size_t i = 0; i < pool.ids.size(); ++i) {
    if (pool.views[i].available) up.push_back(pool.ids[i]);
  }
  fleet::DecodeRoom::Answer answer = core.room.reserve(exchange.model, up, choices_of(exchange.scan));
  if (answer.guard) {
    exchange.decode_room = *std::move(answer.guard);
    return std::nullopt;
  }
  ApiError error = api_error({ErrorCode::kExhausted, "all decode workers are full"});
  error.code = "decode_pool_full";
  error.retry_after_s = static_cast<int>(std::chrono::ceil<std::chrono::seconds>(answer.retry_after_ms).count());
  return error;
}

fleet::RoomGuard occupy_decode_room(Core& core, Exchange& exchange, fleet::WorkerId worker, int64_t choices) {
  fleet::RoomGuard place = core.room.occupy(worker, choices);
  exchange.decode_room.release();
  return place;
}

void note_busy(Core& core, fleet::WorkerId worker, const net::ResponseHead& head) {
  const std::string_view* given = head.headers.find("Retry-After");
  if ((head.status != 429 && head.status != 503) || given == nullptr) return;
  int seconds = 0;
  std::from_chars(given->data(), given->data() + given->size(), seconds);
  if (seconds > 0) core.room.report_full(worker, std::chrono::seconds(std::min(seconds, 3600)));
}

}  // namespace kindred::router

#include "cli/router_requests.h"

#include <chrono>

#include "cli/router_limits.h"

namespace kindred::cli {
namespace {

using std::chrono::milliseconds;

constexpr int64_t kMostRequests = 1'000'000;

}  // namespace

void RequestArguments::add_to(ConfigSchema& schema) {
  schema.integer("max_inflight", &max_inflight, 1, kMostRequests, "requests served at once; more wait");
  schema.integer("queue", &queue, 0, kMostRequests, "requests of each lane that may wait; more: 429");
  schema.integer("queue_wait_ms", &queue_wait_ms, 1, kDayMs, "a request may wait for its place; then 503");
  schema.integer("batch_headroom_percent", &batch_headroom_percent, 0, 100,
                 "share of max_inflight that batch requests leave free");
  schema.integer("decode_inflight", &decode_inflight, 0, kMostRequests,
                 "requests a decode worker has room for; without room no prompt is run; 0: no limit");
  schema.integer("retries", &retries, 0, 100, "further workers to try while the client has nothing yet");
  schema.list("retry_on", &retry_on,
              "status of a worker's answer after which another one is tried: 400 to 599, 4xx, 5xx or none");
  schema.integer("prefill_deadline_ms", &prefill_deadline_ms, 1, kDayMs,
                 "for a prefill worker to answer, and for a plain one to begin a stream");
  schema.integer("first_deadline_ms", &first_deadline_ms, 1, kDayMs, "for a decode worker to begin a stream");
  schema.integer("decode_deadline_ms", &decode_deadline_ms, 1, kDayMs,
                 "for a worker to generate an answer that is not streamed");
  schema.integer("idle_deadline_ms", &idle_deadline_ms, 1, kDayMs, "for more bytes of an answer that has begun");
}

void RequestArguments::apply(router::RouterOptions& out) const {
  out.max_inflight = static_cast<size_t>(max_inflight);
  out.queue = static_cast<size_t>(queue);
  out.queue_wait_ms = milliseconds(queue_wait_ms);
  out.batch_headroom_percent = static_cast<uint32_t>(batch_headroom_percent);
  out.decode_inflight = decode_inflight;
  out.retries = static_cast<uint32_t>(retries);
  out.retry_on = retry_on;
  out.prefill_deadline_ms = milliseconds(prefill_deadline_ms);
  out.first_deadline_ms = milliseconds(first_deadline_ms);
  out.decode_deadline_ms = milliseconds(decode_deadline_ms);
  out.idle_deadline_ms = milliseconds(idle_deadline_ms);
}

}  // namespace kindred::cli

// Export of spans over OTLP/HTTP in its JSON encoding.
//
// A queue that any thread fills, and one task that empties it in batches. What does not fit into the queue, or
// is not taken by the collector, is dropped and counted: a request never waits for its trace.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/result.h"
#include "net/http_message.h"
#include "net/task.h"
#include "router/trace.h"

namespace kindred::router {

class Core;

struct OtlpTarget {
  net::Endpoint endpoint;
  std::string path = "/v1/traces";
};
// "http://host:4318", or with a path of its own. Error: kInvalid, naming `otlp_endpoint`.
Result<OtlpTarget> parse_otlp_endpoint(const std::string& url);

// Thread-safe.
class SpanQueue {
 public:
  static constexpr size_t kMostSpans = 8192;

  // Returns how many were dropped.
  size_t add(std::vector<Span> spans);
  std::vector<Span> take(size_t most);
  size_t size() const;

 private:
  mutable std::mutex mutex_;
  std::deque<Span> spans_;
};

// One ExportTraceServiceRequest. `unix_ns_at_origin`: wall-clock time of the monotonic clock's origin.
std::string otlp_json(const std::vector<Span>& spans, int64_t unix_ns_at_origin);

// Sends what is queued until the router closes.
net::Task<void> export_spans(std::shared_ptr<Core> core);
// Sends what is queued now, within `deadline`. At shutdown.
net::Task<void> flush_spans(std::shared_ptr<Core> core, std::chrono::milliseconds deadline);

}  // namespace kindred::router

// Reads the traces that workers' engines publish (fleet/engine_trace.h) into the fleet, on a thread of its own that
// starts with the first worker that publishes any. A publisher that goes away and comes back is heard again by itself.
//
// Thread-safety: all methods may be called from any thread.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/result.h"
#include "fleet/fleet.h"
#include "net/http_client.h"

namespace kindred::router {

struct TraceFeedStatus {
  uint64_t traces = 0;   // taken in
  uint64_t ignored = 0;  // older than what was known, or of no engine that there is
  uint64_t errors = 0;   // messages that are no traces
  size_t subscriptions = 0;
};

class TraceFeed {
 public:
  explicit TraceFeed(fleet::Fleet& fleet);  // borrowed
  ~TraceFeed();                             // ends the thread
  TraceFeed(const TraceFeed&) = delete;
  TraceFeed& operator=(const TraceFeed&) = delete;

  // From now on, instead of the endpoint that the worker had. Error: kInvalid, naming the endpoint.
  Status add(fleet::WorkerId worker, const std::string& endpoint);
  void remove(fleet::WorkerId worker);

  TraceFeedStatus status() const;

 private:
  class Loop;
  std::unique_ptr<Loop> loop_;
};

// Where each worker publishes its traces, by URL.
using TraceSources = std::vector<std::pair<std::string, std::string>>;
// "WORKER_URL=tcp://host:port" each. Error: kInvalid, naming `traces`.
Result<TraceSources> parse_trace_sources(const std::vector<std::string>& entries);

// Of one worker: what `sources` has of it, else the port that it named, on the host of its URL, which is where the
// router reaches it. Empty: nowhere.
std::string trace_endpoint(const TraceSources& sources, const net::Endpoint& worker, std::string_view named);

}  // namespace kindred::router

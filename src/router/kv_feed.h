// Reads workers' KV events into the index, on a thread of its own.
//
// Per worker: a subscriber at its publisher, and, where there is one, a dealer at its replay socket. Gaps in the
// numbers are filled by asking for what was missed; meanwhile the worker's live messages wait in ZeroMQ's queue,
// which is bounded. A replay that says nothing for kReplayWait is given up.
//
// Thread-safety: all methods may be called from any thread.
#pragma once

#include <chrono>
#include <memory>
#include <string>

#include "base/result.h"
#include "fleet/kv_index.h"

namespace kindred::router {

struct KvFeedStatus {
  uint64_t gaps = 0, replays = 0, resets = 0, bad_messages = 0;
  size_t subscriptions = 0;
};

class KvFeed {
 public:
  static constexpr std::chrono::milliseconds kReplayWait{2000};

  explicit KvFeed(std::shared_ptr<fleet::KvIndex> index);
  ~KvFeed();  // ends the thread
  KvFeed(const KvFeed&) = delete;
  KvFeed& operator=(const KvFeed&) = delete;

  // From now on. `replay`: empty: none. Error: kInvalid, naming the endpoint.
  Status add(fleet::KvIndex::WorkerId worker, const std::string& events, const std::string& replay);
  void remove(fleet::KvIndex::WorkerId worker);  // what it holds is forgotten
  // The worker was restarted: what it held is gone.
  void reset(fleet::KvIndex::WorkerId worker);

  KvFeedStatus status() const;

 private:
  class Loop;
  std::unique_ptr<Loop> loop_;
};

}  // namespace kindred::router

// KV events of one mock worker, as vLLM publishes them (map form): [topic, number, payload] on a PUB socket, and
// what is asked for again on a ROUTER socket beside it. A subscriber that is too slow loses messages, as with vLLM.
//
// Thread-safety: confined to the fleet's thread.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/json.h"
#include "base/result.h"
#include "live/worker_loop.h"
#include "net/zmq.h"

namespace kindred::live {

class KvPublisher {
 public:
  // Events on `port`, replay on the next one; 0: on free ones. `clock` outlives this.
  // Error: kIo or kInvalid, naming the endpoint.
  static Result<std::unique_ptr<KvPublisher>> bind(const net::ZmqContext& context, const std::string& host,
                                                   uint16_t port, uint32_t piece_tokens, const Clock& clock);

  // For the worker's loop. This must outlive the loop's use of it.
  CacheListener listener();
  // Answers who has asked for lost messages; call it often.
  void serve_replay();

  std::string events_endpoint() const { return events_.endpoint(); }
  std::string replay_endpoint() const { return replay_.endpoint(); }

 private:
  KvPublisher(net::ZmqSocket events, net::ZmqSocket replay, uint32_t piece_tokens, const Clock& clock)
      : events_(std::move(events)), replay_(std::move(replay)), piece_tokens_(piece_tokens), clock_(clock) {}

  void stored(const Ticket& ticket, size_t held);
  void evicted(uint32_t engine, const std::vector<uint64_t>& pieces);
  void cleared();
  void send(Json event);

  net::ZmqSocket events_, replay_;
  const uint32_t piece_tokens_;
  const Clock& clock_;
  uint64_t number_ = 0;                             // of the next message
  std::deque<std::string> sent_;                    // the last ones, for replay
  std::map<uint64_t, std::set<uint32_t>> holders_;  // of each piece: engines
};

}  // namespace kindred::live

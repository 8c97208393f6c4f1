// Pushes the traces of a worker's engines on a ZMQ PUB socket: a trace that has changed at most every 20 ms, a
// change in between at the next mark, and all of them at least once a second. Nobody is waited for: who subscribes
// later has the state within a second, and who is slow loses traces, never the latest for long.
//
// Thread-safety: confined to the executor's thread, except changed().
#pragma once

#include <atomic>
#include <boost/asio/any_io_executor.hpp>
#include <boost/asio/steady_timer.hpp>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/result.h"
#include "fleet/engine_trace.h"
#include "net/task.h"
#include "net/zmq.h"

namespace kindred::engine {

class TracePublisher : public std::enable_shared_from_this<TracePublisher> {
 public:
  static constexpr std::chrono::milliseconds kLeastInterval{20};
  static constexpr std::chrono::milliseconds kHeartbeat{1000};

  // The latest trace of one engine; epoch, sequence and time are filled in here.
  using Source = std::function<fleet::EngineTrace(uint32_t rank)>;

  // Port 0: a free one. `clock` outlives this. Error: kInvalid, naming the endpoint.
  static Result<std::shared_ptr<TracePublisher>> bind(net::asio::any_io_executor executor, const std::string& host,
                                                      uint16_t port, uint64_t epoch, const Clock& clock);

  const std::string& endpoint() const { return endpoint_; }  // "tcp://host:port"

  // Until stop(). Once.
  void start(uint32_t engines, Source source);
  void stop();

  // A trace may have changed. From any thread; does not wait. The executor's context must still be there.
  void changed();

 private:
  using Time = std::chrono::steady_clock::time_point;
  struct Pushed {
    fleet::EngineTrace trace;
    Time at;
  };

  TracePublisher(net::asio::any_io_executor executor, net::ZmqContext context, net::ZmqSocket socket, uint64_t epoch,
                 const Clock& clock);
  static net::Task<void> run(std::weak_ptr<TracePublisher> weak, std::shared_ptr<net::asio::steady_timer> timer);
  Time next_push() const;
  void push_due(Time now);
  void send(const fleet::EngineTrace& trace);

  net::asio::any_io_executor executor_;
  net::ZmqContext context_;
  net::ZmqSocket socket_;
  const std::string endpoint_;
  const uint64_t epoch_;
  const Clock& clock_;
  std::shared_ptr<net::asio::steady_timer> timer_;
  Source source_;
  std::vector<Pushed> last_;  // by rank
  Time last_push_;
  uint64_t number_ = 0;  // of the next message
  bool pending_ = false, stopped_ = false;
  std::atomic<bool> woken_ = false;
};

}  // namespace kindred::engine

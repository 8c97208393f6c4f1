// Admission at work: requests wait here as coroutines until they have a place, and keep it until they end.
//
// Thread-safety: any thread; who waits is woken, and told of preemption, on its own executor.
#pragma once

#include <boost/asio/any_io_executor.hpp>
#include <chrono>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>

#include "base/result.h"
#include "net/task.h"
#include "router/admission.h"
#include "router/options.h"
#include "router/router_metrics.h"

namespace kindred::router {

class Gate;

// A place. Its end gives the place back, once.
class Permit {
 public:
  ~Permit();
  Permit(const Permit&) = delete;
  Permit& operator=(const Permit&) = delete;

  // Fires when an interactive request needs the place of this one: to be ended, and the client told.
  net::CancelToken preempted() const { return preempted_ ? preempted_->token() : net::CancelToken(); }

 private:
  friend class Gate;
  Permit(std::shared_ptr<Gate> gate, Admission::Ticket ticket, std::optional<net::CancelSource> preempted)
      : gate_(std::move(gate)), ticket_(ticket), preempted_(std::move(preempted)) {}

  std::shared_ptr<Gate> gate_;
  Admission::Ticket ticket_;
  std::optional<net::CancelSource> preempted_;  // of the batch lane
};

struct GateOptions {
  AdmissionOptions admission;
  std::chrono::milliseconds wait_ms{10'000};  // for a place
};

GateOptions gate_options(const RouterOptions& options);

class Gate : public std::enable_shared_from_this<Gate> {
 public:
  // `metrics` is borrowed.
  Gate(GateOptions options, RouterMetrics& metrics)
      : admission_(options.admission),
        limit_(options.admission.running),
        wait_ms_(options.wait_ms),
        metrics_(metrics) {}

  // A place that an interactive request has without waiting; null where enter() must say.
  std::unique_ptr<Permit> enter_now(const Claim& claim);
  // Errors: kExhausted (no room to wait), kTimeout (no place came free in time), kCancelled.
  net::Task<Result<std::unique_ptr<Permit>>> enter(net::asio::any_io_executor executor, Claim claim,
                                                   net::CancelToken cancel);
  // For requests that come from now on.
  void set_options(GateOptions options);

  size_t running() const;
  size_t waiting() const;

 private:
  friend class Permit;
  struct Visit;
  using VisitPtr = std::shared_ptr<Visit>;

  void leave(Admission::Ticket ticket);
  bool give_up(Admission::Ticket ticket, const VisitPtr& visit);  // false: it has a place, or was refused
  void carry_out(const Admission::Changes& changes);              // with the mutex held

  mutable std::mutex mutex_;
  Admission admission_;
  size_t limit_;
  std::chrono::milliseconds wait_ms_;
  RouterMetrics& metrics_;
  std::unordered_map<Admission::Ticket, VisitPtr> visits_;  // that wait, or run since enter()
  Admission::Ticket last_ = 0;
};

}  // namespace kindred::router

#include "router/gate.h"

#include <fmt/format.h>

#include <algorithm>
#include <boost/asio/post.hpp>
#include <boost/asio/steady_timer.hpp>

namespace kindred::router {

struct Gate::Visit {
  enum class State { kWaits, kRuns, kRefused };

  explicit Visit(const net::asio::any_io_executor& executor) : timer(executor) {}

  State state = State::kWaits;  // under the gate's mutex
  net::asio::steady_timer timer;
  net::CancelSource preempted;
};

GateOptions gate_options(const RouterOptions& options) {
  GateOptions out;
  out.admission.running = options.max_inflight;
  out.admission.waiting = options.queue;
  out.admission.batch_headroom = options.max_inflight * options.batch_headroom_percent / 100;
  out.wait_ms = options.queue_wait_ms;
  return out;
}

Permit::~Permit() { gate_->leave(ticket_); }

std::unique_ptr<Permit> Gate::enter_now(const Claim& claim) {
  const std::lock_guard lock(mutex_);
  if (claim.lane != Lane::kInteractive || !admission_.runs_now(claim.lane)) return nullptr;
  const Admission::Ticket ticket = ++last_;
  Admission::Changes changes;
  admission_.arrive(ticket, claim, changes);
  carry_out(changes);
  return std::unique_ptr<Permit>(new Permit(shared_from_this(), ticket, std::nullopt));
}

net::Task<Result<std::unique_ptr<Permit>>> Gate::enter(net::asio::any_io_executor executor, Claim claim,
                                                       net::CancelToken cancel) {
  const auto begun = std::chrono::steady_clock::now();
  const VisitPtr visit = std::make_shared<Visit>(executor);
  Admission::Ticket ticket = 0;
  Admission::Verdict verdict{};
  std::chrono::milliseconds wait_ms{};
  {
    const std::lock_guard lock(mutex_);
    ticket = ++last_;
    wait_ms = wait_ms_;
    Admission::Changes changes;
    verdict = admission_.arrive(ticket, std::move(claim), changes);
    if (verdict == Admission::Verdict::kRuns) visit->state = Visit::State::kRuns;
    if (verdict != Admission::Verdict::kRefused) visits_.emplace(ticket, visit);
    carry_out(changes);
  }
  if (verdict == Admission::Verdict::kWaits) {
    visit->timer.expires_at(begun + wait_ms);
    const auto registration = cancel.on_cancel([&visit] { visit->timer.cancel(); });
    // One wait: the timer ends it, or who cancels the timer because something has changed.
    if (!cancel.cancelled()) co_await visit->timer.async_wait(net::kNoThrow);
    metrics_.queue_s.observe(std::chrono::duration<double>(std::chrono::steady_clock::now() - begun).count());
    if (give_up(ticket, visit)) {
      if (cancel.cancelled()) co_return Error{ErrorCode::kCancelled, "the client left while its request waited"};
      co_return Error{ErrorCode::kTimeout,
                      fmt::format("no place came free within {} ms; the router is busy", wait_ms.count())};
    }
  }
  if (visit->state != Visit::State::kRuns) {
    co_return Error{ErrorCode::kExhausted, "the router is busy and its queue is full"};
  }
  // Not make_unique: the constructor is private.
  co_return std::unique_ptr<Permit>(new Permit(shared_from_this(), ticket, visit->preempted));
}

void Gate::set_options(GateOptions options) {
  const std::lock_guard lock(mutex_);
  wait_ms_ = options.wait_ms;
  limit_ = options.admission.running;
  Admission::Changes changes;
  admission_.set_limits(options.admission, changes);
  carry_out(changes);
}

size_t Gate::running() const {
  const std::lock_guard lock(mutex_);
  return admission_.running();
}

size_t Gate::waiting() const {
  const std::lock_guard lock(mutex_);
  return admission_.waiting();
}

void Gate::leave(Admission::Ticket ticket) {
  const std::lock_guard lock(mutex_);
  visits_.erase(ticket);
  Admission::Changes changes;
  admission_.leave(ticket, changes);
  carry_out(changes);
}

bool Gate::give_up(Admission::Ticket ticket, const VisitPtr& visit) {
  const std::lock_guard lock(mutex_);
  if (visit->state != Visit::State::kWaits) return false;
  visits_.erase(ticket);
  Admission::Changes changes;
  admission_.leave(ticket, changes);
  carry_out(changes);
  return true;
}

void Gate::carry_out(const Admission::Changes& changes) {
  const auto wake = [](const VisitPtr& visit) {
    net::asio::post(visit->timer.get_executor(), [visit] { visit->timer.cancel(); });
  };
  for (const Admission::Ticket ticket : changes.admitted) {
    const VisitPtr& visit = visits_.at(ticket);
    visit->state = Visit::State::kRuns;
    wake(visit);
  }
  for (const Admission::Ticket ticket : changes.refused) {
    const auto at = visits_.find(ticket);
    at->second->state = Visit::State::kRefused;
    wake(at->second);
    visits_.erase(at);
  }
  for (const Admission::Ticket ticket : changes.preempted) {
    const VisitPtr visit = visits_.at(ticket);
    net::asio::post(visit->timer.get_executor(), [visit] { visit->preempted.cancel(); });
    metrics_.preempted.add();
  }
  metrics_.requests_in_flight.set(static_cast<double>(admission_.running()));
  metrics_.requests_waiting.set(static_cast<double>(admission_.waiting()));
  const auto present = static_cast<double>(admission_.running() + admission_.waiting());
  metrics_.requests_limit.set(static_cast<double>(limit_));
  metrics_.saturation.set(present / static_cast<double>(std::max<size_t>(limit_, 1)));
}

}  // namespace kindred::router

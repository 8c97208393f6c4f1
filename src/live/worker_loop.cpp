#include "live/worker_loop.h"

#include <fmt/format.h>

#include <algorithm>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/post.hpp>

namespace kindred::live {
namespace {

using std::chrono::steady_clock;

// Later than that, lost time is not made up for: the machine was busy, or asleep.
constexpr std::chrono::milliseconds kMostLate{50};

steady_clock::duration from_seconds(double seconds) {
  return std::chrono::duration_cast<steady_clock::duration>(std::chrono::duration<double>(seconds));
}

}  // namespace

net::Task<void> Ticket::changed(uint32_t seen, bool fetched_before) {
  while (end == TicketEnd::kNone && generated <= seen && fetched == fetched_before) {
    co_await wake.async_wait(net::kNoThrow);
  }
}

WorkerLoop::WorkerLoop(net::asio::any_io_executor executor, LoopOptions options, const expert::ExpertShape& shape)
    : executor_(std::move(executor)),
      options_(std::move(options)),
      engines_(options_.engines, sim::Engine(options_.engine)),
      experts_(std::make_shared<const sim::ExpertRanks>(
          sim::ExpertRanks::linear(static_cast<uint32_t>(shape.layers.size()), shape.experts, options_.ranks))),
      timer_(executor_) {}

void WorkerLoop::start() { net::asio::co_spawn(executor_, run(shared_from_this()), net::asio::detached); }

void WorkerLoop::stop() {
  cut_all();
  stopping_ = true;
  listener_ = {};
  timer_.cancel();
}

void WorkerLoop::kick() {
  if (idle_) timer_.cancel();
}

size_t WorkerLoop::waiting() const {
  size_t out = 0;
  for (const sim::Engine& engine : engines_) out += engine.waiting();
  return out;
}

Result<TicketPtr> WorkerLoop::submit(Job job) {
  if (!alive_ || stopping_) return Error{ErrorCode::kUnavailable, "this worker is down"};
  const auto requests = [](const sim::Engine& engine) { return engine.running() + engine.waiting(); };
  const auto chosen = std::ranges::min_element(engines_, {}, requests);
  const sim::KvPool& pool = chosen->pool();
  const uint32_t blocks = pool.blocks_for(uint64_t{job.prompt_tokens} + job.output_tokens);
  if (blocks > pool.capacity()) {
    return Error{ErrorCode::kTooLarge,
                 fmt::format("prompt and output need {} KV blocks, and this worker has {}", blocks, pool.capacity())};
  }
  if (waiting() >= options_.queue) {
    return Error{ErrorCode::kExhausted, fmt::format("{} requests wait already", waiting())};
  }
  const auto ticket = std::make_shared<Ticket>(executor_, std::move(job));
  if (free_.empty()) {
    free_.push_back(static_cast<uint32_t>(tickets_.size()));
    tickets_.emplace_back();
  }
  ticket->request = free_.back();
  free_.pop_back();
  tickets_[ticket->request] = ticket;
  const Job& now = ticket->job;
  if (!now.fetches) {
    const size_t tokens = pool.held(now.pieces) * options_.engine.kv.piece_tokens;
    ticket->cached_tokens = static_cast<uint32_t>(std::min<size_t>(tokens, now.prompt_tokens - 1));
  }
  ticket->place.engine = static_cast<uint32_t>(chosen - engines_.begin());
  ticket->place.slot = chosen->add({.request = ticket->request,
                                    .prompt_tokens = now.prompt_tokens,
                                    .output_tokens = now.output_tokens,
                                    .generated = now.generated,
                                    .fetches = now.fetches,
                                    .hands_off = now.hands_off,
                                    .pieces = now.pieces,
                                    .experts = &now.experts});
  ++totals_.requests;
  kick();
  return ticket;
}

// A slot refers to its ticket's job, so the ticket stays until the slot is gone.
void WorkerLoop::leave(const Ticket& ticket) {
  tickets_[ticket.request].reset();
  free_.push_back(ticket.request);
}

void WorkerLoop::end(const TicketPtr& ticket, TicketEnd how) {
  if (ticket->end != TicketEnd::kNone) return;
  ticket->end = how;
  ticket->wake.cancel();
}

void WorkerLoop::abandon(const TicketPtr& ticket) {
  if (ticket->end != TicketEnd::kNone) return;
  end(ticket, TicketEnd::kCancelled);
  release(ticket->place);
}

// Not in the middle of a step: whatever takes part in it has been planned.
void WorkerLoop::release(Place place) {
  if (stepping_) {
    doomed_.push_back(place);
    return;
  }
  sim::Engine& engine = engines_[place.engine];
  const TicketPtr ticket = tickets_[engine.request(place.slot)];
  engine.release(place.slot);
  leave(*ticket);
  kick();
}

bool WorkerLoop::plan() {
  experts_.clear();
  shapes_.assign(engines_.size(), {});
  bool any = false;
  for (size_t e = 0; e < engines_.size(); ++e) {
    sim::Engine& engine = engines_[e];
    fetches_.clear();
    any = engine.plan(shapes_[e], experts_, fetches_) || any;
    for (const uint32_t slot : fetches_) {
      const TicketPtr ticket = tickets_[engine.request(slot)];
      const Time begins = std::max(in_free_, steady_clock::now());
      in_free_ = begins + from_seconds(options_.cost->kv_transfer_s(ticket->job.prompt_tokens));
      net::asio::co_spawn(executor_, fetch(shared_from_this(), ticket, in_free_), net::asio::detached);
    }
    const std::vector<uint64_t> evicted = engine.pool().take_evicted();
    if (!evicted.empty() && listener_.on_evicted) listener_.on_evicted(static_cast<uint32_t>(e), evicted);
  }
  return any;
}

// Engines go in lockstep, as long as the slowest takes.
double WorkerLoop::step_s() {
  const std::span<const uint32_t> experts = experts_.count();
  uint32_t tokens = 0;
  for (const sim::StepShape& shape : shapes_) tokens += shape.prefill_tokens + shape.decode_requests;
  double longest_s = 0;
  for (sim::StepShape& shape : shapes_) {
    shape.experts = experts;
    shape.ranks = options_.ranks;
    shape.group_tokens = tokens;
    longest_s = std::max(longest_s, options_.cost->step_s(shape));
  }
  return longest_s * factor_;
}

net::Task<void> WorkerLoop::fetch(std::shared_ptr<WorkerLoop> self, TicketPtr ticket, Time ends) {
  const uint64_t epoch = self->epoch_;
  net::asio::steady_timer timer(self->executor_, ends);
  co_await timer.async_wait(net::kNoThrow);
  if (self->epoch_ != epoch || ticket->end != TicketEnd::kNone) co_return;
  if (ticket->job.kv_there && !ticket->job.kv_there()) {
    self->end(ticket, TicketEnd::kKvLost);
    self->release(ticket->place);
    co_return;
  }
  ticket->fetched = true;
  ticket->wake.cancel();
  self->engines_[ticket->place.engine].fetched(ticket->place.slot);
  self->kick();
}

net::Task<void> WorkerLoop::sleep_until(Time due, uint64_t epoch) {
  while (epoch == epoch_ && !stopping_ && (stalled_ || steady_clock::now() < due)) {
    timer_.expires_at(stalled_ ? Time::max() : due);
    co_await timer_.async_wait(net::kNoThrow);
  }
}

net::Task<void> WorkerLoop::run_step(Time& due) {
  const uint64_t epoch = epoch_;
  const Time now = steady_clock::now();
  if (now - due > kMostLate) due = now;
  due += from_seconds(step_s());
  stepping_ = true;
  // Whoever got a token goes first, even if this step is late already.
  co_await net::asio::post(executor_, net::asio::use_awaitable);
  co_await sleep_until(due, epoch);
  stepping_ = false;
  if (epoch != epoch_ || stopping_) co_return;
  if (std::exchange(was_stalled_, false)) due = steady_clock::now();
  ++totals_.steps;
  for (const sim::StepShape& shape : shapes_) totals_.prompt_tokens += shape.prefill_tokens;
  deliver();
  for (const Place place : std::exchange(doomed_, {})) release(place);
}

net::Task<void> WorkerLoop::run(std::shared_ptr<WorkerLoop> self) {
  Time due = steady_clock::now();
  while (!self->stopping_) {
    if (self->alive_ && self->plan()) {
      co_await self->run_step(due);
      continue;
    }
    self->idle_ = true;
    self->timer_.expires_at(Time::max());
    co_await self->timer_.async_wait(net::kNoThrow);
    self->idle_ = false;
    due = steady_clock::now();
  }
}

void WorkerLoop::deliver() {
  emitted_.clear();
  for (sim::Engine& engine : engines_) engine.finish(emitted_);
  for (const sim::Emitted& emitted : emitted_) {
    const TicketPtr ticket = tickets_[emitted.request];
    ++totals_.generated_tokens;
    ticket->generated = emitted.generated;
    if (emitted.generated == 1 && !ticket->job.fetches && listener_.on_prefilled) {
      listener_.on_prefilled(*ticket, engines_[ticket->place.engine].pool().held(ticket->job.pieces));
    }
    if (emitted.finished) {
      // One that was abandoned in its last step has a slot no more.
      std::erase_if(doomed_,
                    [&](Place at) { return at.engine == ticket->place.engine && at.slot == ticket->place.slot; });
      leave(*ticket);
      end(ticket, TicketEnd::kFinished);
    } else if (emitted.handed_off) {
      end(ticket, TicketEnd::kHandedOff);
    }
    ticket->wake.cancel();
  }
}

void WorkerLoop::cut_all() {
  for (const TicketPtr& ticket : std::vector<TicketPtr>(tickets_)) {
    if (!ticket || ticket->end != TicketEnd::kNone) continue;
    end(ticket, TicketEnd::kCut);
    release(ticket->place);
  }
}

void WorkerLoop::kill() {
  if (!alive_) return;
  alive_ = false;
  ++epoch_;
  for (const TicketPtr& ticket : tickets_) {
    if (ticket) end(ticket, TicketEnd::kCut);
  }
  for (sim::Engine& engine : engines_) engine.clear();
  tickets_.clear();
  free_.clear();
  doomed_.clear();
  stepping_ = false;
  in_free_ = {};
  timer_.cancel();
}

void WorkerLoop::revive() {
  if (alive_) return;
  alive_ = true;
  stalled_ = false;
  factor_ = 1;
  if (listener_.on_cleared) listener_.on_cleared();
  kick();
}

void WorkerLoop::stall(bool on) {
  stalled_ = on;
  was_stalled_ = was_stalled_ || on;
  timer_.cancel();
}

void WorkerLoop::slow(double factor) { factor_ = factor; }

}  // namespace kindred::live

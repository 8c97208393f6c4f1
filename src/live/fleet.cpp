#include "live/fleet.h"

#include <fmt/format.h>

#include <algorithm>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/steady_timer.hpp>
#include <tuple>

#include "base/log.h"
#include "live/faults.h"
#include "live/worker.h"

namespace kindred::live {
namespace {

constexpr std::chrono::milliseconds kHousekeeping{100};

Status check_options(const LiveOptions& options) {
  if (options.workers.empty()) return invalid("a fleet needs at least one worker", "workers");
  if (options.dialect == fleet::Dialect::kLlamaServer) {
    return invalid("dialect: accepted: kindred, vllm, sglang, openai", "dialect");
  }
  const size_t count = options.workers.size();
  const uint16_t events = options.kv_events_port.value_or(0);
  for (const auto& [name, first, ports] :
       {std::tuple{"port", options.port, count}, {"kv_events_port", events, 2 * count}}) {
    if (first != 0 && first + ports - 1 > UINT16_MAX) {
      return invalid(fmt::format("{}: {} workers need ports {} to {}, and 65535 is the last", name, count, first,
                                 first + ports - 1),
                     name);
    }
  }
  for (size_t i = 0; i < options.faults.size(); ++i) {
    if (options.faults[i].worker < count) continue;
    return invalid(fmt::format("faults[{}].worker is {}; accepted: 0 to {}", i, options.faults[i].worker, count - 1),
                   fmt::format("faults[{}].worker", i));
  }
  const bool pairs = fleet::disaggregates(options.dialect);
  for (const WorkerSpec& worker : options.workers) {
    if (!pairs && worker.role != Role::kBoth) {
      return invalid("dialect openai has no prefill and decode legs: all workers must do both", "dialect");
    }
  }
  return {};
}

}  // namespace

struct LiveFleet::Impl : std::enable_shared_from_this<LiveFleet::Impl> {
  Impl(net::asio::any_io_executor on, std::shared_ptr<Site> of)
      : executor(std::move(on)), site(std::move(of)), housekeeping(executor), script(executor) {}

  static net::Task<void> keep_house(std::shared_ptr<Impl> self) {
    while (!self->closing) {
      self->housekeeping.expires_after(kHousekeeping);
      co_await self->housekeeping.async_wait(net::kNoThrow);
      self->site->leases.expire();
      self->site->rooms.sweep();
      for (const auto& worker : self->workers) {
        if (worker->publisher() != nullptr) worker->publisher()->serve_replay();
      }
    }
  }

  static net::Task<void> run_script(std::shared_ptr<Impl> self) {
    const auto begin = std::chrono::steady_clock::now();
    for (const Fault& fault : self->site->options.faults) {
      const auto at = begin + std::chrono::duration_cast<std::chrono::steady_clock::duration>(
                                  std::chrono::duration<double>(fault.at_s));
      while (!self->closing && std::chrono::steady_clock::now() < at) {
        self->script.expires_at(at);
        co_await self->script.async_wait(net::kNoThrow);
      }
      if (self->closing) co_return;
      const Status done = co_await apply(self, fault);
      if (!done) self->log.error("fault of worker {}: {}", fault.worker, done.error().message);
    }
  }

  static net::Task<Status> apply(std::shared_ptr<Impl> self, Fault fault) {
    const std::shared_ptr<LiveWorker> worker = self->workers.at(fault.worker);
    self->log.info("worker {}: {}", fault.worker, to_string(fault.kind));
    switch (fault.kind) {
      case FaultKind::kKill: co_await worker->kill(); break;
      case FaultKind::kRestart: co_await worker->kill(); co_return self->undo(*worker);
      case FaultKind::kStall: worker->loop().stall(true); break;
      case FaultKind::kSlow: worker->loop().slow(fault.factor); break;
      case FaultKind::kReset: worker->loop().cut_all(); co_return Status();
      case FaultKind::kWrongCounts: worker->wrong_counts(true); break;
    }
    if (fault.for_s > 0) net::asio::co_spawn(self->executor, undo_later(self, fault), net::asio::detached);
    co_return Status();
  }

  static net::Task<void> undo_later(std::shared_ptr<Impl> self, Fault fault) {
    const auto timer = std::make_shared<net::asio::steady_timer>(
        self->executor,
        std::chrono::duration_cast<std::chrono::steady_clock::duration>(std::chrono::duration<double>(fault.for_s)));
    self->pending.push_back(timer);
    co_await timer->async_wait(net::kNoThrow);
    std::erase(self->pending, timer);
    if (self->closing) co_return;
    LiveWorker& worker = *self->workers.at(fault.worker);
    switch (fault.kind) {
      case FaultKind::kKill: {
        if (const Status back = self->undo(worker); !back) {
          self->log.error("worker {}: {}", fault.worker, back.error().message);
        }
        break;
      }
      case FaultKind::kStall: worker.loop().stall(false); break;
      case FaultKind::kSlow: worker.loop().slow(1); break;
      case FaultKind::kWrongCounts: worker.wrong_counts(false); break;
      case FaultKind::kRestart:
      case FaultKind::kReset: break;
    }
    self->log.info("worker {}: {} is over", fault.worker, to_string(fault.kind));
  }

  // A process that has started anew has none of the faults that the script gave it.
  Status undo(LiveWorker& worker) {
    worker.wrong_counts(false);
    return worker.revive();
  }

  net::asio::any_io_executor executor;
  std::shared_ptr<Site> site;
  std::vector<std::shared_ptr<LiveWorker>> workers;
  net::asio::steady_timer housekeeping, script;
  std::vector<std::shared_ptr<net::asio::steady_timer>> pending;  // faults to be undone
  Logger log{"simulate"};
  bool closing = false;
};

LiveFleet::LiveFleet(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}
LiveFleet::~LiveFleet() = default;

Result<std::unique_ptr<LiveFleet>> LiveFleet::make(net::asio::any_io_executor executor, LiveOptions options,
                                                   std::unique_ptr<sim::ExpertProcess> experts, const Clock& clock) {
  if (const Status checked = check_options(options); !checked) return checked.error();
  std::ranges::stable_sort(options.faults, {}, &Fault::at_s);
  const size_t count = options.workers.size();
  auto impl = std::make_shared<Impl>(executor, std::make_shared<Site>(std::move(options), std::move(experts), clock));
  for (uint32_t i = 0; i < count; ++i) {
    impl->workers.push_back(std::make_shared<LiveWorker>(executor, impl->site, i));
    const Result<uint16_t> port = impl->workers.back()->listen();
    if (!port) return port.error();
    impl->site->ports.push_back(*port);
  }
  net::asio::co_spawn(executor, Impl::keep_house(impl), net::asio::detached);
  net::asio::co_spawn(executor, Impl::run_script(impl), net::asio::detached);
  return std::unique_ptr<LiveFleet>(new LiveFleet(std::move(impl)));  // the constructor is private
}

std::span<const uint16_t> LiveFleet::ports() const { return impl_->site->ports; }

std::string LiveFleet::kv_events(uint32_t worker) const {
  const KvPublisher* const publisher = impl_->workers.at(worker)->publisher();
  return publisher == nullptr ? std::string() : publisher->events_endpoint() + "," + publisher->replay_endpoint();
}

net::Task<Status> LiveFleet::apply(Fault fault) { return Impl::apply(impl_, fault); }

net::Task<void> LiveFleet::drain(std::chrono::milliseconds deadline) {
  const std::shared_ptr<Impl> impl = impl_;
  impl->closing = true;
  impl->housekeeping.cancel();
  impl->script.cancel();
  for (const auto& timer : impl->pending) timer->cancel();
  const auto until = std::chrono::steady_clock::now() + deadline;
  for (const auto& worker : impl->workers) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(until - std::chrono::steady_clock::now());
    co_await worker->drain(std::max(left, std::chrono::milliseconds(0)));
  }
}

}  // namespace kindred::live

#include "router/lease.h"

#include <algorithm>
#include <array>
#include <boost/asio/post.hpp>
#include <span>
#include <utility>

#include "base/bytes.h"

namespace kindred::router {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kReleaseTimeout{5'000};
constexpr milliseconds kDefaultTtl{30'000};
constexpr milliseconds kLeastTtl{100}, kMostTtl{3'600'000};
constexpr milliseconds kIdleTick{3'600'000};
constexpr size_t kAnswerBytes = 64 * 1024;
// A release waits so long for others, which spares a busy pair a third of its calls.
constexpr milliseconds kReleaseAfter{5};
constexpr uint64_t kMostAtOnce = 256;

// The status of the answer, or 0 if there was none.
net::Task<int> call_worker(const CorePtr& core, Loop& loop, fleet::WorkerId worker, std::string target,
                           std::string body, milliseconds timeout) {
  net::RequestHead head;
  head.method = "POST";
  head.target = std::move(target);
  head.headers.add("Content-Type", "application/json");
  const std::array<std::string_view, 1> parts = {body};
  net::RequestDeadlines deadlines;
  deadlines.head_ms = timeout;
  deadlines.read_ms = timeout;
  auto response =
      co_await loop.client.send(core->endpoint(worker), std::move(head), parts, loop.closing.token(), deadlines);
  if (!response) co_return 0;
  // Read to its end, so that the connection can be used again.
  const Result<std::string> answer = co_await (*response)->read_all(kAnswerBytes);
  co_return answer.ok() ? (*response)->head().status : 0;
}

std::string release_body(std::span<const std::string> leases) {
  if (leases.size() == 1) return "{\"lease\":" + json_string(leases.front()) + "}";
  std::string body = "{\"leases\":[";
  for (const std::string& lease : leases) {
    append_json_string(body, lease);
    body += ',';
  }
  body.back() = ']';
  return body + '}';
}

net::Task<void> release_all(CorePtr core, Loop& loop, fleet::WorkerId worker, std::vector<std::string> leases) {
  std::string body = release_body(leases);
  const int status =
      co_await call_worker(core, loop, worker, "/v1/kv_transfer/release", std::move(body), kReleaseTimeout);
  Counter& ended = status == 200 ? core->metrics.leases_released : core->metrics.leases_stranded;
  ended.add(static_cast<double>(leases.size()));
}

// Ids are the worker's own text; in a path only plain ones may stand.
bool fits_in_path(std::string_view id) {
  return !id.empty() && id.size() <= 256 && std::all_of(id.begin(), id.end(), [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '-' || c == '_' ||
           c == '.';
  });
}

}  // namespace

void LeaseKeeper::add(const std::shared_ptr<Entry>& entry, milliseconds in) {
  bool sooner = false;
  {
    const std::lock_guard lock(mutex_);
    if (entry->lease.empty()) return;  // released meanwhile
    const MonotonicTime when = clock_.now() + in;
    entry->turn = queue_.emplace(when, entry);
    sooner = when < wakes_;
    if (sooner) wakes_ = when;
  }
  if (!sooner) return;
  net::asio::post(timer_.get_executor(), [self = shared_from_this()] { self->timer_.cancel(); });
}

std::string LeaseKeeper::give_up(Entry& entry) {
  const std::lock_guard lock(mutex_);
  drop(entry);
  return std::exchange(entry.lease, {});
}

void LeaseKeeper::drop(Entry& entry) {
  if (!entry.turn) return;
  const Queue::iterator turn = *std::exchange(entry.turn, std::nullopt);
  queue_.erase(turn);  // and maybe the entry
}

std::shared_ptr<LeaseKeeper::Entry> LeaseKeeper::next_due(MonotonicTime now) {
  const std::lock_guard lock(mutex_);
  if (queue_.empty() || queue_.begin()->first > now) return nullptr;
  std::shared_ptr<Entry> entry = queue_.begin()->second;
  drop(*entry);
  return entry;
}

milliseconds LeaseKeeper::sleep_from(MonotonicTime now) {
  const std::lock_guard lock(mutex_);
  milliseconds wait = kIdleTick;
  if (!queue_.empty()) wait = std::chrono::ceil<milliseconds>(queue_.begin()->first - now);
  wait = std::max(wait, milliseconds(1));
  wakes_ = now + wait;
  return wait;
}

net::Task<void> LeaseKeeper::run(CorePtr core) {
  LeaseKeeper& self = *core->leases;
  while (!core->closing.cancelled()) {
    self.renew_due(core);
    self.timer_.expires_after(self.sleep_from(self.clock_.now()));
    co_await self.timer_.async_wait(net::kNoThrow);
  }
}

void LeaseKeeper::renew_due(const CorePtr& core) {
  const MonotonicTime now = clock_.now();
  while (const std::shared_ptr<Entry> entry = next_due(now)) {
    const bool called = calls_ < kMaxCalls && Core::spawn(core, renew(core, entry));
    if (!called) add(entry, entry->interval_ms / 2);
  }
}

net::Task<void> LeaseKeeper::renew(CorePtr core, std::shared_ptr<Entry> entry) {
  LeaseKeeper& self = *core->leases;
  std::string target;
  {
    const std::lock_guard lock(self.mutex_);
    if (entry->lease.empty()) co_return;
    target = "/v1/kv/" + entry->lease + "/renew";
  }
  ++self.calls_;
  const int status =
      co_await call_worker(core, core->loops.front(), entry->worker, std::move(target), "{}", entry->interval_ms);
  --self.calls_;
  if (status == 200) core->metrics.leases_renewed.add();
  // Unknown there: renewing does not bring it back. No answer: there is time for another try.
  if (status == 404 || ++entry->renewals >= kMaxRenewals) co_return;
  self.add(entry, entry->interval_ms);
}

void LeaseKeeper::release(const CorePtr& core, Loop& loop, fleet::WorkerId worker, std::string lease, size_t at_once) {
  std::vector<std::string> now;
  bool first = false;
  {
    const std::lock_guard lock(mutex_);
    std::vector<std::string>& waiting = outbox_[{&loop, worker}];
    first = waiting.empty();
    waiting.push_back(std::move(lease));
    if (waiting.size() >= at_once) {
      now.swap(waiting);
      outbox_.erase({&loop, worker});  // or each worker that ever was would leave an empty one
    }
  }
  const size_t count = now.size();
  if (count > 0) {
    auto task = release_all(core, loop, worker, std::move(now));
    if (!Core::spawn_on(loop, core, std::move(task))) core->metrics.leases_stranded.add(static_cast<double>(count));
  } else if (first && !Core::spawn_on(loop, core, release_soon(core, loop, worker))) {
    const std::lock_guard lock(mutex_);
    core->metrics.leases_stranded.add(static_cast<double>(outbox_[{&loop, worker}].size()));
    outbox_.erase({&loop, worker});
  }
}

net::Task<void> LeaseKeeper::release_soon(CorePtr core, Loop& loop, fleet::WorkerId worker) {
  net::asio::steady_timer pause(loop.executor, kReleaseAfter);
  const auto registration = loop.closing.token().on_cancel([&pause] { pause.cancel(); });
  if (!loop.closing.cancelled()) co_await pause.async_wait(net::kNoThrow);
  std::vector<std::string> leases;
  {
    LeaseKeeper& self = *core->leases;
    const std::lock_guard lock(self.mutex_);
    leases.swap(self.outbox_[{&loop, worker}]);
    self.outbox_.erase({&loop, worker});
  }
  if (!leases.empty()) co_await release_all(core, loop, worker, std::move(leases));
}

LeaseHold::LeaseHold(CorePtr core, Loop& loop, fleet::WorkerId worker, const PrefillReply& reply)
    : core_(std::move(core)),
      loop_(loop),
      at_once_(static_cast<size_t>(std::min(reply.releases, kMostAtOnce))),
      entry_(std::make_shared<LeaseKeeper::Entry>()) {
  const uint64_t ttl_ms = reply.lease_ttl_ms;
  entry_->worker = worker;
  entry_->lease = reply.lease_id;
  const auto most = static_cast<uint64_t>(kMostTtl.count());
  const milliseconds ttl = ttl_ms == 0 ? kDefaultTtl : milliseconds(static_cast<int64_t>(std::min(ttl_ms, most)));
  entry_->interval_ms = std::max(ttl, kLeastTtl) / 3;
  if (fits_in_path(entry_->lease)) core_->leases->add(entry_, entry_->interval_ms);
}

void LeaseHold::release() {
  std::string lease = core_->leases->give_up(*entry_);
  if (!lease.empty()) core_->leases->release(core_, loop_, entry_->worker, std::move(lease), at_once_);
}

void start_renewing(const CorePtr& core) { Core::spawn(core, LeaseKeeper::run(core), /*standing=*/true); }

}  // namespace kindred::router

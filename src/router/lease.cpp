#include "router/lease.h"

#include <algorithm>
#include <array>
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

// The status of the answer, or 0 if there was none.
net::Task<int> call_worker(const CorePtr& core, fleet::WorkerId worker, std::string target, std::string body,
                           milliseconds timeout) {
  net::RequestHead head;
  head.method = "POST";
  head.target = std::move(target);
  head.headers.add("Content-Type", "application/json");
  const std::array<std::string_view, 1> parts = {body};
  net::RequestDeadlines deadlines;
  deadlines.head_ms = timeout;
  deadlines.read_ms = timeout;
  auto response =
      co_await core->client.send(core->endpoint(worker), std::move(head), parts, core->closing.token(), deadlines);
  if (!response) co_return 0;
  // Read to its end, so that the connection can be used again.
  const Result<std::string> answer = co_await (*response)->read_all(kAnswerBytes);
  co_return answer.ok() ? (*response)->head().status : 0;
}

net::Task<void> release_lease(CorePtr core, fleet::WorkerId worker, std::string lease) {
  std::string body = "{\"lease\":" + json_string(lease) + "}";
  const int status = co_await call_worker(core, worker, "/v1/kv_transfer/release", std::move(body), kReleaseTimeout);
  if (status == 200) core->metrics.leases_released.add();
  else core->metrics.leases_stranded.add();
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
  entry->turn = queue_.emplace(clock_.now() + in, entry);
  if (entry->turn == queue_.begin()) timer_.cancel();  // it waits for a later one
}

void LeaseKeeper::drop(Entry& entry) {
  if (!entry.turn) return;
  const Queue::iterator turn = *std::exchange(entry.turn, std::nullopt);
  queue_.erase(turn);  // and maybe the entry
}

net::Task<void> LeaseKeeper::run(CorePtr core) {
  LeaseKeeper& self = *core->leases;
  while (!core->closing.cancelled()) {
    self.renew_due(core);
    milliseconds wait = kIdleTick;
    if (!self.queue_.empty()) {
      wait = std::chrono::ceil<milliseconds>(self.queue_.begin()->first - self.clock_.now());
    }
    self.timer_.expires_after(std::max(wait, milliseconds(1)));
    co_await self.timer_.async_wait(net::kNoThrow);
  }
}

void LeaseKeeper::renew_due(const CorePtr& core) {
  const MonotonicTime now = clock_.now();
  while (!queue_.empty() && queue_.begin()->first <= now) {
    const std::shared_ptr<Entry> entry = queue_.begin()->second;
    drop(*entry);
    const bool called = calls_ < kMaxCalls && Core::spawn(core, renew(core, entry));
    if (!called) add(entry, entry->interval_ms / 2);
  }
}

net::Task<void> LeaseKeeper::renew(CorePtr core, std::shared_ptr<Entry> entry) {
  LeaseKeeper& self = *core->leases;
  ++self.calls_;
  const int status =
      co_await call_worker(core, entry->worker, "/v1/kv/" + entry->lease + "/renew", "{}", entry->interval_ms);
  --self.calls_;
  if (status == 200) core->metrics.leases_renewed.add();
  // Unknown there: renewing does not bring it back. No answer: there is time for another try.
  if (status == 404 || entry->lease.empty() || ++entry->renewals >= kMaxRenewals) co_return;
  self.add(entry, entry->interval_ms);
}

LeaseHold::LeaseHold(CorePtr core, fleet::WorkerId worker, std::string lease, uint64_t ttl_ms)
    : core_(std::move(core)), entry_(std::make_shared<LeaseKeeper::Entry>()) {
  entry_->worker = worker;
  entry_->lease = std::move(lease);
  const auto most = static_cast<uint64_t>(kMostTtl.count());
  const milliseconds ttl = ttl_ms == 0 ? kDefaultTtl : milliseconds(static_cast<int64_t>(std::min(ttl_ms, most)));
  entry_->interval_ms = std::max(ttl, kLeastTtl) / 3;
  if (fits_in_path(entry_->lease)) core_->leases->add(entry_, entry_->interval_ms);
}

void LeaseHold::release() {
  if (entry_->lease.empty()) return;
  core_->leases->drop(*entry_);
  std::string lease = std::exchange(entry_->lease, {});
  if (!Core::spawn(core_, release_lease(core_, entry_->worker, std::move(lease)))) core_->metrics.leases_stranded.add();
}

void start_renewing(const CorePtr& core) { Core::spawn(core, LeaseKeeper::run(core), /*standing=*/true); }

}  // namespace kindred::router

#include "router/lease.h"

#include <array>
#include <utility>

#include "base/bytes.h"

namespace kindred::router {
namespace {

constexpr std::chrono::milliseconds kReleaseTimeout{5'000};
constexpr size_t kAnswerBytes = 64 * 1024;

net::Task<void> release_lease(CorePtr core, fleet::WorkerId worker, std::string lease) {
  net::RequestHead head;
  head.method = "POST";
  head.target = "/v1/kv_transfer/release";
  head.headers.add("Content-Type", "application/json");
  const std::string body = "{\"lease\":" + json_string(lease) + "}";
  const std::array<std::string_view, 1> parts = {body};
  net::RequestDeadlines deadlines;
  deadlines.head_ms = kReleaseTimeout;
  deadlines.read_ms = kReleaseTimeout;
  auto response =
      co_await core->client.send(core->endpoint(worker), std::move(head), parts, core->closing.token(), deadlines);
  bool released = false;
  if (response) {
    // Read to its end, so that the connection can be used again.
    const Result<std::string> answer = co_await (*response)->read_all(kAnswerBytes);
    released = answer.ok() && (*response)->head().status == 200;
  }
  if (released) core->metrics.leases_released.add();
  else core->metrics.leases_stranded.add();
}

}  // namespace

void LeaseHold::release() {
  if (lease_.empty()) return;
  std::string lease = std::exchange(lease_, {});
  if (!Core::spawn(core_, release_lease(core_, worker_, std::move(lease)))) core_->metrics.leases_stranded.add();
}

}  // namespace kindred::router

#include "router/loop_watch.h"

#include <algorithm>

namespace kindred::router {
namespace {

// Fifty looks a second: enough to see a stall of a tenth, and nothing in a profile.
constexpr std::chrono::milliseconds kPause{20};

net::Task<void> watch(CorePtr core) {
  net::asio::steady_timer timer(core->executor);
  const auto registration = core->closing.token().on_cancel([&timer] { timer.cancel(); });
  double worst_s = 0;
  while (!core->closing.cancelled()) {
    timer.expires_after(kPause);
    co_await timer.async_wait(net::kNoThrow);
    const double late_s = std::chrono::duration<double>(std::chrono::steady_clock::now() - timer.expiry()).count();
    core->metrics.loop_late_s.observe(std::max(0.0, late_s));
    worst_s = std::max(worst_s, late_s);
    core->metrics.loop_late_max_s.set(worst_s);
  }
}

}  // namespace

void start_loop_watch(CorePtr core) {
  net::Task<void> task = watch(core);
  Core::spawn(std::move(core), std::move(task), /*standing=*/true);
}

}  // namespace kindred::router

#include "router/loop_watch.h"

#include <algorithm>

namespace kindred::router {
namespace {

// Fifty looks a second: enough to see a stall of a tenth, and nothing in a profile.
constexpr std::chrono::milliseconds kPause{20};

net::Task<void> watch(CorePtr core, Loop& loop) {
  net::asio::steady_timer timer(loop.executor);
  const auto registration = loop.closing.token().on_cancel([&timer] { timer.cancel(); });
  while (!loop.closing.cancelled()) {
    timer.expires_after(kPause);
    co_await timer.async_wait(net::kNoThrow);
    const double late_s = std::chrono::duration<double>(std::chrono::steady_clock::now() - timer.expiry()).count();
    core->metrics.loop_late_s.observe(std::max(0.0, late_s));
    core->metrics.loop_late_max_s.raise(late_s);
  }
}

}  // namespace

void start_loop_watch(const CorePtr& core) {
  for (Loop& loop : core->loops) Core::spawn_on(loop, core, watch(core, loop), /*standing=*/true);
}

}  // namespace kindred::router

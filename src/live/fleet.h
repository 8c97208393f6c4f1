// A fleet of mock workers in one process: ports, faults by script, and an orderly end. For routers, ours or
// others', to be tried in real time against workers that take as long as a hardware profile says.
//
// Thread-safety: confined to the thread of the executor's io_context, where make() is called, too, and where drain()
// has to have returned before the fleet is destroyed.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/result.h"
#include "live/options.h"
#include "net/task.h"
#include "sim/expert_process.h"

namespace kindred::live {

class LiveFleet {
 public:
  // Binds all ports and begins to serve; the faults' time runs from here. `clock` outlives the fleet.
  // Error: kInvalid, naming the option; kIo: a port is taken.
  static Result<std::unique_ptr<LiveFleet>> make(net::asio::any_io_executor executor, LiveOptions options,
                                                 std::unique_ptr<sim::ExpertProcess> experts, const Clock& clock);
  ~LiveFleet();

  std::span<const uint16_t> ports() const;  // by worker
  // "tcp://host:port,tcp://host:port" of its KV events and their replay, as the router's --kv-events takes them; empty:
  // it publishes none.
  std::string kv_events(uint32_t worker) const;
  // Now, whatever the script says; one with for_s is undone by itself. Error: kIo: a port is not free any more.
  net::Task<Status> apply(Fault fault);
  net::Task<void> drain(std::chrono::milliseconds deadline);

 private:
  struct Impl;
  explicit LiveFleet(std::shared_ptr<Impl> impl);
  std::shared_ptr<Impl> impl_;
};

}  // namespace kindred::live

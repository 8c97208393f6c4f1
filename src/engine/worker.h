// The worker: an HTTP service over one engine, or several with a copy of the weights. It speaks OpenAI's API to clients
// and the Kindred dialect (docs/kindred-dialect.md) to routers and other workers.
//
// Ownership: the worker owns its server, its client and its leases; model, engines, clock and registry
// are the caller's. Order of construction: io_context, clock and registry; model; engines; worker.
// Before it is destroyed the worker must be drained and the io_context have run out of work.
//
// Thread-safety: confined to the io_context's one thread.
#pragma once

#include <boost/asio/any_io_executor.hpp>
#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/metrics.h"
#include "base/result.h"
#include "base/role.h"
#include "engine/engine.h"
#include "engine/model.h"
#include "net/http_message.h"
#include "net/task.h"

namespace kindred::engine {

struct WorkerOptions {
  Role role = Role::kBoth;
  std::string served_model;          // the name clients use; empty: the model's own
  std::string version = "unknown";   // of this program, for /version
  std::vector<net::Endpoint> peers;  // prefill workers whose KV a decode leg may pull
  uint64_t lease_bytes = 1ULL << 30;
  std::chrono::milliseconds lease_ttl{30'000};
  size_t body_bytes = 64 * 1024 * 1024;
  std::optional<uint16_t> traces_port;  // where engines' traces are pushed (trace_publisher.h); 0: a free one
  // Of the engine of that rank, in token equivalents. Called on the io thread; must not block. Empty: what the
  // model's expert ranks say, 0 without any.
  std::function<double(uint32_t rank)> expert_pressure;
};

class Worker {
 public:
  Worker(net::asio::any_io_executor executor, WorkerOptions options, const Clock& clock, Registry& metrics);
  ~Worker();

  // Binds and answers; /health says "loading" and everything else 503 until serve(). Returns the port.
  Result<uint16_t> listen(const std::string& host, uint16_t port);

  // From now on requests are served, by engines with equal options, each with its place here as rank. Error:
  // kInvalid if the model's chat template cannot be used.
  Status serve(const Model& model, std::span<Engine* const> engines);

  // Accepts no more connections and says "draining"; returns when all requests have ended, or cuts
  // what is left at the deadline.
  net::Task<void> drain(std::chrono::milliseconds deadline);

 private:
  struct Impl;
  std::shared_ptr<Impl> impl_;
};

}  // namespace kindred::engine

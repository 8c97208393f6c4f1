// The router: an OpenAI-compatible server in front of a fleet of workers.
//
// Threads: one io_context each. Connections are handed round to them, and requests stay where their connection is;
// what they share (fleet, policies, admission, limits, metrics) is one, so that N threads decide as one router.
//
// Thread-safety: confined to the first io_context's thread.
// Lifetime: destroy it after drain() has returned or when no io_context runs any more, and before the io_contexts.
#pragma once

#include <boost/asio/any_io_executor.hpp>
#include <chrono>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/result.h"
#include "net/http_server.h"
#include "net/task.h"
#include "router/core.h"
#include "router/options.h"
#include "router/reload.h"

namespace kindred::router {

class Router {
 public:
  // `executors`: of one io_context per thread (net/io_threads.h), at least one. `clock` is borrowed. Errors: kInvalid,
  // naming the option; that of reading the cohort file.
  static Result<std::unique_ptr<Router>> make(std::span<const net::asio::any_io_executor> executors,
                                              RouterOptions options, const Clock& clock);
  static Result<std::unique_ptr<Router>> make(const net::asio::any_io_executor& executor, RouterOptions options,
                                              const Clock& clock) {
    return make(std::span(&executor, 1), std::move(options), clock);
  }
  ~Router();

  // Binds, starts to serve and to look for the workers; none of them need be there yet. Returns the
  // port. Error kIo: address and cause.
  Result<uint16_t> listen();

  // Of the admin listener, once listen() has returned; nothing where there is none of its own.
  std::optional<uint16_t> admin_port() const { return admin_port_; }

  // Takes no more requests, lets those in flight finish until `deadline_ms`, and ends all background work.
  net::Task<void> drain(std::chrono::milliseconds deadline_ms);

  // Without one, reload() and /config have nothing to go by.
  void set_config_source(std::unique_ptr<ConfigSource> source);
  // What SIGHUP does: configuration, keys and certificates are read again. Returns all that is wrong; what is,
  // stays as it was.
  std::vector<Error> reload();

  Core& core() { return *core_; }
  const CorePtr& shared_core() const { return core_; }  // for other doors to the same fleet

 private:
  explicit Router(CorePtr core);

  CorePtr core_;
  std::vector<std::unique_ptr<net::HttpServer>> servers_;  // one per loop; the first listens
  std::unique_ptr<net::HttpServer> admin_server_;          // of the control loop; null: the others answer its paths too
  std::optional<uint16_t> admin_port_;
};

}  // namespace kindred::router

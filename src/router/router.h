// The router: an OpenAI-compatible server in front of a fleet of workers.
//
// Thread-safety: confined to the io_context's thread.
// Lifetime: destroy it after drain() has returned or when the io_context runs no more, and before the
// io_context.
#pragma once

#include <boost/asio/any_io_executor.hpp>
#include <chrono>
#include <memory>
#include <optional>
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
  // `clock` is borrowed. Errors: kInvalid, naming the option; that of reading the cohort file.
  static Result<std::unique_ptr<Router>> make(net::asio::any_io_executor executor, RouterOptions options,
                                              const Clock& clock);
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

 private:
  explicit Router(CorePtr core);

  CorePtr core_;
  std::unique_ptr<net::HttpServer> server_;
  std::unique_ptr<net::HttpServer> admin_server_;  // null: the public one answers its paths too
  std::optional<uint16_t> admin_port_;
};

}  // namespace kindred::router

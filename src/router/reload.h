// A new configuration for a running router: SIGHUP reads the file again, PUT /config brings some keys. All of it
// is checked first; then it holds from one request to the next, or, where anything is wrong, nothing changes and
// all reasons are given. Requests under way go on under what they began with (router/settings.h).
//
// Thread-safety: confined to the control loop, but for answer_config(), which is called on the request's own.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "router/core.h"
#include "router/exchange.h"

namespace kindred::router {

// Where configurations come from; the command line's side of it.
class ConfigSource {
 public:
  virtual ~ConfigSource() = default;
  // Reads file and flags again, or, given `yaml`, the running configuration with its keys changed. Returns
  // everything that is wrong; then `out` means nothing.
  virtual std::vector<Error> read(std::optional<std::string_view> yaml, RouterOptions& out) = 0;
  virtual void accept() = 0;                // what was read last is what runs now
  virtual std::string running() const = 0;  // as JSON, without secrets
};

// What stands in the way of running `next` instead of what runs; empty: it runs now.
std::vector<Error> apply_options(const CorePtr& core, RouterOptions next);

// Reads and applies; logs what came of it.
std::vector<Error> reload(const CorePtr& core, std::optional<std::string_view> yaml);

// GET and PUT /config. Returns false for other paths.
net::Task<bool> answer_config(CorePtr core, Exchange& exchange);

}  // namespace kindred::router

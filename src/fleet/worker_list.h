// The workers that a file, or another list from outside, asks for.
//
// Thread-safety: plain values and pure functions.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "base/role.h"
#include "fleet/dialect.h"

namespace kindred::fleet {

struct WantedWorker {
  std::string url;
  Role role = Role::kBoth;
  std::optional<Dialect> dialect = {};
  bool draining = false;  // a member that gets no new requests

  bool operator==(const WantedWorker&) const = default;
};

// YAML or JSON: a list of workers, or an object with such a list as `workers`; each with `url`, `role` (prefill,
// decode, both; both if missing), `dialect` and `drain`. Errors: kInvalid, with everything that is wrong, by line
// and field; kTooLarge past kMaxWorkerListBytes or `most` workers.
Result<std::vector<WantedWorker>> parse_worker_list(std::string_view text, size_t most);
inline constexpr size_t kMaxWorkerListBytes = 1024 * 1024;

}  // namespace kindred::fleet

// What requests go by that a reload replaces, as a whole. A request takes it at its beginning and keeps it to its
// end, so that it never sees half of one configuration and half of another.
//
// Thread-safety: immutable once it is in force; the policies in it are behind locks (policy/locked.h).
#pragma once

#include <memory>

#include "policy/decode_policy.h"
#include "policy/engine_policy.h"
#include "policy/prefill_policy.h"
#include "router/models.h"
#include "router/options.h"
#include "router/retry.h"
#include "router/trace_feed.h"

namespace kindred::router {

struct Settings {
  RouterOptions options;
  ModelAliases aliases;
  RetryStatuses retry_on;  // answers of a worker after which another one is asked
  std::shared_ptr<policy::PrefillPolicy> prefill_policy;
  std::shared_ptr<policy::DecodePolicy> decode_policy;
  std::shared_ptr<policy::DecodePolicy> plain_policy;   // like decode_policy, of those that need no experts
  std::shared_ptr<policy::EnginePolicy> engine_policy;  // null: none; else it chooses wherever a prompt is computed
  TraceSources traces;
};

using SettingsPtr = std::shared_ptr<const Settings>;

}  // namespace kindred::router

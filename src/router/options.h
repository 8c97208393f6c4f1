// What `kindred router` can be told.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "fleet/fleet.h"
#include "policy/decode_policy.h"
#include "policy/prefill_policy.h"
#include "router/edge_options.h"
#include "router/engine_options.h"
#include "router/experiment_options.h"
#include "router/history_options.h"
#include "router/kv_options.h"

namespace kindred::router {

// Cohorts that follow the traffic (router/refitter.h).
struct RefitSettings {
  bool on = false;
  std::chrono::milliseconds interval_ms{5'000};
  std::chrono::milliseconds window_ms{5'000};
  std::chrono::milliseconds grace_ms{30'000};  // a worker that is gone keeps its cohort for so long
  uint32_t min_requests = 64;                  // in the window; never fewer than cohorts
  uint64_t seed = 1;
};

struct RouterOptions {
  std::string host = "127.0.0.1";
  uint16_t port = 8000;
  size_t threads = 1;  // io_contexts, each on a thread of its own; whoever makes the router makes them
  EdgeOptions edge;

  std::vector<std::string> prefill;  // URLs
  std::vector<std::string> decode;   // URLs; cohort i belongs to the i-th
  std::vector<std::string> worker;   // URLs of servers that do both, of any OpenAI-compatible kind

  std::vector<std::string> dialects;       // URL=DIALECT, for workers whose engine is not to be guessed
  std::vector<std::string> model_aliases;  // ALIAS=MODEL

  policy::PrefillPolicyOptions prefill_policy;
  policy::DecodePolicyOptions decode_policy;
  EngineOptions engines;                                     // a policy that takes the place of prefill_policy
  KvOptions kv;                                              // for policies that ask what workers hold
  HistoryOptions history;                                    // of prompts' experts, for SGLang
  ExperimentOptions experiment;                              // policies that take turns, instead of those above
  std::optional<policy::DecodePolicyOptions> shadow_policy;  // decides and is logged, does not act
  std::string cohorts;                                       // file; empty: none
  RefitSettings refit;
  bool manage_workers = false;  // POST and DELETE /workers change the fleet, PUT /config the rest
  std::string workers_file;     // a list of workers that is watched (fleet/worker_list.h); empty: none
  std::chrono::milliseconds workers_file_interval_ms{1'000};
  std::vector<std::string> kubernetes_services;           // NAMESPACE/NAME[:PORT][=ROLE] (fleet/endpoint_slices.h)
  std::string kubernetes_api;                             // URL of the API server, or of `kubectl proxy`
  std::string kubernetes_token_file, kubernetes_ca_file;  // empty: none; the system's store
  std::chrono::milliseconds dns_interval_ms{5'000};       // between two looks at the addresses behind names

  fleet::LoadSource load = fleet::LoadSource::kRequests;  // what policies balance
  std::chrono::milliseconds load_interval_ms{1'000};      // between two polls of a worker's load; 0: none
  std::chrono::milliseconds load_max_age_ms{5'000};       // an older one is unknown

  std::chrono::milliseconds health_interval_ms{1'000};
  std::chrono::milliseconds health_timeout_ms{2'000};
  uint32_t failures_until_out = 3;                   // checks in a row, or requests in a row
  std::chrono::milliseconds breaker_open_ms{1'000};  // until requests are tried again
  uint32_t breaker_probes = 2;                       // so many at once, until one succeeds
  std::chrono::milliseconds slow_start_ms{5'000};    // of a worker that was out; 0: none

  int64_t decode_inflight = 0;  // requests that a decode worker has room for; 0: as many as it takes

  uint32_t retries = 2;  // further workers a leg tries, while nothing has reached the client
  // Statuses after which it does: numbers, "5xx", or "none". Others pass to the client as they are.
  std::vector<std::string> retry_on = {"429", "500", "502", "503", "504"};

  // All below the 300 s for which engines wait for each other.
  std::chrono::milliseconds prefill_deadline_ms{240'000};  // to the head of the prefill reply
  // To the head of a decode worker's reply: of a stream, and of an answer in one piece, which comes when all
  // of it is generated. A stream from a plain worker, which runs the prompt too, has the prefill deadline.
  std::chrono::milliseconds first_deadline_ms{60'000};
  std::chrono::milliseconds decode_deadline_ms{600'000};
  std::chrono::milliseconds idle_deadline_ms{120'000};  // between two reads of a reply

  size_t body_bytes = 64ULL * 1024 * 1024;           // of a request; more: 413
  size_t prefill_reply_bytes = 64ULL * 1024 * 1024;  // first output, prompt token ids, counts and state
  size_t answer_bytes = 256ULL * 1024 * 1024;        // of an answer that is not streamed
  size_t max_inflight = 4096;                        // requests served at once; more wait
  size_t queue = 1024;                               // that wait, of each lane; more: 429
  std::chrono::milliseconds queue_wait_ms{10'000};   // then 503
  uint32_t batch_headroom_percent = 10;              // of max_inflight, which batch requests leave free
  size_t decisions = 1024;                           // kept for GET /status
};

}  // namespace kindred::router

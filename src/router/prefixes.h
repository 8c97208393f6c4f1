// What workers hold of a request's prompt, for policies that price it.
//
// Exact, for workers that publish KV events: the prompt's token ids, which a worker's /tokenize tells (kept by
// prompt), looked up in the index that the events keep. Approximate, for the others: the prompt's bytes, cut into
// pieces of kPieceBytes, looked up in an index of what was sent where; what a worker has forgotten since is not
// noticed, and a restart of which its health tells forgets all.
//
// Thread-safety: any loop's thread; workers come and go on the control loop, events on a thread of their own.
#pragma once

#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/json.h"
#include "base/metrics.h"
#include "fleet/fleet.h"
#include "fleet/kv_index.h"
#include "net/http_client.h"
#include "net/task.h"
#include "router/exchange.h"
#include "router/kv_feed.h"
#include "router/kv_options.h"
#include "router/token_cache.h"

namespace kindred::router {

class Prefixes {
 public:
  // `workers`: that may be there at a time. Error: kInvalid, naming `kv_events`.
  static Result<std::unique_ptr<Prefixes>> make(KvOptions options, uint32_t workers);

  // Listens to the worker's events, if it publishes any. Error: kInvalid, naming `kv_events`.
  Status worker_added(fleet::WorkerId worker, const net::Endpoint& endpoint);
  void worker_removed(fleet::WorkerId worker);
  // It was out and is back: perhaps restarted.
  void worker_returned(fleet::WorkerId worker);

  // May ask a worker to tokenise, for no longer than the timeout.
  net::Task<PromptPrefix> look_up(CorePtr core, const Exchange& exchange);
  // The request goes there, and the worker will hold the prompt. `computes`: what it does not hold yet, it has to
  // compute; not so for a decode worker.
  void sent(fleet::WorkerId worker, const PromptPrefix& prefix, bool computes);

  Json status() const;
  std::string metrics();

 private:
  struct Source {
    std::string worker_url, events, replay;
  };

  Prefixes(KvOptions options, std::vector<Source> sources, uint32_t workers);
  net::Task<TokenIds> tokens(CorePtr core, const Exchange& exchange);
  void approximate(const Exchange& exchange, PromptPrefix& out);

  const KvOptions options_;
  const std::vector<Source> sources_;
  std::shared_ptr<fleet::KvIndex> exact_;  // null: nobody publishes
  std::unique_ptr<KvFeed> feed_;           // beside it
  mutable std::mutex mutex_;               // guards sent_ and found_
  fleet::PrefixIndex sent_;
  std::vector<fleet::PrefixIndex::Held> found_;
  TokenCache token_cache_;
  Registry registry_;
  Counter &exact_lookups_, &approximate_lookups_, &tokenize_failures_, &prompt_tokens_, &held_tokens_;
};

// For flows; does nothing without prefixes.
void sent_to(Core& core, const Exchange& exchange, fleet::WorkerId worker, bool computes);

}  // namespace kindred::router

// The leg whose answer the client gets, of flows in which one worker makes all of it: sent, and relayed as it is.
//
// Thread-safety: none; one object per request, which must outlive run().
#pragma once

#include <string>
#include <string_view>

#include "router/exchange.h"

namespace kindred::router {

class WholeLeg {
 public:
  // `who`: "the decode worker", for the client. `span`: what traces call the leg. Both are literals.
  WholeLeg(CorePtr core, Exchange& exchange, std::string_view who, std::string_view span)
      : core_(std::move(core)), exchange_(exchange), who_(who), span_(span) {}

  // True: the client has its answer, or is gone. False: nothing has reached the client, failure() says why, and
  // another worker may do better; or `cancel` was used while the client is still there. `body` must outlive the
  // call. `guard`: told when the answer begins; null: nobody is.
  net::Task<bool> run(fleet::WorkerId worker, net::RequestHead head, std::string_view body, net::CancelToken cancel,
                      fleet::LoadGuard* guard = nullptr);

  // Once a stream has begun nobody needs the request's body: a stream may last for minutes, with thousands beside it.
  // `changed`: what was sent in its place, forgotten with it.
  void forget_body_in_streams(std::string& changed) { changed_body_ = &changed; }

  LegFailure& failure() { return failure_; }

 private:
  net::Task<bool> relay_events(net::ClientResponse& response, fleet::WorkerId worker);
  net::Task<bool> relay_whole(net::ClientResponse& response, fleet::WorkerId worker);
  net::Task<bool> after_transport_error(fleet::WorkerId worker, Error error);

  CorePtr core_;
  Exchange& exchange_;
  std::string_view who_, span_;
  std::string* changed_body_ = nullptr;  // null: bodies are kept
  fleet::LoadGuard* guard_ = nullptr;
  LegFailure failure_;
};

}  // namespace kindred::router

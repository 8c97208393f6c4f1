// One worker does the whole request: any OpenAI-compatible server, of which nothing about experts is
// known. Balanced by load; bytes pass as they are.
//
// Thread-safety: none; one object per request, which must outlive run().
#pragma once

#include <optional>
#include <vector>

#include "router/engine_leg.h"
#include "router/exchange.h"

namespace kindred::router {

class PlainFlow {
 public:
  // `role`: of the workers that may serve it.
  PlainFlow(CorePtr core, Exchange& exchange, Role role = Role::kBoth);

  net::Task<void> run();

 private:
  std::optional<PromptTarget> choose();

  CorePtr core_;
  Exchange& exchange_;
  Role role_;
  bool by_engine_;            // the request is work for an engine, and a policy for them is in force
  std::string changed_body_;  // what the worker gets, where it is not the client's own
  std::vector<fleet::WorkerId> tried_;
};

}  // namespace kindred::router

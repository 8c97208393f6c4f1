// The KV that a prefill worker holds for a request until the decode worker has pulled it.
//
// Thread-safety: none.
#pragma once

#include <string>

#include "router/core.h"

namespace kindred::router {

// Releases the lease exactly once: when told, or when it is dropped, whatever ended the request. The
// call to the worker runs in the background; if it fails the lease ends with its time to live.
class LeaseHold {
 public:
  LeaseHold(CorePtr core, fleet::WorkerId worker, std::string lease)
      : core_(std::move(core)), worker_(worker), lease_(std::move(lease)) {}
  LeaseHold(const LeaseHold&) = delete;
  LeaseHold& operator=(const LeaseHold&) = delete;
  ~LeaseHold() { release(); }

  void release();

 private:
  CorePtr core_;
  fleet::WorkerId worker_;
  std::string lease_;  // empty: released
};

}  // namespace kindred::router

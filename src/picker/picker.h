// The gRPC side of `kindred picker`: Envoy's external processing service, and gRPC's health service.
//
// Health. "" and "liveness" serve while the process lives; "readiness" and the processing service's own name while
// some model can be served and no shutdown has begun.
//
// Threads: gRPC's own; what a stream does runs on one of the router's loops (picker/stream.h), which are given to
// streams in turn.
// Bounds: streams; a stream has one message on its way at a time; connections that do not answer pings are closed, so
// that a proxy that is gone keeps no load.
// Thread-safety: all methods may be called from any thread.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

#include "base/result.h"
#include "router/core.h"

namespace kindred::picker {

struct PickerOptions {
  std::string host = "127.0.0.1";
  uint16_t port = 9002;
  size_t streams = 8192;                           // open at a time; more are answered 429
  std::chrono::milliseconds stream_ms{3'600'000};  // the longest that one may be open
  std::string tls_cert, tls_key;                   // PEM files, both or none
};

class Picker {
 public:
  // Serves until it is destroyed. Errors: kInvalid for an experiment among the router's options; that of reading a
  // file; kIo for an address that cannot be had.
  static Result<std::unique_ptr<Picker>> listen(router::CorePtr core, const PickerOptions& options);
  ~Picker();  // ends what is left at once

  uint16_t port() const;
  // Takes no more streams; those that are open have `deadline_ms` to end. Blocks until they have.
  void drain(std::chrono::milliseconds deadline_ms);

 private:
  struct Impl;
  explicit Picker(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace kindred::picker

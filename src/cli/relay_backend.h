// The workers of `kindred bench relay`: servers that answer at once and say always the same, on a thread of
// their own, so that what is measured is who stands in front of them.
//
// Thread-safety: none; the servers run on their own thread.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

#include "base/result.h"
#include "expert/counts.h"

namespace kindred::cli {

struct BackendOptions {
  uint32_t events = 128;                     // of a streamed answer, each written by itself
  std::chrono::milliseconds interval_ms{0};  // between two events; 0: as fast as they are taken
};

class RelayBackend {
 public:
  // A plain OpenAI-compatible server, and a prefill and two decode workers that speak Kindred's dialect.
  static Result<std::unique_ptr<RelayBackend>> start(const expert::ExpertShape& shape);
  ~RelayBackend();

  uint16_t plain_port() const;
  uint16_t prefill_port() const;
  uint16_t decode_port(size_t index) const;  // of two
  static constexpr size_t kDecodeWorkers = 2;

  // For answers from now on. Thread-safe.
  void set(BackendOptions options);

 private:
  struct Impl;
  explicit RelayBackend(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace kindred::cli

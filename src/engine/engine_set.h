// The engines of one worker: data-parallel ranks over one copy of the weights, each with a context, a thread, KV
// and a queue of its own.
//
// Thread-safety: as Engine; start from one thread.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "engine/engine.h"

namespace kindred::engine {

class EngineSet {
 public:
  // `count` > 0 engines with equal options but for the rank. threads == 0: the cores, shared evenly, at least one
  // each. The first is started as if it were alone; the others only if what they need by its measure is then
  // available (asked for once; nothing: no check). Errors: as Engine::start; kExhausted with the figures if memory
  // does not do.
  using Available = std::function<std::optional<uint64_t>()>;
  static Result<EngineSet> start(const Model& model, EngineOptions options, uint32_t count, const Clock& clock,
                                 Registry& metrics, const Available& available_bytes);

  std::span<Engine* const> engines() const { return pointers_; }

 private:
  std::vector<std::unique_ptr<Engine>> engines_;
  std::vector<Engine*> pointers_;
};

}  // namespace kindred::engine

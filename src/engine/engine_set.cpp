#include "engine/engine_set.h"

#include <fmt/format.h>
#include <llama.h>

#include <algorithm>
#include <string>
#include <thread>

#include "engine/llama_backend.h"

namespace kindred::engine {
namespace {

constexpr double kMiB = 1024.0 * 1024.0;

// What a context needs beside its KV, roughly: activations of a step (about as many as 64 vectors of the model's
// width are alive for each token) and the logits of every sequence, in the graph and in its output.
uint64_t compute_bytes(const Model& model, const EngineOptions& options) {
  constexpr uint64_t kVectors = 64;
  const auto width = static_cast<uint64_t>(llama_model_n_embd(model.handle()));
  return sizeof(float) * (kVectors * width * options.token_budget + 2ULL * model.info().vocabulary * options.sequences);
}

Status check_memory(const Model& model, const Engine& first, uint32_t count, std::optional<uint64_t> available) {
  if (!available || has_gpu()) return {};
  const uint64_t kv = first.kv_bytes(), compute = compute_bytes(model, first.options()), each = kv + compute;
  const uint64_t room = *available / each;
  if (count - 1 <= room) return {};
  return Error{
      ErrorCode::kExhausted,
      fmt::format("data_parallel_size: {} engines need {:.0f} MiB of KV and about {:.0f} MiB for computing each, "
                  "and {:.0f} MiB are available beside the first; accepted: at most {}, or fewer kv_tokens",
                  count, static_cast<double>(kv) / kMiB, static_cast<double>(compute) / kMiB,
                  static_cast<double>(*available) / kMiB, room + 1),
      "data_parallel_size"};
}

}  // namespace

Result<EngineSet> EngineSet::start(const Model& model, EngineOptions options, uint32_t count, const Clock& clock,
                                   Registry& metrics, const Available& available_bytes) {
  KINDRED_CHECK(count > 0);
  if (options.threads == 0) options.threads = std::max(1U, std::thread::hardware_concurrency() / count);
  EngineSet set;
  for (uint32_t rank = 0; rank < count; ++rank) {
    if (rank == 1) {
      if (Status fits = check_memory(model, *set.engines_.front(), count, available_bytes()); !fits)
        return fits.error();
    }
    options.rank = rank;
    auto engine = Engine::start(model, options, clock, metrics);
    if (!engine) return std::move(engine).error();
    set.engines_.push_back(*std::move(engine));
    set.pointers_.push_back(set.engines_.back().get());
  }
  return set;
}

}  // namespace kindred::engine

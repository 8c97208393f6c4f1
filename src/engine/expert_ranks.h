// Expert parallelism inside one process: the experts of a model lie with R ranks, each a group of threads with
// memory of its own, and may change ranks while the model runs, without a bit of its output changing.
//
// It is a ggml device (rank_device.h) that takes the experts' weights at load and computes the experts' FFN of
// each layer: each rank works on the tokens that chose its experts, with llama.cpp's own kernels. The sum over
// experts and everything else stay with llama.cpp.
//
// Ownership: the Model owns it; it outlives the llama_model and all contexts.
// Thread-safety: all methods from any thread, but for those that say otherwise.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/result.h"
#include "engine/expert_migration.h"
#include "engine/expert_owners.h"
#include "engine/expert_placement.h"
#include "engine/expert_ranks_options.h"
#include "engine/rank_arena.h"
#include "engine/rank_counts.h"
#include "engine/rank_threads.h"

struct ggml_tensor;
struct ggml_backend_buffer_type;

namespace kindred::engine {

class ExpertController;
struct ExpertControllerOptions;

struct StepLatency {
  uint64_t steps = 0;
  double total_s = 0;             // of all of them
  double p50_ms = 0, p99_ms = 0;  // of the last 1024 of them
};

class ExpertRanks {
 public:
  // One expert tensor of one layer, as every rank has it.
  struct Weights {
    uint32_t layer = 0;         // row of the placement
    bool down = false;          // the FFN's last product
    uint64_t expert_bytes = 0;  // expert e lies at e * expert_bytes
    uint64_t offset = 0;        // in its arenas
    std::vector<RankArena>* arenas = nullptr;
    std::byte* at(uint32_t rank) const { return (*arenas)[rank].at(offset); }
  };

  // Reads the model's head and refuses what cannot be served, before any weight is read. Errors: kInvalid (no
  // experts, layers that differ in their number, more ranks than experts, the placement), kExhausted (memory).
  static Result<std::unique_ptr<ExpertRanks>> prepare(const std::string& model_path, const ExpertRanksOptions& options);
  ~ExpertRanks();
  ExpertRanks(const ExpertRanks&) = delete;
  ExpertRanks& operator=(const ExpertRanks&) = delete;

  // For llama_model_params::tensor_buft_overrides.
  static constexpr const char* kWeightsPattern = R"(blk\.\d+\.ffn_(up|gate|down|gate_up)_exps\.weight$)";
  ggml_backend_buffer_type* buffer_type() const { return buffer_type_.get(); }
  // After the model is loaded, before anything is evaluated. Error: kInvalid (weights that did not come here).
  Status finish_load();

  uint32_t ranks() const { return shape_.ranks; }
  const RankShape& shape() const { return shape_; }
  const std::vector<uint32_t>& layers() const { return layers_; }  // of the model, for each row of the placement
  uint32_t top_k() const { return top_k_; }
  const ExpertRanksOptions& options() const { return options_; }

  ExpertPlacement placement() const { return migration_->current(); }
  // Applied live, a few moves a step; replaces one that is under way. Error: kInvalid (shape, rank).
  Status apply(const ExpertPlacement& target);
  void cancel() { migration_->cancel(); }
  MigrationProgress progress() const { return migration_->progress(); }
  void wait_for_migration() const { migration_->wait(); }

  RankTraffic traffic() const { return counts_->total(); }
  RankTraffic window() const;
  void reset_window();
  // Per engine, in token equivalents: the load on the ranks that it owns (rank_counts.h), over the window.
  std::vector<double> expert_pressure() const;
  double expert_bytes() const;  // of one expert in one layer, mean
  // From now on placements follow the traffic (expert_controller.h). Once, before others use the ranks. Error:
  // kInvalid (ranks that cannot hold as many experts each, which the solvers need).
  Status start_controller(const ExpertControllerOptions& options);
  const ExpertController* controller() const { return controller_.get(); }  // null: none was started
  uint32_t stalled_ranks() const { return threads_->stalled(); }
  StepLatency step_latency(bool while_migrating) const;

  // One llama_decode: allows moves, and is timed.
  class Step {
   public:
    explicit Step(ExpertRanks* ranks);  // null: does nothing
    ~Step();
    Step(const Step&) = delete;
    Step& operator=(const Step&) = delete;

   private:
    ExpertRanks* ranks_;
    bool migrating_ = false;
    std::chrono::steady_clock::time_point began_{};
  };

  // For tests: fills one expert's memory at one rank, all its tensors, with bytes that are NaN in F16, BF16, F32
  // and as the scale of a Q8_0 block.
  void poison(uint32_t layer, uint32_t expert, uint32_t rank);
  uint64_t resident_bytes() const;

  // --- for the device ---
  Result<std::vector<RankArena>*> reserve(uint64_t bytes);
  // Null if the tensor is not one of the experts'; why is kept for finish_load.
  const Weights* add_weights(const ggml_tensor& tensor, std::vector<RankArena>& arenas);
  // Bytes [offset, offset + data.size()) of the whole tensor, to whom they belong. A failure is kept for finish_load.
  void write(const Weights& weights, uint64_t offset, std::span<const std::byte> data);
  void read(const Weights& weights, uint64_t offset, std::span<std::byte> data);
  ExpertOwners& owners(uint32_t layer) { return *owners_[layer]; }
  RankThreads& threads() { return *threads_; }
  RankCounts& counts() { return *counts_; }
  uint32_t threads_per_rank() const { return threads_per_rank_; }

 private:
  struct Head;
  class Mover;
  struct FreeBufferType {
    void operator()(ggml_backend_buffer_type* type) const;
  };
  ExpertRanks(const ExpertRanksOptions& options, const Head& head);
  static Result<Head> read_head(const std::string& model_path);
  void record(double seconds, bool migrating);

  const ExpertRanksOptions options_;
  RankShape shape_;
  std::vector<uint32_t> layers_;
  uint32_t top_k_ = 0;
  size_t tensors_ = 0;  // expert tensors that the file has
  uint32_t threads_per_rank_ = 1;
  SystemClock clock_;
  std::unique_ptr<RankCounts> counts_;
  std::deque<std::vector<RankArena>> arenas_;  // one set per ggml buffer; addresses stay
  std::deque<Weights> weights_;
  std::vector<std::vector<const Weights*>> of_layer_;
  std::vector<std::unique_ptr<ExpertOwners>> owners_;
  std::vector<std::vector<uint32_t>> cpus_;
  std::unique_ptr<ggml_backend_buffer_type, FreeBufferType> buffer_type_;
  std::string problem_;  // the first tensor that could not be taken

  static constexpr size_t kSteps = 1024;
  struct Latencies {
    uint64_t steps = 0;
    double total_s = 0;
    std::vector<double> last_s;  // ring of kSteps
  };
  mutable std::mutex latency_mutex_;
  Latencies normal_steps_, migrating_steps_;

  std::unique_ptr<RankThreads> threads_;  // stops before what it works on
  std::unique_ptr<ExpertMover> mover_;
  std::unique_ptr<ExpertMigration> migration_;  // and this before them
  std::unique_ptr<ExpertController> controller_;
};

}  // namespace kindred::engine

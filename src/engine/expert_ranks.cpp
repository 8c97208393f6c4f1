#include "engine/expert_ranks.h"

#include <fmt/format.h>
#include <ggml.h>

#include <algorithm>
#include <charconv>
#include <cstring>
#include <regex>
#include <utility>

#include "engine/expert_controller.h"
#include "engine/gguf_file.h"
#include "engine/gguf_handle.h"
#include "engine/memory.h"
#include "engine/rank_device.h"
#include "engine/rank_topology.h"

namespace kindred::engine {
namespace {

struct FreeGgmlContext {
  void operator()(ggml_context* context) const { ggml_free(context); }
};

// Reading a tensor from a slow disk is no stall.
constexpr std::chrono::hours kLoadTimeout{1};
// How long a rank looks for work before it sleeps: about what attention takes between two layers.
constexpr std::chrono::microseconds kSpin{50};

std::optional<uint32_t> layer_of(std::string_view name) {
  if (!name.starts_with("blk.")) return std::nullopt;
  uint32_t layer = 0;
  const auto [end, error] = std::from_chars(name.data() + 4, name.data() + name.size(), layer);
  return error == std::errc() ? std::optional(layer) : std::nullopt;
}

// Copies of each rank's part of a tensor, made on its own thread, so that its memory is near it.
class CopyJob final : public RankJob {
 public:
  struct Piece {
    std::byte* to;
    const std::byte* from;
    size_t bytes;
  };
  explicit CopyJob(uint32_t ranks) : pieces_(ranks) {}
  void add(uint32_t rank, Piece piece) { pieces_[rank].push_back(piece); }
  bool takes_part(uint32_t rank) const override { return !pieces_[rank].empty(); }
  bool compute(uint32_t rank) override {
    for (const Piece& piece : pieces_[rank]) std::memcpy(piece.to, piece.from, piece.bytes);
    return true;
  }
  void deliver(uint32_t /*rank*/) override {}

 private:
  std::vector<std::vector<Piece>> pieces_;
};

// Calls take(expert, offset in the expert, offset in the data, bytes) for each expert that a range touches.
void for_each_expert(const ExpertRanks::Weights& weights, uint64_t offset, uint64_t bytes, const auto& take) {
  for (uint64_t done = 0; done < bytes;) {
    const uint64_t at = offset + done;
    const uint64_t inside = at % weights.expert_bytes;
    const uint64_t take_bytes = std::min(weights.expert_bytes - inside, bytes - done);
    take(static_cast<uint32_t>(at / weights.expert_bytes), inside, done, take_bytes);
    done += take_bytes;
  }
}

}  // namespace

// What the file says of its experts.
struct ExpertRanks::Head {
  std::vector<uint32_t> layers;
  uint32_t experts = 0, top_k = 0;
  size_t tensors = 0;
  uint64_t bytes = 0;
};

// An expert's bytes are those of its matrices, one after another.
class ExpertRanks::Mover final : public ExpertMover {
 public:
  explicit Mover(ExpertRanks& ranks) : ranks_(ranks) {}

  uint64_t expert_bytes(uint32_t layer) const override {
    uint64_t bytes = 0;
    for (const Weights* w : ranks_.of_layer_[layer]) bytes += w->expert_bytes;
    return bytes;
  }
  void copy(uint32_t layer, uint32_t expert, uint16_t to, uint64_t begin, uint64_t end) override {
    // Pages belong to the node of who writes them first.
    if (std::exchange(near_, to) != to) (void)pin_this_thread(ranks_.cpus_[to]);
    const uint16_t from = ranks_.owners_[layer]->owner(expert);
    uint64_t first = 0;  // of the matrix
    for (const Weights* w : ranks_.of_layer_[layer]) {
      const uint64_t at = std::clamp(begin, first, first + w->expert_bytes) - first;
      const uint64_t until = std::clamp(end, first, first + w->expert_bytes) - first;
      const uint64_t offset = expert * w->expert_bytes + at;
      std::memcpy(w->at(to) + offset, w->at(from) + offset, until - at);
      first += w->expert_bytes;
    }
  }
  void finish(uint32_t layer, uint32_t expert, uint16_t to) override {
    const uint16_t from = ranks_.owners_[layer]->owner(expert);
    ranks_.owners_[layer]->move(expert, to);
    drop(layer, expert, from);
  }
  void drop(uint32_t layer, uint32_t expert, uint16_t from) override {
    for (const Weights* w : ranks_.of_layer_[layer]) {
      (*w->arenas)[from].release(w->offset + expert * w->expert_bytes, w->expert_bytes);
    }
  }

 private:
  ExpertRanks& ranks_;
  std::optional<uint16_t> near_;  // the rank that the thread is pinned to
};

Result<ExpertRanks::Head> ExpertRanks::read_head(const std::string& model_path) {
  ggml_context* raw = nullptr;
  const Gguf gguf(gguf_init_from_file(model_path.c_str(), {.no_alloc = true, .ctx = &raw}));
  const std::unique_ptr<ggml_context, FreeGgmlContext> tensors(raw);
  if (!gguf || !tensors) return Error{ErrorCode::kCorrupt, fmt::format("{}: not a GGUF file", model_path)};
  const std::regex pattern(kWeightsPattern);
  Head head;
  for (ggml_tensor* t = ggml_get_first_tensor(raw); t != nullptr; t = ggml_get_next_tensor(raw, t)) {
    const auto layer = layer_of(t->name);
    if (!layer || !std::regex_search(t->name, pattern)) continue;
    if (head.experts != 0 && t->ne[2] != head.experts) {
      return invalid(fmt::format("{}: layers with {} and with {} experts; --expert-ranks takes models with as many in "
                                 "each",
                                 model_path, head.experts, t->ne[2]),
                     "expert_ranks");
    }
    head.experts = static_cast<uint32_t>(t->ne[2]);
    head.layers.push_back(*layer);
    head.bytes += ggml_nbytes(t);
    ++head.tensors;
  }
  std::ranges::sort(head.layers);
  head.layers.erase(std::ranges::unique(head.layers).begin(), head.layers.end());
  const auto architecture = gguf_text(gguf.get(), "general.architecture").value_or("");
  head.top_k = gguf_number(gguf.get(), architecture + ".expert_used_count").value_or(0);
  return head;
}

Result<std::unique_ptr<ExpertRanks>> ExpertRanks::prepare(const std::string& model_path,
                                                          const ExpertRanksOptions& options) {
  const auto head = read_head(model_path);
  if (!head) return head.error();
  if (head->experts == 0) {
    return invalid(fmt::format("{}: the model has no experts, so there is nothing for --expert-ranks", model_path),
                   "expert_ranks");
  }
  if (options.ranks == 0 || options.ranks > head->experts) {
    return invalid(
        fmt::format("expert_ranks: {}; accepted: 1..{}, the experts of a layer", options.ranks, head->experts),
        "expert_ranks");
  }
  if (options.moves_per_step == 0) return invalid("expert_moves_per_step: at least 1", "expert_moves_per_step");
  const uint64_t available = options.memory_bytes > 0 ? options.memory_bytes : available_memory_bytes().value_or(0);
  if (available > 0 && head->bytes > available) {
    return Error{ErrorCode::kExhausted,
                 fmt::format("{}: the experts need {} MB in the ranks' memory, {} MB are available", model_path,
                             head->bytes / 1'000'000, available / 1'000'000),
                 "expert_ranks"};
  }
  const auto layers = static_cast<uint32_t>(head->layers.size());
  std::optional<ExpertPlacement> first;
  if (!options.placement.empty()) {
    auto loaded = load_expert_placement(options.placement, layers, head->experts, options.ranks);
    if (!loaded) return std::move(loaded).error();
    first = std::move(*loaded);
  }
  const ExpertPlacement start = first ? *first : linear_placement(layers, head->experts, options.ranks);
  auto ranks = std::unique_ptr<ExpertRanks>(new ExpertRanks(options, *head));
  for (uint32_t l = 0; l < layers; ++l) {
    const auto row = start.rank_of.begin() + static_cast<std::ptrdiff_t>(size_t{l} * start.experts);
    ranks->owners_.push_back(std::make_unique<ExpertOwners>(std::vector<uint16_t>(row, row + start.experts)));
  }
  ranks->mover_ = std::make_unique<Mover>(*ranks);
  ranks->migration_ =
      std::make_unique<ExpertMigration>(start, MigrationPace{.moves_per_step = options.moves_per_step}, *ranks->mover_);
  return ranks;
}

ExpertRanks::ExpertRanks(const ExpertRanksOptions& options, const Head& head)
    : options_(options),
      shape_{static_cast<uint32_t>(head.layers.size()), head.experts, options.ranks},
      layers_(head.layers),
      top_k_(head.top_k),
      tensors_(head.tensors),
      counts_(std::make_unique<RankCounts>(shape_)),
      of_layer_(head.layers.size()),
      buffer_type_(make_rank_buffer_type(*this)) {
  counts_->reset_window(clock_.now());
  const std::vector<uint32_t> allowed = allowed_cpus();
  const std::vector<NumaNode> nodes = read_numa_nodes(allowed);
  const auto processors = std::max<uint32_t>(1, static_cast<uint32_t>(allowed.size()));
  const uint32_t threads = options.threads > 0 ? options.threads : processors;
  threads_per_rank_ = std::max(1U, threads / options.ranks);
  const bool pinned =
      options.pinning == RankPinning::kAlways || (options.pinning == RankPinning::kAuto && nodes.size() > 1);
  cpus_ = pinned ? rank_cpus(nodes, options.ranks) : std::vector<std::vector<uint32_t>>(options.ranks);
  // Without nodes of their own the caller, which would only wait, takes rank 0's part.
  const bool near = nodes.size() == 1;
  // The context's threads are busy while ranks look for work, one of them as rank 0.
  const bool room = options.ranks > 1 && threads + uint64_t{threads_per_rank_} * (options.ranks - 1) <= processors;
  threads_ = std::make_unique<RankThreads>(RankThreadsOptions{.ranks = options.ranks,
                                                              .cpus = cpus_,
                                                              .caller_is_rank_0 = near || options.ranks == 1,
                                                              .spin = room ? kSpin : std::chrono::microseconds(0),
                                                              .stall_timeout = options.stall_timeout});
}

ExpertRanks::~ExpertRanks() = default;

void ExpertRanks::FreeBufferType::operator()(ggml_backend_buffer_type* type) const { free_rank_buffer_type(type); }

Result<std::vector<RankArena>*> ExpertRanks::reserve(uint64_t bytes) {
  std::vector<RankArena> arenas;
  for (uint32_t r = 0; r < shape_.ranks; ++r) {
    auto arena = RankArena::reserve(bytes, /*filled=*/shape_.ranks == 1);
    if (!arena) {
      problem_ = arena.error().message;
      return std::move(arena).error();
    }
    arenas.push_back(std::move(*arena));
  }
  return &arenas_.emplace_back(std::move(arenas));
}

const ExpertRanks::Weights* ExpertRanks::add_weights(const ggml_tensor& tensor, std::vector<RankArena>& arenas) {
  const auto layer = layer_of(tensor.name);
  const auto row = layer ? std::ranges::find(layers_, *layer) : layers_.end();
  if (row == layers_.end() || tensor.ne[2] != shape_.experts || tensor.ne[3] != 1 || !ggml_is_contiguous(&tensor)) {
    problem_ = fmt::format("{} is not a tensor of {} experts", tensor.name, shape_.experts);
    return nullptr;
  }
  Weights weights;
  weights.layer = static_cast<uint32_t>(row - layers_.begin());
  weights.down = std::string_view(tensor.name).find("ffn_down_exps") != std::string_view::npos;
  weights.expert_bytes = tensor.nb[2];
  weights.offset = static_cast<uint64_t>(static_cast<std::byte*>(tensor.data) - arenas[0].at(0));
  weights.arenas = &arenas;
  weights_.push_back(weights);
  of_layer_[weights.layer].push_back(&weights_.back());
  return &weights_.back();
}

void ExpertRanks::write(const Weights& weights, uint64_t offset, std::span<const std::byte> data) {
  const auto job = std::make_shared<CopyJob>(shape_.ranks);
  const ExpertOwners::Reading reading(*owners_[weights.layer]);
  for_each_expert(weights, offset, data.size(), [&](uint32_t expert, uint64_t inside, uint64_t done, uint64_t bytes) {
    const uint16_t rank = reading.owner(expert);
    job->add(rank, {weights.at(rank) + expert * weights.expert_bytes + inside, data.data() + done, bytes});
  });
  const Status done = threads_->run(job, std::chrono::duration_cast<std::chrono::milliseconds>(kLoadTimeout));
  if (!done.ok()) problem_ = done.error().message;
}

void ExpertRanks::read(const Weights& weights, uint64_t offset, std::span<std::byte> data) {
  const ExpertOwners::Reading reading(*owners_[weights.layer]);
  for_each_expert(weights, offset, data.size(), [&](uint32_t expert, uint64_t inside, uint64_t done, uint64_t bytes) {
    std::memcpy(data.data() + done, weights.at(reading.owner(expert)) + expert * weights.expert_bytes + inside, bytes);
  });
}

Status ExpertRanks::finish_load() {
  if (!problem_.empty()) return invalid(fmt::format("--expert-ranks: {}", problem_), "expert_ranks");
  if (weights_.size() != tensors_) {
    return invalid(fmt::format("--expert-ranks: llama.cpp placed {} of {} expert tensors with the ranks; this "
                               "architecture is not supported",
                               weights_.size(), tensors_),
                   "expert_ranks");
  }
  const bool each_has_down = std::ranges::all_of(
      of_layer_, [](const auto& layer) { return std::ranges::any_of(layer, [](auto* w) { return w->down; }); });
  if (!each_has_down) return invalid("--expert-ranks: a layer has no ffn_down_exps", "expert_ranks");
  return {};
}

Status ExpertRanks::apply(const ExpertPlacement& target) {
  if (target.layers != shape_.layers || target.experts != shape_.experts || target.ranks != shape_.ranks ||
      target.rank_of.size() != size_t{shape_.layers} * shape_.experts) {
    return invalid(fmt::format("placement: {} layers x {} experts on {} ranks; accepted: {} x {} on {}", target.layers,
                               target.experts, target.ranks, shape_.layers, shape_.experts, shape_.ranks),
                   "placement");
  }
  if (std::ranges::any_of(target.rank_of, [this](uint16_t rank) { return rank >= shape_.ranks; })) {
    return invalid(fmt::format("placement: a rank is out of range; accepted: 0..{}", shape_.ranks - 1), "placement");
  }
  migration_->set_target(target);
  return {};
}

double ExpertRanks::expert_bytes() const {
  uint64_t bytes = 0;
  for (const Weights& w : weights_) bytes += w.expert_bytes;
  return static_cast<double>(bytes) / shape_.layers;
}

Status ExpertRanks::start_controller(const ExpertControllerOptions& options) {
  if (shape_.experts % shape_.ranks != 0) {
    return invalid(
        fmt::format("--expert-placement auto: {} experts on {} ranks; accepted: ranks that hold as many each",
                    shape_.experts, shape_.ranks),
        "expert_ranks");
  }
  controller_ = std::make_unique<ExpertController>(*this, options);
  return {};
}

RankTraffic ExpertRanks::window() const { return counts_->window(clock_.now()); }

void ExpertRanks::reset_window() { counts_->reset_window(clock_.now()); }

std::vector<double> ExpertRanks::expert_pressure() const { return source_pressure(window(), shape_, top_k_); }

ExpertRanks::Step::Step(ExpertRanks* ranks) : ranks_(ranks) {
  if (ranks_ == nullptr) return;
  ranks_->migration_->begin_step();
  migrating_ = ranks_->migration_->active();
  began_ = std::chrono::steady_clock::now();
}

ExpertRanks::Step::~Step() {
  if (ranks_ == nullptr) return;
  const auto took = std::chrono::steady_clock::now() - began_;
  ranks_->migration_->end_step();
  ranks_->record(std::chrono::duration<double>(took).count(), migrating_ || ranks_->migration_->active());
  ranks_->counts_->rotate(ranks_->clock_.now(), ranks_->options_.window);
}

void ExpertRanks::record(double seconds, bool migrating) {
  const std::lock_guard lock(latency_mutex_);
  Latencies& to = migrating ? migrating_steps_ : normal_steps_;
  if (to.last_s.size() < kSteps) {
    to.last_s.push_back(seconds);
  } else {
    to.last_s[to.steps % kSteps] = seconds;
  }
  ++to.steps;
  to.total_s += seconds;
}

StepLatency ExpertRanks::step_latency(bool while_migrating) const {
  std::vector<double> sorted;
  StepLatency out;
  {
    const std::lock_guard lock(latency_mutex_);
    const Latencies& from = while_migrating ? migrating_steps_ : normal_steps_;
    sorted = from.last_s;
    out.steps = from.steps;
    out.total_s = from.total_s;
  }
  if (sorted.empty()) return out;
  std::ranges::sort(sorted);
  const auto quantile = [&](double q) {
    return sorted[static_cast<size_t>(q * static_cast<double>(sorted.size() - 1))];
  };
  out.p50_ms = quantile(0.5) * 1e3;
  out.p99_ms = quantile(0.99) * 1e3;
  return out;
}

void ExpertRanks::poison(uint32_t layer, uint32_t expert, uint32_t rank) {
  for (const Weights* w : of_layer_[layer]) {
    std::memset(w->at(rank) + expert * w->expert_bytes, 0xFF, w->expert_bytes);
  }
}

uint64_t ExpertRanks::resident_bytes() const {
  uint64_t bytes = 0;
  for (const auto& of_buffer : arenas_) {
    for (const RankArena& arena : of_buffer) bytes += arena.resident_bytes();
  }
  return bytes;
}

}  // namespace kindred::engine

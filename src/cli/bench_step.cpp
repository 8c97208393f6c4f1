// `kindred bench step`: a decode step's time against its batch size and against the number of distinct
// experts |U|, apart: ELDR's figure 2 and its law T = a + b |U|.
//
// The bundled model is widened (engine/widen.h) until its experts exceed the cache. One llama.cpp context
// holds the prompts of many domains; a batch is made of copies of some of them. Copies of one prompt select
// the same experts, so |U| stays top-k at any batch size; B tokens of d different prompts give a larger |U|
// at the same B. What is in the KV cache is the same for all batches, so attention costs them the same.

#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <set>
#include <thread>

#include "base/clock.h"
#include "base/rng.h"
#include "cli/bench.h"
#include "cli/line_fit.h"
#include "cli/llama_loop.h"
#include "cli/local_cluster.h"
#include "cli/openmp.h"
#include "cli/plot.h"
#include "cli/process.h"
#include "cli/prompts.h"
#include "cli/terminal.h"
#include "engine/llama_session.h"
#include "engine/widen.h"

namespace kindred::cli {
namespace {

using engine::LlamaSession;
using engine::SequenceId;

constexpr uint32_t kContextTokens = 32;  // of each prompt; the next one is what is decoded
constexpr uint32_t kMostSlots = 64;

struct StepBenchOptions {
  std::string model;
  std::string prompts;
  std::string type = "f16";
  int64_t factor = 16, batch = 16, threads = 0, seconds = 60, seed = 1;
  bool cpu_time = false;
  BenchOutput output;

  const char* time() const { return cpu_time ? "processor" : "wall"; }
};

// One batch to be measured: which prompt each of its sequences continues.
struct StepBatch {
  std::vector<uint32_t> sources;
  bool by_size = false;  // of the series over batch sizes; else of that over |U|
  double distinct = 0;   // mean over the captured layers
  std::vector<double> ms;
  double median_ms() const { return quantile(ms, 0.5); }
};

class StepBench {
 public:
  explicit StepBench(const StepBenchOptions& options) : options_(options) {}
  Status run();

 private:
  Status open_model();
  Status read_prompts();
  Status prefill();
  void choose_batches();
  Result<double> step(StepBatch& batch);
  Status measure();
  void fit();
  void print_text() const;
  void print_json() const;
  Status draw() const;
  double layers() const { return model_->info().layers; }

  StepBenchOptions options_;
  const Machine machine_ = this_machine();
  std::optional<ScratchDir> scratch_;
  engine::WidenReport widened_;
  std::unique_ptr<engine::Model> model_;
  std::unique_ptr<LlamaSession> session_;
  std::vector<std::vector<engine::Token>> prompts_;  // [kContextTokens + 1] each
  std::vector<StepBatch> batches_;
  size_t rounds_ = 0;
  LineFit by_experts_, by_size_;
};

Status StepBench::open_model() {
  auto scratch = ScratchDir::make();
  if (!scratch) return std::move(scratch).error();
  scratch_.emplace(std::move(*scratch));
  const std::string path = scratch_->path() + "/widened.gguf";
  {
    std::optional<Progress> progress;
    const auto report = engine::widen_gguf(options_.model, path,
                                           {.factor = static_cast<uint32_t>(options_.factor),
                                            .type = options_.type,
                                            .progress = [&](size_t done, size_t tensors) {
                                              if (!progress) progress.emplace("widening", tensors);
                                              progress->set(done);
                                            }});
    if (!report) return report.error();
    widened_ = *report;
  }
  auto model = engine::Model::load(path);
  if (!model) return std::move(model).error();
  model_ = std::move(*model);
  if (options_.threads == 0) options_.threads = std::max(1U, std::thread::hardware_concurrency());
  auto session = LlamaSession::open(*model_, {.kv_tokens = kMostSlots * (kContextTokens + 2),
                                              .batch_tokens = kMostSlots * kContextTokens / 4,
                                              .sequences = 2 * kMostSlots,
                                              .threads = static_cast<uint32_t>(options_.threads)});
  if (!session) return std::move(session).error();
  session_ = std::move(*session);
  return {};
}

// One prompt of each domain in turn, so that the first ones are as unlike as can be.
Status StepBench::read_prompts() {
  auto prompts = load_prompts(options_.prompts);
  if (!prompts) return std::move(prompts).error();
  const auto wanted = static_cast<size_t>(options_.batch);
  std::vector<bool> used(prompts->size(), false);
  for (bool found = true; found && prompts_.size() < wanted;) {
    found = false;
    std::set<std::string> domains;
    for (size_t i = 0; i < prompts->size() && prompts_.size() < wanted; ++i) {
      if (used[i] || domains.contains((*prompts)[i].domain)) continue;
      std::vector<engine::Token> tokens = model_->tokenize((*prompts)[i].text, false);
      used[i] = true;
      if (tokens.size() <= kContextTokens) continue;
      found = true;
      domains.insert((*prompts)[i].domain);
      tokens.resize(kContextTokens + 1);
      prompts_.push_back(std::move(tokens));
    }
  }
  if (prompts_.size() == wanted) return {};
  return invalid(fmt::format("{}: only {} prompts have more than {} tokens; {} are needed", options_.prompts,
                             prompts_.size(), kContextTokens, wanted),
                 "prompts");
}

Status StepBench::prefill() {
  for (size_t p = 0; p < prompts_.size(); ++p) {
    session_->begin();
    for (uint32_t i = 0; i < kContextTokens; ++i)
      session_->add(prompts_[p][i], i, static_cast<SequenceId>(p), i + 1 == kContextTokens);
    if (Status done = session_->evaluate(); !done) return done;
  }
  return {};
}

void StepBench::choose_batches() {
  Rng rng(static_cast<uint64_t>(options_.seed));
  const auto most = static_cast<uint32_t>(options_.batch);
  for (uint32_t size = 1; size <= most; size *= 2) {
    // Two prompts' worth, since top-k experts differ in nothing but which they are.
    for (uint32_t source = 0; source < std::min(2U, most); ++source)
      batches_.push_back({std::vector<uint32_t>(size, source), true, 0, {}});
  }
  const uint32_t stride = std::max(1U, most / 16);
  for (uint32_t different = 1; different <= most; different += stride) {
    for (int draw = 0; draw < 2; ++draw) {
      std::vector<uint32_t> order(most);
      for (uint32_t i = 0; i < most; ++i) order[i] = i;
      for (uint32_t i = most; i > 1; --i) std::swap(order[i - 1], order[rng.below(i)]);
      StepBatch batch;
      for (uint32_t i = 0; i < most; ++i) batch.sources.push_back(order[i % different]);
      batches_.push_back(std::move(batch));
    }
  }
}

// The step's milliseconds; nothing of it stays in the KV cache.
Result<double> StepBench::step(StepBatch& batch) {
  const auto slot = [](size_t i) { return static_cast<SequenceId>(kMostSlots + i); };
  for (size_t i = 0; i < batch.sources.size(); ++i)
    session_->copy_all(static_cast<SequenceId>(batch.sources[i]), slot(i));
  session_->begin();
  for (size_t i = 0; i < batch.sources.size(); ++i)
    session_->add(prompts_[batch.sources[i]][kContextTokens], kContextTokens, slot(i), true);
  const TimeBy by = options_.cpu_time ? TimeBy::kProcessor : TimeBy::kWall;
  const double begin_s = time_now_s(by);
  const Status done = session_->evaluate();
  (void)session_->logits(0);  // waits for them
  const double took_s = time_now_s(by) - begin_s;
  for (size_t i = 0; i < batch.sources.size(); ++i) session_->remove(slot(i), 0);
  if (!done.ok()) return done.error();
  const engine::ExpertCapture* experts = session_->experts();
  if (experts == nullptr) return Error{ErrorCode::kInternal, "the step's experts were not seen"};
  size_t distinct = 0;
  for (size_t l = 0; l < experts->shape().layers.size(); ++l) {
    std::set<uint16_t> of_layer;
    for (uint32_t t = 0; t < batch.sources.size(); ++t) {
      const auto selected = experts->selected(l, t);
      of_layer.insert(selected.begin(), selected.end());
    }
    distinct += of_layer.size();
  }
  batch.distinct = static_cast<double>(distinct) / static_cast<double>(experts->shape().layers.size());
  return took_s * 1e3;
}

Status StepBench::measure() {
  const SystemClock clock;
  const MonotonicTime begin = clock.now();
  const auto spent_s = [&] { return seconds_between(begin, clock.now()); };
  Progress progress("measuring (s)", static_cast<size_t>(options_.seconds));
  constexpr size_t kLeastRounds = 3;
  std::vector<size_t> order(batches_.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  Rng rng(static_cast<uint64_t>(options_.seed) + 1);
  while (rounds_ < kLeastRounds || spent_s() < static_cast<double>(options_.seconds)) {
    for (size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[rng.below(i)]);
    for (const size_t i : order) {
      auto ms = step(batches_[i]);
      if (!ms) return std::move(ms).error();
      batches_[i].ms.push_back(*ms);
    }
    ++rounds_;
    progress.set(static_cast<size_t>(std::min(spent_s(), static_cast<double>(options_.seconds))));
  }
  return {};
}

void StepBench::fit() {
  std::vector<double> experts, experts_ms, sizes, sizes_ms;
  for (const StepBatch& batch : batches_) {
    if (batch.by_size) {
      sizes.push_back(static_cast<double>(batch.sources.size()));
      sizes_ms.push_back(batch.median_ms());
    } else {
      experts.push_back(batch.distinct);
      experts_ms.push_back(batch.median_ms());
    }
  }
  by_experts_ = fit_line(experts, experts_ms);
  by_size_ = fit_line(sizes, sizes_ms);
}

void StepBench::print_text() const {
  fmt::print("{}\n{} widened x{} ({}): {} experts of {:.2f} MB a layer, {} layers, {:.0f} MB in all; {} threads; {}\n",
             machine_text(machine_), options_.model, options_.factor, options_.type, model_->info().experts.experts,
             static_cast<double>(widened_.expert_bytes) / 1e6, layers(),
             static_cast<double>(widened_.expert_bytes) * model_->info().experts.experts * layers() / 1e6,
             options_.threads, llama_features());
  fmt::print("{} time, medians of {} rounds over all batches in random order\n\n", options_.time(), rounds_);
  Table table({"series", "batch", "|U| a layer", "step ms", "quartiles"});
  for (const StepBatch& batch : batches_) {
    table.row({batch.by_size ? "one prompt, copied" : "different prompts", fmt::format("{}", batch.sources.size()),
               fmt::format("{:.1f}", batch.distinct), fmt::format("{:.2f}", batch.median_ms()),
               fmt::format("{:.2f}-{:.2f}", quantile(batch.ms, 0.25), quantile(batch.ms, 0.75))});
  }
  fmt::print("{}\n", table.text());
  const double expert_us = 1e3 * by_experts_.b / layers();
  fmt::print("at batch {}:      T = {:.2f} ms + {:.3f} ms x |U|, R2 {:.4f}: {:.1f} us per expert and layer",
             options_.batch, by_experts_.a, by_experts_.b, by_experts_.r2, expert_us);
  if (expert_us > 0) fmt::print(", {:.1f} GB/s", static_cast<double>(widened_.expert_bytes) / expert_us / 1e3);
  fmt::print("\nat |U| = {}:       T = {:.2f} ms + {:.3f} ms x batch, R2 {:.4f}\n", model_->info().experts.top_k,
             by_size_.a, by_size_.b, by_size_.r2);
}

Json line_json(const LineFit& fit) { return {{"a_ms", fit.a}, {"b_ms", fit.b}, {"r2", fit.r2}}; }

void StepBench::print_json() const {
  Json out = {{"bench", "step"},
              {"machine", machine_json(machine_)},
              {"model", options_.model},
              {"factor", options_.factor},
              {"type", options_.type},
              {"expert_bytes", widened_.expert_bytes},
              {"layers", model_->info().layers},
              {"threads", options_.threads},
              {"features", llama_features()},
              {"rounds", rounds_},
              {"time", options_.time()},
              {"batch", options_.batch},
              {"by_experts", line_json(by_experts_)},
              {"by_batch", line_json(by_size_)}};
  for (const StepBatch& batch : batches_) {
    out["batches"].push_back({{"series", batch.by_size ? "batch" : "experts"},
                              {"batch", batch.sources.size()},
                              {"distinct_experts", batch.distinct},
                              {"median_ms", batch.median_ms()},
                              {"low_quartile_ms", quantile(batch.ms, 0.25)},
                              {"high_quartile_ms", quantile(batch.ms, 0.75)}});
  }
  fmt::print("{}\n", dump_json(out, 2));
}

Status StepBench::draw() const {
  const auto chart_of = [&](bool by_size, const LineFit& fit) {
    Chart chart;
    chart.title = by_size ? fmt::format("Step time at {} distinct experts a layer", model_->info().experts.top_k)
                          : fmt::format("Step time at batch {}", options_.batch);
    chart.x_label = by_size ? "sequences in the batch" : "distinct experts a layer, mean";
    chart.y_label = fmt::format("ms of {} time, median", options_.time());
    chart.note = fmt::format("{} widened x{}; {}", options_.model, options_.factor, machine_text(machine_));
    chart.x_from_zero = chart.y_from_zero = true;
    Series points{.name = "measured", .x = {}, .y = {}, .line = false};
    double most = 0;
    for (const StepBatch& batch : batches_) {
      if (batch.by_size != by_size) continue;
      points.x.push_back(by_size ? static_cast<double>(batch.sources.size()) : batch.distinct);
      points.y.push_back(batch.median_ms());
      most = std::max(most, points.x.back());
    }
    chart.series.push_back(std::move(points));
    chart.series.push_back({.name = fmt::format("{:.2f} + {:.3f} x, R2 {:.3f}", fit.a, fit.b, fit.r2),
                            .x = {0, most},
                            .y = {fit.a, fit.a + fit.b * most},
                            .markers = false});
    return chart;
  };
  if (Status saved = save_svg(options_.output.plots, "step-experts", line_chart(chart_of(false, by_experts_))); !saved)
    return saved;
  return save_svg(options_.output.plots, "step-batch", line_chart(chart_of(true, by_size_)));
}

Status StepBench::run() {
  if (Status done = open_model(); !done) return done;
  if (Status done = read_prompts(); !done) return done;
  if (Status done = prefill(); !done) return done;
  choose_batches();
  if (Status done = measure(); !done) return done;
  fit();
  if (options_.output.json) {
    print_json();
  } else {
    print_text();
  }
  return options_.output.plots.empty() ? Status{} : draw();
}

}  // namespace

int bench_step(Args args) {
  StepBenchOptions options;
  ConfigSchema schema("bench step [--factor F] [--batch B]",
                      "Times one worker's decode steps on a widened model: against the batch size at a fixed number of "
                      "distinct experts, and against that number at a fixed batch size.");
  schema.text("model", &options.model,
              "GGUF file of an MoE model, which is widened into a temporary file; default: the bundled one");
  schema.text("prompts", &options.prompts, "JSONL with \"prompt\" and \"domain\"; default: the bundled ones");
  schema.integer("factor", &options.factor, 1, 64, "how much wider the experts become: a power of two");
  schema.choice("type", &options.type, engine::widened_types(), "type of the experts' weights");
  schema.integer("batch", &options.batch, 2, kMostSlots, "sequences of the batches with different prompts");
  schema.integer("threads", &options.threads, 0, 1024, "0: one per core");
  schema.integer("seconds", &options.seconds, 1, 86'400, "time to measure for; three rounds at least");
  schema.integer("seed", &options.seed, 0, 1LL << 40, "of which prompts meet");
  schema.flag("cpu_time", &options.cpu_time, "processor time, not elapsed time: for a machine that is not idle");
  options.output.declare(schema, /*draws=*/true);
  if (const auto status = parse_bench_flags(schema, args)) return *status;
  const std::string root = find_root();
  if (options.model.empty()) options.model = root + "/models/kindred-tiny-moe-q8_0.gguf";
  if (options.prompts.empty()) options.prompts = root + "/data/prompts/calibration.jsonl";
  make_openmp_wait_passively();
  if (const Status done = StepBench(options).run(); !done) return fail("bench step", done.error());
  return 0;
}

}  // namespace kindred::cli

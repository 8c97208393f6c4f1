// `kindred bench ranks`: what expert ranks cost and what a migration costs.
//
// The same file is loaded without ranks, with one rank (with and without counting the traffic) and with two. In
// each round all decode the same tokens, one after the other in an order that changes, so that what the machine
// does besides hits all alike; figures are medians over rounds of the ratio within a round. Then two ranks decode
// while all their experts change places.

#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <thread>

#include "base/rng.h"
#include "cli/bench.h"
#include "cli/local_cluster.h"
#include "cli/openmp.h"
#include "cli/process.h"
#include "cli/terminal.h"
#include "engine/expert_ranks.h"
#include "engine/llama_session.h"
#include "engine/widen.h"

namespace kindred::cli {
namespace {

using engine::ExpertPlacement;
using engine::LlamaSession;
using engine::SequenceId;

constexpr uint32_t kRanksPromptTokens = 32;
constexpr uint32_t kRanksMostBatch = 16;
constexpr uint32_t kRanksMovesPerStep = 1;  // a worker's default

struct RanksBenchOptions {
  std::string model;
  std::string type = "f16";
  int64_t factor = 0, threads = 0, seconds = 30, steps = 16, seed = 1;
  bool cpu_time = false;
  BenchOutput output;
};

struct RanksVariant {
  const char* name;
  uint32_t ranks;
  bool count;
  std::unique_ptr<engine::Model> model = {};
  std::unique_ptr<LlamaSession> session = {};
  std::vector<std::vector<double>> tokens_per_s = {};  // by batch size, one a round
};

class RanksBench {
 public:
  explicit RanksBench(const RanksBenchOptions& options)
      : options_(options), rng_(static_cast<uint64_t>(options.seed)) {}
  Status run();

 private:
  Result<std::string> model_path();
  Status open();
  Status prefill(LlamaSession& session);
  Result<double> decode(RanksVariant& variant, uint32_t batch);
  Status measure();
  Status migrate();
  void print_text() const;
  void print_json() const;
  engine::Token token() { return static_cast<engine::Token>(rng_.below(4000) + 10); }

  RanksBenchOptions options_;
  const Machine machine_ = this_machine();
  Rng rng_;
  std::optional<ScratchDir> scratch_;
  engine::WidenReport widened_;
  std::vector<uint32_t> batches_ = {1, 8, kRanksMostBatch};
  std::vector<RanksVariant> variants_;
  size_t rounds_ = 0;
  std::vector<double> before_ms_, during_ms_;
  engine::MigrationProgress migration_;
};

Result<std::string> RanksBench::model_path() {
  if (options_.factor == 0) return options_.model;
  auto scratch = ScratchDir::make();
  if (!scratch) return std::move(scratch).error();
  scratch_.emplace(std::move(*scratch));
  std::string path = scratch_->path() + "/widened.gguf";
  const auto report = engine::widen_gguf(options_.model, path,
                                         {.factor = static_cast<uint32_t>(options_.factor), .type = options_.type});
  if (!report) return report.error();
  widened_ = *report;
  return path;
}

Status RanksBench::open() {
  auto path = model_path();
  if (!path) return std::move(path).error();
  if (options_.threads == 0) options_.threads = std::max(1U, std::thread::hardware_concurrency());
  variants_.push_back({"off", 0, true});
  variants_.push_back({"1 rank, not counted", 1, false});
  variants_.push_back({"1 rank", 1, true});
  variants_.push_back({"2 ranks", 2, true});
  for (RanksVariant& v : variants_) {
    auto model = engine::Model::load(*path, {},
                                     {.ranks = v.ranks,
                                      .threads = static_cast<uint32_t>(options_.threads),
                                      .moves_per_step = kRanksMovesPerStep,
                                      .count = v.count});
    if (!model) return std::move(model).error();
    v.model = std::move(*model);
    auto session = LlamaSession::open(*v.model, {.kv_tokens = 4096,
                                                 .batch_tokens = 64,
                                                 .sequences = 2 * kRanksMostBatch,
                                                 .threads = static_cast<uint32_t>(options_.threads),
                                                 .capture_experts = false});
    if (!session) return std::move(session).error();
    v.session = std::move(*session);
    v.tokens_per_s.resize(batches_.size());
    rng_ = Rng(static_cast<uint64_t>(options_.seed));  // the same prompts for all
    if (Status done = prefill(*v.session); !done) return done;
  }
  return {};
}

Status RanksBench::prefill(LlamaSession& session) {
  for (uint32_t s = 0; s < kRanksMostBatch; ++s) {
    session.begin();
    for (uint32_t i = 0; i < kRanksPromptTokens; ++i) {
      session.add(token(), i, static_cast<SequenceId>(s), i + 1 == kRanksPromptTokens);
    }
    if (Status done = session.evaluate(); !done) return done;
  }
  return {};
}

// Tokens per second over `steps` steps of copies of the first `batch` prompts.
Result<double> RanksBench::decode(RanksVariant& variant, uint32_t batch) {
  LlamaSession& session = *variant.session;
  const TimeBy by = options_.cpu_time ? TimeBy::kProcessor : TimeBy::kWall;
  const auto sequence = [](uint32_t i) { return static_cast<SequenceId>(kRanksMostBatch + i); };
  for (uint32_t i = 0; i < batch; ++i) session.copy_all(static_cast<SequenceId>(i), sequence(i));
  Status failed;
  const double begin_s = time_now_s(by);
  for (int64_t step = 0; step < options_.steps && failed.ok(); ++step) {
    session.begin();
    for (uint32_t i = 0; i < batch; ++i) {
      session.add(token(), kRanksPromptTokens + static_cast<uint32_t>(step), sequence(i), true);
    }
    failed = session.evaluate();
    (void)session.logits(0);  // waits for them
  }
  const double took_s = time_now_s(by) - begin_s;
  for (uint32_t i = 0; i < batch; ++i) session.remove(sequence(i), 0);
  if (!failed.ok()) return failed.error();
  return static_cast<double>(batch) * static_cast<double>(options_.steps) / took_s;
}

Status RanksBench::measure() {
  const double begin_s = time_now_s(TimeBy::kWall);
  constexpr size_t kLeastRounds = 5;
  Progress progress("measuring (s)", static_cast<size_t>(options_.seconds));
  for (; rounds_ < kLeastRounds || time_now_s(TimeBy::kWall) - begin_s < static_cast<double>(options_.seconds);
       ++rounds_) {
    for (size_t b = 0; b < batches_.size(); ++b) {
      for (size_t i = 0; i < variants_.size(); ++i) {
        RanksVariant& v = variants_[(i + rounds_) % variants_.size()];
        rng_ = Rng(static_cast<uint64_t>(options_.seed) + rounds_ * 64 + b);  // the same tokens for all
        const auto speed = decode(v, batches_[b]);
        if (!speed) return speed.error();
        v.tokens_per_s[b].push_back(*speed);
      }
    }
    progress.set(
        static_cast<size_t>(std::min(time_now_s(TimeBy::kWall) - begin_s, static_cast<double>(options_.seconds))));
  }
  return {};
}

// Steps of the largest batch, first without a migration, then while every expert changes places, to and fro.
Status RanksBench::migrate() {
  RanksVariant& two = variants_.back();
  engine::ExpertRanks& ranks = *two.model->ranks();
  const int64_t steps = std::exchange(options_.steps, 1);
  const auto step_ms = [&](std::vector<double>& into) -> Status {
    const auto speed = decode(two, kRanksMostBatch);
    if (!speed) return speed.error();
    into.push_back(1e3 * kRanksMostBatch / *speed);
    return {};
  };
  constexpr size_t kMostSteps = 400;
  for (size_t i = 0; i < kMostSteps; ++i) {
    if (Status done = step_ms(before_ms_); !done) return done;
  }
  while (during_ms_.size() < kMostSteps) {
    if (!ranks.progress().active) {
      ExpertPlacement target = ranks.placement();
      for (uint16_t& rank : target.rank_of) rank = static_cast<uint16_t>(1 - rank);
      if (Status set = ranks.apply(target); !set) return set;
    }
    if (Status done = step_ms(during_ms_); !done) return done;
  }
  migration_ = ranks.progress();
  options_.steps = steps;
  return {};
}

double ranks_ratio(const std::vector<double>& of, const std::vector<double>& to, double q = 0.5) {
  std::vector<double> ratios;
  for (size_t i = 0; i < of.size(); ++i) ratios.push_back(of[i] / to[i]);
  return quantile(std::move(ratios), q);
}

void RanksBench::print_text() const {
  fmt::print("{}\n{}, {}; {} threads; {} time, {} rounds of {} steps, in turns\n\n", machine_text(machine_),
             options_.model,
             options_.factor == 0 ? "as it is"
                                  : fmt::format("widened x{} ({}): {:.2f} MB an expert", options_.factor, options_.type,
                                                static_cast<double>(widened_.expert_bytes) / 1e6),
             options_.threads, options_.cpu_time ? "processor" : "wall", rounds_, options_.steps);
  Table table({"batch", "ranks", "tokens/s", "against off", "quartiles"});
  for (size_t b = 0; b < batches_.size(); ++b) {
    const std::vector<double>& off = variants_[0].tokens_per_s[b];
    for (const RanksVariant& v : variants_) {
      const std::vector<double>& speed = v.tokens_per_s[b];
      table.row({fmt::format("{}", batches_[b]), v.name, fmt::format("{:.1f}", quantile(speed, 0.5)),
                 fmt::format("{:.3f}", ranks_ratio(speed, off)),
                 fmt::format("{:.3f} .. {:.3f}", ranks_ratio(speed, off, 0.25), ranks_ratio(speed, off, 0.75))});
    }
  }
  fmt::print("{}\n", table.text());
  fmt::print(
      "moving all experts of 2 ranks to and fro, batch {}: {} moves, {:.1f} MB; a step p50 {:.2f} -> {:.2f} ms, "
      "p99 {:.2f} -> {:.2f} ms\n",
      kRanksMostBatch, migration_.total_moves, static_cast<double>(migration_.total_bytes) / 1e6,
      quantile(before_ms_, 0.5), quantile(during_ms_, 0.5), quantile(before_ms_, 0.99), quantile(during_ms_, 0.99));
}

void RanksBench::print_json() const {
  Json out = {{"bench", "ranks"},       {"machine", machine_json(machine_)}, {"factor", options_.factor},
              {"type", options_.type},  {"threads", options_.threads},       {"rounds", rounds_},
              {"decode", Json::array()}};
  for (size_t b = 0; b < batches_.size(); ++b) {
    for (const RanksVariant& v : variants_) {
      out["decode"].push_back({{"batch", batches_[b]},
                               {"ranks", v.ranks},
                               {"counted", v.count},
                               {"tokens_per_s", quantile(v.tokens_per_s[b], 0.5)},
                               {"against_off", ranks_ratio(v.tokens_per_s[b], variants_[0].tokens_per_s[b])}});
    }
  }
  out["migration"] = {{"moves", migration_.total_moves},
                      {"bytes", migration_.total_bytes},
                      {"before_p50_ms", quantile(before_ms_, 0.5)},
                      {"before_p99_ms", quantile(before_ms_, 0.99)},
                      {"during_p50_ms", quantile(during_ms_, 0.5)},
                      {"during_p99_ms", quantile(during_ms_, 0.99)}};
  fmt::print("{}\n", dump_json(out, 2));
}

Status RanksBench::run() {
  if (Status done = open(); !done) return done;
  if (Status done = measure(); !done) return done;
  if (Status done = migrate(); !done) return done;
  if (options_.output.json) {
    print_json();
  } else {
    print_text();
  }
  return {};
}

}  // namespace

int bench_ranks(Args args) {
  RanksBenchOptions options;
  ConfigSchema schema("bench ranks [--factor F]",
                      "Decode speed with expert ranks against none, and the steps of a worker whose experts move.");
  schema.text("model", &options.model, "GGUF file of an MoE model; default: the bundled one");
  schema.integer("factor", &options.factor, 0, 64, "widen its experts, into a temporary file; 0: as they are");
  schema.choice("type", &options.type, engine::widened_types(), "type of the widened experts' weights");
  schema.integer("threads", &options.threads, 0, 1024, "of the engine, and of all ranks together; 0: one per core");
  schema.integer("seconds", &options.seconds, 1, 86'400, "time to measure for; five rounds at least");
  schema.integer("steps", &options.steps, 1, 1024, "steps of one measurement");
  schema.integer("seed", &options.seed, 0, 1LL << 40, "of the tokens");
  schema.flag("cpu_time", &options.cpu_time, "processor time, not elapsed time: for a machine that is not idle");
  options.output.declare(schema, /*draws=*/false);
  if (const auto status = parse_bench_flags(schema, args)) return *status;
  if (options.model.empty()) options.model = find_root() + "/models/kindred-tiny-moe-q8_0.gguf";
  make_openmp_wait_passively();
  if (const Status done = RanksBench(options).run(); !done) return fail("bench ranks", done.error());
  return 0;
}

}  // namespace kindred::cli

// `kindred bench engine`: decode tokens/s of our step loop against llama.cpp's own batched loop, on the same
// model, threads, prompts and tokens, in one run.
//
// Variants are measured in turn, round after round, so that whatever else the machine does hits all alike;
// ratios are taken within a round. Ours: a whole Engine, sampling and events included. llama.cpp's: batches
// of tokens that are known beforehand, nothing sampled (llama_loop.h), once with llama.cpp's defaults and
// once with our KV types, so that a difference can be attributed: settings, our loop, capture.

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <thread>

#include "base/clock.h"
#include "cli/bench.h"
#include "cli/llama_loop.h"
#include "cli/local_cluster.h"
#include "cli/openmp.h"
#include "cli/plot.h"
#include "cli/prompts.h"
#include "cli/terminal.h"
#include "engine/engine.h"

namespace kindred::cli {
namespace {

using engine::Token;

constexpr uint32_t kPromptTokens = 32;
constexpr uint32_t kSteps = 32;  // measured
constexpr uint32_t kSlack = 16;  // steps by which the first job may be ahead of the last
constexpr auto kSequences = std::to_array<uint32_t>({1, 8, 16});
constexpr uint32_t kMostBatch = kSequences.back();

struct EngineBenchOptions {
  std::string model;
  std::string prompts;
  int64_t threads = 0, kv_tokens = 16'384, seconds = 60;
  bool cpu_time = false, full_cache = true;
  BenchOutput output;

  TimeBy time() const { return cpu_time ? TimeBy::kProcessor : TimeBy::kWall; }
};

struct Work {
  std::vector<std::vector<Token>> prompts, tokens;  // [kMostBatch]
};

// Watches the jobs of one run: all tokens, and when the last job's come.
class Stopwatch {
 public:
  Stopwatch(size_t jobs, TimeBy time) : time_(time), tokens_(jobs), open_(jobs) {}

  void take(size_t job, const engine::Event& event) {
    const std::lock_guard lock(mutex_);
    if (const auto* output = std::get_if<engine::Output>(&event)) {
      tokens_[job].push_back(output->token);
      if (job + 1 < tokens_.size()) return;
      if (tokens_[job].size() == 1) begin_s_ = time_now_s(time_);
      if (tokens_[job].size() == kSteps + 1) {
        end_s_ = time_now_s(time_);
        // Then every step so far had all sequences in it.
        all_ran_ = open_ == tokens_.size();
      }
    } else if (const auto* error = std::get_if<Error>(&event)) {
      if (failed_.ok()) failed_ = *error;
      --open_;
    } else if (std::holds_alternative<engine::Finished>(event)) {
      --open_;
    }
    if (open_ == 0) over_.notify_one();
  }

  Result<double> wait() {
    std::unique_lock lock(mutex_);
    over_.wait(lock, [this] { return open_ == 0; });
    if (!failed_.ok()) return failed_.error();
    if (!all_ran_) return Error{ErrorCode::kInternal, "the sequences did not run together"};
    return end_s_ - begin_s_;
  }
  std::vector<std::vector<Token>> tokens() const { return tokens_; }

 private:
  const TimeBy time_;
  std::mutex mutex_;
  std::condition_variable over_;
  std::vector<std::vector<Token>> tokens_;
  size_t open_;
  double begin_s_ = 0, end_s_ = 0;
  bool all_ran_ = false;
  Status failed_;
};

engine::Job bench_job(std::vector<Token> prompt, uint32_t max_tokens, bool prefix_cache) {
  engine::Job job;
  job.prompt = std::move(prompt);
  job.max_tokens = max_tokens;
  job.prefix_cache = prefix_cache;
  job.sampling.temperature = 0;
  job.sampling.ignore_eos = true;
  job.choices.resize(1);
  return job;
}

// A variant's run returns the seconds of kSteps steps of `batch` sequences.
class Variant {
 public:
  explicit Variant(std::string name) : name_(std::move(name)) {}
  virtual ~Variant() = default;
  virtual Result<double> run(const Work& work, size_t batch) = 0;
  const std::string& name() const { return name_; }

 private:
  std::string name_;
};

class OurVariant final : public Variant {
 public:
  using Variant::Variant;

  Status open(const engine::Model& model, const EngineBenchOptions& options, bool capture, bool full) {
    engine::EngineOptions wanted;
    wanted.kv_tokens = static_cast<uint32_t>(options.kv_tokens);
    wanted.threads = static_cast<uint32_t>(options.threads);
    wanted.capture_experts = capture;
    time_ = options.time();
    auto engine = engine::Engine::start(model, wanted, clock_, metrics_);
    if (!engine) return std::move(engine).error();
    engine_ = std::move(*engine);
    return full ? fill(model) : Status{};
  }

  Result<double> run(const Work& work, size_t batch) override {
    auto watch = std::make_shared<Stopwatch>(batch, time_);
    for (size_t i = 0; i < batch; ++i) {
      engine::Job job = bench_job(work.prompts[i], kSteps + kSlack, false);
      job.on_event = [watch, i](const engine::Event& event) { watch->take(i, event); };
      if (auto submitted = engine_->submit(std::move(job)); !submitted) return std::move(submitted).error();
    }
    auto took_s = watch->wait();
    tokens_ = watch->tokens();
    return took_s;
  }
  const std::vector<std::vector<Token>>& tokens() const { return tokens_; }

 private:
  // Prompts of no common prefix, until the cache holds all but what a run needs.
  Status fill(const engine::Model& model) {
    constexpr uint32_t kLength = 480;
    const uint32_t room = engine_->options().kv_tokens;
    const uint32_t wanted = room - std::min(room, kMostBatch * (kPromptTokens + kSteps + kSlack) + kLength);
    for (uint32_t i = 0; i * kLength < wanted; ++i) {
      std::vector<Token> prompt(kLength);
      for (uint32_t t = 0; t < kLength; ++t)
        prompt[t] = static_cast<Token>((i * 7919 + t * 31 + 1) % model.info().vocabulary);
      engine::Job job = bench_job(std::move(prompt), 1, true);
      std::mutex mutex;
      std::condition_variable over;
      bool done = false;
      job.on_event = [&](const engine::Event& event) {
        if (!std::holds_alternative<engine::Finished>(event) && !std::holds_alternative<Error>(event)) return;
        const std::lock_guard lock(mutex);
        done = true;
        over.notify_one();
      };
      if (auto submitted = engine_->submit(std::move(job)); !submitted) return std::move(submitted).error();
      std::unique_lock lock(mutex);
      over.wait(lock, [&] { return done; });
    }
    return {};
  }

  const SystemClock clock_;
  TimeBy time_ = TimeBy::kWall;
  Registry metrics_;
  std::unique_ptr<engine::Engine> engine_;
  std::vector<std::vector<Token>> tokens_;
};

class LlamaVariant final : public Variant {
 public:
  using Variant::Variant;

  Status open(const engine::Model& model, const EngineBenchOptions& options, LlamaSettings settings, bool full) {
    const auto kv_tokens = static_cast<uint32_t>(options.kv_tokens);
    auto loop = LlamaLoop::open(model, {.settings = settings,
                                        .kv_tokens = kv_tokens,
                                        .sequences = kMostBatch,
                                        .threads = static_cast<uint32_t>(options.threads),
                                        .time = options.time()});
    if (!loop) return std::move(loop).error();
    loop_ = std::move(*loop);
    if (!full) return {};
    return loop_->fill(kv_tokens - std::min(kv_tokens, kMostBatch * (kPromptTokens + kSteps + kSlack) + 480));
  }

  Result<double> run(const Work& work, size_t batch) override {
    return loop_->run(std::span(work.prompts).first(batch), std::span(work.tokens).first(batch), kSteps);
  }
  LlamaLoop& loop() { return *loop_; }

 private:
  std::unique_ptr<LlamaLoop> loop_;
};

enum Which : size_t {
  kStockLoop,
  kOneStreamLoop,
  kManyIdsLoop,
  kSameLoop,
  kOurs,
  kOursBlind,
  kSameLoopFull,
  kOursFull,
  kOursBlindFull,
  kVariants
};

// The variant that each one is compared with, for a ratio of its own.
struct Comparison {
  Which which, to;
  const char* name;
  const char* means;
};
constexpr auto kComparisons = std::to_array<Comparison>({
    {kOurs, kStockLoop, "kindred / llama.cpp", "all"},
    {kOneStreamLoop, kStockLoop, "llama.cpp: one stream / one per sequence", "settings"},
    {kManyIdsLoop, kOneStreamLoop, "llama.cpp: 256 sequence ids / 16, one stream", "settings"},
    {kSameLoop, kManyIdsLoop, "llama.cpp: our KV types / its defaults, 256 ids", "settings"},
    {kOursBlind, kSameLoop, "kindred without capture / llama.cpp with our KV settings", "our loop"},
    {kOurs, kOursBlind, "kindred: capture on / off", "capture"},
    {kOursBlindFull, kSameLoopFull, "full cache: kindred without capture / llama.cpp with our KV settings", "our loop"},
    {kOursFull, kOursBlindFull, "full cache: kindred, capture on / off", "capture"},
    {kOursFull, kOurs, "kindred: full / empty cache", "full cache"},
});

using Rates = std::array<std::vector<double>, kVariants>;  // tokens/s, one per round

class EngineBench {
 public:
  explicit EngineBench(const EngineBenchOptions& options) : options_(options) {}
  Status run();

 private:
  Status prepare();
  Status check_tokens();
  Status measure();
  void print_text() const;
  void print_json() const;
  Status draw() const;
  std::vector<double> ratios(size_t b, const Comparison& comparison) const;

  EngineBenchOptions options_;
  const Machine machine_ = this_machine();
  std::unique_ptr<engine::Model> model_;
  std::vector<std::unique_ptr<Variant>> variants_;
  Work work_;
  double agreed_ = 0;
  std::array<Rates, kSequences.size()> rates_;
};

Status EngineBench::prepare() {
  if (options_.threads == 0) options_.threads = std::max(1U, std::thread::hardware_concurrency());
  auto prompts = load_prompts(options_.prompts);
  if (!prompts) return std::move(prompts).error();
  auto model = engine::Model::load(options_.model);
  if (!model) return std::move(model).error();
  model_ = std::move(*model);
  for (const Prompt& prompt : *prompts) {
    std::vector<Token> tokens = model_->tokenize(prompt.text, false);
    if (tokens.size() < kPromptTokens) continue;
    tokens.resize(kPromptTokens);
    work_.prompts.push_back(std::move(tokens));
    if (work_.prompts.size() == kMostBatch) break;
  }
  if (work_.prompts.size() < kMostBatch) {
    return invalid(
        fmt::format("{}: {} prompts of at least {} tokens are needed", options_.prompts, kMostBatch, kPromptTokens),
        "prompts");
  }
  Progress progress("preparing", kVariants);
  const auto add = [&](auto variant, auto... how) -> Status {
    if (Status opened = variant->open(*model_, options_, how...); !opened) return opened;
    variants_.push_back(std::move(variant));
    progress.set(variants_.size());
    return {};
  };
  const auto ours = [](const char* name) { return std::make_unique<OurVariant>(name); };
  const auto llama = [](const char* name) { return std::make_unique<LlamaVariant>(name); };
  // In the order of Which.
  for (const bool full : {false, true}) {
    const std::string cache = full ? ", full cache" : "";
    if (!full) {
      if (Status s = add(llama("llama.cpp"), LlamaSettings::kStock, false); !s) return s;
      if (Status s = add(llama("llama.cpp, one stream"), LlamaSettings::kOneStream, false); !s) return s;
      if (Status s = add(llama("llama.cpp, one stream, 256 ids"), LlamaSettings::kManyIds, false); !s) return s;
    } else if (!options_.full_cache) {
      break;
    }
    if (Status s = add(llama(("llama.cpp, our KV settings" + cache).c_str()), LlamaSettings::kKindred, full); !s)
      return s;
    if (Status s = add(ours(("kindred" + cache).c_str()), true, full); !s) return s;
    if (Status s = add(ours(("kindred, no capture" + cache).c_str()), false, full); !s) return s;
  }
  return check_tokens();
}

// The tokens that all will evaluate are those that we generate; llama.cpp's loop must find them likeliest too.
Status EngineBench::check_tokens() {
  auto& ours = static_cast<OurVariant&>(*variants_[kOurs]);
  if (auto done = ours.run(work_, kMostBatch); !done) return std::move(done).error();
  work_.tokens = ours.tokens();
  auto done =
      static_cast<LlamaVariant&>(*variants_[kSameLoop]).loop().run(work_.prompts, work_.tokens, kSteps, &agreed_);
  if (!done) return std::move(done).error();
  return {};
}

Status EngineBench::measure() {
  const SystemClock clock;
  const MonotonicTime begin = clock.now();
  Progress progress("measuring (s)", static_cast<size_t>(options_.seconds));
  for (size_t round = 0;; ++round) {
    for (size_t b = 0; b < kSequences.size(); ++b) {
      for (size_t i = 0; i < variants_.size(); ++i) {
        const size_t v = (i + round) % variants_.size();
        const auto took_s = variants_[v]->run(work_, kSequences[b]);
        if (!took_s) return took_s.error();
        rates_[b][v].push_back(kSteps * kSequences[b] / *took_s);
        progress.set(
            static_cast<size_t>(std::min(seconds_between(begin, clock.now()), static_cast<double>(options_.seconds))));
      }
    }
    // A round that would not end in time is not begun.
    const double spent_s = seconds_between(begin, clock.now());
    if (spent_s * static_cast<double>(round + 2) / static_cast<double>(round + 1) >
        static_cast<double>(options_.seconds))
      break;
  }
  return {};
}

std::vector<double> EngineBench::ratios(size_t b, const Comparison& comparison) const {
  std::vector<double> out;
  const auto &of = rates_[b][comparison.which], &to = rates_[b][comparison.to];
  for (size_t round = 0; round < of.size(); ++round) out.push_back(of[round] / to[round]);
  return out;
}

void EngineBench::print_text() const {
  fmt::print("{}\n{} ({}), {} threads; {}\n", machine_text(machine_), options_.model, model_->info().description,
             options_.threads, llama_features());
  fmt::print("prompts of {} tokens, {} steps a run, {} rounds, {} KV cells; the loops agree on {:.1f} % of tokens\n\n",
             kPromptTokens, kSteps, rates_[0][0].size(), options_.kv_tokens, 100 * agreed_);
  Table table({options_.cpu_time ? "decode tokens/s of processor time" : "decode tokens/s", "1 sequence", "8 sequences",
               "16 sequences"});
  for (size_t v = 0; v < variants_.size(); ++v) {
    std::vector<std::string> row{variants_[v]->name()};
    for (const Rates& rates : rates_) {
      row.push_back(fmt::format("{:.0f} ({:.0f}-{:.0f})", quantile(rates[v], 0.5), quantile(rates[v], 0.25),
                                quantile(rates[v], 0.75)));
    }
    table.row(std::move(row));
  }
  fmt::print("{}\n", table.text());
  Table shares({"ratio within a round", "1 sequence", "8 sequences", "16 sequences"});
  for (const Comparison& comparison : kComparisons) {
    if (comparison.which >= variants_.size()) continue;
    std::vector<std::string> row{comparison.name};
    for (size_t b = 0; b < kSequences.size(); ++b) {
      const auto of = ratios(b, comparison);
      row.push_back(fmt::format("{:.3f} ({:.3f}-{:.3f})", quantile(of, 0.5), quantile(of, 0.25), quantile(of, 0.75)));
    }
    shares.row(std::move(row));
  }
  fmt::print("{}  medians (quartiles)\n", shares.text());
}

void EngineBench::print_json() const {
  Json out = {{"bench", "engine"},
              {"machine", machine_json(machine_)},
              {"model", options_.model},
              {"threads", options_.threads},
              {"features", llama_features()},
              {"kv_tokens", options_.kv_tokens},
              {"steps", kSteps},
              {"prompt_tokens", kPromptTokens},
              {"rounds", rates_[0][0].size()},
              {"tokens_agreed", agreed_},
              {"time", options_.cpu_time ? "processor" : "wall"}};
  for (size_t b = 0; b < kSequences.size(); ++b) {
    Json entry = {{"sequences", kSequences[b]}};
    for (size_t v = 0; v < variants_.size(); ++v) entry["tokens_per_s"][variants_[v]->name()] = rates_[b][v];
    for (const Comparison& comparison : kComparisons) {
      if (comparison.which >= variants_.size()) continue;
      const auto of = ratios(b, comparison);
      entry["ratios"][comparison.name] = {{"median", quantile(of, 0.5)},
                                          {"low_quartile", quantile(of, 0.25)},
                                          {"high_quartile", quantile(of, 0.75)},
                                          {"of", comparison.means}};
    }
    out["results"].push_back(std::move(entry));
  }
  fmt::print("{}\n", dump_json(out, 2));
}

Status EngineBench::draw() const {
  BarChart chart;
  chart.title = "Decode tokens/s: Kindred's step loop and llama.cpp's";
  chart.y_label = options_.cpu_time ? "tokens/s of processor time, median" : "tokens/s, median";
  chart.note = machine_text(machine_);
  for (const uint32_t batch : kSequences) chart.categories.push_back(fmt::format("{} sequences", batch));
  for (size_t v = 0; v < variants_.size(); ++v) {
    chart.groups.push_back(variants_[v]->name());
    std::vector<double> values;
    for (const Rates& rates : rates_) values.push_back(quantile(rates[v], 0.5));
    chart.values.push_back(std::move(values));
  }
  return save_svg(options_.output.plots, "engine", bar_chart(chart));
}

Status EngineBench::run() {
  if (Status done = prepare(); !done) return done;
  if (Status done = measure(); !done) return done;
  if (options_.output.json) {
    print_json();
  } else {
    print_text();
  }
  return options_.output.plots.empty() ? Status{} : draw();
}

}  // namespace

int bench_engine(Args args) {
  EngineBenchOptions options;
  ConfigSchema schema("bench engine [--model MODEL.gguf]",
                      "Decode tokens/s of a worker's step loop against llama.cpp's own batched loop, at 1, 8 and 16 "
                      "sequences, with an empty and a full prefix cache, with and without capture of experts.");
  schema.text("model", &options.model, "GGUF file; default: the bundled model");
  schema.text("prompts", &options.prompts, "JSONL with \"prompt\"; default: the bundled ones");
  schema.integer("threads", &options.threads, 0, 1024, "0: one per core");
  schema.integer("kv_tokens", &options.kv_tokens, 4096, 1 << 24, "KV cells; the full cache leaves room for a run");
  schema.integer("seconds", &options.seconds, 1, 86'400, "time to measure for; one round at least");
  schema.flag("full_cache", &options.full_cache, "measure with a full prefix cache too");
  schema.flag("cpu_time", &options.cpu_time, "processor time, not elapsed time: for a machine that is not idle");
  options.output.declare(schema, /*draws=*/true);
  if (const auto status = parse_bench_flags(schema, args)) return *status;
  const std::string root = find_root();
  if (options.model.empty()) options.model = root + "/models/kindred-tiny-moe-q8_0.gguf";
  if (options.prompts.empty()) options.prompts = root + "/data/prompts/calibration.jsonl";
  make_openmp_wait_passively();
  if (const Status done = EngineBench(options).run(); !done) return fail("bench engine", done.error());
  return 0;
}

}  // namespace kindred::cli

#include "engine/engine.h"

#include <fmt/format.h>

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <variant>
#include <vector>

#include "engine/scheduler.h"

namespace kindred::engine {
namespace {

// llama.cpp has 256 sequence ids per context; running sequences and the prefix cache share them.
constexpr uint32_t kSequenceIds = 256;

Result<EngineOptions> check(EngineOptions options, const ModelInfo& model) {
  if (options.sequences == 0 || options.sequences >= kSequenceIds) {
    return invalid(fmt::format("sequences: {}; accepted: 1..{}", options.sequences, kSequenceIds - 1), "sequences");
  }
  if (options.block_tokens == 0 || options.block_tokens > 255) {
    return invalid(fmt::format("block_tokens: {}; accepted: 1..255", options.block_tokens), "block_tokens");
  }
  constexpr uint32_t kMostTokens = 1U << 30;
  if (options.kv_tokens < 2 || options.kv_tokens > kMostTokens) {
    return invalid(fmt::format("kv_tokens: {}; accepted: 2..{}", options.kv_tokens, kMostTokens), "kv_tokens");
  }
  if (options.context_tokens < 2) return invalid("context_tokens: at least 2", "context_tokens");
  if (options.token_budget == 0 || options.token_budget > kMostTokens) {
    return invalid(fmt::format("token_budget: {}; accepted: 1..{}", options.token_budget, kMostTokens), "token_budget");
  }
  if (model.context_tokens > 0) options.context_tokens = std::min(options.context_tokens, model.context_tokens);
  options.context_tokens = std::min(options.context_tokens, options.kv_tokens);
  // Every running sequence gets its token into every step.
  options.token_budget = std::max(options.token_budget, options.sequences);
  options.token_budget = std::min(options.token_budget, std::max(options.kv_tokens, options.sequences));
  options.prefix_cache = options.prefix_cache && model.partial_removal;
  if (options.threads == 0) options.threads = std::max(1U, std::thread::hardware_concurrency());
  return options;
}

// The longest step there can be must be one that a pacer waits for, or figures would not be the profile's.
Status check_pace(const EngineOptions& options, const ModelInfo& model) {
  if (!options.pace) return {};
  if (options.pace->expert_us > 0 && (model.experts.experts == 0 || !options.capture_experts)) {
    return invalid("pace: the profile has a time per expert, and no experts are seen", "pace");
  }
  const auto longest = options.pace->step_time(options.token_budget, options.sequences, model.experts.experts);
  if (longest <= kLongestPacedStep) return {};
  return invalid(
      fmt::format("pace: with a token_budget of {} a step can take {:.0f} ms by profile '{}'; accepted: at most {} ms",
                  options.token_budget, std::chrono::duration<double, std::milli>(longest).count(), options.pace->name,
                  kLongestPacedStep.count()),
      "pace");
}

struct Cancel {
  JobId id = 0;
};
struct DropPrefixCache {};
struct Submit {
  JobId id = 0;
  Job job;
  MonotonicTime arrived;
};
using Message = std::variant<Submit, Cancel, DropPrefixCache>;

// Jobs that the scheduler has not published yet.
struct Arrivals {
  uint32_t jobs = 0;
  uint64_t prompt_tokens = 0, prefill_tokens = 0;  // prefix hits are not known yet

  void add(const Job& job) {
    ++jobs;
    prompt_tokens += job.prompt.size();
    if (job.kind != Job::Kind::kDecode) prefill_tokens += job.prompt.size();
  }
  void remove(const Arrivals& gone) {
    jobs -= gone.jobs;
    prompt_tokens -= gone.prompt_tokens;
    prefill_tokens -= gone.prefill_tokens;
  }
};

}  // namespace

struct Engine::Impl {
  Impl(const Model& model_of, const EngineOptions& options_of, const Clock& clock_of)
      : model(model_of), options(options_of), clock(clock_of) {}

  Status validate(const Job& job) const;
  static Status validate_start(const Job& job);
  Status validate_handoff(const Job& job) const;
  bool known(Token token) const { return token >= 0 && static_cast<uint32_t>(token) < model.info().vocabulary; }
  void run();
  void apply(Message& message);
  void publish(const Arrivals& applied);
  EngineStats stats_locked() const;

  const Model& model;
  const EngineOptions options;
  const Clock& clock;
  uint64_t kv_bytes = 0;
  std::unique_ptr<Scheduler> scheduler;  // the thread's alone

  mutable std::mutex mutex;
  std::condition_variable wake;
  std::vector<Message> inbox;
  Arrivals arrivals;              // in the inbox, or taken from it and not yet in `published`
  std::deque<uint64_t> received;  // dispatch ids
  std::function<void()> listener;
  bool stopping = false;
  JobId last_id = 0;
  EngineStats published;
  std::thread thread;
};

Engine::Engine(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

Result<std::unique_ptr<Engine>> Engine::start(const Model& model, const EngineOptions& wanted, const Clock& clock,
                                              Registry& metrics) {
  auto checked = check(wanted, model.info());
  if (!checked) return std::move(checked).error();
  const EngineOptions& options = *checked;
  if (Status paced = check_pace(options, model.info()); !paced) return std::move(paced).error();
  // One holder per cached path; more of them than blocks are of no use.
  const uint32_t holders = options.prefix_cache ? std::min(kSequenceIds - options.sequences,
                                                           std::max(1U, options.kv_tokens / options.block_tokens))
                                                : 0;
  auto session = LlamaSession::open(model, {.kv_tokens = options.kv_tokens,
                                            .batch_tokens = options.token_budget,
                                            .sequences = options.sequences + holders,
                                            .threads = options.threads,
                                            .capture_experts = options.capture_experts});
  if (!session) return std::move(session).error();
  std::vector<SequenceId> holder_ids;
  for (uint32_t i = 0; i < holders; ++i) holder_ids.push_back(static_cast<SequenceId>(options.sequences + i));

  auto impl = std::make_unique<Impl>(model, options, clock);
  const KvLayout& layout = session.value()->layout();
  impl->kv_bytes = layout.known ? layout.cell_bytes() * options.kv_tokens : 0;
  impl->scheduler =
      std::make_unique<Scheduler>(model, options, clock, metrics, std::move(session).value(), std::move(holder_ids));
  impl->published = impl->scheduler->stats();
  impl->thread = std::thread(&Impl::run, impl.get());
  return std::unique_ptr<Engine>(new Engine(std::move(impl)));
}

Engine::~Engine() {
  {
    const std::lock_guard lock(impl_->mutex);
    impl_->stopping = true;
  }
  impl_->wake.notify_one();
  impl_->thread.join();
}

Status Engine::Impl::validate(const Job& job) const {
  if (!job.on_event) return invalid("on_event is missing");
  if (job.prompt.empty()) return invalid("the prompt has no tokens", "prompt");
  if (job.max_tokens == 0) return invalid("max_tokens must be at least 1", "max_tokens");
  if (job.prompt.size() + job.max_tokens > options.context_tokens) {
    return invalid(fmt::format("the prompt has {} tokens and max_tokens is {}: together more than the context of {}",
                               job.prompt.size(), job.max_tokens, options.context_tokens),
                   "prompt");
  }
  if (job.choices.empty() || job.choices.size() > options.sequences) {
    return invalid(fmt::format("n is {}; accepted: 1..{}", job.choices.size(), options.sequences), "n");
  }
  const uint64_t cells = job.prompt.size() + uint64_t{job.choices.size()} * (job.max_tokens - 1);
  if (cells > options.kv_tokens) {
    return invalid(
        fmt::format("the prompt and n x max_tokens need {} KV tokens; there are {}", cells, options.kv_tokens),
        "max_tokens");
  }
  if (!std::ranges::all_of(job.prompt, [this](Token token) { return known(token); })) {
    return invalid("the prompt has a token outside the vocabulary", "prompt");
  }
  for (const std::string& stop : job.stop) {
    if (stop.empty()) return invalid("a stop string is empty", "stop");
  }
  return job.kind == Job::Kind::kDecode ? validate_handoff(job) : validate_start(job);
}

Status Engine::Impl::validate_start(const Job& job) {
  const auto fresh = [](const ChoiceState& choice) {
    return choice.generated.empty() && choice.held.empty() && choice.finish == FinishReason::kNone;
  };
  if (!std::ranges::all_of(job.choices, fresh)) return invalid("a choice has begun already", "choices");
  return {};
}

Status Engine::Impl::validate_handoff(const Job& job) const {
  if (!job.kv) return invalid("the KV is missing", "kv");
  bool active = false;
  for (const ChoiceState& choice : job.choices) {
    if (choice.generated.empty() || choice.generated.size() > job.max_tokens ||
        !std::ranges::all_of(choice.generated, [this](Token token) { return known(token); })) {
      return invalid("a choice's generated tokens are not those of a prefill", "choices");
    }
    if (choice.finish != FinishReason::kNone) continue;
    active = true;
    // The KV is that of the prompt, and one token is evaluated per step.
    if (choice.generated.size() != 1 || job.max_tokens == 1) {
      return invalid("a choice that goes on must have exactly one token", "choices");
    }
  }
  if (!active) return invalid("no choice goes on", "choices");
  return {};
}

Result<JobId> Engine::submit(Job job) {
  if (auto valid = impl_->validate(job); !valid) return std::move(valid).error();
  JobId id = 0;
  {
    const std::lock_guard lock(impl_->mutex);
    if (impl_->stopping) return Error{ErrorCode::kUnavailable, "the engine is stopping"};
    if (impl_->published.waiting + impl_->arrivals.jobs >= impl_->options.waiting) {
      return Error{ErrorCode::kExhausted, fmt::format("{} jobs are waiting already", impl_->options.waiting)};
    }
    id = ++impl_->last_id;
    impl_->arrivals.add(job);
    if (job.dispatch) {
      impl_->received.push_back(*job.dispatch);
      if (impl_->received.size() > fleet::kReceived) impl_->received.pop_front();
    }
    impl_->inbox.emplace_back(Submit{id, std::move(job), impl_->clock.now()});
    if (impl_->listener) impl_->listener();
  }
  impl_->wake.notify_one();
  return id;
}

void Engine::cancel(JobId id) {
  {
    const std::lock_guard lock(impl_->mutex);
    impl_->inbox.emplace_back(Cancel{id});
  }
  impl_->wake.notify_one();
}

void Engine::drop_prefix_cache() {
  {
    const std::lock_guard lock(impl_->mutex);
    impl_->inbox.emplace_back(DropPrefixCache{});
  }
  impl_->wake.notify_one();
}

EngineStats Engine::stats() const {
  const std::lock_guard lock(impl_->mutex);
  return impl_->stats_locked();
}

EngineStats Engine::Impl::stats_locked() const {
  EngineStats stats = published;
  stats.waiting += arrivals.jobs;
  stats.waiting_tokens += arrivals.prompt_tokens;
  stats.waiting_prefill_tokens += arrivals.prefill_tokens;
  return stats;
}

fleet::EngineTrace Engine::trace() const {
  const std::lock_guard lock(impl_->mutex);
  const EngineStats stats = impl_->stats_locked();
  fleet::EngineTrace trace;
  trace.rank = impl_->options.rank;
  trace.remaining_prefill_tokens = stats.remaining_prefill_tokens;
  trace.waiting_prefill_tokens = stats.waiting_prefill_tokens;
  trace.running = stats.running_jobs;
  trace.waiting = stats.waiting;
  trace.kv_usage = std::min(1.0, static_cast<double>(stats.kv_used_tokens) / stats.kv_tokens);
  trace.kv_tokens = stats.kv_tokens;
  trace.received.assign(impl_->received.begin(), impl_->received.end());
  return trace;
}

void Engine::on_change(std::function<void()> listener) {
  const std::lock_guard lock(impl_->mutex);
  impl_->listener = std::move(listener);
}

uint64_t Engine::kv_bytes() const { return impl_->kv_bytes; }

const EngineOptions& Engine::options() const { return impl_->options; }

void Engine::Impl::run() {
  std::vector<Message> taken;
  for (;;) {
    {
      std::unique_lock lock(mutex);
      wake.wait(lock, [this] { return stopping || !inbox.empty() || !scheduler->idle(); });
      if (stopping) break;
      taken.swap(inbox);
    }
    Arrivals applied;
    for (Message& message : taken) {
      if (const auto* submit = std::get_if<Submit>(&message)) applied.add(submit->job);
      apply(message);
    }
    taken.clear();
    // Before the step, which may be long: how much of it the prefix cache has is known now.
    if (applied.jobs > 0) publish(applied);
    scheduler->step();
    publish({});
  }
  // Nothing is added any more: submit refuses.
  for (Message& message : inbox) apply(message);
  scheduler->cancel_all();
}

void Engine::Impl::publish(const Arrivals& applied) {
  const EngineStats now = scheduler->stats();
  const std::lock_guard lock(mutex);
  published = now;
  arrivals.remove(applied);
  if (listener) listener();
}

void Engine::Impl::apply(Message& message) {
  if (auto* submit = std::get_if<Submit>(&message)) {
    scheduler->submit(submit->id, std::move(submit->job), submit->arrived);
  } else if (const auto* cancel = std::get_if<Cancel>(&message)) {
    scheduler->cancel(cancel->id);
  } else {
    scheduler->drop_prefix_cache();
  }
}

}  // namespace kindred::engine

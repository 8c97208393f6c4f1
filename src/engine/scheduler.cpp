#include "engine/scheduler.h"

#include <algorithm>

namespace kindred::engine {
namespace {

std::vector<Token> end_tokens(const Model& model) {
  std::vector<Token> tokens;
  for (uint32_t token = 0; token < model.info().vocabulary; ++token) {
    if (model.is_end(static_cast<Token>(token))) tokens.push_back(static_cast<Token>(token));
  }
  return tokens;
}

}  // namespace

Scheduler::Scheduler(const Model& model, const EngineOptions& options, const Clock& clock, Registry& metrics,
                     std::unique_ptr<LlamaSession> session, std::vector<SequenceId> holders)
    : model_(model),
      options_(options),
      clock_(clock),
      metrics_(metrics, model.info().name, options.rank),
      session_(std::move(session)),
      cache_(*session_, options.block_tokens, std::move(holders),
             session_->captures() ? model.info().experts.cells() : 0),
      cache_enabled_(options.prefix_cache),
      end_tokens_(end_tokens(model)),
      queue_(options.queue) {
  if (options.pace) pacer_.emplace(*options.pace, clock, sleeper_, metrics);
  for (uint32_t id = options.sequences; id-- > 0;) free_sequences_.push_back(static_cast<SequenceId>(id));
  publish_gauges();
}

void Scheduler::submit(JobId id, Job job, MonotonicTime arrived) {
  enqueue({.id = id, .job = std::move(job), .arrived = arrived});
}

void Scheduler::cancel(JobId id) {
  if (waiting_.contains(id)) {
    const Waiting gone = dequeue(id);
    if (resumes(gone.job)) {
      for (const ChoiceState& choice : gone.job.choices) {
        if (choice.finish == FinishReason::kNone) metrics_.finished(FinishReason::kCancelled).add();
      }
    }
    gone.job.on_event(Error{ErrorCode::kCancelled, "cancelled"});
    return;
  }
  const auto running = std::ranges::find(running_, id, &Running::id);
  if (running == running_.end()) return;
  fail(*running, {ErrorCode::kCancelled, "cancelled"});
  sweep();
}

void Scheduler::cancel_all() {
  while (!waiting_.empty()) cancel(waiting_.begin()->first);
  while (!running_.empty()) cancel(running_.back().id);
}

void Scheduler::drop_prefix_cache() {
  metrics_.evicted_blocks.add(cache_.evict(cache_.blocks()));
  publish_gauges();
}

void Scheduler::step() {
  // Who was just preempted would take the room again.
  if (!grow_decodes()) admit();
  if (build_batch()) {
    const MonotonicTime begin = clock_.now();
    if (pacer_) pacer_->begin_step();
    if (const Status done = evaluate(); done) {
      if (pacer_) pace_step();
      handle_results();
    } else {
      fail_batch(done.error());
    }
    metrics_.step_seconds.observe(seconds_between(begin, clock_.now()));
  }
  sweep();
  if (pacer_ && idle()) pacer_->idle();
  publish_gauges();
}

EngineStats Scheduler::stats() const {
  EngineStats stats;
  stats.running = options_.sequences - static_cast<uint32_t>(free_sequences_.size());
  stats.waiting = static_cast<uint32_t>(waiting_.size());
  stats.waiting_prefill_tokens = waiting_prefill_tokens_;
  stats.waiting_tokens = waiting_tokens_;
  for (const Running& running : running_) {
    ++stats.running_jobs;
    stats.remaining_prefill_tokens += running.prompt_tokens() - running.computed;
    for (const Choice& choice : running.choices) {
      if (choice.active() && !choice.state.generated.empty()) stats.remaining_prefill_tokens += choice.to_replay();
    }
  }
  stats.kv_cached_tokens = cache_.evictable() * options_.block_tokens;
  stats.kv_used_tokens = reserved_ + (cache_.blocks() - cache_.evictable()) * options_.block_tokens;
  stats.kv_tokens = options_.kv_tokens;
  stats.generated_tokens = static_cast<uint64_t>(metrics_.generation_tokens.value());
  stats.prefix_queries = static_cast<uint64_t>(metrics_.prefix_queries.value());
  stats.prefix_hits = static_cast<uint64_t>(metrics_.prefix_hits.value());
  return stats;
}

void Scheduler::finish(Running& running) {
  Finished finished;
  finished.usage = usage(running);
  for (const Choice& choice : running.choices) finished.reasons.push_back(choice.state.finish);
  if (!running.rows_lost) finished.decode_counts = std::move(running.decode_counts);
  release(running);
  running.job.on_event(std::move(finished));
}

void Scheduler::fail(Running& running, Error error) {
  release(running);
  for (const Choice& choice : running.choices) {
    if (choice.active()) metrics_.finished(FinishReason::kCancelled).add();
  }
  running.job.on_event(std::move(error));
}

void Scheduler::release(Running& running) {
  for (Choice& choice : running.choices) release_sequence(choice);
  cache_.unpin(running.node);
  running.node = PrefixCache::kRoot;
  reserved_ -= running.reserved;
  running.reserved = 0;
  running.done = true;
}

void Scheduler::release_sequence(Choice& choice) {
  if (choice.sequence < 0) return;
  session_->remove(choice.sequence, 0);
  free_sequences_.push_back(choice.sequence);
  choice.sequence = -1;
}

// While the prompt is computed, it belongs to the first choice that goes on.
SequenceId Scheduler::prompt_sequence(const Running& running) {
  const auto first = std::ranges::find_if(running.choices, [](const Choice& choice) { return choice.sequence >= 0; });
  KINDRED_CHECK(first != running.choices.end());
  return first->sequence;
}

void Scheduler::sweep() {
  std::erase_if(running_, [](const Running& running) { return running.done; });
}

Usage Scheduler::usage(const Running& running) const {
  Usage usage;
  usage.prompt_tokens = running.prompt_tokens();
  usage.cached_tokens = running.cached;
  for (const Choice& choice : running.choices) {
    usage.completion_tokens += static_cast<uint32_t>(choice.state.generated.size());
  }
  return usage;
}

void Scheduler::publish_gauges() {
  const EngineStats now = stats();
  metrics_.running.set(now.running);
  metrics_.waiting.set(now.waiting);
  metrics_.kv_usage.set(static_cast<double>(now.kv_used_tokens) / now.kv_tokens);
  metrics_.kv_cached_tokens.set(now.kv_cached_tokens);
  metrics_.remaining_prefill_tokens.set(static_cast<double>(now.remaining_prefill_tokens));
  metrics_.waiting_prefill_tokens.set(static_cast<double>(now.waiting_prefill_tokens));
}

}  // namespace kindred::engine

#include <algorithm>
#include <bit>

#include "engine/scheduler.h"

namespace kindred::engine {

bool Scheduler::build_batch() {
  session_->begin();
  for (Running& running : running_) {
    running.in_batch = false;
    running.chunk = 0;
    if (!running.done && running.decoding) add_decodes(running);
  }
  batch_decodes_ = session_->batch_size();
  batch_gates_ = false;
  for (Running& running : running_) {
    if (running.done) continue;
    if (!(running.decoding ? add_replay(running) : add_prompt(running))) break;
  }
  return session_->batch_size() > 0;
}

void Scheduler::add_decodes(Running& running) {
  for (Choice& choice : running.choices) {
    choice.replayed = 0;
    choice.decodes = choice.active() && choice.to_replay() == 0;
    if (!choice.decodes) continue;
    const std::vector<Token>& generated = choice.state.generated;
    const auto position = running.prompt_tokens() + choice.in_kv;
    choice.batch_index = session_->add(generated.back(), position, choice.sequence, true);
    running.in_batch = true;
  }
}

bool Scheduler::add_prompt(Running& running) {
  const uint32_t left = options_.token_budget - session_->batch_size();
  running.chunk = std::min(left, running.prompt_tokens() - running.computed);
  if (running.chunk == 0) return false;
  running.in_batch = true;
  batch_gates_ |= running.gates.has_value();
  running.chunk_begin = session_->batch_size();
  const SequenceId sequence = prompt_sequence(running);
  for (uint32_t i = 0; i < running.chunk; ++i) {
    const uint32_t position = running.computed + i;
    const bool last = position + 1 == running.prompt_tokens();
    session_->add(running.job.prompt[position], position, sequence, last);
  }
  return true;
}

bool Scheduler::add_replay(Running& running) {
  for (Choice& choice : running.choices) {
    if (!choice.active() || choice.to_replay() == 0) continue;
    const uint32_t left = options_.token_budget - session_->batch_size();
    choice.replayed = std::min(left, choice.to_replay());
    if (choice.replayed == 0) return false;
    running.in_batch = true;
    for (uint32_t i = choice.in_kv; i < choice.in_kv + choice.replayed; ++i) {
      session_->add(choice.state.generated[i], running.prompt_tokens() + i, choice.sequence, false);
    }
  }
  return true;
}

Status Scheduler::evaluate() {
  Status done = session_->evaluate(batch_gates_);
  if (done.ok() || done.error().code != ErrorCode::kExhausted) return done;
  // The reservations rule this out; if llama.cpp needs more cells than we know, the cache has some.
  log_.warn("no free KV cells; dropping the prefix cache");
  drop_prefix_cache();
  return session_->evaluate(batch_gates_);
}

void Scheduler::fail_batch(const Error& error) {
  log_.error("batch of {} tokens: {}", session_->batch_size(), error.message);
  for (Running& running : running_) {
    if (running.in_batch) fail(running, error);
  }
}

void Scheduler::handle_results() {
  const ExpertCapture* experts = session_->experts();
  if (session_->captures() && experts == nullptr) metrics_.lost_rows.add();
  observe_decode_experts(experts);
  for (Running& running : running_) {
    if (!running.in_batch) continue;
    if (running.decoding) {
      handle_decodes(running, experts);
    } else {
      handle_prompt(running, experts);
    }
  }
}

void Scheduler::handle_decodes(Running& running, const ExpertCapture* experts) {
  count_decode(running, experts);
  for (size_t c = 0; c < running.choices.size(); ++c) {
    Choice& choice = running.choices[c];
    choice.in_kv += choice.replayed;
    metrics_.recomputed_tokens.add(choice.replayed);
    if (!choice.decodes) continue;
    ++choice.in_kv;
    if (!sample(running, c, session_->logits(choice.batch_index))) return;
  }
  if (std::ranges::none_of(running.choices, &Choice::active)) finish(running);
}

void Scheduler::handle_prompt(Running& running, const ExpertCapture* experts) {
  count_prompt(running, experts);
  sum_gates(running, experts);
  const uint32_t end = running.computed + running.chunk;
  if (running.lost_computed > running.computed) {
    metrics_.recomputed_tokens.add(std::min(end, running.lost_computed) - running.computed);
  }
  running.computed = end;
  metrics_.prompt_tokens_evaluated.add(running.chunk);
  if (running.computed < running.prompt_tokens()) return;
  if (running.resumes) {
    resume(running);
  } else {
    finish_prefill(running);
  }
}

void Scheduler::observe_decode_experts(const ExpertCapture* experts) {
  if (batch_decodes_ == 0) return;
  metrics_.count_decode_step(batch_decodes_, experts != nullptr ? distinct_experts(*experts, batch_decodes_) : -1);
}

double Scheduler::distinct_experts(const ExpertCapture& experts, uint32_t tokens) {
  const expert::ExpertShape& shape = experts.shape();
  size_t distinct = 0;
  for (size_t l = 0; l < shape.layers.size(); ++l) {
    expert_set_.assign((shape.experts + 63) / 64, 0);
    for (uint32_t t = 0; t < tokens; ++t) {
      for (const uint16_t e : experts.selected(l, t)) expert_set_[e / 64] |= uint64_t{1} << (e % 64);
    }
    for (const uint64_t word : expert_set_) distinct += static_cast<size_t>(std::popcount(word));
  }
  return static_cast<double>(distinct) / static_cast<double>(shape.layers.size());
}

// All tokens of the batch count, prompts too: the machine reads every expert that any of them selects.
void Scheduler::pace_step() {
  const ExpertCapture* experts = session_->experts();
  const uint32_t tokens = session_->batch_size();
  double distinct = experts == nullptr ? -1 : distinct_experts(*experts, tokens);
  if (!session_->captures()) distinct = 0;  // then the profile has no time per expert
  pacer_->end_step(tokens - batch_decodes_, batch_decodes_, distinct);
}

void Scheduler::count_prompt(Running& running, const ExpertCapture* experts) {
  if (!running.counts || running.rows_lost) return;
  if (experts == nullptr) {
    running.rows_lost = true;
    return;
  }
  const uint32_t block_tokens = options_.block_tokens;
  const uint32_t counted = running.first_block * block_tokens;  // by the cached blocks
  const size_t width = experts->shape().experts;
  for (uint32_t i = 0; i < running.chunk; ++i) {
    const uint32_t position = running.computed + i;
    // A fully cached prompt's last token, evaluated again, is in its block's counts already.
    const bool fresh = position >= counted;
    const uint32_t block = fresh ? position / block_tokens - running.first_block : 0;
    std::vector<uint8_t>* block_counts =
        fresh && block < running.block_counts.size() ? &running.block_counts[block] : nullptr;
    for (size_t l = 0; l < experts->shape().layers.size(); ++l) {
      for (const uint16_t e : experts->selected(l, running.chunk_begin + i)) {
        const size_t cell = l * width + e;
        ++running.suffix->data[cell];
        if (fresh) ++running.counts->data[cell];
        if (block_counts != nullptr) ++(*block_counts)[cell];
      }
    }
    ++running.suffix->tokens;
    if (fresh) ++running.counts->tokens;
  }
}

void Scheduler::sum_gates(Running& running, const ExpertCapture* experts) {
  if (!running.gates) return;
  if (experts == nullptr || !experts->gates_complete()) {
    running.gates.reset();
    return;
  }
  double* sums = running.gates->data();
  for (size_t l = 0; l < experts->shape().layers.size(); ++l, sums += experts->shape().experts) {
    for (uint32_t i = 0; i < running.chunk; ++i) {
      const std::span<const float> gates = experts->gates(l, running.chunk_begin + i);
      for (size_t e = 0; e < gates.size(); ++e) sums[e] += gates[e];
    }
  }
}

void Scheduler::count_decode(Running& running, const ExpertCapture* experts) {
  if (!running.decode_counts || running.rows_lost) return;
  if (experts == nullptr) {
    running.rows_lost = true;
    return;
  }
  for (const Choice& choice : running.choices) {
    if (!choice.decodes) continue;
    for (size_t l = 0; l < experts->shape().layers.size(); ++l) {
      for (const uint16_t e : experts->selected(l, choice.batch_index)) {
        ++running.decode_counts->data[l * experts->shape().experts + e];
      }
    }
    ++running.decode_counts->tokens;
  }
}

// Its prompt is in KV again. The rest was said before it was preempted.
void Scheduler::resume(Running& running) {
  store_prefix(running);
  const SequenceId prompt = prompt_sequence(running);
  for (const Choice& choice : running.choices) {
    if (choice.sequence >= 0 && choice.sequence != prompt) session_->copy_all(prompt, choice.sequence);
  }
  running.counts.reset();
  running.suffix.reset();
  running.decoding = true;
}

void Scheduler::finish_prefill(Running& running) {
  store_prefix(running);
  const auto index = running.chunk_begin + running.chunk - 1;
  const std::span<const float> logits = session_->logits(index);
  const SequenceId prompt_sequence = running.choices[0].sequence;
  const bool goes_on = running.job.kind == Job::Kind::kFull;
  for (size_t c = 1; goes_on && c < running.choices.size(); ++c) {
    session_->copy_all(prompt_sequence, running.choices[c].sequence);
  }
  PrefillDone done;
  running.decoding = goes_on;
  for (size_t c = 0; c < running.choices.size(); ++c) {
    if (!sample(running, c, logits)) return;
  }
  const bool ended = std::ranges::none_of(running.choices, &Choice::active);
  if (!goes_on && !ended) {
    auto kv = session_->save(prompt_sequence);
    if (!kv) return fail(running, std::move(kv).error());
    done.kv = std::make_shared<const Bytes>(std::move(kv).value());
  }
  done.usage = usage(running);
  for (Choice& choice : running.choices) {
    done.choices.push_back(choice.state);
    done.choices.back().held = choice.text.held();
  }
  if (!running.rows_lost) {
    done.counts = std::move(running.counts);
    done.suffix = std::move(running.suffix);
  }
  if (running.gates) {
    const expert::ExpertShape& shape = model_.info().experts;
    done.gates = {shape.layers, shape.experts, {running.gates->begin(), running.gates->end()}};
    running.gates.reset();
  }
  if (!goes_on) release(running);
  running.job.on_event(std::move(done));
  if (goes_on && ended) finish(running);
}

void Scheduler::store_prefix(Running& running) {
  const bool counted = !session_->captures() || !running.rows_lost;
  if (!cache_enabled_ || !running.job.prefix_cache || !counted) return;
  // Without experts there is one empty set of counts per block.
  running.block_counts.resize(running.prompt_tokens() / options_.block_tokens - running.first_block);
  const auto stored =
      cache_.insert(running.job.prompt, prompt_sequence(running), running.first_block, running.block_counts);
  cache_.pin(stored.node);
  cache_.unpin(running.node);
  running.node = stored.node;
  // Its new blocks are the cache's now.
  const uint32_t given = stored.blocks * options_.block_tokens;
  running.reserved -= given;
  reserved_ -= given;
  running.block_counts.clear();
}

bool Scheduler::sample(Running& running, size_t choice, std::span<const float> logits) {
  Choice& of = running.choices[choice];
  if (logits.empty()) {
    fail(running, {ErrorCode::kInternal, "llama.cpp gave no logits"});
    return false;
  }
  const uint64_t position = running.prompt_tokens() + of.state.generated.size();
  auto sampled = of.sampler.sample(logits, of.state.seed, position);
  if (!sampled) {
    fail(running, std::move(sampled).error());
    return false;
  }
  accept(running, choice, *sampled);
  return true;
}

void Scheduler::accept(Running& running, size_t choice, const Sample& sample) {
  Choice& of = running.choices[choice];
  of.state.generated.push_back(sample.token);
  metrics_.generation_tokens.add();
  Output output;
  output.choice = static_cast<uint32_t>(choice);
  output.token = sample.token;
  output.piece = model_.piece(sample.token, /*special=*/true);
  output.logprob = sample.logprob;
  output.top = sample.top;
  FinishReason reason = FinishReason::kNone;
  if (model_.is_end(sample.token) && !running.job.sampling.ignore_eos) {
    reason = FinishReason::kStop;
  } else {
    TextAssembler::Step step = of.text.append(model_.piece(sample.token));
    output.text = std::move(step.text);
    if (step.stopped) {
      reason = FinishReason::kStop;
    } else if (of.state.generated.size() >= running.job.max_tokens) {
      reason = FinishReason::kLength;
    }
  }
  running.job.on_event(std::move(output));
  if (reason != FinishReason::kNone) end_choice(running, choice, reason);
}

void Scheduler::end_choice(Running& running, size_t choice, FinishReason reason) {
  Choice& of = running.choices[choice];
  of.state.finish = reason;
  metrics_.finished(reason).add();
  if (running.decoding && running.choices.size() > 1) {  // the others run on
    release_sequence(of);
    running.reserved -= of.reserved;
    reserved_ -= of.reserved;
    of.reserved = 0;
  }
  running.job.on_event(ChoiceEnd{static_cast<uint32_t>(choice), reason, of.text.finish()});
}

}  // namespace kindred::engine

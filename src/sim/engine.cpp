#include "sim/engine.h"

#include <algorithm>

#include "base/result.h"

namespace kindred::sim {

uint32_t Engine::add(const Sequence& sequence) {
  uint32_t at = 0;
  if (free_slots_.empty()) {
    at = static_cast<uint32_t>(slots_.size());
    slots_.emplace_back();
  } else {
    at = free_slots_.back();
    free_slots_.pop_back();
  }
  slots_[at] = Slot{.sequence = sequence, .state = State::kWaiting};
  slots_[at].queued = ++queue_names_;
  enqueue(at, /*preempted=*/false);
  return at;
}

// The last token is computed whatever is cached: its output is the next one.
uint32_t Engine::cached_pieces(const Sequence& sequence) const {
  const uint32_t total = sequence.prompt_tokens + sequence.generated;
  return static_cast<uint32_t>(std::min<size_t>(pool_.held(sequence.pieces), (total - 1) / options_.kv.piece_tokens));
}

void Engine::enqueue(uint32_t at, bool preempted) {
  Slot& slot = slots_[at];
  const Sequence& sequence = slot.sequence;
  slot.waiting = 0;
  if (!sequence.fetches) {
    slot.waiting = sequence.prompt_tokens + sequence.generated - cached_pieces(sequence) * options_.kv.piece_tokens;
  }
  waiting_prefill_tokens_ += slot.waiting;
  queued_.emplace(slot.queued, at);
  waiting_.add({.sequence = slot.queued,
                .arrival_ns = sequence.arrival_ns,
                .prefill_tokens = slot.waiting,
                .priority = sequence.priority,
                .preempted = preempted});
}

void Engine::dequeue(uint32_t at) {
  waiting_.remove(slots_[at].queued);
  queued_.erase(slots_[at].queued);
  waiting_prefill_tokens_ -= slots_[at].waiting;
}

uint64_t Engine::remaining_prefill_tokens() const {
  uint64_t out = 0;
  for (const uint32_t at : running_) out += slots_[at].to_compute - slots_[at].chunk;
  return out;
}

void Engine::free_blocks(Slot& slot) {
  pool_.drop(slot.sequence.pieces.first(slot.shared));
  pool_.give(slot.blocks);
  slot.shared = slot.blocks = slot.context = slot.to_compute = 0;
}

void Engine::vacate(uint32_t at) {
  free_blocks(slots_[at]);
  slots_[at].state = State::kFree;
  free_slots_.push_back(at);
}

// Blocks for all that has to be here before it can decode.
bool Engine::admit(uint32_t at) {
  Slot& slot = slots_[at];
  const Sequence& sequence = slot.sequence;
  if (sequence.fetches) {
    const uint32_t blocks = pool_.blocks_for(sequence.prompt_tokens);
    if (!pool_.take(blocks)) return false;
    slot.blocks = blocks;
    slot.context = sequence.prompt_tokens;
    slot.state = State::kFetching;
    ++fetching_;
  } else {
    const uint32_t total = sequence.prompt_tokens + sequence.generated;
    const uint32_t piece = options_.kv.piece_tokens;
    const uint32_t hits = cached_pieces(sequence);
    pool_.share(sequence.pieces.first(hits));
    const uint32_t blocks = pool_.blocks_for(total) - hits * (piece / options_.kv.block_tokens);
    if (!pool_.take(blocks)) {
      pool_.drop(sequence.pieces.first(hits));
      return false;
    }
    slot.shared = hits;
    slot.blocks = blocks;
    slot.context = hits * piece;
    slot.to_compute = total - slot.context;
    slot.state = State::kRunning;
    running_.push_back(at);
    prompt_tokens_ += total;
    cached_tokens_ += slot.context;
  }
  slot.admitted = ++admissions_;
  return true;
}

void Engine::preempt_last() {
  const uint32_t at = running_.back();
  running_.pop_back();
  Slot& slot = slots_[at];
  free_blocks(slot);
  slot.sequence.fetches = false;  // what it had is lost: it computes here
  slot.state = State::kWaiting;
  slot.decodes = false;
  enqueue(at, /*preempted=*/true);
  ++preemptions_;
  preempted_ = true;
}

// Room for one more token. False: it was the last one itself and is preempted.
bool Engine::grow(uint32_t at) {
  const uint32_t have = slots_[at].shared * (options_.kv.piece_tokens / options_.kv.block_tokens) + slots_[at].blocks;
  if (pool_.blocks_for(slots_[at].context + 1) <= have) return true;
  while (!pool_.take(1)) {
    const bool itself = running_.back() == at;
    preempt_last();
    if (itself) return false;
  }
  ++slots_[at].blocks;
  return true;
}

void Engine::plan_decodes(StepShape& shape, ExpertUnion& experts, uint32_t& budget) {
  // running_ may lose its end while this goes on, never what has been planned already.
  for (size_t i = 0; i < running_.size() && budget > 0; ++i) {
    const uint32_t at = running_[i];
    if (slots_[at].to_compute > 0) continue;
    if (!grow(at)) break;
    Slot& slot = slots_[at];
    slot.decodes = true;
    --budget;
    ++shape.decode_requests;
    shape.decode_context_tokens += slot.context + 1;
    const RequestExperts& uses = *slot.sequence.experts;
    experts.add(uses.decode->token((uses.first + slot.sequence.generated - 1) % uses.decode->tokens()));
  }
}

void Engine::plan_chunk(uint32_t at, StepShape& shape, ExpertUnion& experts, uint32_t& budget) {
  Slot& slot = slots_[at];
  slot.chunk = std::min(slot.to_compute, budget);
  if (slot.chunk == 0) return;
  budget -= slot.chunk;
  const double tokens = slot.chunk, before = slot.context;
  shape.prefill_tokens += slot.chunk;
  shape.prefill_token_contexts += tokens * before + tokens * (tokens + 1) / 2;
  experts.add_chunk(*slot.sequence.experts->prompt, slot.chunk);
}

bool Engine::plan(StepShape& shape, ExpertUnion& experts, std::vector<uint32_t>& fetches, int64_t now_ns) {
  uint32_t budget = options_.token_budget;
  preempted_ = false;
  plan_decodes(shape, experts, budget);
  for (const uint32_t at : running_) {
    if (slots_[at].to_compute > 0) plan_chunk(at, shape, experts, budget);
  }
  while (!preempted_ && !waiting_.empty() && running() < options_.max_running) {
    const uint32_t at = queued_.at(*waiting_.next(now_ns));
    if (!slots_[at].sequence.fetches && budget == 0) break;
    if (!admit(at)) break;
    dequeue(at);
    if (slots_[at].state == State::kFetching) fetches.push_back(at);
    else plan_chunk(at, shape, experts, budget);
  }
  return shape.decode_requests > 0 || shape.prefill_tokens > 0;
}

// Whole pieces become shared. One that another request has computed meanwhile is used instead of the own copy.
void Engine::publish(Slot& slot) {
  const std::span<const uint64_t> pieces = slot.sequence.pieces;
  const uint32_t piece = options_.kv.piece_tokens, blocks = piece / options_.kv.block_tokens;
  while (options_.kv.cache && slot.shared < pieces.size() && (slot.shared + 1) * piece <= slot.context) {
    if (!pool_.publish(pieces[slot.shared])) {
      pool_.share(pieces.subspan(slot.shared, 1));
      pool_.give(blocks);
    }
    slot.blocks -= blocks;
    ++slot.shared;
  }
}

void Engine::finish(std::vector<Emitted>& out) {
  size_t kept = 0;
  for (size_t i = 0; i < running_.size(); ++i) {
    const uint32_t at = running_[i];
    Slot& slot = slots_[at];
    bool emits = slot.decodes;
    if (slot.decodes) {
      ++slot.context;
    } else if (slot.chunk > 0) {
      slot.context += slot.chunk;
      slot.to_compute -= slot.chunk;
      publish(slot);
      emits = slot.to_compute == 0;
    }
    slot.decodes = false;
    slot.chunk = 0;
    if (!emits) {
      running_[kept++] = at;
      continue;
    }
    const Sequence& sequence = slot.sequence;
    Emitted token{.request = sequence.request, .slot = at, .generated = ++slot.sequence.generated};
    token.finished = token.generated >= sequence.output_tokens;
    token.handed_off = !token.finished && sequence.hands_off;
    out.push_back(token);
    if (token.finished) vacate(at);
    else if (token.handed_off) slot.state = State::kLeased;
    else running_[kept++] = at;
  }
  running_.resize(kept);
}

void Engine::fetched(uint32_t slot) {
  KINDRED_CHECK(slots_[slot].state == State::kFetching);
  --fetching_;
  slots_[slot].state = State::kRunning;
  // In order of admission, which the order of arrival over the links need not be.
  const auto later = [&](uint32_t other) { return slots_[other].admitted > slots_[slot].admitted; };
  auto at = running_.end();
  while (at != running_.begin() && later(*(at - 1))) --at;
  running_.insert(at, slot);
}

void Engine::release(uint32_t slot) {
  KINDRED_CHECK(slots_[slot].state != State::kFree && !slots_[slot].decodes && slots_[slot].chunk == 0);
  if (slots_[slot].state == State::kRunning) std::erase(running_, slot);
  if (slots_[slot].state == State::kFetching) --fetching_;
  if (slots_[slot].state == State::kWaiting) dequeue(slot);
  vacate(slot);
}

void Engine::clear() {
  slots_.clear();
  free_slots_.clear();
  waiting_.clear();
  queued_.clear();
  waiting_prefill_tokens_ = 0;
  running_.clear();
  fetching_ = 0;
  pool_.clear();
}

}  // namespace kindred::sim

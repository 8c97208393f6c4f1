// Requests, as the router follows them (router/pd_flow.cpp, router/plain_flow.cpp).

#include <cstring>

#include "base/rng.h"
#include "sim/cluster_run.h"

namespace kindred::sim {
namespace {

constexpr size_t kProgressEvery = 256;

std::string bytes_of(uint64_t number) {
  std::string out(sizeof number, '\0');
  for (size_t i = 0; i < sizeof number; ++i) out[i] = static_cast<char>(number >> (8 * i));
  return out;
}

}  // namespace

void ClusterRun::arrive(uint32_t at) {
  const SimRequest& given = given_[at];
  Request& request = requests_[at];
  RequestRecord& record = result_.requests[at];
  record.arrival_ns = clock_.now_ns();
  record.prompt_tokens = given.prompt_tokens;
  record.output_tokens = given.output_tokens;
  record.domain = given.experts.domain;
  const uint32_t piece_tokens = options_.groups[0].engine.kv.piece_tokens;
  const size_t whole = std::min<size_t>(given.blocks.size(), given.prompt_tokens / piece_tokens);
  uint64_t hash = 0;
  for (size_t i = 0; i < whole; ++i) request.pieces.push_back(hash = mix64(hash ^ mix64(given.blocks[i])));
  // The router hashes about as many bytes as the first piece has; a prompt without pieces is like no other.
  request.routed.key = bytes_of(given.blocks.empty() ? mix64(at) : mix64(given.blocks[0]));
  request.routed.label = given.label;
  request.routed.prompt_tokens = given.prompt_tokens;
  request.routed.assigned = given.assigned;
  if (given.direct) return start_direct(at);
  router(at).arrived(request.routed, request.pieces, piece_tokens);
  if (!disaggregated_) return start_whole(at);
  if (!router(at).reserve(request.routed)) return end(at, Ended::kRoomFull);
  start_prefill(at);
}

void ClusterRun::note(uint32_t at, bool decode, uint32_t worker) {
  if (decode) {
    result_.requests[at].decode_worker = worker;
  } else {
    result_.requests[at].prefill_worker = worker;
  }
  if (decode || options_.router.engine) ++result_.fallbacks[static_cast<size_t>(router(at).last().fallback)];
}

// Nobody listens where the router has sent it: the worker is out at once, and another one is tried.
bool ClusterRun::refused(uint32_t at, fleet::WorkerId id) {
  if (workers_[worker_of_[id]].alive) return false;
  router(at).fleet().report_refused(id, "connection refused");
  ++result_.requests[at].retries;
  return true;
}

Sequence ClusterRun::sequence_of(uint32_t at) const {
  const SimRequest& given = given_[at];
  return {.request = at,
          .prompt_tokens = given.prompt_tokens,
          .output_tokens = given.output_tokens,
          .experts = &given.experts,
          .priority = given.priority};
}

void ClusterRun::start_prefill(uint32_t at) {
  Request& request = requests_[at];
  request.phase = Phase::kPrefill;
  while (request.routed.tried_prefill.size() <= options_.retries) {
    const std::optional<Destination> to = router(at).prefill(request.routed);
    if (!to) break;
    if (refused(at, to->worker)) continue;
    const uint32_t worker = worker_of_[to->worker];
    note(at, false, worker);
    Sequence sequence = sequence_of(at);
    sequence.hands_off = true;
    sequence.pieces = request.pieces;
    request.prefill = put(worker, to->engine, sequence, request.routed.leg.dispatch());
    result_.requests[at].engine = request.prefill.engine;
    return;
  }
  end(at, request.routed.tried_prefill.empty() ? Ended::kNoWorker : Ended::kWorkerLost);
}

void ClusterRun::start_decode(uint32_t at) {
  Request& request = requests_[at];
  request.phase = Phase::kHanded;
  request.fetched = false;
  ++request.attempt;
  const SimRequest& given = given_[at];
  while (request.leased && request.routed.tried_decode.size() <= options_.retries) {
    const std::optional<fleet::WorkerId> id = router(at).decode(request.routed, given.experts.prompt.get());
    if (!id) break;
    if (refused(at, *id)) continue;
    const uint32_t worker = worker_of_[*id];
    note(at, true, worker);
    result_.requests[at].handed_ns = clock_.now_ns();
    Sequence sequence = sequence_of(at);
    sequence.generated = 1;
    sequence.fetches = true;
    request.decode = put(worker, std::nullopt, sequence, 0);
    return;
  }
  end(at, request.routed.tried_decode.empty() ? Ended::kNoWorker : Ended::kWorkerLost);
}

void ClusterRun::start_whole(uint32_t at) {
  Request& request = requests_[at];
  request.phase = Phase::kWhole;
  while (request.routed.tried_decode.size() <= options_.retries) {
    const std::optional<Destination> to = router(at).whole(request.routed);
    if (!to) break;
    if (refused(at, to->worker)) continue;
    const uint32_t worker = worker_of_[to->worker];
    note(at, true, worker);
    Sequence sequence = sequence_of(at);
    sequence.pieces = request.pieces;
    request.decode = put(worker, to->engine, sequence, request.routed.leg.dispatch());
    result_.requests[at].engine = request.decode.engine;
    return;
  }
  end(at, request.routed.tried_decode.empty() ? Ended::kNoWorker : Ended::kWorkerLost);
}

// No router knows of it; it shows in its engine's traces alone.
void ClusterRun::start_direct(uint32_t at) {
  Request& request = requests_[at];
  const EnginePlace place = *given_[at].direct;
  if (!workers_[place.worker].alive) return end(at, Ended::kNoWorker);
  request.phase = Phase::kWhole;
  Sequence sequence = sequence_of(at);
  sequence.pieces = request.pieces;
  request.decode = put(place.worker, place.engine, sequence, 0);
  result_.requests[at].decode_worker = place.worker;
  result_.requests[at].engine = place.engine;
}

void ClusterRun::token(uint32_t worker, const Emitted& emitted) {
  const uint32_t at = emitted.request;
  Request& request = requests_[at];
  RequestRecord& record = result_.requests[at];
  record.generated = emitted.generated;
  record.last_ns = clock_.now_ns();
  if (emitted.generated == 1) first_token(at, worker);
  if (request.phase == Phase::kHanded) {  // the first one of decode: the router lets the prefill worker's KV go
    release_lease(at);
    request.phase = Phase::kDecoding;
    request.decode_first_ns = clock_.now_ns();
    router(at).fleet().report_answered(workers_[worker].id);
  }
  if (emitted.finished) {
    router(at).fleet().report_completed(workers_[worker].id);
    if (request.phase == Phase::kDecoding && emitted.generated > 2) {  // as the router times the stream that it relays
      request.routed.leg.decoded(emitted.generated - 2,
                                 static_cast<double>(clock_.now_ns() - request.decode_first_ns) * 1e-9);
    }
    return end(at, Ended::kOk);
  }
  if (!emitted.handed_off) return;
  request.leased = true;
  router(at).fleet().report_completed(workers_[worker].id);
  start_decode(at);
}

void ClusterRun::first_token(uint32_t at, uint32_t worker) {
  result_.requests[at].first_ns = clock_.now_ns();
  requests_[at].routed.leg.answered();
  router(at).fleet().report_answered(workers_[worker].id);
  if (!workers_[worker].group->engine.kv.cache) return;
  for (const auto& router : routers_) router->stored(workers_[worker].id, requests_[at].pieces);
}

void ClusterRun::release_lease(uint32_t at) {
  Request& request = requests_[at];
  if (!request.leased) return;
  request.leased = false;
  Worker& worker = workers_[request.prefill.worker];
  measure_load(worker);
  worker.engines[request.prefill.engine].release(request.prefill.slot);
  changed(request.prefill.worker, request.prefill.engine);
  kick(request.prefill.worker);
}

void ClusterRun::end(uint32_t at, Ended how) {
  Request& request = requests_[at];
  release_lease(at);
  request.phase = Phase::kDone;
  request.routed = {};
  request.pieces = {};
  result_.requests[at].ended = how;
  ++ended_;
  if (options_.on_ended && (ended_ % kProgressEvery == 0 || all_ended())) options_.on_ended(ended_);
}

// What the failure of `worker`, whose engines are empty by now, means for one request.
void ClusterRun::lost_with(uint32_t at, uint32_t worker) {
  Request& request = requests_[at];
  const auto broke_off = [&](uint32_t on) {
    router(at).fleet().report_fault(workers_[on].id, fleet::Fault::kTransport);
    ++result_.requests[at].retries;
  };
  if (request.leased && request.prefill.worker == worker) request.leased = false;
  switch (request.phase) {
    case Phase::kPrefill:
      if (request.prefill.worker != worker) return;
      broke_off(worker);
      return start_prefill(at);
    case Phase::kHanded:
      if (request.decode.worker == worker) {
        broke_off(worker);
        return start_decode(at);
      }
      if (request.prefill.worker != worker || request.fetched) return;
      // The KV is gone, and the client has the first token already: nothing can be done again.
      workers_[request.decode.worker].engines[request.decode.engine].release(request.decode.slot);
      changed(request.decode.worker, request.decode.engine);
      kick(request.decode.worker);
      return end(at, Ended::kWorkerLost);
    case Phase::kDecoding:
      if (request.decode.worker != worker) return;
      broke_off(worker);
      return end(at, Ended::kWorkerLost);
    case Phase::kWhole:
      if (request.decode.worker != worker) return;
      broke_off(worker);
      if (result_.requests[at].generated > 0 || given_[at].direct) return end(at, Ended::kWorkerLost);
      return start_whole(at);
    case Phase::kNotYet:
    case Phase::kDone: return;
  }
}

}  // namespace kindred::sim

// Decode legs: a handoff is checked, its KV pulled from the prefill worker, and the response continued.
#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <iterator>

#include "base/bytes.h"
#include "engine/worker_impl.h"

namespace kindred::engine {

using net::Task;

namespace {

constexpr std::string_view kBytesHeader = "X-Kindred-Handoff-Bytes";
constexpr std::chrono::milliseconds kPullTimeout{10'000};

// What went wrong with the KV is for the router: the other end's fault, and worth another try.
ApiError pull_failed(const Error& error) {
  return {502, "upstream_error", "kv_pull_failed", {}, "cannot take over the KV: " + error.message};
}

ApiError decode_error(const Error& error) {
  if (error.code == ErrorCode::kCorrupt) return pull_failed(error);
  if (error.code == ErrorCode::kInvalid) return bad_request("handoff_invalid", error.message, error.field);
  return api_error(error);
}

// The client's body and the handoff behind it.
Result<std::pair<std::string_view, std::string_view>> split_body(const net::Request& request) {
  const std::string_view* header = request.head.headers.find(kBytesHeader);
  if (!header) return invalid(fmt::format("{} is missing", kBytesHeader), std::string(kBytesHeader));
  size_t bytes = 0;
  const char* end = header->data() + header->size();
  const auto [at, error] = std::from_chars(header->data(), end, bytes);
  if (error != std::errc() || at != end || bytes == 0 || bytes > request.body.size())
    return invalid(fmt::format("{}: accepted: a whole number from 1 to the body's length", kBytesHeader),
                   std::string(kBytesHeader));
  const std::string_view whole = request.body;
  return std::pair(whole.substr(0, whole.size() - bytes), whole.substr(whole.size() - bytes));
}

}  // namespace

// Fills `generation` from the client's body and the handoff's state; the prompt is not tokenised again.
Result<Handoff> Worker::Impl::read_handoff(const Exchange& x, Api api, Generation& generation) {
  const auto bodies = split_body(x.request);
  if (!bodies) return bodies.error();
  auto request = parse_generation_request(api, bodies->first, limits());
  if (!request) return request.error();
  const ModelInfo& info = backend->model.info();
  auto handoff = parse_handoff(bodies->second, {info.vocabulary, backend->limits.context_tokens, options.lease_bytes});
  if (!handoff) return handoff.error();
  HandoffState& state = handoff->state;
  if (state.choices.size() != request->n)
    return invalid(fmt::format("state.choices: {} for a request with n = {}", state.choices.size(), request->n));
  generation.request = std::move(*request);
  generation.prompt = std::move(state.prompt);
  generation.max_tokens = state.max_tokens;
  generation.meta = {state.id, state.created, state.model, info.fingerprint};
  return handoff;
}

Task<void> Worker::Impl::run_decode(Exchange& x, Api api) {
  Generation generation;
  auto handoff = read_handoff(x, api, generation);
  if (!handoff)
    co_return co_await send_error(x, bad_request("handoff_invalid", handoff.error().message, handoff.error().field));
  if (handoff->fingerprint != generation.meta.fingerprint) {
    const ApiError other{
        409, "invalid_request_error", "fingerprint_mismatch", "fingerprint",
        fmt::format("the KV is of model {}, this worker serves {}", handoff->fingerprint, generation.meta.fingerprint)};
    co_return co_await send_error(x, other);
  }
  if (std::find(options.peers.begin(), options.peers.end(), handoff->from) == options.peers.end()) {
    const ApiError foreign{403, "permission_error", "peer_not_configured", "from",
                           fmt::format("{} is not among this worker's peers (--peer)", handoff->from.url())};
    co_return co_await send_error(x, foreign);
  }
  auto kv = co_await pull_kv(*handoff, x.request.cancel);
  if (!kv) co_return co_await send_error(x, pull_failed(kv.error()));

  HandoffState& state = handoff->state;
  Job job = make_job(x, generation, Job::Kind::kDecode);
  job.kv = std::move(*kv);
  ResponseTail tail;
  tail.usage = state.usage;
  tail.counts = std::move(state.counts);
  tail.suffix = std::move(state.suffix);
  tail.gates = std::move(state.gates);
  std::vector<ChoiceProgress> progress;
  for (size_t i = 0; i < state.choices.size(); ++i) {
    job.choices[i] = choice_state(state.choices[i]);
    progress.push_back(std::move(state.choices[i].progress));
  }
  ResponseRenderer renderer = make_renderer(generation);
  renderer.resume(std::move(progress));
  // The client has its first token already.
  EventSink sink(renderer, backend->metrics, clock, x.arrived, true);
  co_await respond(x, std::move(job), renderer, sink, std::move(tail), &decode_error);
}

Task<Result<std::shared_ptr<const Bytes>>> Worker::Impl::pull_kv(const Handoff& handoff, net::CancelToken cancel) {
  using Out = Result<std::shared_ptr<const Bytes>>;
  const MonotonicTime begun = clock.now();
  net::RequestHead head;
  head.method = "GET";
  head.target = "/v1/kv/" + handoff.lease.id;
  net::RequestDeadlines deadlines;
  deadlines.head_ms = deadlines.read_ms = kPullTimeout;
  const std::span<const std::string_view> no_body;
  auto response = co_await client.send(handoff.from, std::move(head), no_body, std::move(cancel), deadlines);
  if (!response) co_return Out(response.error());
  if (const int status = (*response)->head().status; status != 200)
    co_return Out(Error{ErrorCode::kUnavailable,
                        fmt::format("{} answers {} for lease {}", handoff.from.url(), status, handoff.lease.id)});
  auto blob = std::make_shared<Bytes>();
  blob->reserve(handoff.lease.bytes);
  for (;;) {
    const auto piece = co_await (*response)->read_some();
    if (!piece) co_return Out(piece.error());
    if (piece->empty()) break;
    if (blob->size() + piece->size() > handoff.lease.bytes)
      co_return Out(Error{ErrorCode::kCorrupt, "it is longer than its lease says"});
    const auto bytes = as_bytes(*piece);
    blob->insert(blob->end(), bytes.begin(), bytes.end());
  }
  if (blob->size() != handoff.lease.bytes)
    co_return Out(Error{ErrorCode::kCorrupt, "it is shorter than its lease says"});
  if (kv_hash(*blob) != handoff.lease.hash) co_return Out(Error{ErrorCode::kCorrupt, "its hash is not its lease's"});
  backend->metrics.kv_pull.observe(seconds_between(begun, clock.now()));
  co_return Out(std::shared_ptr<const Bytes>(std::move(blob)));
}

}  // namespace kindred::engine

#include "router/pd_flow.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "router/decide.h"
#include "router/decode_room.h"
#include "router/headers.h"
#include "router/leg_load.h"
#include "router/prefixes.h"
#include "router/refitter.h"

namespace kindred::router {
namespace {

constexpr std::string_view kPrefillWorker = "the prefill worker";
constexpr std::string_view kDecodeWorker = "the decode worker";

}  // namespace

PdFlow::PdFlow(CorePtr core, Exchange& exchange) : core_(std::move(core)), exchange_(exchange) {}

net::Task<void> PdFlow::run() {
  for (bool may_restart = true;; may_restart = false) {
    Step step = co_await prefill();
    if (step != Step::kGoOn) co_return;
    if (reply_->finished) {
      co_await send_finished();
      co_return;
    }
    lease_.emplace(core_, exchange_.loop, prefill_.worker, *reply_);
    if (streams()) {
      const bool sent = co_await send_first();
      if (!sent) {
        exchange_.cancelled();
        co_return;
      }
      may_restart = false;
    }
    step = co_await decode(may_restart);
    if (step != Step::kRestart) co_return;
    core_->metrics.retried("prefill");
    lease_.reset();
    tried_prefill_.clear();  // it may have lost the lease and live on; if not, its connection tells
  }
}

net::Task<PdFlow::Step> PdFlow::prefill() {
  failure_ = {.error = no_worker(
                  fmt::format("no prefill worker with a matching decode worker is up for '{}'", exchange_.model))};
  for (uint32_t attempt = 0; attempt <= exchange_.options().retries; ++attempt) {
    const auto target = decide_prefill(*core_, exchange_, fleet::Dialect::kKindred, tried_prefill_);
    if (!target) break;
    if (attempt > 0) core_->metrics.retried("prefill");
    tried_prefill_.push_back(target->worker);
    fleet::LoadGuard guard = take(*core_, *target, prefill_load(exchange_.scan));
    const Step step = co_await prefill_leg(*target, guard);
    if (step != Step::kRetry) co_return step;
  }
  co_await exchange_.fail(std::move(failure_));
  co_return Step::kDone;
}

net::Task<PdFlow::Step> PdFlow::prefill_leg(const PromptTarget& target, fleet::LoadGuard& guard) {
  const fleet::WorkerId worker = target.worker;
  ScopedSpan span(exchange_.trace, core_->clock, "prefill", Span::Kind::kClient);
  if (span.recorded()) span.set("server.address", core_->endpoint(worker).text());
  net::RequestHead head = worker_head(exchange_);
  head.headers.set("X-Kindred-Leg", "prefill");
  add_engine_headers(*core_, target, guard, head);
  const std::array<std::string_view, 1> parts = {exchange_.request.body};
  net::RequestDeadlines deadlines;
  deadlines.head_ms = exchange_.options().prefill_deadline_ms;
  deadlines.read_ms = exchange_.options().idle_deadline_ms;
  auto response = co_await exchange_.loop.client.send(core_->endpoint(worker), std::move(head), parts,
                                                      exchange_.request.cancel, deadlines);
  if (!response) co_return co_await after_transport_error(worker, kPrefillWorker, std::move(response).error());
  const net::ResponseHead& got = (*response)->head();
  core_->worker_answered(worker, got.status);
  if (got.status != 200) {
    failure_ = co_await read_answer(**response, exchange_.id);
    if (exchange_.settings->retry_on.contains(got.status)) co_return Step::kRetry;
    co_await exchange_.fail(std::move(failure_));
    co_return Step::kDone;
  }
  guard.answered();
  const std::string_view* type = got.headers.find("Content-Type");
  if (type == nullptr || !type->starts_with(kPrefillContentType)) {
    failure_ = {.error = bad_worker_reply("the prefill worker's reply is not of the kindred dialect")};
    co_return Step::kRetry;
  }
  Result<std::string> bytes =
      co_await (*response)->read_rest(exchange_.options().prefill_reply_bytes, PrefillReply::kPadding);
  if (!bytes) co_return co_await after_transport_error(worker, kPrefillWorker, std::move(bytes).error());
  Result<PrefillReply> reply = PrefillReply::parse(*std::move(bytes));
  if (!reply) {
    core_->log.warn("{}: {}", core_->endpoint(worker).url(), reply.error().message);
    failure_ = {.error = api_error(reply.error())};
    co_return Step::kRetry;
  }
  core_->worker_completed(worker);
  reply_.emplace(*std::move(reply));
  prefill_ = target;
  exchange_.notes.usage.prompt_tokens = reply_->prompt_tokens;
  counts_read_ = false;
  counts_.reset();
  handoff_.clear();
  co_return Step::kGoOn;
}

net::Headers PdFlow::own_headers() const {
  net::Headers headers;
  headers.add("Content-Type", reply_->content_type);
  if (streams()) headers.add("Cache-Control", "no-cache");
  headers.add(kRequestIdHeader, exchange_.id);
  return headers;
}

net::Task<PdFlow::Step> PdFlow::send_finished() {
  if (!streams()) {
    co_await exchange_.relay(200, own_headers(), std::move(reply_->first));
    co_return Step::kDone;
  }
  bool taken = co_await send_first();
  if (taken) taken = co_await exchange_.writer.finish();
  exchange_.outcome = taken ? Outcome::kOk : Outcome::kCancelled;
  co_return Step::kDone;
}

net::Task<bool> PdFlow::send_first() {
  const bool started = co_await exchange_.start_stream(own_headers());
  if (!started) co_return false;
  if (reply_->first.empty()) co_return true;  // the token's bytes are not whole yet
  exchange_.measure(*core_).feed({.bytes = reply_->first});
  co_return co_await exchange_.writer.write(reply_->first);
}

net::Task<PdFlow::Step> PdFlow::decode(bool may_restart) {
  failure_ = {.error = no_worker("no decode worker that matches the prefill worker is up any more")};
  for (uint32_t attempt = 0; attempt <= exchange_.options().retries; ++attempt) {
    std::optional<DecodeChoice> choice = choose_decode();
    if (!choice && attempt == 0 && !tried_decode_.empty()) {
      // After a restart: the only worker there is may do better with KV that is there.
      tried_decode_.clear();
      choice = choose_decode();
    }
    if (!choice) break;
    if (attempt > 0) core_->metrics.retried("decode");
    tried_decode_.push_back(choice->worker);
    fleet::LoadGuard guard = core_->fleet.take(choice->worker, decode_load(), std::move(choice->inclusion));
    const auto place = occupy_decode_room(*core_, exchange_, choice->worker, static_cast<int64_t>(reply_->n));
    const Step step = co_await decode_leg(choice->worker, may_restart, guard);
    if (step != Step::kRetry) co_return step;
  }
  if (lease_) lease_->release();
  co_await exchange_.fail(std::move(failure_));
  co_return Step::kDone;
}

const expert::ExpertCounts* PdFlow::counts() {
  if (!exchange_.settings->decode_policy->wants_counts() || reply_->expert_counts.empty()) return nullptr;
  if (!counts_read_) {
    counts_read_ = true;
    Result<expert::ExpertCounts> read = expert::counts_from_json(reply_->expert_counts, /*padded=*/true);
    if (read) {
      counts_ = std::make_shared<const expert::ExpertCounts>(*std::move(read));
      if (core_->refitter) core_->refitter->observe(reply_->fingerprint, counts_);
    } else {
      core_->metrics.bad_counts.add();
      core_->log.warn("{}: expert counts: {}", core_->endpoint(prefill_.worker).url(), read.error().message);
    }
  }
  return counts_.get();
}

fleet::LegLoad PdFlow::decode_load() const {
  fleet::LegLoad load = whole_load(exchange_.scan, reply_->prompt_tokens);
  load.requests = static_cast<int64_t>(reply_->n);
  return load;
}

std::optional<DecodeChoice> PdFlow::choose_decode() {
  ScopedSpan span(exchange_.trace, core_->clock, "decision", Span::Kind::kInternal);
  const MonotonicTime begun = core_->clock.now();
  fleet::Ask ask = ask_of(exchange_, decode_load(), tried_decode_);
  ask.fingerprint = reply_->fingerprint;
  ask.counts = counts();
  const std::shared_ptr<const expert::CohortModel> cohorts = core_->cohorts();
  const auto choice =
      fleet::choose_decode(core_->fleet, core_->room, *exchange_.settings->decode_policy, cohorts.get(), ask);
  if (!choice) return std::nullopt;
  const policy::Decision& decision = choice->decision;
  const double took_s = seconds_between(begun, core_->clock.now());
  core_->metrics.decode_decision_s.observe(took_s);
  core_->metrics.fell_back(decision.fallback);
  sent_to(*core_, exchange_, choice->worker, /*computes=*/false);
  record(choice->snapshot, decision, took_s);
  span.set("kindred.policy", std::string(decision.policy));
  span.set("kindred.reason", std::string(policy::to_string(decision.reason)));
  return DecodeChoice{.worker = choice->worker, .inclusion = decision.inclusion};
}

void PdFlow::record(const fleet::Snapshot& snapshot, const policy::Decision& decision, double took_s) {
  DecisionRecord out;
  out.request_id = exchange_.id;
  out.unix_s = core_->clock.unix_seconds();
  out.model = exchange_.model;
  note_prefill(prefill_, out);
  out.decode_worker = snapshot.ids[decision.worker];
  out.policy = decision.policy;
  out.reason = policy::to_string(decision.reason);
  out.fallback = policy::to_string(decision.fallback);
  out.prompt_tokens = reply_->prompt_tokens;
  out.decision_s = took_s;
  if (decision.shadow) out.shadow_worker = snapshot.ids[*decision.shadow];
  for (const uint32_t at : decision.candidates) out.candidates.push_back(snapshot.ids[at]);
  for (size_t i = 0; i < decision.scores.size() && i < snapshot.ids.size(); ++i) {
    if (decision.scores[i] > policy::kNoScore) out.scores.emplace_back(snapshot.ids[i], decision.scores[i]);
  }
  if (decision.worker < decision.scores.size() && decision.reason != policy::Reason::kNoCohort) {
    out.similarity = decision.scores[decision.worker];
    core_->metrics.similarity.observe(*out.similarity);
  }
  if (decision.reason == policy::Reason::kBand) {
    out.band_size = decision.candidates.size();
    core_->metrics.band_size.observe(static_cast<double>(decision.candidates.size()));
  }
  if (exchange_.notes.watched) {
    exchange_.notes.decode_worker = core_->endpoint(out.decode_worker).url();
    exchange_.notes.policy = out.policy;
    exchange_.notes.reason = out.reason;
  }
  core_->decisions.add(std::move(out));
}

net::Task<PdFlow::Step> PdFlow::decode_leg(fleet::WorkerId worker, bool may_restart, fleet::LoadGuard& load) {
  ScopedSpan span(exchange_.trace, core_->clock, "decode", Span::Kind::kClient);
  if (span.recorded()) span.set("server.address", core_->endpoint(worker).text());
  if (handoff_.empty()) handoff_ = reply_->handoff(core_->endpoint(prefill_.worker).url());
  net::RequestHead head = worker_head(exchange_);
  head.headers.set("X-Kindred-Leg", "decode");
  head.headers.set("X-Kindred-Handoff-Bytes", fmt::format("{}", handoff_.size()));
  const std::array<std::string_view, 2> parts = {exchange_.request.body, handoff_};
  net::RequestDeadlines deadlines;
  deadlines.head_ms = streams() ? exchange_.options().first_deadline_ms : exchange_.options().decode_deadline_ms;
  deadlines.read_ms = exchange_.options().idle_deadline_ms;
  auto response = co_await exchange_.loop.client.send(core_->endpoint(worker), std::move(head), parts,
                                                      exchange_.request.cancel, deadlines);
  if (!response) co_return co_await after_transport_error(worker, kDecodeWorker, std::move(response).error());
  const net::ResponseHead& got = (*response)->head();
  core_->worker_answered(worker, got.status);
  if (got.status != 200) co_return co_await refused(**response, worker, may_restart);
  const std::string_view* type = got.headers.find("Content-Type");
  if (streams() && (type == nullptr || !type->starts_with("text/event-stream"))) {
    failure_ = {.error = bad_worker_reply("the decode worker's reply is not an event stream")};
    co_return Step::kRetry;
  }
  if (streams()) co_return co_await relay_events(**response, worker, load);
  co_return co_await relay_whole(**response, worker);
}

net::Task<PdFlow::Step> PdFlow::refused(net::ClientResponse& response, fleet::WorkerId worker, bool may_restart) {
  failure_ = co_await read_answer(response, exchange_.id);
  const int status = response.head().status;
  const std::string& code = failure_.error.code;
  note_busy(*core_, worker, response.head());
  core_->log.warn("{} refused a handoff: status {}, {}", core_->endpoint(worker).url(), status, loggable_code(code));
  if (code == "kv_pull_failed" && may_restart) co_return Step::kRestart;
  if (code == "handoff_invalid") {
    // The router's fault, not the client's, whose request the prefill worker took.
    failure_.status = 0;
  } else if (exchange_.settings->retry_on.contains(status) || status == 403 || status == 409) {
    // What the pair said to each other means nothing to the client; being busy does.
    if (status != 429 && status != 503) failure_.status = 0;
    co_return Step::kRetry;
  }
  if (lease_) lease_->release();
  co_await exchange_.fail(std::move(failure_));
  co_return Step::kDone;
}

// What only a retry would need: a stream may last for minutes and there may be thousands.
void PdFlow::forget_handoff() {
  std::string().swap(handoff_);  // an assignment would keep its memory
  counts_.reset();
  reply_->forget_transfer();
  exchange_.scan.prompt = {};
  std::string().swap(exchange_.request.body);
}

net::Task<PdFlow::Step> PdFlow::relay_events(net::ClientResponse& response, fleet::WorkerId worker,
                                             fleet::LoadGuard& load) {
  RelaySource source(response, exchange_.writer, exchange_.has_end_mark());
  Result<Piece> first = co_await source.next();
  if (!first) co_return co_await after_transport_error(worker, kDecodeWorker, std::move(first).error());
  lease_->release();
  forget_handoff();
  StreamMeter& meter = exchange_.measure(*core_);
  const MonotonicTime begun = core_->clock.now();
  const uint64_t before = meter.watch().tokens();
  RelayResult result = co_await relay_stream(source, *first, exchange_.writer, meter);
  // What came with the first piece has taken no time here: one token, as a rule.
  const uint64_t made = (meter.watch().tokens() - before) / std::max<uint64_t>(reply_->n, 1);
  if (made > 1) load.decoded(made - 1, seconds_between(begun, core_->clock.now()));
  switch (result.end) {
    case RelayEnd::kComplete:
      core_->worker_completed(worker);
      exchange_.outcome = Outcome::kOk;
      break;
    case RelayEnd::kClientGone: exchange_.cancelled(); break;
    case RelayEnd::kCut: {
      LegFailure failure = transport_failure(*core_, worker, kDecodeWorker, result.error);
      co_await exchange_.fail(std::move(failure));
      break;
    }
  }
  co_return Step::kDone;
}

net::Task<PdFlow::Step> PdFlow::relay_whole(net::ClientResponse& response, fleet::WorkerId worker) {
  const size_t limit_bytes = exchange_.options().answer_bytes;
  Result<std::string> body = std::string();
  if (std::optional<std::string> all = response.all_now(limit_bytes)) body = *std::move(all);
  else body = co_await response.read_all(limit_bytes);
  if (!body) co_return co_await after_transport_error(worker, kDecodeWorker, std::move(body).error());
  core_->worker_completed(worker);
  lease_->release();
  if (exchange_.notes.watched) exchange_.notes.usage = usage_in(*body);
  co_await exchange_.relay(200, to_client(response.take_headers(), exchange_.id), *std::move(body));
  co_return Step::kDone;
}

net::Task<PdFlow::Step> PdFlow::after_transport_error(fleet::WorkerId worker, std::string_view who, Error error) {
  if (error.code == ErrorCode::kCancelled || exchange_.client_gone()) {
    exchange_.cancelled();
    co_return Step::kDone;
  }
  core_->log.warn("{}: request {}: {}", core_->endpoint(worker).url(), exchange_.id, error.message);
  failure_ = transport_failure(*core_, worker, who, error);
  if (worth_retrying(error)) co_return Step::kRetry;
  if (lease_) lease_->release();
  co_await exchange_.fail(std::move(failure_));
  co_return Step::kDone;
}

}  // namespace kindred::router

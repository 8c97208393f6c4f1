#include "router/vllm_flow.h"

#include <fmt/format.h>

#include <array>
#include <charconv>

#include "base/json.h"
#include "router/decode_room.h"
#include "router/leg_load.h"
#include "router/refitter.h"
#include "router/splice.h"
#include "router/whole_leg.h"

namespace kindred::router {
namespace {

constexpr std::string_view kVllmPrefill = "the prefill worker";
constexpr std::string_view kParams = "kv_transfer_params";
constexpr std::string_view kAskForTransfer =
    R"({"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,)"
    R"("remote_host":null,"remote_port":null})";

uint64_t prompt_tokens(std::string_view reply) {
  const auto usage = raw_field(reply, "usage");
  if (!usage || !*usage) return 0;
  auto count = raw_field(**usage, "prompt_tokens");
  if (count && !*count) count = raw_field(**usage, "input_tokens");
  uint64_t out = 0;
  if (count && *count) std::from_chars((*count)->data(), (*count)->data() + (*count)->size(), out);
  return out;
}

}  // namespace

bool forces_tool_call(std::string_view body) {
  const auto choice = raw_field(body, "tool_choice");
  if (!choice || !*choice || !(*choice)->starts_with('{')) return false;
  const auto type = raw_field(**choice, "type");
  return type && *type && (**type == R"("any")" || **type == R"("tool")");
}

Result<std::string> vllm_prefill_body(std::string_view body, std::optional<int64_t> priority,
                                      const std::optional<std::string>& xargs) {
  std::vector<Edit> edits = {{"stream", "false"},
                             {"max_tokens", "1"},
                             {"max_completion_tokens", "1", /*add=*/false},
                             {"stream_options", std::nullopt},
                             {"min_tokens", std::nullopt},
                             {"n", std::nullopt},
                             {"best_of", std::nullopt},
                             {"echo", std::nullopt},
                             {kParams, kAskForTransfer}};
  const std::string number = priority ? fmt::to_string(*priority) : std::string();
  if (priority) edits.push_back({"priority", number});
  if (xargs) edits.push_back({kXargs, *xargs});
  return splice(body, edits);
}

Result<std::string> vllm_decode_body(std::string_view body, std::string_view params) {
  return splice(body, {{kParams, params}});
}

net::Task<void> VllmFlow::run() {
  const Step step = co_await prefill();
  if (step != Step::kGoOn) co_return;
  const Result<std::string> body = vllm_decode_body(exchange_.request.body, params_);
  KINDRED_CHECK(body.ok());  // the prefill leg's body was made from the same bytes
  const std::string fingerprint = core_->fleet.description(prefill_.worker).fingerprint;
  failure_ = {.error = no_worker("no decode worker that matches the prefill worker is up any more")};
  const DecodeAsk ask = {.prefill = prefill_,
                         .fingerprint = fingerprint,
                         .load = whole_load(exchange_.scan, prompt_tokens_),
                         .prompt_tokens = prompt_tokens_,
                         .counts = counts_.get()};
  co_await decode(*body, ask);
}

net::Task<void> VllmFlow::run_whole() {
  failure_ = {.error = no_worker(fmt::format("no decode worker of '{}' is up", exchange_.model))};
  const DecodeAsk ask = {.dialect = fleet::Dialect::kVllm, .load = whole_load(exchange_.scan)};
  co_await decode(exchange_.request.body, ask);
}

net::Task<VllmFlow::Step> VllmFlow::prefill() {
  failure_ = {.error = no_worker(
                  fmt::format("no prefill worker with a matching decode worker is up for '{}'", exchange_.model))};
  std::vector<fleet::WorkerId> tried;
  for (uint32_t attempt = 0; attempt <= exchange_.options().retries; ++attempt) {
    const auto choice = decide_prefill(*core_, exchange_, fleet::Dialect::kVllm, tried);
    if (!choice) break;
    if (attempt > 0) core_->metrics.retried("prefill");
    prefill_ = *choice;
    tried.push_back(choice->worker);
    fleet::LoadGuard guard = take(*core_, prefill_, prefill_load(exchange_.scan));
    const Step step = co_await prefill_leg(guard);
    if (step != Step::kRetry) co_return step;
  }
  co_await exchange_.fail(std::move(failure_));
  co_return Step::kDone;
}

net::Task<VllmFlow::Step> VllmFlow::prefill_leg(fleet::LoadGuard& guard) {
  const fleet::WorkerId worker = prefill_.worker;
  ScopedSpan span(exchange_.trace, core_->clock, "prefill", Span::Kind::kClient);
  if (span.recorded()) span.set("server.address", core_->endpoint(worker).text());
  const std::string_view whole = exchange_.request.body;
  const Result<std::string> body =
      vllm_prefill_body(whole, leg_priority(*core_, exchange_, worker, prefill_.prefill_tokens),
                        named_xargs(*core_, prefill_, guard, whole));
  if (!body) {
    ApiError error = api_error(body.error());
    co_await exchange_.fail(std::move(error));
    co_return Step::kDone;
  }
  const std::array<std::string_view, 1> parts = {*body};
  net::RequestDeadlines deadlines;
  deadlines.head_ms = exchange_.options().prefill_deadline_ms;
  deadlines.read_ms = exchange_.options().idle_deadline_ms;
  net::RequestHead head = worker_head(exchange_);
  add_engine_headers(*core_, prefill_, guard, head);
  auto response = co_await exchange_.loop.client.send(core_->endpoint(worker), std::move(head), parts,
                                                      exchange_.request.cancel, deadlines);
  if (!response) co_return co_await after_transport_error(worker, std::move(response).error());
  const int status = (*response)->head().status;
  core_->worker_answered(worker, status);
  if (status != 200) {
    failure_ = co_await read_answer(**response, exchange_.id);
    if (exchange_.settings->retry_on.contains(status)) co_return Step::kRetry;
    co_await exchange_.fail(std::move(failure_));
    co_return Step::kDone;
  }
  guard.answered();
  const Result<std::string> reply = co_await (*response)->read_all(exchange_.options().prefill_reply_bytes);
  if (!reply) co_return co_await after_transport_error(worker, reply.error());
  core_->worker_completed(worker);
  if (Status read = read_reply(*reply); !read) {
    core_->log.warn("{}: {}", core_->endpoint(worker).url(), read.error().message);
    failure_ = {.error = bad_worker_reply(read.error().message)};
    co_return Step::kRetry;
  }
  co_return Step::kGoOn;
}

Status VllmFlow::read_reply(std::string_view reply) {
  const auto params = raw_field(reply, kParams);
  if (!params || !*params || !(*params)->starts_with('{')) {
    return Error{ErrorCode::kCorrupt, "the prefill worker's answer has no kv_transfer_params: it runs no KV connector"};
  }
  const auto counts = raw_field(**params, "expert_counts");
  if (counts && *counts && exchange_.settings->decode_policy->wants_counts()) read_counts(**counts);
  Result<std::string> kept = splice(**params, {{"expert_counts", std::nullopt}});
  if (!kept) return std::move(kept).error();
  params_ = *std::move(kept);
  prompt_tokens_ = prompt_tokens(reply);
  if (prompt_tokens_ > 0) exchange_.notes.usage.prompt_tokens = prompt_tokens_;
  return {};
}

void VllmFlow::read_counts(std::string_view json) {
  Result<expert::ExpertCounts> read = expert::counts_from_json(json);
  if (!read) {
    core_->metrics.bad_counts.add();
    core_->log.warn("{}: expert counts: {}", core_->endpoint(prefill_.worker).url(), read.error().message);
    return;
  }
  counts_ = std::make_shared<const expert::ExpertCounts>(*std::move(read));
  if (core_->refitter) core_->refitter->observe(core_->fleet.description(prefill_.worker).fingerprint, counts_);
}

net::Task<VllmFlow::Step> VllmFlow::after_transport_error(fleet::WorkerId worker, Error error) {
  if (error.code == ErrorCode::kCancelled || exchange_.client_gone()) {
    exchange_.cancelled();
    co_return Step::kDone;
  }
  core_->log.warn("{}: request {}: {}", core_->endpoint(worker).url(), exchange_.id, error.message);
  failure_ = transport_failure(*core_, worker, kVllmPrefill, error);
  if (worth_retrying(error)) co_return Step::kRetry;
  co_await exchange_.fail(std::move(failure_));
  co_return Step::kDone;
}

net::Task<void> VllmFlow::decode(std::string_view body, const DecodeAsk& ask) {
  WholeLeg leg(core_, exchange_, "the decode worker", "decode");
  leg.failure() = std::move(failure_);
  std::vector<fleet::WorkerId> tried;
  for (uint32_t attempt = 0; attempt <= exchange_.options().retries; ++attempt) {
    DecodeAsk now = ask;
    now.exclude = tried;
    const auto choice = decide_decode(*core_, exchange_, now);
    if (!choice) break;
    if (attempt > 0) core_->metrics.retried("decode");
    tried.push_back(choice->worker);
    const fleet::LoadGuard guard = core_->fleet.take(choice->worker, ask.load, choice->inclusion);
    const auto place = occupy_decode_room(*core_, exchange_, choice->worker, ask.load.requests);
    const bool done = co_await leg.run(choice->worker, worker_head(exchange_), body, exchange_.request.cancel);
    if (done) co_return;
  }
  co_await exchange_.fail(std::move(leg.failure()));
}

}  // namespace kindred::router

// Requests for tokens, whatever the dialect.

#include <fmt/format.h>

#include <charconv>

#include "base/bytes.h"
#include "live/worker.h"

namespace kindred::live {
namespace {

net::Headers fields_of(std::string_view content_type) {
  net::Headers out;
  out.add("Content-Type", content_type);
  if (content_type == "text/event-stream") out.add("Cache-Control", "no-cache");
  return out;
}

// The client's body and, behind it, the handoff.
Result<std::string> take_handoff(net::Request& request) {
  constexpr std::string_view kName = "X-Kindred-Handoff-Bytes";
  const std::string_view* const header = request.head.headers.find(kName);
  size_t bytes = 0;
  if (header != nullptr) std::from_chars(header->data(), header->data() + header->size(), bytes);
  if (bytes == 0 || bytes > request.body.size()) {
    return invalid(fmt::format("{}: accepted: whole numbers from 1 to the body's length", kName), std::string(kName));
  }
  std::string out = request.body.substr(request.body.size() - bytes);
  request.body.resize(request.body.size() - bytes);
  return out;
}

net::Task<void> send_failure(net::ResponseWriter& writer, int status, std::string body) {
  net::Headers fields = fields_of("application/json");
  co_await writer.send(status, std::move(fields), body);
}

ApiFailure wrong_role(Role role) {
  return {
      .status = 400,
      .type = "invalid_request_error",
      .code = "wrong_role",
      .message = fmt::format("this is a {} worker: it takes {} legs only (X-Kindred-Leg); send requests to its router",
                             to_string(role), to_string(role))};
}

}  // namespace

net::Task<void> LiveWorker::fail(net::ResponseWriter& writer, const ApiFailure& failure) const {
  return send_failure(writer, failure.status, failure_body(failure));
}

net::Task<void> LiveWorker::generate(net::Request& request, net::ResponseWriter& writer, bool chat) {
  const fleet::Dialect dialect = site_->options.dialect;
  const std::string_view* const header = request.head.headers.find("X-Kindred-Leg");
  std::string leg(header == nullptr ? "" : *header);
  if (dialect != fleet::Dialect::kKindred) leg.clear();
  const Role role = spec().role;
  if (dialect == fleet::Dialect::kKindred && role != Role::kBoth && leg != to_string(role)) {
    co_return co_await fail(writer, wrong_role(role));
  }
  std::string handoff;
  if (leg == "decode") {
    Result<std::string> taken = take_handoff(request);
    if (!taken) co_return co_await fail(writer, api_failure(taken.error()));
    handoff = *std::move(taken);
  }
  RequestLimits limits;
  limits.model = site_->options.model;
  limits.context_tokens = site_->options.context_tokens;
  limits.default_output_tokens = site_->options.default_output_tokens;
  limits.piece_tokens = spec().loop.engine.kv.piece_tokens;
  Result<LiveRequest> parsed = parse_live_request(chat, request.body, limits);
  if (!parsed) co_return co_await fail(writer, api_failure(parsed.error()));
  AnswerMeta meta;
  meta.id = (chat ? "chatcmpl-" : "cmpl-") + hex64(site_->ids.next());
  meta.created = site_->clock.unix_seconds();
  meta.model = site_->options.model;
  Call call(*std::move(parsed), std::move(meta), request, writer);
  sim::TraceRequest as;
  as.prompt_tokens = call.request.prompt_tokens();
  as.output_tokens = call.request.output_tokens;
  // The prompt decides which experts it uses, so that both legs and every repetition use the same.
  call.experts = site_->process->experts(as, call.request.hash);
  const auto asks = [&](const char* name) {
    return call.request.transfer.is_object() && call.request.transfer.value(name, Json()) == true;
  };
  if (leg == "prefill") co_return co_await kindred_prefill(call);
  if (leg == "decode") co_return co_await kindred_decode(call, std::move(handoff));
  if (dialect == fleet::Dialect::kVllm && asks("do_remote_decode")) co_return co_await vllm_prefill(call);
  if (dialect == fleet::Dialect::kVllm && asks("do_remote_prefill")) co_return co_await vllm_decode(call);
  if (dialect == fleet::Dialect::kSglang && role == Role::kPrefill) co_return co_await sglang_prefill(call);
  if (dialect == fleet::Dialect::kSglang && role == Role::kDecode) co_return co_await sglang_decode(call);
  co_await whole(call);
}

Job LiveWorker::job_of(const Call& call) const {
  Job job;
  job.prompt_tokens = call.request.prompt_tokens();
  job.output_tokens = call.request.output_tokens;
  job.pieces = call.request.pieces;
  job.experts = call.experts;
  if (publisher_) {
    job.tokens = std::make_shared<const std::vector<uint32_t>>(call.request.tokens);
  }
  return job;
}

std::string LiveWorker::counts_json(const Call& call) const {
  if (!wrong_counts_) return expert::counts_to_json(*call.experts.prompt);
  // One token too many in one row, as from a worker that counts padding.
  expert::ExpertCounts counts = *call.experts.prompt;
  ++counts.data.front();
  return expert::counts_to_json(counts);
}

std::string LiveWorker::put_lease(const Call& call, const Ticket& ticket) {
  Lease lease;
  lease.owner = loop_;
  lease.worker = number_;
  lease.epoch = loop_->epoch();
  lease.place = ticket.place;
  lease.prompt_tokens = call.request.prompt_tokens();
  return site_->leases.put(std::move(lease));
}

net::Task<void> LiveWorker::whole(Call& call) {
  Job job = job_of(call);
  Result<TicketPtr> ticket = loop_->submit(std::move(job));
  if (!ticket) co_return co_await fail(call.writer, api_failure(ticket.error()));
  co_await answer(call, *ticket, /*shown=*/0);
}

// From the token behind those that the client has.
net::Task<void> LiveWorker::answer(Call& call, TicketPtr ticket, uint32_t shown) {
  const auto left = call.http.cancel.on_cancel([loop = loop_, at = ticket] { loop->abandon(at); });
  const bool stream = call.request.stream;
  AnswerEnd end;
  end.cached_tokens = ticket->cached_tokens;
  if (call.request.return_expert_counts) end.counts = counts_json(call);
  std::string out;
  while (true) {
    co_await ticket->changed(shown, ticket->fetched);
    if (ticket->end == TicketEnd::kCut || ticket->end == TicketEnd::kCancelled) co_return call.writer.abort();
    out.clear();
    for (; stream && shown < ticket->generated; ++shown) call.renderer.token(shown, out);
    const bool finished = ticket->end == TicketEnd::kFinished;
    if (finished && !stream) break;
    if (finished) call.renderer.end(end, out);
    if (!stream) {
      shown = ticket->generated;
      continue;
    }
    if (!out.empty() && !call.writer.started()) {
      net::Headers fields = fields_of("text/event-stream");
      co_await call.writer.start(200, std::move(fields));
    }
    if (!out.empty()) {
      const bool there = co_await call.writer.write(out);
      if (!there) co_return loop_->abandon(ticket);
    }
    if (finished) {
      co_await call.writer.finish();
      co_return;
    }
  }
  const std::string body = call.renderer.whole(end);
  net::Headers fields = fields_of("application/json");
  co_await call.writer.send(200, std::move(fields), body);
}

// Runs the prompt and keeps its KV. False: there is nothing more to say.
net::Task<bool> LiveWorker::run_prefill(Call& call, TicketPtr& ticket) {
  Job job = job_of(call);
  ++job.output_tokens;  // so that it is handed over whatever the client wants
  job.hands_off = true;
  Result<TicketPtr> submitted = loop_->submit(std::move(job));
  if (!submitted) {
    co_await fail(call.writer, api_failure(submitted.error()));
    co_return false;
  }
  ticket = *std::move(submitted);
  const auto left = call.http.cancel.on_cancel([loop = loop_, at = ticket] { loop->abandon(at); });
  while (ticket->end == TicketEnd::kNone) co_await ticket->changed(ticket->generated, ticket->fetched);
  if (ticket->end == TicketEnd::kHandedOff) co_return true;
  call.writer.abort();
  co_return false;
}

// Takes over the KV of a lease. False: the client has been told that it is not there, or is gone itself.
net::Task<bool> LiveWorker::fetch(Call& call, TicketPtr& ticket, std::string lease, uint32_t generated) {
  const auto lost = [] {
    return ApiFailure{.status = 502,
                      .type = "upstream_error",
                      .code = "kv_pull_failed",
                      .message = "cannot take over the KV: it has expired or been released, or its worker is gone"};
  };
  const auto there = [site = site_, lease] { return site->leases.find(lease) != nullptr; };
  if (!there()) {
    co_await fail(call.writer, lost());
    co_return false;
  }
  Job job = job_of(call);
  job.pieces.clear();  // a decode worker caches no prompts
  job.fetches = true;
  job.generated = generated;
  job.output_tokens = std::max(job.output_tokens, generated + 1);
  job.kv_there = there;
  Result<TicketPtr> submitted = loop_->submit(std::move(job));
  if (!submitted) {
    co_await fail(call.writer, api_failure(submitted.error()));
    co_return false;
  }
  ticket = *std::move(submitted);
  const auto left = call.http.cancel.on_cancel([loop = loop_, at = ticket] { loop->abandon(at); });
  while (!ticket->fetched && ticket->end == TicketEnd::kNone) co_await ticket->changed(ticket->generated, false);
  if (ticket->fetched) co_return true;
  if (ticket->end == TicketEnd::kKvLost) co_await fail(call.writer, lost());
  else call.writer.abort();
  co_return false;
}

}  // namespace kindred::live

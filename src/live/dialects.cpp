// How prefill and decode legs come and go in each dialect.

#include <fmt/format.h>

#include "base/bytes.h"
#include "live/worker.h"

namespace kindred::live {
namespace {

// How long one leg waits for the other, as in SGLang's bootstrap.
constexpr std::chrono::seconds kRoomTimeout{30};

net::Headers json_fields(std::string_view type = "application/json") {
  net::Headers out;
  out.add("Content-Type", type);
  return out;
}

ApiFailure handoff_invalid(std::string_view what) {
  return {.status = 400,
          .type = "invalid_request_error",
          .code = "handoff_invalid",
          .message = fmt::format("the handoff is malformed: {}", what)};
}

std::string text_of(const Json& root, const char* name) {
  if (!root.is_object()) return {};
  const auto found = root.find(name);
  return found != root.end() && found->is_string() ? found->get<std::string>() : std::string();
}

// Leaves a room with a word to the other leg.
struct Leave {
  explicit Leave(std::shared_ptr<Room> from) : room(std::move(from)) {}
  Leave(const Leave&) = delete;
  Leave& operator=(const Leave&) = delete;
  ~Leave() {
    if (!room->taken) room->failed = true;
    room->wake.cancel();
  }
  std::shared_ptr<Room> room;
};

ApiFailure room_failure(std::string_view who) {
  return {.status = 500,
          .type = "server_error",
          .code = "kv_transfer_failed",
          .message = fmt::format("the {} worker of this bootstrap room has failed or has not come", who)};
}

}  // namespace

net::Task<void> LiveWorker::kindred_prefill(Call& call) {
  TicketPtr ticket;
  const bool ran = co_await run_prefill(call, ticket);
  if (!ran) co_return;
  LiveRequest& request = call.request;
  const bool finished = request.output_tokens == 1;
  AnswerEnd end;
  end.cached_tokens = ticket->cached_tokens;
  std::string first;
  if (request.stream) {
    call.renderer.token(0, first);
    if (finished) call.renderer.end(end, first);
  } else if (finished) {
    first = call.renderer.whole(end);
  }
  Json reply = {{"v", 1},
                {"finished", finished},
                {"content_type", call.renderer.content_type()},
                {"first", std::move(first)},
                {"usage",
                 {{"prompt_tokens", request.prompt_tokens()},
                  {"cached_tokens", ticket->cached_tokens},
                  {"completion_tokens", 1}}},
                {"n", 1},
                {"max_tokens", request.output_tokens},
                {"fingerprint", site_->options.fingerprint}};
  std::string lease;
  if (finished) {
    loop_->release(ticket->place);
  } else {
    lease = put_lease(call, *ticket);
    // The KV itself does not exist: what is pulled is its name, and takes as long as the KV would.
    reply["lease"] = {
        {"id", lease}, {"bytes", lease.size()}, {"hash", blob_hash(lease)}, {"ttl_ms", site_->leases.ttl().count()}};
    reply["state"] = {{"id", call.renderer.meta().id}, {"created", call.renderer.meta().created}};
  }
  std::string body = dump_json(reply);
  body.pop_back();
  body += ",\"expert_counts\":" + counts_json(call) + "}";
  net::Headers fields = json_fields("application/vnd.kindred.prefill+json");
  const bool sent = co_await call.writer.send(200, std::move(fields), body);
  if (!sent && !lease.empty()) site_->leases.release(lease);
}

net::Task<void> LiveWorker::kindred_decode(Call& call, std::string handoff) {
  const Json root = parse_json(handoff);
  if (!root.is_object() || root.value("v", Json()) != 1) co_return co_await fail(call.writer, handoff_invalid("v"));
  if (text_of(root, "fingerprint") != site_->options.fingerprint) {
    ApiFailure other = handoff_invalid("");
    other.status = 409;
    other.code = "fingerprint_mismatch";
    other.message = fmt::format("this worker serves the model with fingerprint '{}'", site_->options.fingerprint);
    co_return co_await fail(call.writer, other);
  }
  const Json state = root.value("state", Json()), lease = root.value("lease", Json());
  if (text_of(lease, "id").empty()) co_return co_await fail(call.writer, handoff_invalid("lease"));
  if (text_of(state, "id").empty()) co_return co_await fail(call.writer, handoff_invalid("state"));
  const Result<net::Endpoint> from = net::parse_endpoint(text_of(root, "from"));
  const bool peer = from && std::ranges::find(site_->ports, from->port) != site_->ports.end();
  if (!peer) {
    ApiFailure stranger = handoff_invalid("");
    stranger.status = 403;
    stranger.code = "peer_not_configured";
    stranger.message = fmt::format("'{}' is no worker of this fleet", text_of(root, "from"));
    co_return co_await fail(call.writer, stranger);
  }
  AnswerMeta meta = call.renderer.meta();
  meta.id = text_of(state, "id");
  const auto created = state.find("created");
  if (created != state.end() && created->is_number_integer()) meta.created = created->get<int64_t>();
  Call going_on(std::move(call.request), std::move(meta), call.http, call.writer);
  going_on.experts = std::move(call.experts);
  if (going_on.request.output_tokens < 2)
    co_return co_await fail(call.writer, handoff_invalid("nothing is left to do"));
  TicketPtr ticket;
  const bool fetched = co_await fetch(going_on, ticket, text_of(lease, "id"), /*generated=*/1);
  if (fetched) co_await answer(going_on, ticket, /*shown=*/1);
}

// As vLLM's NixlConnector: the answer has one token, and where the KV is.
net::Task<void> LiveWorker::vllm_prefill(Call& call) {
  call.request.output_tokens = 1;
  TicketPtr ticket;
  const bool ran = co_await run_prefill(call, ticket);
  if (!ran) co_return;
  const std::string lease = put_lease(call, *ticket);
  AnswerEnd end;
  end.cached_tokens = ticket->cached_tokens;
  const uint32_t blocks = loop_->engines()[0].pool().blocks_for(call.request.prompt_tokens());
  Json ids = Json::array();
  for (uint32_t i = 0; i < blocks; ++i) ids.push_back(i);
  end.transfer = {{"do_remote_prefill", true},
                  {"do_remote_decode", false},
                  {"remote_engine_id", fmt::format("simulated-{}", number_)},
                  {"remote_request_id", lease},
                  {"remote_block_ids", std::move(ids)},
                  {"remote_host", site_->options.host},
                  {"remote_port", port_},
                  {"tp_size", 1}};
  end.transfer["expert_counts"] = parse_json(counts_json(call));
  const std::string body = call.renderer.whole(end);
  net::Headers fields = json_fields();
  const bool sent = co_await call.writer.send(200, std::move(fields), body);
  if (!sent) site_->leases.release(lease);
}

net::Task<void> LiveWorker::vllm_decode(Call& call) {
  std::string lease = text_of(call.request.transfer, "remote_request_id");
  if (lease.empty()) {
    ApiFailure missing =
        api_failure(invalid("'kv_transfer_params.remote_request_id' is missing: it is in what the "
                            "prefill worker answered",
                            "kv_transfer_params"));
    co_return co_await fail(call.writer, missing);
  }
  TicketPtr ticket;
  const bool fetched = co_await fetch(call, ticket, lease, /*generated=*/0);
  if (!fetched) co_return;
  site_->leases.release(lease);  // read once, then free
  co_await answer(call, ticket, /*shown=*/0);
}

// Answers when the decode worker has the KV.
net::Task<void> LiveWorker::sglang_prefill(Call& call) {
  if (!call.request.room) {
    ApiFailure missing = api_failure(invalid("'bootstrap_room' is required by a prefill worker", "bootstrap_room"));
    co_return co_await fail(call.writer, missing);
  }
  const auto room = site_->rooms.enter(*call.request.room, executor_);
  const Leave leave(room);
  TicketPtr ticket;
  const bool ran = co_await run_prefill(call, ticket);
  if (!ran) co_return;
  room->lease = put_lease(call, *ticket);
  room->wake.cancel();
  const auto until = std::chrono::steady_clock::now() + kRoomTimeout;
  const auto left = call.http.cancel.on_cancel([room] {
    room->failed = true;
    room->wake.cancel();
  });
  while (!room->taken && !room->failed && std::chrono::steady_clock::now() < until) {
    room->wake.expires_at(until);
    co_await room->wake.async_wait(net::kNoThrow);
  }
  site_->leases.release(room->lease);
  if (!room->taken) co_return co_await fail(call.writer, room_failure("decode"));
  call.request.output_tokens = 1;
  call.request.stream = false;
  AnswerEnd end;
  end.cached_tokens = ticket->cached_tokens;
  const std::string body = call.renderer.whole(end);
  net::Headers fields = json_fields();
  co_await call.writer.send(200, std::move(fields), body);
}

net::Task<void> LiveWorker::sglang_decode(Call& call) {
  if (!call.request.room) {
    ApiFailure missing = api_failure(invalid("'bootstrap_room' is required by a decode worker", "bootstrap_room"));
    co_return co_await fail(call.writer, missing);
  }
  const auto room = site_->rooms.enter(*call.request.room, executor_);
  const Leave leave(room);
  const auto until = std::chrono::steady_clock::now() + kRoomTimeout;
  const auto left = call.http.cancel.on_cancel([room] {
    room->failed = true;
    room->wake.cancel();
  });
  while (room->lease.empty() && !room->failed && std::chrono::steady_clock::now() < until) {
    room->wake.expires_at(until);
    co_await room->wake.async_wait(net::kNoThrow);
  }
  if (room->lease.empty() || room->failed) co_return co_await fail(call.writer, room_failure("prefill"));
  TicketPtr ticket;
  const bool fetched = co_await fetch(call, ticket, room->lease, /*generated=*/1);
  if (!fetched) co_return;
  room->taken = true;
  room->wake.cancel();
  co_await answer(call, ticket, /*shown=*/0);
}

}  // namespace kindred::live

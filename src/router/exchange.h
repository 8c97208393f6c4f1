// One client request on its way through the router, and its answer.
//
// Thread-safety: none; lives in the request's coroutine, on the thread of its loop.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "base/clock.h"
#include "net/http_client.h"
#include "net/http_server.h"
#include "net/task.h"
#include "router/api_form.h"
#include "router/core.h"
#include "router/errors.h"
#include "router/prompt_prefix.h"
#include "router/relay.h"
#include "router/request_notes.h"
#include "router/request_scan.h"
#include "router/router_metrics.h"
#include "router/trace.h"

namespace kindred::router {

// Why a leg did not work: an answer of the worker that is passed on as it is, or an error of our own.
struct LegFailure {
  ApiError error;  // of our own; and what stands for the answer once a stream has begun
  int status = 0;  // of the worker's answer; 0: there is none
  net::Headers headers = {};
  std::string body = {};
};

class Exchange {
 public:
  Exchange(Loop& its_loop, SettingsPtr in_force, net::Request& req, net::ResponseWriter& to, std::string request_id,
           MonotonicTime now)
      : loop(its_loop),
        settings(std::move(in_force)),
        request(req),
        writer(to),
        id(std::move(request_id)),
        arrived(now) {}

  // A whole answer.
  net::Task<void> answer(int status, net::Headers headers, std::string_view body);
  // A worker's answer, byte for byte but for expert counts that the client did not ask for.
  net::Task<void> relay(int status, net::Headers headers, std::string body);
  // Before the answer has begun: the error as JSON. In a stream: an error event where `meter` says that one
  // may stand, and then a cut either way, so that the end never looks clean.
  net::Task<void> fail(ApiError error);
  net::Task<void> fail(LegFailure failure);
  // The head of a stream. False: the client is gone.
  net::Task<bool> start_stream(net::Headers headers);

  ApiForm form() const { return api_form(request.head.path()); }
  bool completes() const { return request.head.path().ends_with("/completions"); }
  // Whether an event says that a stream of this request's kind is whole.
  bool has_end_mark() const { return completes() || names_events(form()); }
  // The meter of the one stream that this request may have; to be made before it begins.
  StreamMeter& measure(Core& core);

  // What stands at the beginning of what the model reads, as far as it was found.
  std::string_view prompt() const { return joined_prompt.empty() ? scan.prompt : std::string_view(joined_prompt); }

  bool client_gone() const { return request.cancel.cancelled(); }
  void cancelled() { outcome = Outcome::kCancelled; }

  const RouterOptions& options() const { return settings->options; }

  Loop& loop;                  // on whose thread all of it runs
  const SettingsPtr settings;  // that were in force when it began
  net::Request& request;
  net::ResponseWriter& writer;
  const std::string id;
  const MonotonicTime arrived;
  RequestScan scan;
  std::string joined_prompt;       // scan's preamble and prompt in one, where there is a preamble
  std::string key_name;            // of the API key that the client presented; empty: none is asked for
  bool strip_credentials = false;  // the client's are not for workers
  net::Headers answer_headers;     // that go with every answer, whoever made it
  std::optional<RequestTrace> trace;
  RequestNotes notes;
  PromptPrefix prefix;  // if a policy asks what workers hold
  std::string label;    // of its domain, as the client names it; empty: none
  std::string model;    // what is routed by; empty if the client named none and there is only one

  std::optional<StreamMeter> meter;  // once there is a stream
  fleet::RoomGuard decode_room;      // reserved, until a decode worker is chosen
  Outcome outcome = Outcome::kCancelled;
  int status = 499;  // as sent
};

// The answer of a worker that is not what the leg hoped for, read within bounds.
net::Task<LegFailure> read_answer(net::ClientResponse& response, std::string_view request_id);

// Reports a broken exchange with a worker to the fleet and says what the client is told. `who`: "the
// prefill worker".
LegFailure transport_failure(Core& core, fleet::WorkerId worker, std::string_view who, const Error& error);

// Whether another worker may do better after this transport error. Not after a timeout: the client
// has waited long enough.
bool worth_retrying(const Error& error);

// Head of the request for a worker: the client's method, target and headers, asking for no compression.
net::RequestHead worker_head(const Exchange& exchange);

}  // namespace kindred::router

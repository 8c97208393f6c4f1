#include "router/sglang_flow.h"

#include <fmt/format.h>

#include <array>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/this_coro.hpp>
#include <vector>

#include "base/bytes.h"
#include "base/json.h"
#include "router/decode_room.h"
#include "router/leg_load.h"
#include "router/refitter.h"
#include "router/splice.h"
#include "router/whole_leg.h"

namespace kindred::router {
namespace {

constexpr std::string_view kSglangPrefill = "the prefill worker";
// For which the rest of a prefill answer that is learned from is waited for when the client has all of its own.
constexpr std::chrono::milliseconds kLearnGrace{250};

// The prefill leg beside the decode leg. Both legs and whoever waits share it.
struct Sibling {
  explicit Sibling(const net::asio::any_io_executor& executor) : ended(executor) {
    ended.expires_at(std::chrono::steady_clock::time_point::max());
  }

  net::CancelSource cancel_prefill, cancel_decode;
  net::asio::steady_timer ended;  // cancelled when the prefill leg has ended
  bool done = false;
  bool failed = false;
  bool whole = false;  // the answer is there to its end
  LegFailure failure = {};
};

// Several prompts in one request would each need a room of its own.
bool is_batch(std::string_view prompt) {
  if (!prompt.starts_with('[')) return false;
  const size_t inner = prompt.find_first_not_of(" \t\r\n", 1);
  return inner != std::string_view::npos && (prompt[inner] == '"' || prompt[inner] == '[');
}

// `reader`: sees the answer; null: nobody does.
net::Task<void> prefill_leg(CorePtr core, Exchange& exchange, fleet::WorkerId worker, std::string_view body,
                            std::shared_ptr<Sibling> sibling, fleet::LoadGuard& guard, RoutedExpertsReader* reader) {
  const auto fail = [&](LegFailure failure) {
    sibling->failed = true;
    sibling->failure = std::move(failure);
    // A stream that has begun needs the prefill no more.
    if (!exchange.writer.started()) sibling->cancel_decode.cancel();
  };
  ScopedSpan span(exchange.trace, core->clock, "prefill", Span::Kind::kClient);
  span.set("server.address", core->endpoint(worker).text());
  const std::array<std::string_view, 1> parts = {body};
  net::RequestDeadlines deadlines;
  deadlines.head_ms = exchange.options().prefill_deadline_ms;
  deadlines.read_ms = exchange.options().idle_deadline_ms;
  auto response = co_await exchange.loop.client.send(core->endpoint(worker), worker_head(exchange), parts,
                                                     sibling->cancel_prefill.token(), deadlines);
  Error error;
  if (response) {
    const int status = (*response)->head().status;
    core->worker_answered(worker, status);
    if (status != 200) {
      fail(co_await read_answer(**response, exchange.id));
    } else {
      // Nothing of it is for the client, but hanging up before its end would abort the request.
      for (;;) {
        auto piece = co_await (*response)->read_some();
        if (!piece) {
          error = std::move(piece).error();
          break;
        }
        guard.answered();  // a stream's head comes before its prompt is computed
        if (piece->empty()) break;
        if (reader != nullptr) reader->feed(*piece);
      }
      sibling->whole = error.message.empty();
      if (sibling->whole) core->worker_completed(worker);
    }
  } else {
    error = std::move(response).error();
  }
  if (!error.message.empty() && error.code != ErrorCode::kCancelled) {
    core->log.warn("{}: request {}: {}", core->endpoint(worker).url(), exchange.id, error.message);
    fail(transport_failure(*core, worker, kSglangPrefill, error));
  }
  sibling->done = true;
  sibling->ended.cancel();
}

}  // namespace

Result<std::string> sglang_body(std::string_view body, const SglangMeeting& meeting, bool prefill) {
  const std::string host = json_string(meeting.host), port = fmt::to_string(meeting.port),
                    number = fmt::to_string(meeting.room), rank = fmt::to_string(meeting.prefill_rank.value_or(0));
  std::vector<Edit> edits = {{"bootstrap_host", host}, {"bootstrap_port", port}, {"bootstrap_room", number}};
  if (meeting.prefill_rank) edits.push_back({prefill ? "routed_dp_rank" : "disagg_prefill_dp_rank", rank});
  if (prefill && meeting.ask_experts) {
    edits.push_back({"return_routed_experts", "true"});
    edits.push_back({"routed_experts_start_len", std::nullopt});
    if (meeting.stream) edits.push_back({"stream_options", R"({"include_usage":true})"});
  }
  return splice(body, edits);
}

uint64_t room_of_rank(uint64_t room, uint32_t rank, size_t engines) {
  const uint64_t first = room - room % engines;
  return (first >= engines && room % engines < rank ? first - engines : first) + rank;
}

net::Task<void> SglangFlow::run() {
  if (is_batch(exchange_.scan.prompt) && exchange_.request.head.path().ends_with("/v1/completions")) {
    ApiError error =
        api_error(invalid("'prompt' must be one prompt: several in one request are not supported with "
                          "prefill and decode on different SGLang workers",
                          "prompt"));
    co_await exchange_.fail(std::move(error));
    co_return;
  }
  failure_ = {.error = no_worker(
                  fmt::format("no prefill worker with a matching decode worker is up for '{}'", exchange_.model))};
  std::vector<fleet::WorkerId> tried_prefill, tried_decode;
  for (uint32_t attempt = 0; attempt <= exchange_.options().retries; ++attempt) {
    // A pair fails together, and one of the two may be the only one of its kind: then it is tried again.
    auto prefill = decide_prefill(*core_, exchange_, fleet::Dialect::kSglang, tried_prefill);
    if (!prefill && attempt > 0) prefill = decide_prefill(*core_, exchange_, fleet::Dialect::kSglang, {});
    if (!prefill) break;
    const fleet::Description said = core_->fleet.description(prefill->worker);
    look_up(said);
    DecodeAsk ask = {.prefill = prefill,
                     .fingerprint = said.fingerprint,
                     .exclude = tried_decode,
                     .load = whole_load(exchange_.scan),
                     .counts = known_.counts.get()};
    if (known_.counts) ask.known_share = known_.share;
    auto decode = decide_decode(*core_, exchange_, ask);
    ask.exclude = {};
    if (!decode && attempt > 0) decode = decide_decode(*core_, exchange_, ask);
    if (!decode) break;
    if (attempt > 0) core_->metrics.retried("pair");
    tried_prefill.push_back(prefill->worker);
    tried_decode.push_back(decode->worker);
    const fleet::LoadGuard decode_guard = core_->fleet.take(decode->worker, ask.load, decode->inclusion);
    const auto place = occupy_decode_room(*core_, exchange_, decode->worker, ask.load.requests);
    const bool done = co_await run_pair(*prefill, decode->worker, said);
    if (done) co_return;
  }
  co_await exchange_.fail(std::move(failure_));
}

void SglangFlow::look_up(const fleet::Description& said) {
  History* history = core_->history.get();
  if (history == nullptr || !exchange_.settings->decode_policy->wants_counts()) return;
  if (!key_.pieces.empty() || exchange_.scan.prompt.size() < kPieceBytes) return;  // of an attempt before; too short
  key_ = History::key(exchange_.model, said.fingerprint, exchange_.scan.prompt);
  known_ = history->find(key_, exchange_.options().history.least_share);
  if (known_.counts && core_->refitter) core_->refitter->observe(said.fingerprint, known_.counts);
}

void SglangFlow::learn(fleet::WorkerId prefill, const std::string& fingerprint, bool whole) {
  if (!whole) {
    core_->history->lost();
    return;
  }
  auto learned = core_->history->learn(key_, *reader_);
  if (!learned) {
    const bool missing = reader_->fault() == RoutedExpertsReader::Fault::kMissing;
    if (missing && !core_->history->first_missing()) return;  // nor will the next ones have it
    core_->log.warn("{}: request {}: {}{}", core_->endpoint(prefill).url(), exchange_.id, learned.error().message,
                    missing ? "; SGLang from 0.5.22 on, with --enable-return-routed-experts, has it" : "");
    return;
  }
  // Those of a known prefix were observed when they were found.
  if (!known_.counts && core_->refitter) core_->refitter->observe(fingerprint, *std::move(learned));
}

net::Task<bool> SglangFlow::run_pair(const PromptTarget& prefill, fleet::WorkerId decode,
                                     const fleet::Description& said) {
  SglangMeeting meeting = {.host = core_->endpoint(prefill.worker).host,
                           .port = said.bootstrap_port,
                           .room = core_->new_room(),
                           .stream = exchange_.scan.stream};
  reader_.reset();
  if (!key_.pieces.empty()) {
    const std::optional<RoutedShape> shape = core_->history->shape(exchange_.model);
    meeting.ask_experts = shape && core_->history->asks(known_.share, exchange_.options().history.sample);
    if (meeting.ask_experts) reader_.emplace(*shape);
  }
  if (prefill.pinned()) {
    meeting.prefill_rank = prefill.rank;
    meeting.room = room_of_rank(meeting.room, *prefill.rank, prefill.engines);
  }
  const Result<std::string> body = sglang_body(exchange_.request.body, meeting, /*prefill=*/true);
  if (!body) {  // the scanner refuses what cannot be spliced; if ever not, the request fails and not the router
    failure_ = {.error = api_error(body.error())};
    co_return false;
  }
  // One for both, unless something tells them apart.
  std::string decode_text;
  if (meeting.legs_differ()) decode_text = *sglang_body(exchange_.request.body, meeting, /*prefill=*/false);
  const std::string_view decode_body = meeting.legs_differ() ? decode_text : *body;
  fleet::LoadGuard guard = take(*core_, prefill, prefill_load(exchange_.scan));
  const auto executor = co_await net::asio::this_coro::executor;
  const auto sibling = std::make_shared<Sibling>(executor);
  std::optional client_left = exchange_.request.cancel.on_cancel([sibling] {
    sibling->cancel_decode.cancel();
    sibling->cancel_prefill.cancel();
  });
  RoutedExpertsReader* const reader = reader_ ? &*reader_ : nullptr;
  net::asio::co_spawn(executor, prefill_leg(core_, exchange_, prefill.worker, *body, sibling, guard, reader),
                      net::asio::detached);
  WholeLeg leg(core_, exchange_, "the decode worker", "decode");
  const bool done = co_await leg.run(decode, worker_head(exchange_), decode_body, sibling->cancel_decode.token());
  client_left.reset();  // who has it all may go, and often does at once
  if (reader != nullptr && !sibling->done && exchange_.outcome == Outcome::kOk) {
    sibling->ended.expires_after(kLearnGrace);
    co_await sibling->ended.async_wait(net::kNoThrow);
    sibling->ended.expires_at(std::chrono::steady_clock::time_point::max());
  }
  // The answer is there, or there will be none: either way nobody needs the prefill leg. It refers to what is
  // ours, so its end is waited for; closing its connection ends it.
  sibling->cancel_prefill.cancel();
  while (!sibling->done) co_await sibling->ended.async_wait(net::kNoThrow);
  if (reader != nullptr) learn(prefill.worker, said.fingerprint, sibling->whole);
  if (done) co_return true;
  failure_ = sibling->failed ? std::move(sibling->failure) : std::move(leg.failure());
  if (!sibling->failed || failure_.status == 0 || exchange_.settings->retry_on.contains(failure_.status))
    co_return false;
  co_await exchange_.fail(std::move(failure_));  // the request itself is at fault
  co_return true;
}

}  // namespace kindred::router

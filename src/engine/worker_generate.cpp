// Plain requests and prefill legs.
#include <fmt/format.h>
#include <llama.h>

#include <algorithm>
#include <utility>

#include "base/bytes.h"
#include "engine/worker_impl.h"

namespace kindred::engine {

using net::Task;

namespace {

constexpr std::string_view kLegHeader = "X-Kindred-Leg";

ApiError wrong_role(Role role) {
  std::string_view accepted = "";
  if (role == Role::kPrefill) accepted = "prefill legs only (X-Kindred-Leg: prefill); send requests to its router";
  if (role == Role::kDecode) accepted = "decode legs only (X-Kindred-Leg: decode); send requests to its router";
  return bad_request("wrong_role", fmt::format("this is a {} worker, which takes {}", to_string(role), accepted));
}

}  // namespace

EventSink::EventSink(ResponseRenderer& renderer, WorkerMetrics& metrics, const Clock& clock, MonotonicTime arrived,
                     bool has_first_token)
    : renderer_(renderer), metrics_(metrics), clock_(clock), arrived_(arrived), has_first_token_(has_first_token) {}

void EventSink::observe(uint32_t choice) {
  const MonotonicTime now = clock_.now();
  if (!std::exchange(has_first_token_, true)) metrics_.first_token.observe(seconds_between(arrived_, now));
  const auto [at, first] = last_token_.try_emplace(choice, now);
  if (!first) metrics_.between_tokens.observe(seconds_between(at->second, now));
  at->second = now;
}

void EventSink::take(Event& event, std::string& out) {
  if (error) return;
  if (auto* output = std::get_if<Output>(&event)) {
    observe(output->choice);
    renderer_.output(*output, out);
  } else if (auto* end = std::get_if<ChoiceEnd>(&event)) {
    renderer_.choice_end(end->choice, end->reason, end->text, out);
  } else if (auto* done = std::get_if<PrefillDone>(&event)) {
    prefill = std::move(*done);
  } else if (auto* last = std::get_if<Finished>(&event)) {
    finished = std::move(*last);
  } else {
    error = std::move(std::get<Error>(event));
  }
}

// Models that begin every text with a token of their own need it in every prompt, once.
std::vector<Token> Worker::Impl::with_bos(std::vector<Token> tokens) const {
  const llama_vocab* vocab = llama_model_get_vocab(backend->model.handle());
  if (!llama_vocab_get_add_bos(vocab)) return tokens;
  const Token bos = llama_vocab_bos(vocab);
  if (bos >= 0 && (tokens.empty() || tokens.front() != bos)) tokens.insert(tokens.begin(), bos);
  return tokens;
}

// Before anything is tokenised: text that cannot fit the context, even if every token were the longest.
Status Worker::Impl::check_length(size_t text_bytes, std::string_view field) const {
  const size_t least_tokens = text_bytes / backend->longest_piece_bytes;
  if (least_tokens <= backend->limits.context_tokens) return {};
  return Error{ErrorCode::kTooLarge,
               fmt::format("the prompt has more than {} tokens, and the context holds {}", least_tokens,
                           backend->limits.context_tokens),
               std::string(field)};
}

Result<std::vector<Token>> Worker::Impl::chat_tokens(std::span<const ChatMessage> messages,
                                                     bool add_generation_prompt) const {
  size_t bytes = 0;
  for (const ChatMessage& message : messages) bytes += message.content.size();
  if (Status fits = check_length(bytes, "messages"); !fits) return fits.error();
  const auto parts = backend->chat_template.render(messages, add_generation_prompt);
  if (!parts) return parts.error();
  return tokenize_parts(backend->model, *parts);
}

// As other servers do, control tokens in a raw prompt are recognised: whoever sends one is the template.
Result<std::vector<Token>> Worker::Impl::text_tokens(std::string_view text) const {
  if (Status fits = check_length(text.size(), "prompt"); !fits) return fits.error();
  return backend->model.tokenize(text, true);
}

Result<Generation> Worker::Impl::prepare(Api api, std::string_view body) {
  auto request = parse_generation_request(api, body, limits());
  if (!request) return request.error();
  Generation out;
  out.request = std::move(*request);
  if (!out.request.prompt_tokens.empty()) {
    out.prompt = std::move(out.request.prompt_tokens);
  } else {
    auto tokens = api == Api::kChat ? chat_tokens(out.request.messages, true) : text_tokens(out.request.prompt_text);
    if (!tokens) return tokens.error();
    out.prompt = with_bos(std::move(*tokens));
  }
  if (out.prompt.empty()) return invalid("the prompt has no tokens", api == Api::kChat ? "messages" : "prompt");
  const auto most = resolve_max_tokens(out.request, out.prompt.size(), backend->limits);
  if (!most) return most.error();
  out.max_tokens = *most;
  out.meta.id =
      fmt::format("{}-{}{}", api == Api::kChat ? "chatcmpl" : "cmpl", hex64(random.next()), hex64(random.next()));
  out.meta.created = clock.unix_seconds();
  out.meta.model = options.served_model;
  out.meta.fingerprint = backend->model.info().fingerprint;
  return out;
}

Job Worker::Impl::make_job(const Exchange& x, const Generation& generation, Job::Kind kind) {
  Job job;
  job.dispatch = x.dispatch;
  job.priority = generation.request.priority;
  job.kind = kind;
  job.id = generation.meta.id;
  job.prompt = generation.prompt;
  job.sampling = generation.request.sampling;
  job.stop = generation.request.stop;
  job.max_tokens = generation.max_tokens;
  job.prefix_cache = generation.request.cache_prompt;
  job.gates = generation.request.return_expert_gates;
  job.decode_counts = generation.request.return_expert_counts;
  const uint64_t seed = generation.request.seed.value_or(random.next());
  for (uint32_t i = 0; i < generation.request.n; ++i) {
    ChoiceState choice;
    choice.seed = choice_seed(seed, i);
    job.choices.push_back(std::move(choice));
  }
  return job;
}

ResponseRenderer Worker::Impl::make_renderer(const Generation& generation) const {
  const Model* model = &backend->model;
  return ResponseRenderer(
      generation.request, generation.meta, [model](Token token) { return model->piece(token, true); },
      generation.prompt);
}

Task<void> Worker::Impl::chat(Exchange& x) { return generate(x, Api::kChat); }
Task<void> Worker::Impl::completions(Exchange& x) { return generate(x, Api::kCompletions); }

Task<void> Worker::Impl::generate(Exchange& x, Api api) {
  const std::string_view* header = x.request.head.headers.find(kLegHeader);
  const std::string_view leg = header ? *header : std::string_view();
  if (!leg.empty() && leg != "prefill" && leg != "decode") {
    const ApiError unknown =
        bad_request("unknown_leg", fmt::format("{}: accepted: prefill, decode", kLegHeader), std::string(kLegHeader));
    co_return co_await send_error(x, unknown);
  }
  const bool allowed = options.role == Role::kBoth || leg == to_string(options.role);
  if (!allowed) co_return co_await send_error(x, wrong_role(options.role));
  if (const Status placed = read_placement(x); !placed) co_return co_await send_error(x, api_error(placed.error()));
  if (leg == "decode") co_return co_await run_decode(x, api);
  auto generation = prepare(api, x.request.body);
  if (!generation) co_return co_await send_error(x, api_error(generation.error()));
  if (leg == "prefill") {
    co_await run_prefill(x, std::move(*generation));
  } else {
    co_await run_plain(x, std::move(*generation));
  }
}

Task<void> Worker::Impl::run_plain(Exchange& x, Generation generation) {
  ResponseRenderer renderer = make_renderer(generation);
  EventSink sink(renderer, backend->metrics, clock, x.arrived, false);
  Job job = make_job(x, generation, Job::Kind::kFull);
  ResponseTail tail;
  co_await respond(x, std::move(job), renderer, sink, std::move(tail), &api_error);
}

Task<void> Worker::Impl::respond(Exchange& x, Job job, ResponseRenderer& renderer, EventSink& sink, ResponseTail tail,
                                 ApiError (*error_of)(const Error&)) {
  auto running = RunningJob::submit(engine_for(x), executor, std::move(job));
  if (!running) co_return co_await send_error(x, error_of(running.error()));
  const auto registration = x.request.cancel.on_cancel([&] { running->cancel(); });
  const bool stream = renderer.content_type() != "application/json";
  while (!sink.finished) {
    std::vector<Event> events = co_await running->next();
    if (events.empty()) {
      x.status = Exchange::kClientGone;
      co_return;
    }
    std::string out;
    for (Event& event : events) sink.take(event, out);
    if (sink.error && !x.writer.started()) co_return co_await send_error(x, error_of(*sink.error));
    if (sink.finished) {
      if (sink.prefill) {
        tail.usage = sink.prefill->usage;
        tail.counts = std::move(sink.prefill->counts);
        tail.suffix = std::move(sink.prefill->suffix);
        tail.gates = std::move(sink.prefill->gates);
      }
      tail.usage.completion_tokens = renderer.completion_tokens();
      tail.decode_counts = std::move(sink.finished->decode_counts);
      renderer.finish(tail, out);
      backend->metrics.whole_request.observe(seconds_between(x.arrived, clock.now()));
      if (!stream) co_return co_await send(x, 200, renderer.content_type(), out);
    }
    if (!stream) continue;
    if (sink.error) out += error_event(render_error(api_error(*sink.error)));
    if (!x.writer.started()) {
      net::Headers fields = headers(x, renderer.content_type());
      fields.add("Cache-Control", "no-cache");
      co_await x.writer.start(200, std::move(fields));
    }
    x.status = 200;
    bool there = true;
    if (!out.empty()) there = co_await x.writer.write(out);
    if (!there) {
      x.status = Exchange::kClientGone;
      co_return;
    }
    if (sink.error) {
      // A cut and not an end: nobody may take what was sent for a whole answer.
      log.warn("request {}: {} in the middle of its stream", x.request_id, to_string(sink.error->code));
      x.writer.abort();
      x.status = 500;
      co_return;
    }
  }
  co_await x.writer.finish();
}

Task<void> Worker::Impl::run_prefill(Exchange& x, Generation generation) {
  ResponseRenderer renderer = make_renderer(generation);
  EventSink sink(renderer, backend->metrics, clock, x.arrived, false);
  Job job = make_job(x, generation, Job::Kind::kPrefill);
  auto running = RunningJob::submit(engine_for(x), executor, std::move(job));
  if (!running) co_return co_await send_error(x, api_error(running.error()));
  const auto registration = x.request.cancel.on_cancel([&] { running->cancel(); });
  std::string first;
  while (!sink.prefill) {
    std::vector<Event> events = co_await running->next();
    if (events.empty()) {
      x.status = Exchange::kClientGone;
      co_return;
    }
    for (Event& event : events) sink.take(event, first);
    if (sink.error) co_return co_await send_error(x, api_error(*sink.error));
  }
  const auto reply = prefill_reply(generation, renderer, *sink.prefill, std::move(first));
  if (!reply) co_return co_await send_error(x, api_error(reply.error()));
  const std::string body = write_prefill_reply(*reply);
  co_await send(x, 200, kPrefillReplyType, body);
  // Nobody will come for it.
  if (x.status == Exchange::kClientGone && reply->lease) leases.release(reply->lease->id);
}

Result<PrefillReply> Worker::Impl::prefill_reply(const Generation& generation, ResponseRenderer& renderer,
                                                 PrefillDone& done, std::string first) {
  PrefillReply reply;
  reply.content_type = renderer.content_type();
  reply.usage = done.usage;
  reply.usage.completion_tokens = renderer.completion_tokens();
  reply.n = generation.request.n;
  reply.max_tokens = generation.max_tokens;
  reply.fingerprint = generation.meta.fingerprint;
  reply.counts = std::move(done.counts);
  reply.suffix = std::move(done.suffix);
  const bool wants_counts = generation.request.return_expert_counts;
  reply.finished = renderer.all_finished();
  if (reply.finished) {
    ResponseTail tail;
    tail.usage = reply.usage;
    tail.gates = std::move(done.gates);
    if (wants_counts && reply.counts) {
      tail.counts = reply.counts;
      tail.suffix = reply.suffix;
      tail.decode_counts.emplace(reply.counts->shape);  // nothing was fed back
    }
    renderer.finish(tail, first);
    reply.first = std::move(first);
    return reply;
  }
  reply.first = std::move(first);
  if (!done.kv || done.choices.size() != renderer.progress().size())
    return Error{ErrorCode::kInternal, "the engine gave no KV to hand over"};
  auto lease = leases.put(done.kv);
  if (!lease && lease.error().code == ErrorCode::kTooLarge)
    return Error{ErrorCode::kExhausted, lease.error().message};  // not the client's fault
  if (!lease) return lease.error();
  reply.lease = std::move(*lease);
  HandoffState& state = reply.state.emplace();
  state.id = generation.meta.id;
  state.created = generation.meta.created;
  state.model = generation.meta.model;
  state.max_tokens = generation.max_tokens;
  state.prompt = generation.prompt;
  state.usage = reply.usage;
  for (size_t i = 0; i < done.choices.size(); ++i)
    state.choices.push_back({done.choices[i].seed, std::move(done.choices[i].held), renderer.progress()[i]});
  state.gates = std::move(done.gates);
  if (wants_counts) {
    state.counts = reply.counts;
    state.suffix = reply.suffix;
  }
  return reply;
}

}  // namespace kindred::engine

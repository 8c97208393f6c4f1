#include "router/prefixes.h"

#include <fmt/format.h>
#include <simdjson.h>

#include <algorithm>
#include <array>

#include "router/headers.h"
#include "router/leg_load.h"

namespace kindred::router {
namespace {

constexpr size_t kMaxTokenReplyBytes = 32ULL << 20;

// "URL=tcp://…[,tcp://…]"; the URL has no '=' of its own.
Result<std::array<std::string, 3>> parse_source(const std::string& text) {
  const size_t equals = text.find('=');
  const auto wrong = [&] {
    return invalid(fmt::format("kv_events: '{}'; accepted: WORKER_URL=tcp://host:port[,tcp://host:port]", text),
                   "kv_events");
  };
  if (equals == std::string::npos) return wrong();
  const Result<net::Endpoint> endpoint = net::parse_endpoint(text.substr(0, equals));
  if (!endpoint) return wrong();
  std::string events = text.substr(equals + 1), replay;
  if (const size_t comma = events.find(','); comma != std::string::npos) {
    replay = events.substr(comma + 1);
    events.resize(comma);
    if (!replay.starts_with("tcp://")) return wrong();
  }
  if (!events.starts_with("tcp://")) return wrong();
  return std::array<std::string, 3>{endpoint->url(), std::move(events), std::move(replay)};
}

// {"tokens": [1, 2, …]}; anything else is nothing.
TokenIds parse_tokens(const std::string& body) {
  simdjson::ondemand::parser parser;
  const simdjson::padded_string padded(body);
  simdjson::ondemand::document document;
  simdjson::ondemand::array list;
  if (parser.iterate(padded).get(document) != simdjson::SUCCESS) return nullptr;
  if (document["tokens"].get_array().get(list) != simdjson::SUCCESS) return nullptr;
  auto out = std::make_shared<std::vector<uint32_t>>();
  for (auto element : list) {
    uint64_t token = 0;
    if (element.get_uint64().get(token) != simdjson::SUCCESS || token > UINT32_MAX) return nullptr;
    out->push_back(static_cast<uint32_t>(token));
  }
  return out;
}

// What the token ids depend on: the prompt, and, where there are any, the tools that the template puts before it.
std::string_view tokenised(const Exchange& exchange) {
  const std::string_view body = exchange.request.body;
  const bool more =
      body.find("\"tools\"") != std::string_view::npos || body.find("\"chat_template") != std::string_view::npos;
  return more ? body : exchange.scan.prompt;
}

}  // namespace

Result<std::unique_ptr<Prefixes>> Prefixes::make(KvOptions options, uint32_t workers) {
  std::vector<Source> sources;
  for (const std::string& text : options.events) {
    auto source = parse_source(text);
    if (!source) return std::move(source).error();
    auto& [url, events, replay] = *source;
    sources.push_back({std::move(url), std::move(events), std::move(replay)});
  }
  return std::unique_ptr<Prefixes>(new Prefixes(std::move(options), std::move(sources), workers));
}

Prefixes::Prefixes(KvOptions options, std::vector<Source> sources, uint32_t workers)
    : options_(std::move(options)),
      sources_(std::move(sources)),
      sent_({.budget_bytes = options_.index_bytes, .workers = workers}),
      token_cache_(options_.token_bytes),
      exact_lookups_(
          registry_.counter("kindred_router_prefix_lookups_total", "Prompts looked up.", {{"by", "events"}})),
      approximate_lookups_(
          registry_.counter("kindred_router_prefix_lookups_total", "Prompts looked up.", {{"by", "what_was_sent"}})),
      tokenize_failures_(registry_.counter("kindred_router_tokenize_failures_total",
                                           "Prompts that no worker tokenised in time; looked up by what was sent.")),
      prompt_tokens_(registry_.counter("kindred_router_prefix_prompt_tokens_total",
                                       "Tokens of prompts sent to a worker that computes them.")),
      held_tokens_(registry_.counter("kindred_router_prefix_held_tokens_total",
                                     "Of these, tokens that the worker held already.")) {
  if (sources_.empty() && options_.events_port == 0) return;
  exact_ = std::make_shared<fleet::KvIndex>(
      fleet::PrefixIndexOptions{.budget_bytes = options_.index_bytes, .workers = workers});
  feed_ = std::make_unique<KvFeed>(exact_);
}

Status Prefixes::worker_added(fleet::WorkerId worker, const net::Endpoint& endpoint) {
  if (!feed_) return {};
  const std::string url = endpoint.url();
  const auto named = std::ranges::find(sources_, url, &Source::worker_url);
  std::string events, replay;
  if (named != sources_.end()) {
    events = named->events;
    replay = named->replay;
  } else if (options_.events_port != 0) {
    const auto at = [&](uint16_t port) { return "tcp://" + net::Endpoint{endpoint.host, port}.url().substr(7); };
    events = at(options_.events_port);
    if (options_.replay_port != 0) replay = at(options_.replay_port);
  }
  if (events.empty()) return {};
  Status added = feed_->add(worker, events, replay);
  if (!added) return invalid(fmt::format("kv_events: {}: {}", url, added.error().message), "kv_events");
  return added;
}

void Prefixes::worker_removed(fleet::WorkerId worker) {
  if (feed_) feed_->remove(worker);
  const std::lock_guard lock(mutex_);
  sent_.clear(worker);
}

void Prefixes::worker_returned(fleet::WorkerId worker) {
  if (feed_) feed_->reset(worker);
  const std::lock_guard lock(mutex_);
  sent_.clear(worker);
}

net::Task<TokenIds> Prefixes::tokens(CorePtr core, const Exchange& exchange) {
  const TokenCache::Key key = TokenCache::key(tokenised(exchange));
  if (TokenIds known = token_cache_.find(key)) co_return known;
  std::optional<fleet::WorkerId> worker;
  for (const Role role : {Role::kPrefill, Role::kBoth}) {
    const fleet::Snapshot snapshot = core->fleet.snapshot({.role = role, .model = exchange.model});
    double least = 0;
    for (size_t i = 0; i < snapshot.views.size(); ++i) {
      if (!snapshot.views[i].available || (worker && snapshot.views[i].load >= least)) continue;
      worker = snapshot.ids[i];
      least = snapshot.views[i].load;
    }
    if (worker) break;
  }
  if (!worker) co_return nullptr;
  net::RequestHead head = worker_head(exchange);
  head.target = "/tokenize";
  const std::array<std::string_view, 1> parts = {exchange.request.body};
  net::RequestDeadlines deadlines;
  deadlines.head_ms = options_.tokenize_timeout_ms;
  deadlines.read_ms = options_.tokenize_timeout_ms;
  auto response = co_await exchange.loop.client.send(core->endpoint(*worker), std::move(head), parts,
                                                     exchange.request.cancel, deadlines);
  TokenIds read;
  if (response && (*response)->head().status == 200) {
    const Result<std::string> body = co_await (*response)->read_all(kMaxTokenReplyBytes);
    if (body) read = parse_tokens(*body);
  }
  if (read) token_cache_.add(key, read);
  else tokenize_failures_.add();
  co_return read;
}

void Prefixes::approximate(const Exchange& exchange, PromptPrefix& out) {
  const std::string_view prompt = exchange.prompt();
  out.pieces = prompt_pieces(exchange.model, prompt);
  const std::lock_guard lock(mutex_);
  sent_.match(out.pieces, found_);
  for (const auto& one : found_) {
    if (exact_ && out.exact && exact_->known(one.worker)) continue;
    const double share = static_cast<double>(one.blocks * kPieceBytes) / static_cast<double>(prompt.size());
    out.held_tokens.emplace_back(one.worker, share * out.prompt_tokens);
  }
}

net::Task<PromptPrefix> Prefixes::look_up(CorePtr core, const Exchange& exchange) {
  PromptPrefix out;
  if (exchange.prompt().empty()) co_return out;
  out.prompt_tokens = static_cast<double>(exchange.prompt().size()) / kBytesPerToken;
  TokenIds ids;
  // /tokenize reads what the completions read, and would take messages of another form for those.
  if (exact_ && exact_->any_known() && exchange.completes()) ids = co_await tokens(core, exchange);
  if (ids) {
    out.exact = true;
    out.prompt_tokens = static_cast<double>(ids->size());
    // An adapter is asked for as a model; the names of base models are none.
    std::vector<fleet::KvIndex::HeldTokens> held = exact_->held(*ids, {});
    const std::vector<fleet::KvIndex::HeldTokens> adapted = exact_->held(*ids, exchange.model);
    held.insert(held.end(), adapted.begin(), adapted.end());
    for (const auto& one : held) out.held_tokens.emplace_back(one.worker, static_cast<double>(one.tokens));
  }
  (ids ? exact_lookups_ : approximate_lookups_).add();
  approximate(exchange, out);
  co_return out;
}

void Prefixes::sent(fleet::WorkerId worker, const PromptPrefix& prefix, bool computes) {
  if (computes) {
    prompt_tokens_.add(prefix.prompt_tokens);
    const auto held = std::ranges::find(prefix.held_tokens, worker, &std::pair<fleet::WorkerId, double>::first);
    if (held != prefix.held_tokens.end()) held_tokens_.add(std::min(held->second, prefix.prompt_tokens));
  }
  const std::lock_guard lock(mutex_);
  sent_.store(worker, prefix.pieces);
}

Json Prefixes::status() const {
  const auto index_json = [](const fleet::PrefixIndex::Counts& counts, size_t bytes, size_t capacity) -> Json {
    return {{"blocks", counts.blocks},   {"capacity_blocks", capacity}, {"bytes", bytes},
            {"stored", counts.stored},   {"removed", counts.removed},   {"evicted", counts.evicted},
            {"orphans", counts.orphans}, {"unknown", counts.unknown},   {"refused", counts.refused}};
  };
  Json out = {{"exact", nullptr}, {"token_cache_bytes", token_cache_.bytes()}};
  {
    const std::lock_guard lock(mutex_);
    out["approximate"] = index_json(sent_.counts(), sent_.bytes(), sent_.capacity());
  }
  if (!exact_) return out;
  const fleet::KvIndexStatus index = exact_->status();
  const KvFeedStatus feed = feed_->status();
  Json exact = index_json(index.index, index.bytes, index.capacity_blocks);
  exact["workers"] = index.workers;
  exact["events"] = index.events.events;
  exact["malformed"] = index.events.malformed + feed.bad_messages;
  exact["ignored"] = index.events.ignored;
  exact["subscriptions"] = feed.subscriptions;
  exact["gaps"] = feed.gaps;
  exact["replays"] = feed.replays;
  exact["resets"] = feed.resets;
  out["exact"] = std::move(exact);
  return out;
}

std::string Prefixes::metrics() {
  const Json now = status();
  for (const char* which : {"exact", "approximate"}) {
    if (now[which].is_null()) continue;
    for (const auto& [name, value] : now[which].items()) {
      registry_
          .gauge("kindred_router_prefix_index", "The indexes of what workers hold, as /status has them.",
                 {{"index", which}, {"what", name}})
          .set(value.get<double>());
    }
  }
  return registry_.render();
}

void sent_to(Core& core, const Exchange& exchange, fleet::WorkerId worker, bool computes) {
  if (core.prefixes) core.prefixes->sent(worker, exchange.prefix, computes);
}

}  // namespace kindred::router

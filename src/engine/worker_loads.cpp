// Which engine takes a request, and what the engines say of their load.
#include <fmt/chrono.h>
#include <fmt/format.h>

#include <charconv>
#include <tuple>

#include "base/json.h"
#include "engine/expert_ranks.h"
#include "engine/worker_impl.h"

namespace kindred::engine {

using net::Task;

namespace {

constexpr std::string_view kRankHeader = "X-data-parallel-rank";  // vLLM's name

Result<uint32_t> parse_rank(std::string_view name, std::string_view text, size_t engines) {
  uint32_t rank = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), rank);
  if (error == std::errc() && end == text.data() + text.size() && rank < engines) return rank;
  return invalid(fmt::format("{}: '{}'; accepted: a whole number from 0 to {}", name, text.substr(0, 32), engines - 1),
                 std::string(name));
}

double share(uint64_t part, uint64_t whole) {
  return whole == 0 ? 0 : static_cast<double>(part) / static_cast<double>(whole);
}

// SGLang's fields, and ours under a key of our own.
Json load_json(const fleet::EngineTrace& trace, const EngineStats& stats, uint32_t sequences, double tokens_per_s) {
  return {{"dp_rank", trace.rank},
          {"timestamp", trace.time_s},
          {"num_running_reqs", stats.running},
          {"num_waiting_reqs", stats.waiting},
          {"num_waiting_uncached_tokens", stats.remaining_prefill_tokens + stats.waiting_prefill_tokens},
          {"num_used_tokens", stats.kv_used_tokens},
          {"num_total_tokens", stats.kv_used_tokens + stats.waiting_tokens},
          {"max_total_num_tokens", stats.kv_tokens},
          {"max_running_requests", sequences},
          {"token_usage", share(stats.kv_used_tokens, stats.kv_tokens)},
          {"gen_throughput", tokens_per_s},
          {"cache_hit_rate", share(stats.prefix_hits, stats.prefix_queries)},
          {"kindred",
           {{"epoch", trace.epoch},
            {"remaining_prefill_tokens", trace.remaining_prefill_tokens},
            {"waiting_prefill_tokens", trace.waiting_prefill_tokens},
            {"running", trace.running},
            {"waiting", trace.waiting},
            {"kv_usage", trace.kv_usage},
            {"kv_cached_tokens", stats.kv_cached_tokens},
            {"expert_pressure", trace.expert_pressure}}}};
}

}  // namespace

Status Worker::Impl::read_placement(Exchange& x) const {
  const net::Headers& fields = x.request.head.headers;
  if (const std::string_view* text = fields.find(kRankHeader)) {
    const auto rank = parse_rank(kRankHeader, *text, backend->engines.size());
    if (!rank) return rank.error();
    x.rank = *rank;
  }
  if (const std::string_view* text = fields.find(fleet::kDispatchHeader)) {
    x.dispatch = parse_hex64(*text);
    if (!x.dispatch) {
      return invalid(fmt::format("{}: accepted: 16 hex digits", fleet::kDispatchHeader),
                     std::string(fleet::kDispatchHeader));
    }
  }
  return {};
}

// The least prompt tokens to compute, then the fewest jobs, then whose turn it is.
Engine& Worker::Impl::engine_for(const Exchange& x) {
  const std::vector<Engine*>& engines = backend->engines;
  if (x.rank) return *engines[*x.rank];
  if (engines.size() == 1) return *engines.front();
  size_t best = 0;
  std::optional<std::pair<uint64_t, uint32_t>> least;
  for (size_t i = 0; i < engines.size(); ++i) {
    const size_t at = (backend->turn + i) % engines.size();
    const EngineStats stats = engines[at]->stats();
    const std::pair pressure(stats.remaining_prefill_tokens + stats.waiting_prefill_tokens,
                             stats.running_jobs + stats.waiting);
    if (least && pressure >= *least) continue;
    least = pressure;
    best = at;
  }
  backend->turn = best + 1;
  return *engines[best];
}

fleet::EngineTrace Worker::Impl::trace_of(uint32_t rank) const {
  fleet::EngineTrace trace = backend->engines[rank]->trace();
  trace.rank = rank;
  trace.epoch = epoch;
  trace.time_s = clock.unix_time_s();
  trace.expert_pressure = expert_pressure(rank);
  return trace;
}

double Worker::Impl::expert_pressure(uint32_t rank) const {
  if (options.expert_pressure) return options.expert_pressure(rank);
  const ExpertRanks* ranks = backend->model.ranks();
  if (ranks == nullptr) return 0;
  // Engines are the sources of the ranks' counts, in the order in which they were opened.
  const std::vector<double> pressure = ranks->expert_pressure();
  return rank < pressure.size() ? pressure[rank] : 0;
}

// Each second.
void Worker::Impl::sample_rates() {
  if (!backend) return;
  const MonotonicTime now = clock.now();
  for (size_t i = 0; i < backend->engines.size(); ++i) {
    GenerationRate& rate = backend->rates[i];
    const uint64_t generated = backend->engines[i]->stats().generated_tokens;
    const double seconds = seconds_between(rate.at, now);
    if (seconds > 0) rate.tokens_per_s = static_cast<double>(generated - rate.generated) / seconds;
    rate.at = now;
    rate.generated = generated;
  }
}

void Worker::Impl::show_expert_pressure() {
  if (!backend) return;
  for (uint32_t rank = 0; rank < backend->engines.size(); ++rank) {
    registry
        .gauge("kindred_expert_pressure", "Expert load, in token equivalents; 0 where experts are not spread.",
               {{"model_name", backend->model.info().name}, {"engine", std::to_string(rank)}})
        .set(expert_pressure(rank));
  }
}

Task<void> Worker::Impl::loads(Exchange& x) {
  const std::vector<Engine*>& engines = backend->engines;
  std::optional<uint32_t> only;
  if (const auto text = x.request.head.query_value("dp_rank")) {
    const auto rank = parse_rank("dp_rank", *text, engines.size());
    if (!rank) co_return co_await send_error(x, api_error(rank.error()));
    only = *rank;
  }
  Json list = Json::array();
  for (uint32_t rank = 0; rank < engines.size(); ++rank) {
    if (only && rank != *only) continue;
    list.push_back(load_json(trace_of(rank), engines[rank]->stats(), engines[rank]->options().sequences,
                             backend->rates[rank].tokens_per_s));
  }
  const Json body = {
      {"timestamp", fmt::format("{:%FT%TZ}", fmt::gmtime(static_cast<std::time_t>(clock.unix_seconds())))},
      {"version", options.version},
      {"loads", std::move(list)}};
  const std::string text = dump_json(body);
  co_await send(x, 200, "application/json", text);
}

}  // namespace kindred::engine

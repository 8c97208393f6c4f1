#include "sim/summary.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>

namespace kindred::sim {
namespace {

double share(double part, double whole) { return whole > 0 ? part / whole : 0; }
double seconds(int64_t ns) { return static_cast<double>(ns) * 1e-9; }

RoleSummary role_summary(const SimResult& result, std::span<const Role> roles) {
  RoleSummary out;
  double busy_s = 0, here_s = 0, kv_s = 0;
  uint64_t steps = 0, prompt = 0, cached = 0;
  for (const WorkerReport& worker : result.workers) {
    if (std::ranges::find(roles, worker.role) == roles.end()) continue;
    ++out.workers;
    busy_s += worker.busy_s;
    here_s += worker.here_s;
    kv_s += worker.kv_share_s;
    steps += worker.steps;
    prompt += worker.prompt_tokens;
    cached += worker.cached_tokens;
    out.preemptions += worker.preemptions;
    out.kv_peak = std::max(out.kv_peak, worker.kv_peak);
  }
  out.busy = share(busy_s, here_s);
  out.step_s = share(busy_s, static_cast<double>(steps));
  out.kv_mean = share(kv_s, here_s);
  out.cached = share(static_cast<double>(cached), static_cast<double>(prompt));
  return out;
}

void summarize_steps(const SimResult& result, Summary& out) {
  double tokens = 0, steps = 0, experts = 0, worst = 0, decode_s = 0;
  for (const WorkerReport& worker : result.workers) {
    if (worker.role == Role::kPrefill) continue;
    tokens += static_cast<double>(worker.decode_tokens);
    steps += static_cast<double>(worker.decode_steps);
    experts += worker.expert_reads;
    worst += worker.worst_rank_reads;
    decode_s += worker.decode_s;
  }
  out.decode_batch = share(tokens, steps);
  out.active_experts = share(experts, steps);
  out.worst_rank_experts = share(worst, steps);
  out.decode_step_s = share(decode_s, steps);
}

Json spread_json(const Spread& spread) {
  return {{"mean", spread.mean}, {"p50", spread.p50}, {"p90", spread.p90}, {"p99", spread.p99}};
}

Json role_json(const RoleSummary& role) {
  return {{"workers", role.workers},        {"busy", role.busy},       {"step_s", role.step_s},
          {"kv_mean", role.kv_mean},        {"kv_peak", role.kv_peak}, {"cached", role.cached},
          {"preemptions", role.preemptions}};
}

std::string time_field(int64_t ns) { return ns > 0 ? fmt::format("{:.9f}", seconds(ns)) : std::string(); }
std::string worker_field(const SimResult& result, uint32_t worker) {
  return worker == kNobody ? std::string() : result.workers[worker].name;
}

// One field of a CSV; quoted where it has to be.
std::string csv_field(const std::string& text) {
  if (text.find_first_of(",\"\n\r") == std::string::npos) return text;
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"') out += '"';
    out += c;
  }
  return out + '"';
}

}  // namespace

Spread spread_of(std::vector<double> values) {
  if (values.empty()) return {};
  std::ranges::sort(values);
  // The least value that at least this share of them do not exceed.
  const auto at = [&](double q) {
    const auto rank = static_cast<size_t>(std::ceil(q * static_cast<double>(values.size())));
    return values[std::clamp<size_t>(rank, 1, values.size()) - 1];
  };
  const double sum = std::accumulate(values.begin(), values.end(), 0.0);
  return {.mean = sum / static_cast<double>(values.size()), .p50 = at(0.5), .p90 = at(0.9), .p99 = at(0.99)};
}

Summary summarize(const SimResult& result, double warmup_s) {
  Summary out;
  std::vector<double> ttft_s, tpot_s, total_s, handoff_s;
  uint64_t tokens = 0;
  size_t ok = 0;
  for (const RequestRecord& record : result.requests) {
    tokens += record.generated;
    ok += record.ended == Ended::kOk ? 1 : 0;
    out.retries += record.retries;
    if (seconds(record.arrival_ns) < warmup_s) continue;
    ++out.requests;
    ++out.ended.at(static_cast<size_t>(record.ended));
    if (record.ended != Ended::kOk) continue;
    ttft_s.push_back(record.ttft_s());
    total_s.push_back(seconds(record.last_ns - record.arrival_ns));
    if (record.output_tokens > 1) tpot_s.push_back(record.tpot_s());
    if (record.fetched_ns > 0) handoff_s.push_back(seconds(record.fetched_ns - record.handed_ns));
  }
  out.ttft_s = spread_of(std::move(ttft_s));
  out.tpot_s = spread_of(std::move(tpot_s));
  out.total_s = spread_of(std::move(total_s));
  out.handoff_s = spread_of(std::move(handoff_s));
  out.duration_s = result.requests.empty() ? 0 : result.end_s - seconds(result.requests.front().arrival_ns);
  out.output_tokens_per_s = share(static_cast<double>(tokens), out.duration_s);
  out.requests_per_s = share(static_cast<double>(ok), out.duration_s);
  summarize_steps(result, out);
  out.prefill = role_summary(result, std::array{Role::kPrefill});
  out.decode = role_summary(result, std::array{Role::kDecode, Role::kBoth});
  return out;
}

Json to_json(const Summary& summary) {
  Json ended = Json::object();
  for (size_t i = 0; i < summary.ended.size(); ++i) ended[to_string(static_cast<Ended>(i))] = summary.ended.at(i);
  return {{"requests", summary.requests},
          {"ended", std::move(ended)},
          {"ttft_s", spread_json(summary.ttft_s)},
          {"tpot_s", spread_json(summary.tpot_s)},
          {"total_s", spread_json(summary.total_s)},
          {"handoff_s", spread_json(summary.handoff_s)},
          {"duration_s", summary.duration_s},
          {"output_tokens_per_s", summary.output_tokens_per_s},
          {"requests_per_s", summary.requests_per_s},
          {"decode_batch", summary.decode_batch},
          {"active_experts", summary.active_experts},
          {"worst_rank_experts", summary.worst_rank_experts},
          {"decode_step_s", summary.decode_step_s},
          {"retries", summary.retries},
          {"prefill", role_json(summary.prefill)},
          {"decode", role_json(summary.decode)}};
}

std::string requests_csv(const SimResult& result, std::span<const std::string> domains) {
  std::string out =
      "request,arrival_s,first_token_s,last_token_s,handed_s,fetched_s,prompt_tokens,output_tokens,generated,domain,"
      "prefill_worker,decode_worker,retries,ended\n";
  for (size_t i = 0; i < result.requests.size(); ++i) {
    const RequestRecord& r = result.requests[i];
    const std::string domain = r.domain < domains.size() ? domains[r.domain] : fmt::to_string(r.domain);
    fmt::format_to(std::back_inserter(out), "{},{:.9f},{},{},{},{},{},{},{},{},{},{},{},{}\n", i, seconds(r.arrival_ns),
                   time_field(r.first_ns), time_field(r.last_ns), time_field(r.handed_ns), time_field(r.fetched_ns),
                   r.prompt_tokens, r.output_tokens, r.generated, csv_field(domain),
                   csv_field(worker_field(result, r.prefill_worker)), csv_field(worker_field(result, r.decode_worker)),
                   r.retries, to_string(r.ended));
  }
  return out;
}

std::string steps_trace(const SimResult& result) {
  std::string out = "{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n";
  const auto us = [](int64_t ns) { return static_cast<double>(ns) * 1e-3; };
  for (size_t w = 0; w < result.workers.size(); ++w) {
    fmt::format_to(std::back_inserter(out),
                   R"({{"ph":"M","pid":1,"tid":{},"name":"thread_name","args":{{"name":{}}}}},)", w,
                   Json(result.workers[w].name).dump());
    out += '\n';
  }
  for (const StepRecord& step : result.steps) {
    const char* name = step.prefill_tokens == 0 ? "decode" : step.decode_requests == 0 ? "prefill" : "mixed";
    fmt::format_to(std::back_inserter(out),
                   R"({{"ph":"X","pid":1,"tid":{},"name":"{}","ts":{:.3f},"dur":{:.3f},)"
                   R"("args":{{"prefill_tokens":{},"decode_requests":{},"experts_a_layer":{:.2f}}}}},)",
                   step.worker, name, us(step.begin_ns), us(step.end_ns - step.begin_ns), step.prefill_tokens,
                   step.decode_requests, step.experts);
    out += '\n';
  }
  const int64_t until_ns = result.steps.empty() ? 0 : result.steps.back().end_ns;
  const auto slice = [&](size_t i, const char* name, int64_t from_ns, int64_t to_ns) {
    if (to_ns <= 0 || from_ns <= 0 || from_ns > until_ns) return;
    for (const auto& [phase, at_ns] : {std::pair{'b', from_ns}, std::pair{'e', to_ns}}) {
      fmt::format_to(std::back_inserter(out),
                     R"({{"ph":"{}","cat":"request","id":{},"pid":2,"tid":0,"name":"{}","ts":{:.3f}}},)", phase, i,
                     name, us(at_ns));
      out += '\n';
    }
  };
  for (size_t i = 0; i < result.requests.size(); ++i) {
    const RequestRecord& r = result.requests[i];
    slice(i, "to first token", r.arrival_ns, r.first_ns);
    slice(i, "handoff", r.handed_ns, r.fetched_ns);
    slice(i, "decode", r.fetched_ns > 0 ? r.fetched_ns : r.first_ns, r.last_ns);
  }
  out += R"({"ph":"M","pid":2,"name":"process_name","args":{"name":"requests"}},)";
  out += "\n";
  out += R"({"ph":"M","pid":1,"name":"process_name","args":{"name":"workers"}}]})";
  out += "\n";
  return out;
}

}  // namespace kindred::sim

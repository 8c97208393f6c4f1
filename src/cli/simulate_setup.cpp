// From options to a cluster and its requests.

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <map>

#include "cli/local_cluster.h"
#include "cli/simulate.h"
#include "sim/profile.h"
#include "sim/trace_reader.h"

namespace kindred::cli {

Result<sim::Profile> find_profile(const std::string& name) {
  if (name.find('/') != std::string::npos || name.ends_with(".json")) return sim::load_profile(name);
  const std::filesystem::path folder = std::filesystem::path(find_root()) / "profiles";
  const std::filesystem::path path = folder / (name + ".json");
  std::error_code error;
  if (std::filesystem::exists(path, error)) return sim::load_profile(path.string());
  std::vector<std::string> known;
  for (const auto& entry : std::filesystem::directory_iterator(folder, error)) {
    if (entry.path().extension() == ".json") known.push_back(entry.path().stem().string());
  }
  std::ranges::sort(known);
  return invalid(fmt::format("--profile: no '{}' in {}; accepted: {}{}a file", name, folder.string(),
                             fmt::join(known, ", "), known.empty() ? "" : ", "),
                 "profile");
}

namespace {

constexpr uint32_t kKvBlockTokens = 16;
constexpr uint32_t kCalibrationTokens = 128;  // of a tape that are counted, at most
// Numbers of requests that calibrate: none that is simulated has one of them.
constexpr uint64_t kCalibrationBegins = uint64_t{1} << 40;

struct WorkersPart {
  uint32_t count = 0;
  Role role = Role::kBoth;
  std::string profile;
};

// "8P16D", "8P,16D:h100-x".
Result<std::vector<WorkersPart>> parse_workers(const std::string& text, const std::string& profile) {
  const auto wrong = [&] {
    return invalid(fmt::format("--workers: '{}'; accepted: counts of P, D or B, each with :PROFILE and a comma behind "
                               "it if they differ, as in 8P16D or 8P,8D:h200-qwen3-30b-a3b",
                               text),
                   "workers");
  };
  std::vector<WorkersPart> out;
  size_t at = 0;
  while (at < text.size()) {
    WorkersPart part;
    const size_t digits = text.find_first_not_of("0123456789", at);
    if (digits == at || digits == std::string::npos || digits - at > 4) return wrong();
    part.count = static_cast<uint32_t>(std::stoul(text.substr(at, digits - at)));
    switch (text[digits]) {
      case 'P': part.role = Role::kPrefill; break;
      case 'D': part.role = Role::kDecode; break;
      case 'B': part.role = Role::kBoth; break;
      default: return wrong();
    }
    at = digits + 1;
    part.profile = profile;
    if (at < text.size() && text[at] == ':') {
      const size_t comma = std::min(text.find(',', at), text.size());
      part.profile = text.substr(at + 1, comma - at - 1);
      at = comma;
    }
    if (at < text.size() && text[at] == ',') {
      ++at;
      if (at == text.size()) return wrong();
    }
    if (part.count == 0 || part.profile.empty()) return wrong();
    out.push_back(std::move(part));
  }
  if (out.empty()) return wrong();
  return out;
}

std::string lower(std::string text) {
  for (char& c : text) c = static_cast<char>(c >= 'A' && c <= 'Z' ? c - 'A' + 'a' : c);
  return text;
}

Result<sim::WorkerGroup> make_group(const SimulateOptions& options, const WorkersPart& part, sim::Profile profile,
                                    uint32_t piece_tokens) {
  const auto ranks = static_cast<uint32_t>(options.ranks);
  if (Status ok = profile.check_ranks(ranks); !ok) return ok.error();
  sim::WorkerGroup out;
  out.role = part.role;
  out.count = part.count;
  out.ranks = ranks;
  out.engines = options.engines > 0 ? static_cast<uint32_t>(options.engines) : ranks;
  out.lockstep = ranks > 1;
  // Replicas have a GPU each.
  const uint64_t gpus_tokens = profile.kv_capacity_tokens(ranks) * (out.lockstep ? 1 : out.engines);
  const uint64_t tokens = options.kv_tokens > 0 ? static_cast<uint64_t>(options.kv_tokens) : gpus_tokens;
  const uint64_t blocks = std::min<uint64_t>(tokens / out.engines / kKvBlockTokens, UINT32_MAX);
  if (blocks == 0) {
    return invalid(
        fmt::format("{}: {} tokens of KV a worker; accepted: {} or more for each of its {} engines",
                    options.kv_tokens > 0 ? "--kv-tokens" : profile.name, tokens, kKvBlockTokens, out.engines),
        "kv_tokens");
  }
  out.engine.queue = {.policy = *policy::parse_queue_policy(options.queue_policy),
                      .age_ns = std::llround(options.queue_age * 1e9)};
  out.engine.kv = {.blocks = static_cast<uint32_t>(blocks),
                   .block_tokens = kKvBlockTokens,
                   .piece_tokens = piece_tokens,
                   .cache = !options.no_prefix_cache && part.role != Role::kDecode};
  out.engine.token_budget = static_cast<uint32_t>(options.token_budget);
  out.engine.max_running = static_cast<uint32_t>(std::min(options.max_running, options.token_budget));
  out.cost = std::make_shared<const sim::ProfileCost>(std::move(profile));
  return out;
}

// What a worker is called: its role, and its GPU if others of its role have another one.
void name_groups(std::vector<sim::WorkerGroup>& groups) {
  std::map<Role, size_t> of_role;
  for (const sim::WorkerGroup& group : groups) ++of_role[group.role];
  std::map<std::string, size_t> used;
  for (sim::WorkerGroup& group : groups) {
    group.name = to_string(group.role);
    if (of_role[group.role] > 1) {
      const auto* cost = static_cast<const sim::ProfileCost*>(group.cost.get());
      group.name += "-" + lower(cost->time.profile().gpu);
      if (const size_t before = used[group.name]++; before > 0) group.name += fmt::format(".{}", before + 1);
    }
  }
}

Result<std::vector<sim::ScriptEvent>> parse_events(const SimulateOptions& options,
                                                   const std::vector<sim::WorkerGroup>& groups) {
  std::map<std::string, uint32_t> workers;
  for (const sim::WorkerGroup& group : groups) {
    for (uint32_t i = 0; i < group.count; ++i) {
      const auto number = static_cast<uint32_t>(workers.size());
      workers.emplace(fmt::format("{}-{}", group.name, i), number);
    }
  }
  const std::map<std::string, sim::ScriptKind> kinds = {
      {"fail", sim::ScriptKind::kFail}, {"leave", sim::ScriptKind::kLeave}, {"join", sim::ScriptKind::kJoin}};
  std::vector<sim::ScriptEvent> out;
  for (const std::string& text : options.events) {
    const size_t one = text.find(':'), two = one == std::string::npos ? one : text.find(':', one + 1);
    char* end = nullptr;
    const double at_s = std::strtod(text.c_str(), &end);
    const bool whole = two != std::string::npos && end == text.c_str() + one && one > 0 && at_s >= 0 && at_s < 1e8;
    const auto kind = whole ? kinds.find(text.substr(one + 1, two - one - 1)) : kinds.end();
    const auto worker = whole ? workers.find(text.substr(two + 1)) : workers.end();
    if (kind == kinds.end() || worker == workers.end()) {
      return invalid(fmt::format("--event: '{}'; accepted: SECONDS:KIND:WORKER, KIND one of fail, leave, join, WORKER "
                                 "one of {}-0 to {}-{}",
                                 text, groups.front().name, groups.back().name, groups.back().count - 1),
                     "event");
    }
    out.push_back({.at_s = at_s, .kind = kind->second, .worker = worker->second});
  }
  return out;
}

sim::ArrivalOptions arrival_options(const SimulateOptions& options) {
  sim::ArrivalOptions out;
  const double wanted =
      std::min(std::round(options.rate * options.seconds), static_cast<double>(options.most_requests));
  out.requests = static_cast<uint64_t>(wanted);
  out.rate_per_s = options.rate;
  out.burstiness = options.burstiness;
  const auto spread = [&](int64_t mean, uint32_t& least, uint32_t& most) {
    least = options.lengths == "fixed" ? static_cast<uint32_t>(mean) : 1;
    most = static_cast<uint32_t>(2 * mean - least);
  };
  spread(options.prompt_tokens, out.least_prompt_tokens, out.most_prompt_tokens);
  spread(options.output_tokens, out.least_output_tokens, out.most_output_tokens);
  out.seed = static_cast<uint64_t>(options.seed);
  return out;
}

Result<sim::Trace> make_trace(const SimulateOptions& options) {
  const sim::ArrivalOptions drawn = arrival_options(options);
  const bool draws = options.trace.empty() || options.resample;
  if (draws && drawn.requests == 0) {
    return invalid("no request arrives; accepted: a --rate and --seconds that give at least one", "rate");
  }
  if (options.trace.empty()) {
    if (options.resample) return invalid("--resample: accepted only with a --trace", "resample");
    return sim::draw_arrivals(drawn);
  }
  Result<sim::Trace> read = sim::read_trace(options.trace);
  if (!read) return read;
  if (options.resample) return sim::draw_arrivals(drawn, *read);
  if (read->requests.size() > static_cast<size_t>(options.most_requests)) {
    read->requests.resize(static_cast<size_t>(options.most_requests));
  }
  if (read->requests.empty()) return invalid(fmt::format("{}: no request in it", options.trace), "trace");
  return read;
}

struct Processes {
  std::unique_ptr<sim::ExpertProcess> simulated;
  std::unique_ptr<sim::ExpertProcess> calibrating;  // null: `simulated`, with other requests
  std::string about;
};

Result<Processes> recorded_experts(const SimulateOptions& options, const sim::Trace& trace, uint64_t seed) {
  Result<expert::Activations> all = expert::load_activations(options.experts);
  if (!all) return std::move(all).error();
  const auto names_row = [](const sim::TraceRequest& request) { return request.expert_profile >= 0; };
  if (std::ranges::any_of(trace.requests, names_row)) {  // rows of the file as it is
    auto made = sim::make_recorded(*all, seed);
    if (!made) return std::move(made).error();
    return Processes{.simulated = *std::move(made), .calibrating = nullptr, .about = options.experts};
  }
  // Every third request of a domain calibrates, so that both parts have the domains in the same shares.
  expert::Activations parts[2];
  std::map<std::string, size_t> seen;
  for (size_t i = 0; i < all->requests(); ++i) {
    const std::string domain = all->has_domains() ? all->domains[i] : std::string();
    expert::ExpertCounts prompt(all->shape), decode(all->shape);
    prompt.tokens = all->prompt_tokens[i];
    prompt.data.assign(all->prefill(i).begin(), all->prefill(i).end());
    if (all->has_decode()) {
      decode.tokens = all->decode_tokens[i];
      decode.data.assign(all->decode(i).begin(), all->decode(i).end());
    }
    expert::Activations& part = parts[seen[domain]++ % 3 == 0 ? 1 : 0];
    if (Status ok = part.append(prompt, all->has_decode() ? &decode : nullptr, domain); !ok) return ok.error();
  }
  Processes out;
  out.about = fmt::format("recorded: {} requests of {}", all->requests(), options.experts);
  auto simulated = sim::make_recorded(parts[0].requests() > 0 ? parts[0] : parts[1], seed);
  if (!simulated) return std::move(simulated).error();
  auto calibrating = sim::make_recorded(parts[1], seed);
  if (!calibrating) return std::move(calibrating).error();
  out.simulated = *std::move(simulated);
  out.calibrating = *std::move(calibrating);
  return out;
}

sim::SyntheticOptions synthetic_options(const SimulateOptions& options, const sim::Trace& trace,
                                        const expert::ExpertShape& shape) {
  sim::SyntheticOptions out = sim::calibrated_synthetic(shape);
  out.domains = trace.domains;
  for (int64_t d = 0; trace.domains.empty() && d < options.domains; ++d)
    out.domains.push_back(fmt::format("domain-{}", d));
  const auto replace = [](double given, double& value) { value = given >= 0 ? given : value; };
  replace(options.base, out.base);
  replace(options.domain, out.domain);
  replace(options.request, out.request);
  replace(options.drift, out.drift);
  replace(options.phase, out.phase);
  out.seed = static_cast<uint64_t>(options.seed);
  return out;
}

// From places among the trace's domains to places among those of the experts.
Status match_domains(sim::Trace& trace, const std::vector<std::string>& known) {
  std::vector<int32_t> place;
  for (const std::string& name : trace.domains) {
    const auto at = std::ranges::find(known, name);
    if (at == known.end()) {
      return invalid(fmt::format("--trace: its domain '{}' is none of the experts': {}", name, fmt::join(known, ", ")),
                     "trace");
    }
    place.push_back(static_cast<int32_t>(at - known.begin()));
  }
  for (sim::TraceRequest& request : trace.requests) {
    if (request.domain >= 0) request.domain = place.at(static_cast<size_t>(request.domain));
  }
  return {};
}

Result<Processes> make_experts(const SimulateOptions& options, const sim::Trace& trace, const sim::Profile& profile) {
  Processes out;
  const auto seed = static_cast<uint64_t>(options.seed);
  expert::ExpertShape shape;
  for (uint32_t l = 0; l < profile.dims.moe_layers; ++l) shape.layers.push_back(l);
  shape.experts = profile.dims.experts;
  shape.top_k = profile.dims.top_k;
  Result<std::unique_ptr<sim::ExpertProcess>> made = std::unique_ptr<sim::ExpertProcess>();
  if (options.experts == "uniform") {
    out.about = "uniform: every expert as likely as the other";
    made = sim::make_uniform(shape, seed);
  } else if (options.experts == "synthetic") {
    const sim::SyntheticOptions with = synthetic_options(options, trace, shape);
    out.about =
        fmt::format("synthetic: {} domains; base {:.2f}, domain {:.2f}, request {:.2f}, drift {:.2f}, phase {:.2f}",
                    with.domains.size(), with.base, with.domain, with.request, with.drift, with.phase);
    made = sim::make_synthetic(with);
  } else if (std::error_code error; std::filesystem::is_directory(options.experts, error)) {
    out.about = fmt::format("decisions token by token of {}", options.experts);
    made = sim::load_token_decisions(options.experts, {}, seed);
  } else {
    Result<Processes> recorded = recorded_experts(options, trace, seed);
    if (!recorded) return std::move(recorded).error();
    out = *std::move(recorded);
    made = std::move(out.simulated);
  }
  if (!made) return std::move(made).error();
  out.simulated = *std::move(made);
  if (Status ok = profile.check_experts(out.simulated->shape()); !ok) return ok.error();
  return out;
}

Result<sim::FittedCohorts> fit_cohorts(const SimulateOptions& options, const sim::Trace& trace, Processes& experts,
                                       uint32_t decode_workers) {
  std::vector<sim::CalibrationRequest> requests;
  sim::ExpertProcess& process = experts.calibrating ? *experts.calibrating : *experts.simulated;
  const auto count = std::max<size_t>(static_cast<size_t>(options.calibration), 4 * size_t{decode_workers});
  for (size_t i = 0; i < count; ++i) {
    sim::TraceRequest like = trace.requests[i % trace.requests.size()];
    if (experts.calibrating) like.expert_profile = static_cast<int32_t>(i);  // each row once before any twice
    sim::CalibrationRequest request{.experts = process.experts(like, kCalibrationBegins + i)};
    request.decode_tokens = std::clamp<uint32_t>(like.output_tokens, 1, kCalibrationTokens);
    requests.push_back(std::move(request));
  }
  const Result<expert::Activations> recorded = sim::record_activations(requests);
  if (!recorded) return recorded.error();
  return sim::fit_for(*recorded, decode_workers, static_cast<uint64_t>(options.seed));
}

Status set_router(const SimulateOptions& options, sim::DispatchOptions& router) {
  router.prefill.name = options.prefill_policy;
  router.prefill.tie_break = router.decode.tie_break = options.tie_break;
  router.prefill.seed = router.decode.seed = static_cast<uint64_t>(options.seed);
  router.decode.tau = options.tau;
  router.decode.load_cap = options.load_cap;
  router.fleet.load = *fleet::parse_load_source(options.load);
  router.fleet.breaker.slow_start_ms = std::chrono::milliseconds(5000);  // as the router's default
  router.fleet.load_max_age_ms = std::chrono::milliseconds(std::max<int64_t>(5000, 2 * options.poll_ms));
  router.decode_inflight = options.decode_inflight;
  for (const std::string& name : options.engine_policies) {
    router.engine =
        policy::EnginePolicyOptions{.name = name, .tie_break = options.tie_break, .seed = router.decode.seed};
    if (auto made = policy::make_engine_policy(*router.engine); !made) return std::move(made).error();
  }
  if (options.policies.empty()) return invalid("--policy: none is given", "policy");
  for (const std::string& name : options.policies) {
    policy::DecodePolicyOptions one = router.decode;
    one.name = name;
    if (auto made = policy::make_decode_policy(one); !made) return std::move(made).error();
  }
  return {};
}

bool wants_cohorts(const SimulateOptions& options) {
  return std::ranges::any_of(options.policies, [](const std::string& name) {
    policy::DecodePolicyOptions one;
    one.name = name;
    return (*policy::make_decode_policy(one))->wants_counts();
  });
}

Status set_cohorts(const SimulateOptions& options, const sim::Trace& trace, Processes& experts, SimulateSetup& out) {
  uint32_t decode_workers = 0;
  for (const sim::WorkerGroup& group : out.cluster.groups)
    decode_workers += group.role == Role::kDecode ? group.count : 0;
  if (!wants_cohorts(options) || decode_workers == 0) return {};
  if (!options.cohorts.empty()) {
    Result<expert::CohortModel> loaded = expert::CohortModel::load(options.cohorts);
    if (!loaded) return std::move(loaded).error();
    out.cluster.router.cohorts = std::make_shared<const expert::CohortModel>(*std::move(loaded));
    return {};
  }
  Result<sim::FittedCohorts> fitted = fit_cohorts(options, trace, experts, decode_workers);
  if (!fitted) return std::move(fitted).error();
  out.cluster.router.cohorts = fitted->model;
  out.fitted = *std::move(fitted);
  return {};
}

// Groups and events; returns the first profile, by which experts are drawn.
Result<sim::Profile> set_workers(const SimulateOptions& options, uint32_t piece_tokens, SimulateSetup& out) {
  const auto parts = parse_workers(options.workers, options.profile);
  if (!parts) return parts.error();
  std::optional<sim::Profile> first;
  for (const WorkersPart& part : *parts) {
    Result<sim::Profile> profile = find_profile(part.profile);
    if (!profile) return std::move(profile).error();
    if (!first) first = *profile;
    if (profile->model != first->model) {
      return invalid(fmt::format("--workers: {} is of {}, {} of {}: a cluster serves one model", profile->name,
                                 profile->model, first->name, first->model),
                     "workers");
    }
    Result<sim::WorkerGroup> group = make_group(options, part, *std::move(profile), piece_tokens);
    if (!group) return std::move(group).error();
    out.cluster.groups.push_back(*std::move(group));
  }
  name_groups(out.cluster.groups);
  auto events = parse_events(options, out.cluster.groups);
  if (!events) return std::move(events).error();
  out.cluster.script = *std::move(events);
  return *std::move(first);
}

}  // namespace

Result<SimulateSetup> set_up_simulation(const SimulateOptions& options) {
  SimulateSetup out;
  Result<sim::Trace> trace = make_trace(options);
  if (!trace) return std::move(trace).error();
  if (Status ok = set_router(options, out.cluster.router); !ok) return ok.error();
  const Result<sim::Profile> profile = set_workers(options, trace->block_tokens, out);
  if (!profile) return profile.error();
  out.model = profile->model;
  out.cluster.poll_ms = options.poll_ms;
  out.cluster.probe_ms = options.probe_ms;
  out.cluster.trace_ms = options.trace_ms;
  out.cluster.trace_delay_ms = options.trace_delay_ms;
  out.cluster.routers = static_cast<uint32_t>(options.routers);
  out.cluster.retries = static_cast<uint32_t>(options.retries);
  Result<Processes> experts = make_experts(options, *trace, *profile);
  if (!experts) return std::move(experts).error();
  if (Status ok = match_domains(*trace, experts->simulated->domains()); !ok) return ok.error();
  out.experts = experts->about;
  out.domains = experts->simulated->domains();
  for (size_t i = 0; i < trace->requests.size(); ++i) {
    sim::TraceRequest& given = trace->requests[i];
    sim::SimRequest request{.arrival_s = given.arrival_s,
                            .prompt_tokens = given.prompt_tokens,
                            .output_tokens = given.output_tokens,
                            .blocks = std::move(given.blocks),
                            .experts = experts->simulated->experts(given, i),
                            .label = {}};
    if (request.experts.domain < out.domains.size()) request.label = out.domains[request.experts.domain];
    out.requests.push_back(std::move(request));
  }
  if (Status ok = set_cohorts(options, *trace, *experts, out); !ok) return ok.error();
  return out;
}

Result<sim::Profile> set_up_workers(const SimulateOptions& options, uint32_t piece_tokens, SimulateSetup& out) {
  return set_workers(options, piece_tokens, out);
}

Result<std::unique_ptr<sim::ExpertProcess>> set_up_experts(const SimulateOptions& options,
                                                           const sim::Profile& profile) {
  Result<Processes> made = make_experts(options, sim::Trace{}, profile);
  if (!made) return std::move(made).error();
  return std::move(made->simulated);
}

}  // namespace kindred::cli

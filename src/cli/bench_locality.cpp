// `kindred bench locality`: what expert locality changes on a running cluster. One prefill worker, some
// decode workers, a router per policy over the same workers; the policies take turns with the same
// requests, seeds and Poisson arrivals. Cohorts are fitted on prompts that are not measured with.
//
// Workers are paced (docs/pace-profile.md): the tokens and experts are real, the step times are the
// profile's, so that several workers on few cores behave like as many machines.

#include "cli/bench_locality.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "base/rng.h"
#include "cli/terminal.h"
#include "expert/fit.h"
#include "policy/decode_policy.h"

namespace kindred::cli {
namespace {

constexpr size_t kMostRequests = 65'536;
constexpr int64_t kCalibrationTokens = 48;
constexpr size_t kCalibrationConcurrency = 8;
constexpr size_t kSignaturesCompared = 32;

struct PromptSplit {
  std::vector<Prompt> calibration, measured;
};

// Every third prompt of a domain calibrates, so both halves have the domains in the same shares.
PromptSplit split(std::vector<Prompt> prompts) {
  PromptSplit out;
  std::map<std::string, size_t> seen;
  for (Prompt& prompt : prompts) {
    (seen[prompt.domain]++ % 3 == 0 ? out.calibration : out.measured).push_back(std::move(prompt));
  }
  return out;
}

// The counts of the calibration prompts, from a worker that does both phases and is not paced.
Result<expert::Activations> record(const LocalityOptions& options, const std::vector<Prompt>& prompts,
                                   const std::string& log_dir) {
  ClusterPlan plan{options.model, log_dir, 0, {}};
  Result<LocalCluster> cluster = LocalCluster::start(plan);
  if (!cluster) return std::move(cluster).error();
  const Result<LocalCluster::Server> worker = cluster->launch_worker("calibration", "both");
  if (!worker) return worker.error();
  if (Status ready = cluster->wait_ready(); !ready) return std::move(ready).error();
  std::vector<ChatCall> calls;
  for (size_t i = 0; i < prompts.size(); ++i) {
    ChatCall call;
    call.prompt = prompts[i].text;
    call.max_tokens = kCalibrationTokens;
    call.temperature = 0.8;
    call.seed = static_cast<int64_t>(i);
    call.ignore_eos = call.expert_counts = true;
    calls.push_back(std::move(call));
  }
  Progress progress("recording expert counts", calls.size());
  size_t done = 0;
  LoadOptions load;
  load.concurrency = kCalibrationConcurrency;
  load.on_answer = [&](size_t, const ChatAnswer&) { progress.set(++done); };
  const std::vector<ChatAnswer> answers = run_chats(cluster->endpoint(*worker), calls, load);
  expert::Activations out;
  out.model = options.model;
  for (size_t i = 0; i < answers.size(); ++i) {
    if (!answers[i].status.ok()) return answers[i].status.error();
    if (!answers[i].prompt_counts || !answers[i].decode_counts)
      return invalid("the model has no experts: nothing to measure", "model");
    const Status added = out.append(*answers[i].prompt_counts, &*answers[i].decode_counts, prompts[i].domain);
    if (!added) return added.error();
  }
  return out;
}

Status fit(const LocalityOptions& options, const std::string& path, LocalityResult& result) {
  expert::FitOptions with;
  with.workers = static_cast<uint32_t>(options.workers);
  with.seed = static_cast<uint64_t>(options.seed);
  Result<expert::FitReport> fitted = expert::fit_cohorts(result.recorded, with);
  if (!fitted) return std::move(fitted).error();
  result.by_cohort = result.recorded;
  result.by_cohort.domains.clear();
  for (const uint32_t cohort : fitted->assignment) result.by_cohort.domains.push_back(fmt::to_string(cohort));
  result.purity = fitted->purity;
  result.rho = fitted->mask.peak_rho();
  result.kept_layers = fitted->mask.kept;
  result.layers = fitted->mask.order.size();
  return fitted->model.save(path);
}

std::vector<std::string> router_args(const LocalityOptions& options, const std::string& policy,
                                     const std::string& cohorts) {
  std::vector<std::string> args = {"--decode-policy", policy, "--seed", std::to_string(options.seed)};
  const bool by_experts = policy == "locality-band" || policy == "marginal-cost";
  if (by_experts || policy == "domain") args.insert(args.end(), {"--load-cap", fmt::to_string(options.load_cap)});
  if (by_experts) {
    args.insert(args.end(), {"--cohorts", cohorts, "--tau", fmt::to_string(options.tau)});
    if (options.shuffle_signatures) args.emplace_back("--shuffle-signatures");
  }
  return args;
}

// One router per policy, shared by its cache modes.
Status launch_arms(const LocalityOptions& options, const std::string& cohorts, LocalCluster& cluster,
                   std::vector<Arm>& arms) {
  for (const std::string& policy : options.policies) {
    const Result<LocalCluster::Server> router = cluster.launch_router(policy, 0, router_args(options, policy, cohorts));
    if (!router) return router.error();
    if (options.cache != "on") arms.push_back({policy, false, *router});
    if (options.cache != "off") arms.push_back({policy, true, *router});
  }
  return cluster.wait_ready();
}

struct Traffic {
  std::vector<ChatCall> calls;
  std::vector<double> arrivals_s;
};

// The same for every arm of a round. With a pool, a few prompts come again and again; otherwise each prompt
// comes once before any comes twice.
Traffic make_traffic(const LocalityOptions& options, const std::vector<Prompt>& prompts, int64_t round) {
  Rng rng(mix64(static_cast<uint64_t>(options.seed) * 1'000 + static_cast<uint64_t>(round)));
  std::vector<size_t> order(prompts.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  for (size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[rng.below(i)]);
  if (options.pool > 0) order.resize(std::min(order.size(), static_cast<size_t>(options.pool)));
  Traffic traffic;
  double at_s = 0;
  for (size_t i = 0; i < kMostRequests; ++i) {
    at_s += -std::log(1 - rng.uniform()) / options.rate;
    if (at_s > options.seconds) break;
    const Prompt& prompt = prompts[order[i % order.size()]];
    ChatCall call;
    call.domain = prompt.domain;
    call.prompt = prompt.text;
    call.max_tokens = options.tokens;
    call.temperature = 0.8;
    call.seed = static_cast<int64_t>(i);
    call.ignore_eos = true;  // equal lengths: the policies differ in nothing else
    traffic.calls.push_back(std::move(call));
    traffic.arrivals_s.push_back(at_s);
  }
  return traffic;
}

Result<ArmResult> drive(const LocalCluster& cluster, const Arm& arm, Traffic traffic, Progress& progress,
                        size_t& progressed) {
  for (ChatCall& call : traffic.calls) call.prefix_cache = arm.cache;
  const Result<DecodeWork> before = decode_work(cluster);
  if (!before) return before.error();
  ArmResult result;
  LoadOptions load;
  load.arrivals_s = traffic.arrivals_s;
  load.on_answer = [&](size_t, const ChatAnswer& answer) {
    progress.set(++progressed);
    ++result.requests;
    if (!answer.status.ok()) {
      if (result.failed++ == 0) result.first_error = answer.status.error().message;
      return;
    }
    result.ttft_s.push_back(answer.ttft_s);
    if (const std::optional<double> tpot = answer.tpot_s()) result.tpot_s.push_back(*tpot);
  };
  run_chats(cluster.endpoint(arm.router), traffic.calls, load);
  const Result<DecodeWork> after = decode_work(cluster);
  if (!after) return after.error();
  result.work = *after - *before;
  return result;
}

// All arms in every round; the order turns, so that a drift of the machine hits all alike.
Status measure_rounds(const LocalityOptions& options, const LocalCluster& cluster, const std::vector<Prompt>& prompts,
                      LocalityResult& result) {
  std::vector<Traffic> traffic;
  size_t all = 0;
  for (int64_t round = 0; round < options.rounds; ++round) {
    traffic.push_back(make_traffic(options, prompts, round));
    all += traffic.back().calls.size() * result.arms.size();
  }
  if (all == 0) return invalid("no request arrives: accepted: a --rate and --seconds that give at least one", "rate");
  Progress progress("sending requests, all policies", all);
  size_t progressed = 0;
  for (size_t round = 0; round < traffic.size(); ++round) {
    std::vector<ArmResult> results(result.arms.size());
    for (size_t i = 0; i < results.size(); ++i) {
      const size_t turn = round % 2 == 0 ? i : results.size() - 1 - i;
      Result<ArmResult> arm = drive(cluster, result.arms[turn], traffic[round], progress, progressed);
      if (!arm) return std::move(arm).error();
      results[turn] = std::move(*arm);
    }
    result.rounds.push_back(std::move(results));
  }
  return {};
}

// Whether the signature cache gives what a cold run gives: prompts once without and twice with the cache.
Status compare_signatures(const LocalCluster& cluster, const Arm& arm, const std::vector<Prompt>& prompts,
                          LocalityResult& result) {
  std::vector<ChatCall> calls;
  for (size_t i = 0; i < std::min(prompts.size(), kSignaturesCompared); ++i) {
    for (const bool cache : {false, true, true}) {
      ChatCall call;
      call.prompt = prompts[i].text;
      call.max_tokens = 2;
      call.prefix_cache = cache;
      call.expert_counts = true;
      calls.push_back(std::move(call));
    }
  }
  const std::vector<ChatAnswer> answers = run_chats(cluster.endpoint(arm.router), calls, {});
  for (size_t i = 0; i + 2 < answers.size(); i += 3) {
    for (const size_t k : {i, i + 1, i + 2}) {
      if (!answers[k].status.ok()) return answers[k].status.error();
      if (!answers[k].prompt_counts) return Error{ErrorCode::kCorrupt, "an answer has no expert counts"};
    }
    ++result.signatures;
    const auto& cold = *answers[i].prompt_counts;
    if (answers[i + 1].prompt_counts->data == cold.data && answers[i + 2].prompt_counts->data == cold.data)
      ++result.equal_signatures;
  }
  return {};
}

Result<std::string> profile_name(const std::string& path) {
  const Result<std::string> text = read_file(path);
  if (!text) return text.error();
  const Json profile = parse_json(*text);
  if (!profile.is_object()) return Error{ErrorCode::kCorrupt, fmt::format("{}: not a JSON object", path)};
  return profile.value("name", "unnamed");
}

Status check_policies(const std::vector<std::string>& policies) {
  const auto names = policy::decode_policy_names();
  for (const std::string& policy : policies) {
    if (std::find(names.begin(), names.end(), policy) == names.end())
      return invalid(fmt::format("--policy: got '{}', accepted: {}", policy, fmt::join(names, ", ")), "policy");
  }
  return {};
}

}  // namespace

Result<LocalityResult> run_locality(const LocalityOptions& options) {
  Result<std::vector<Prompt>> prompts = load_prompts(options.prompts);
  if (!prompts) return std::move(prompts).error();
  const PromptSplit parts = split(std::move(*prompts));
  if (parts.measured.empty() || parts.calibration.size() < static_cast<size_t>(options.workers))
    return invalid(fmt::format("{}: too few prompts: a third of them must be at least one per worker", options.prompts),
                   "prompts");
  LocalityResult result;
  for (const Prompt& prompt : parts.measured) ++result.domains[prompt.domain];
  Result<ScratchDir> scratch = ScratchDir::make();
  if (!scratch) return std::move(scratch).error();
  const auto began = std::chrono::steady_clock::now();
  Result<expert::Activations> recorded = record(options, parts.calibration, scratch->path());
  if (!recorded) return std::move(recorded).error();
  result.recorded = std::move(*recorded);
  const std::string cohorts = scratch->path() + "/cohorts.safetensors";
  if (Status fitted = fit(options, cohorts, result); !fitted) return std::move(fitted).error();

  ClusterPlan plan{options.model, scratch->path(), static_cast<uint32_t>(options.workers), {}};
  if (!options.unpaced) {
    Result<std::string> name = profile_name(options.pace);
    if (!name) return std::move(name).error();
    result.paced = std::move(*name);
    plan.worker_args = {"--pace", options.pace};
  }
  Result<LocalCluster> cluster = LocalCluster::start(plan);
  if (!cluster) return std::move(cluster).error();
  if (Status up = launch_arms(options, cohorts, *cluster, result.arms); !up) return std::move(up).error();
  if (options.cache != "off") {
    const Status compared = compare_signatures(*cluster, result.arms[0], parts.measured, result);
    if (!compared) return compared.error();
  }
  if (Status done = measure_rounds(options, *cluster, parts.measured, result); !done) return std::move(done).error();
  result.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
  return result;
}

int bench_locality(Args args) {
  LocalityOptions options;
  ConfigSchema schema("bench locality [--mix task|language] [OPTIONS]",
                      "Runs a cluster of paced workers and compares decode policies on the same requests: experts a "
                      "step touches, TPOT, TTFT.");
  schema.choice("mix", &options.mix, {"language", "task"}, "which prompts: of four languages, or of four tasks");
  schema.text("prompts", &options.prompts, "JSONL with \"prompt\" and \"domain\", in place of --mix");
  schema.text("model", &options.model, "GGUF file; default: the bundled one");
  schema.text("pace", &options.pace, "pace profile of the workers; default: the bundled one");
  schema.flag("unpaced", &options.unpaced, "run the workers as fast as this machine can");
  schema.list("policy", &options.policies, "decode policy to compare, the first with the others");
  schema.choice("cache", &options.cache, {"off", "on", "both"}, "prefix cache");
  schema.integer("pool", &options.pool, 0, 1 << 20, "draw prompts in turn from so many; 0: from all");
  schema.integer("workers", &options.workers, 1, 64, "decode workers, each with a cohort");
  schema.integer("rounds", &options.rounds, 1, 100, "each policy has a turn in each");
  schema.real("rate", &options.rate, 0.01, 1000, "requests a second");
  schema.real("seconds", &options.seconds, 1, 3600, "of arrivals in a turn");
  schema.integer("tokens", &options.tokens, 2, 4096, "output tokens of every request");
  schema.real("tau", &options.tau, 0, 2, "locality-band: similarity a candidate may lose to the best");
  schema.real("load_cap", &options.load_cap, 0, 1000,
              "locality-band, domain: multiple of the mean load that a worker may have, at least 1; 0: none");
  schema.flag("shuffle_signatures", &options.shuffle_signatures,
              "give each request another one's signature: the gain must vanish");
  schema.integer("seed", &options.seed, 0, 1LL << 40, "of arrivals, order and sampling");
  options.output.declare(schema, /*draws=*/true);
  if (const auto status = parse_bench_flags(schema, args)) return *status;
  const std::string root = find_root();
  if (options.prompts.empty()) options.prompts = fmt::format("{}/data/prompts/bench_{}.jsonl", root, options.mix);
  if (options.model.empty()) options.model = root + "/models/kindred-tiny-moe-q8_0.gguf";
  if (options.pace.empty()) options.pace = root + "/models/pace-demo.json";
  if (options.policies.empty())
    options.policies = {"round-robin", "least-loaded", "locality-band", "marginal-cost", "domain"};

  if (options.load_cap > 0 && options.load_cap < 1)
    return fail("bench locality", invalid("--load-cap: accepted: 0 (none), 1 or more", "load_cap"), 2);
  if (const Status known = check_policies(options.policies); !known) return fail("bench locality", known.error(), 2);
  const Machine machine = this_machine();
  const Result<LocalityResult> result = run_locality(options);
  if (!result) return fail("bench locality", result.error());
  fmt::print("{}", options.output.json ? dump_json(locality_json(options, *result, machine)) + "\n"
                                       : locality_text(options, *result, machine));
  if (!options.output.plots.empty()) {
    if (const Status drawn = locality_plots(options, *result, machine); !drawn)
      return fail("bench locality", drawn.error());
  }
  const auto failed = [&](size_t arm) { return result->total(arm).failed > 0; };
  for (size_t arm = 0; arm < result->arms.size(); ++arm) {
    if (failed(arm)) return fail("bench locality", Error{ErrorCode::kUnavailable, result->total(arm).first_error});
  }
  return 0;
}

}  // namespace kindred::cli

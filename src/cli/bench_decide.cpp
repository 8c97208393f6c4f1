// `kindred bench decide`: what a router adds to a request for looking at its experts, part by part, on
// one core: the counts of the prefill reply are parsed (JSON, base64, checks), transformed to a
// signature, compared with every cohort, and a worker is chosen. Beside it, what marginal-cost takes, and what keeping
// each worker's expert load costs. ELDR's Table 1 reports 0.86 ms a request.

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <span>
#include <vector>

#include "base/rng.h"
#include "cli/bench.h"
#include "cli/plot.h"
#include "cli/terminal.h"
#include "expert/cohorts.h"
#include "fleet/expert_load.h"
#include "policy/decode_policy.h"

namespace kindred::cli {
namespace {

constexpr double kAimUs = 50;

struct DecideOptions {
  int64_t workers = 16, layers = 48, experts = 128, top_k = 8, tokens = 512, requests = 256, rounds = 20, seed = 1;
  std::string policy = "locality-band";
  BenchOutput output;
};

// Counts as prompts have them: each request prefers the experts of its domain, and every row sums to
// tokens * top_k with no expert above `tokens`.
expert::ExpertCounts random_counts(const expert::ExpertShape& shape, uint32_t tokens, uint64_t domain, Rng& rng) {
  expert::ExpertCounts counts(shape);
  counts.tokens = tokens;
  for (size_t l = 0; l < shape.layers.size(); ++l) {
    uint32_t* row = counts.data.data() + l * shape.experts;
    uint64_t left = static_cast<uint64_t>(tokens) * shape.top_k;
    for (uint32_t e = 0; e < shape.experts; ++e) {
      const bool home = mix64(domain * 1'000'003 + l * 997 + e) % 4 == 0;
      const double mean = static_cast<double>(left) / (shape.experts - e) * (home ? 1.8 : 0.7);
      const auto drawn = static_cast<uint64_t>(mean * (0.5 + rng.uniform()));
      row[e] = static_cast<uint32_t>(std::min<uint64_t>({drawn, left, tokens}));
      left -= row[e];
    }
    for (uint32_t e = 0; left > 0; e = (e + 1) % shape.experts) {
      const uint64_t more = std::min<uint64_t>(left, tokens - row[e]);
      row[e] += static_cast<uint32_t>(more);
      left -= more;
    }
  }
  return counts;
}

struct Workload {
  std::vector<std::string> replies;  // counts as they come over the wire
  std::vector<expert::ExpertCounts> counts;
  std::optional<expert::CohortModel> cohorts;
  std::vector<policy::WorkerView> workers;
  std::vector<std::shared_ptr<const fleet::ExpertState>> loads;  // which `workers` refer to
};

// Each worker has some of the requests.
void put_loads(Workload& work, Rng& rng) {
  const SystemClock clock;
  for (policy::WorkerView& worker : work.workers) {
    fleet::ExpertLoad load(clock);
    worker.requests = worker.load = static_cast<double>(1 + rng.below(16));
    for (auto left = static_cast<int>(worker.requests); left > 0; --left) {
      load.join(expert::pack_inclusion(work.counts[rng.below(work.counts.size())]), 1);
    }
    work.loads.push_back(load.state());
    worker.unused = work.loads.back()->unused;
    worker.used = work.loads.back()->used;
  }
}

// Every layer is kept: the dearest mask there is.
Result<Workload> make_workload(const DecideOptions& options) {
  Workload work;
  Rng rng(static_cast<uint64_t>(options.seed));
  expert::CohortData data;
  data.model = "synthetic";
  for (uint32_t l = 0; l < static_cast<uint32_t>(options.layers); ++l) {
    data.shape.layers.push_back(l);
    data.greedy_layers.push_back(l);
  }
  data.shape.experts = static_cast<uint32_t>(options.experts);
  data.shape.top_k = static_cast<uint32_t>(options.top_k);
  data.layer_mask.assign(data.shape.layers.size(), 1);
  for (size_t c = 0; c < data.shape.cells(); ++c) data.idf.push_back(static_cast<float>(0.01 + rng.uniform()));
  const auto tokens = static_cast<uint32_t>(options.tokens);
  for (int64_t k = 0; k < options.workers; ++k) {
    expert::Signature centroid;
    const expert::ExpertCounts counts = random_counts(data.shape, tokens, static_cast<uint64_t>(k), rng);
    KINDRED_CHECK(expert::build_signature(counts.data, data.idf, data.layer_mask, centroid));
    data.centroids.insert(data.centroids.end(), centroid.begin(), centroid.end());
    work.workers.push_back({"", static_cast<double>(rng.below(8)), true, static_cast<int32_t>(k)});
  }
  for (int64_t i = 0; i < options.requests; ++i) {
    const uint64_t domain = rng.below(static_cast<uint64_t>(options.workers));
    work.counts.push_back(random_counts(data.shape, tokens, domain, rng));
    work.replies.push_back(expert::counts_to_json(work.counts.back()));
  }
  put_loads(work, rng);
  Result<expert::CohortModel> model = expert::CohortModel::make(std::move(data));
  if (!model) return std::move(model).error();
  work.cohorts.emplace(std::move(*model));
  return work;
}

struct Part {
  std::string name;
  std::vector<double> us;
};

// parts[0] without cohorts, parts[1] with them, parts[2] what is kept of a decision.
void time_marginal(const Workload& work, policy::DecodePolicy& policy, fleet::ExpertLoad& load, std::span<Part> parts) {
  const policy::DecodeSnapshot without{work.workers}, with{work.workers, &*work.cohorts};
  std::optional<policy::Decision> decision;
  for (const expert::ExpertCounts& counts : work.counts) {
    policy::DecodeRequest request;
    request.counts = &counts;
    parts[0].us.push_back(1e6 * seconds([&] { decision = policy.choose(without, request); }));
    parts[1].us.push_back(1e6 * seconds([&] { KINDRED_CHECK(policy.choose(with, request).has_value()); }));
    KINDRED_CHECK(decision && decision->fallback == policy::FallbackReason::kNone);
    parts[2].us.push_back(1e6 * seconds([&] {
                            KINDRED_CHECK(load.join(*decision->inclusion, 1));
                            load.leave(*decision->inclusion, 1);
                          }));
  }
}

// Each part over all requests, request by request, in every round.
std::vector<Part> time_parts(const DecideOptions& options, const Workload& work, policy::DecodePolicy& policy) {
  std::vector<Part> parts = {{"parse counts (JSON, base64, checks)", {}},
                             {"transform to a signature", {}},
                             {"similarity to every cohort", {}},
                             {"choose (transform, similarity, band, load)", {}},
                             {"all: parse and choose", {}},
                             {"marginal-cost (inclusion, products, costs)", {}},
                             {"marginal-cost with cohorts", {}},
                             {"expert load (a request joins and leaves)", {}}};
  policy::DecodePolicyOptions marginal;
  marginal.name = "marginal-cost";
  const std::unique_ptr<policy::DecodePolicy> costs = *policy::make_decode_policy(marginal);
  const SystemClock clock;
  fleet::ExpertLoad load(clock);
  const expert::Inclusion other = expert::pack_inclusion(work.counts[0]);
  load.join(other, 1);
  const policy::DecodeSnapshot snapshot{work.workers, &*work.cohorts};
  expert::Signature signature;
  Progress progress("deciding", static_cast<size_t>(options.rounds));
  for (int64_t round = 0; round < options.rounds; ++round) {
    for (size_t i = 0; i < work.counts.size(); ++i) {
      parts[0].us.push_back(1e6 * seconds([&] { KINDRED_CHECK(expert::counts_from_json(work.replies[i]).ok()); }));
      parts[1].us.push_back(1e6 * seconds([&] { (void)work.cohorts->signature(work.counts[i], signature); }));
      parts[2].us.push_back(1e6 * seconds([&] { KINDRED_CHECK(!work.cohorts->similarities(signature).empty()); }));
      policy::DecodeRequest request;
      request.counts = &work.counts[i];
      parts[3].us.push_back(1e6 * seconds([&] { KINDRED_CHECK(policy.choose(snapshot, request).has_value()); }));
      parts[4].us.push_back(1e6 * seconds([&] {
                              const Result<expert::ExpertCounts> counts = expert::counts_from_json(work.replies[i]);
                              request.counts = &*counts;
                              KINDRED_CHECK(policy.choose(snapshot, request)->fallback ==
                                            policy::FallbackReason::kNone);
                            }));
    }
    progress.set(static_cast<size_t>(round) + 1);
    time_marginal(work, *costs, load, std::span(parts).subspan(5));
  }
  return parts;
}

Status measure_decide(const DecideOptions& options) {
  if (options.top_k > options.experts) return invalid("--top-k: accepted: up to --experts", "top_k");
  const Machine machine = this_machine();
  Result<Workload> work = make_workload(options);
  if (!work) return std::move(work).error();
  policy::DecodePolicyOptions with;
  with.name = options.policy;
  Result<std::unique_ptr<policy::DecodePolicy>> policy = policy::make_decode_policy(with);
  if (!policy) return std::move(policy).error();
  const std::vector<Part> parts = time_parts(options, *work, **policy);

  Table table({"part", "p50 us", "p99 us"});
  Json json = {{"bench", "decide"},          {"machine", machine_json(machine)},
               {"workers", options.workers}, {"layers", options.layers},
               {"experts", options.experts}, {"wire_bytes", work->replies[0].size()},
               {"policy", options.policy},   {"aim_us", kAimUs},
               {"parts", Json::array()}};
  BarChart chart{"One decision, part by part", "µs, median", {}, {"p50"}, {{}}, machine_text(machine)};
  for (const Part& part : parts) {
    const double p50 = quantile(part.us, 0.5), p99 = quantile(part.us, 0.99);
    table.row({part.name, fmt::format("{:.1f}", p50), fmt::format("{:.1f}", p99)});
    json["parts"].push_back({{"name", part.name}, {"p50_us", p50}, {"p99_us", p99}});
    chart.categories.push_back(part.name.substr(0, part.name.find_first_of("(:")));
    chart.values[0].push_back(p50);
  }
  if (!options.output.plots.empty()) {
    if (Status saved = save_svg(options.output.plots, "decide", bar_chart(chart)); !saved) return saved;
  }
  if (options.output.json) {
    fmt::print("{}\n", dump_json(json));
    return {};
  }
  fmt::print("{} workers, {} layers x {} experts, {} prompts of {} tokens, {} bytes of counts each\n\n{}\n",
             options.workers, options.layers, options.experts, options.requests, options.tokens,
             work->replies[0].size(), table.text());
  fmt::print("  aim: {:.0f} us for all (ELDR, Table 1: 860 us)\n  {}\n", kAimUs, machine_text(machine));
  return {};
}

}  // namespace

int bench_decide(Args args) {
  DecideOptions options;
  ConfigSchema schema("bench decide [--workers N] [--layers L] [--experts E]",
                      "Times one routing decision on one core: parsing a prefill reply's expert counts, the signature, "
                      "the similarity to every cohort, the choice.");
  schema.integer("workers", &options.workers, 1, 1024, "decode workers, each with a cohort");
  schema.integer("layers", &options.layers, 1, 256, "MoE layers, all kept by the mask");
  schema.integer("experts", &options.experts, 2, 1024, "experts of a layer");
  schema.integer("top_k", &options.top_k, 1, 64, "experts of a token");
  schema.integer("tokens", &options.tokens, 1, 65'535, "tokens of a prompt");
  schema.integer("requests", &options.requests, 1, 65'536, "different prompts");
  schema.integer("rounds", &options.rounds, 1, 10'000, "times each is decided");
  schema.integer("seed", &options.seed, 0, 1LL << 40, "of the synthetic counts");
  const auto names = policy::decode_policy_names();
  schema.choice("policy", &options.policy, {names.begin(), names.end()}, "who chooses");
  options.output.declare(schema, /*draws=*/true);
  if (const auto status = parse_bench_flags(schema, args)) return *status;
  if (const Status done = measure_decide(options); !done) return fail("bench decide", done.error());
  return 0;
}

}  // namespace kindred::cli

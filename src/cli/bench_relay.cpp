// `kindred bench relay`: what the router costs as a data plane, beside nginx and whatever other router is
// installed, in one run: processor time per request and per event of a stream, latency added, memory and
// stalls with thousands of streams open.
//
// Workers and clients live in this process; who is measured is a child, whose processor time the kernel
// keeps. So ratios hold on a machine that does other things too; latencies do not.

#include <fmt/format.h>
#include <sys/resource.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "cli/bench.h"
#include "cli/plot.h"
#include "cli/relay_load.h"
#include "cli/relay_target.h"
#include "cli/terminal.h"
#include "expert/cohorts.h"

namespace kindred::cli {
namespace {

using namespace std::chrono_literals;

constexpr uint32_t kEvents = 128;   // of a stream
constexpr auto kEventPause = 10ms;  // where events come one at a time
constexpr size_t kSmallPrompt = 640;
constexpr size_t kLongPrompt = 600'000;  // 100k tokens

struct RelayOptions {
  int64_t connections = 64, requests = 4000, rounds = 5, streams = 10'000, hold_s = 10, layers = 47, experts = 128;
  int64_t threads = 1;
  std::string nginx = "nginx";
  PeerPrograms peers;
  BenchOutput output;
  std::string limit = {};  // what allows no more streams; empty: as many as were asked for
};

// By target and round, microseconds of processor time; and requests a second, of all clients together.
struct Costs {
  std::vector<double> request, burst_event, single_event, long_prompt;
  std::vector<double> added_p50_us, added_p99_us, per_s;
};

struct Bed {
  RelayOptions options;
  Machine machine;
  ScratchDir folder;
  std::unique_ptr<RelayBackend> backend = {};
  std::vector<RelayTarget> targets = {};  // nginx first
  std::vector<std::string> absent = {};   // other routers that could not be started
  std::vector<Costs> costs = {};
  Json json = {};
};

Result<std::string> save_cohorts(const Bed& bed, const expert::ExpertShape& shape) {
  expert::CohortData data;
  data.model = "m";
  data.model_fingerprint = "f0";
  data.shape = shape;
  data.idf.assign(shape.cells(), 1.0F);
  data.layer_mask.assign(shape.layers.size(), 1);
  data.greedy_layers = shape.layers;
  const auto unit = static_cast<float>(1 / std::sqrt(static_cast<double>(shape.cells()) / 2));
  for (size_t k = 0; k < RelayBackend::kDecodeWorkers; ++k) {
    for (size_t c = 0; c < shape.cells(); ++c) data.centroids.push_back(c % 2 == k ? unit : 0.0F);
  }
  const auto made = expert::CohortModel::make(std::move(data));
  if (!made) return made.error();
  std::string path = bed.folder.path() + "/cohorts.safetensors";
  if (Status saved = made->save(path); !saved) return std::move(saved).error();
  return path;
}

// Every stream takes two descriptors in the router, to client and worker, and two here, which are both; the router
// inherits the limit. It is raised as far as that is allowed; where that is too low, fewer streams are measured.
void fit_to_descriptors(RelayOptions& options) {
  constexpr rlim_t kOthers = 256;  // logs, listeners, health
  const auto wanted = std::max<rlim_t>(2 * static_cast<rlim_t>(options.streams) + kOthers, 4096);
  rlimit files{};
  ::getrlimit(RLIMIT_NOFILE, &files);
  const rlimit more = {.rlim_cur = wanted, .rlim_max = std::max(files.rlim_max, wanted)};
  if (::setrlimit(RLIMIT_NOFILE, &more) == 0) return;
  // The hard limit is for the superuser to raise.
  files.rlim_cur = files.rlim_max;
  ::setrlimit(RLIMIT_NOFILE, &files);
  const auto most = static_cast<int64_t>((std::max(files.rlim_max, kOthers) - kOthers) / 2);
  if (options.streams <= most) return;
  options.limit = fmt::format("the hard limit of {} open files (ulimit -Hn): {} streams, two in the router for each",
                              files.rlim_max, most);
  options.streams = most;
}

Result<Bed> set_up(const RelayOptions& options) {
  Result<ScratchDir> folder = ScratchDir::make();
  if (!folder) return std::move(folder).error();
  Bed bed{.options = options, .machine = this_machine(), .folder = std::move(*folder)};
  expert::ExpertShape shape;
  for (uint32_t l = 0; l < static_cast<uint32_t>(options.layers); ++l) shape.layers.push_back(l);
  shape.experts = static_cast<uint32_t>(options.experts);
  shape.top_k = 8;
  Result<std::unique_ptr<RelayBackend>> backend = RelayBackend::start(shape);
  if (!backend) return std::move(backend).error();
  bed.backend = std::move(*backend);
  Result<std::string> cohorts = save_cohorts(bed, shape);
  if (!cohorts) return std::move(cohorts).error();

  Result<RelayTarget> nginx = start_nginx(options.nginx, *bed.backend, bed.folder.path());
  if (!nginx) return std::move(nginx).error();
  bed.targets.push_back(std::move(*nginx));
  Result<RelayTarget> router = start_router(*bed.backend, bed.folder.path());
  if (!router) return std::move(router).error();
  bed.targets.push_back(std::move(*router));
  Result<RelayTarget> pd = start_pd_router(*bed.backend, *cohorts, bed.folder.path());
  if (!pd) return std::move(pd).error();
  bed.targets.push_back(std::move(*pd));
  if (options.threads > 1) {
    Result<RelayTarget> wide = start_router(*bed.backend, bed.folder.path(), static_cast<size_t>(options.threads));
    if (!wide) return std::move(wide).error();
    bed.targets.push_back(std::move(*wide));
  }
  Peers peers = start_peers(options.peers, *bed.backend, bed.folder.path());
  for (RelayTarget& peer : peers.started) bed.targets.push_back(std::move(peer));
  bed.absent = std::move(peers.absent);
  bed.costs.resize(bed.targets.size());
  return bed;
}

// Microseconds of the target's processor time per request. `wall_s`, if given: how long the load took.
Result<double> cost_us(const RelayTarget& target, const RelayLoad& load, double* wall_s = nullptr) {
  Result<double> before = processor_time_s(target.child->pid());
  if (!before) return before;
  const Result<RelayResult> result = run_relay_load(target.port, load);
  if (!result) return result.error();
  Result<double> after = processor_time_s(target.child->pid());
  if (!after) return after;
  if (wall_s != nullptr) *wall_s = result->wall_s;
  return 1e6 * (*after - *before) / static_cast<double>(load.requests);
}

RelayLoad load_of(const Bed& bed, size_t prompt_bytes, bool stream, size_t requests) {
  const auto connections = static_cast<size_t>(bed.options.connections);
  return {.request = chat_request(prompt_bytes, stream),
          .connections = connections,
          .requests = std::max(requests, connections)};
}

// Latency through the target less that of the workers themselves, four requests at a time.
Status measure_latency(Bed& bed, size_t t) {
  RelayLoad load = load_of(bed, kSmallPrompt, false, static_cast<size_t>(bed.options.requests) / 4);
  load.connections = 4;
  const Result<RelayResult> direct = run_relay_load(bed.backend->plain_port(), load);
  if (!direct) return direct.error();
  const Result<RelayResult> through = run_relay_load(bed.targets[t].port, load);
  if (!through) return through.error();
  for (const auto& [q, out] : {std::pair{0.5, &bed.costs[t].added_p50_us}, std::pair{0.99, &bed.costs[t].added_p99_us}})
    out->push_back(quantile(through->latency_us, q) - quantile(direct->latency_us, q));
  return {};
}

Status measure_target(Bed& bed, size_t t) {
  const RelayTarget& target = bed.targets[t];
  Costs& costs = bed.costs[t];
  const auto requests = static_cast<size_t>(bed.options.requests);
  double wall_s = 0;
  const RelayLoad small = load_of(bed, kSmallPrompt, false, requests);
  const Result<double> request = cost_us(target, small, &wall_s);
  if (!request) return request.error();
  costs.request.push_back(*request);
  costs.per_s.push_back(static_cast<double>(small.requests) / wall_s);
  for (const bool single : {false, true}) {
    bed.backend->set({.events = kEvents, .interval_ms = single ? kEventPause : 0ms});
    const Result<double> stream = cost_us(target, load_of(bed, kSmallPrompt, true, requests / 16));
    if (!stream) return stream.error();
    (single ? costs.single_event : costs.burst_event).push_back((*stream - *request) / kEvents);
  }
  const Result<double> longer = cost_us(target, load_of(bed, kLongPrompt, false, requests / 16));
  if (!longer) return longer.error();
  costs.long_prompt.push_back(*longer);
  return measure_latency(bed, t);
}

double median(const std::vector<double>& values) { return quantile(values, 0.5); }

double median_ratio(const std::vector<double>& of, const std::vector<double>& to) {
  std::vector<double> ratios;
  for (size_t i = 0; i < of.size(); ++i) ratios.push_back(of[i] / to[i]);
  return median(ratios);
}

void report_costs(Bed& bed) {
  Table table({"processor time", "us/request", "us/event", "us/event, one by one", "us/request, 600 kB", "added p50 us",
               "added p99 us", "requests/s"});
  Table ratios({"ratio to nginx", "request", "event", "event, one by one", "request, 600 kB"});
  const Costs& nginx = bed.costs[0];
  for (size_t t = 0; t < bed.targets.size(); ++t) {
    const Costs& c = bed.costs[t];
    table.row({bed.targets[t].name, fmt::format("{:.1f}", median(c.request)),
               fmt::format("{:.2f}", median(c.burst_event)), fmt::format("{:.2f}", median(c.single_event)),
               fmt::format("{:.0f}", median(c.long_prompt)), fmt::format("{:.0f}", median(c.added_p50_us)),
               fmt::format("{:.0f}", median(c.added_p99_us)), fmt::format("{:.0f}", median(c.per_s))});
    ratios.row({bed.targets[t].name, fmt::format("{:.2f}", median_ratio(c.request, nginx.request)),
                fmt::format("{:.2f}", median_ratio(c.burst_event, nginx.burst_event)),
                fmt::format("{:.2f}", median_ratio(c.single_event, nginx.single_event)),
                fmt::format("{:.2f}", median_ratio(c.long_prompt, nginx.long_prompt))});
    bed.json["targets"].push_back({{"name", bed.targets[t].name},
                                   {"version", bed.targets[t].version},
                                   {"request_us", c.request},
                                   {"event_us", c.burst_event},
                                   {"single_event_us", c.single_event},
                                   {"long_prompt_us", c.long_prompt},
                                   {"added_p50_us", c.added_p50_us},
                                   {"added_p99_us", c.added_p99_us},
                                   {"requests_per_s", c.per_s}});
  }
  if (!bed.options.output.json) fmt::print("\n{}\n{}", table.text(), ratios.text());
}

// Cost of a request against `values`, one line per target.
Status draw(Bed& bed, const std::string& name, const std::string& x_label, const std::vector<size_t>& values,
            const std::function<RelayLoad(size_t value)>& load) {
  Chart chart{.title = "Processor time per request", .x_label = x_label, .y_label = "µs", .series = {}};
  chart.note = machine_text(bed.machine);
  chart.y_from_zero = true;
  Json rows = Json::array();
  for (const RelayTarget& target : bed.targets) {
    Series series{.name = target.name, .x = {}, .y = {}};
    for (const size_t value : values) {
      const Result<double> cost = cost_us(target, load(value));
      if (!cost) return cost.error();
      series.x.push_back(static_cast<double>(value));
      series.y.push_back(*cost);
    }
    rows.push_back({{"name", series.name}, {"x", series.x}, {"us", series.y}});
    chart.series.push_back(std::move(series));
  }
  bed.json[name] = std::move(rows);
  return save_svg(bed.options.output.plots, "relay-" + name, line_chart(chart));
}

Status draw_all(Bed& bed) {
  if (bed.options.output.plots.empty()) return {};
  const auto requests = static_cast<size_t>(bed.options.requests);
  if (Status drawn = draw(bed, "connections", "connections", {1, 8, 32, 64, 128, 256},
                          [&](size_t connections) {
                            RelayLoad load = load_of(bed, kSmallPrompt, false, requests);
                            load.connections = connections;
                            return load;
                          });
      !drawn)
    return drawn;
  return draw(bed, "body", "bytes of the prompt", {1'000, 50'000, 150'000, 300'000, 600'000},
              [&](size_t bytes) { return load_of(bed, bytes, false, requests / 16); });
}

Status measure_streams(Bed& bed) {
  const auto streams = static_cast<size_t>(bed.options.streams);
  if (streams == 0) return {};
  const auto hold_s = static_cast<double>(bed.options.hold_s);
  bed.targets.clear();  // whose idle connections are not needed any more, but their descriptors are
  bed.backend->set({.events = 100'000, .interval_ms = 1000ms});
  // One that has served nothing yet, so that its memory is that of the streams.
  Result<RelayTarget> router = start_router(*bed.backend, bed.folder.path());
  if (!router) return std::move(router).error();
  const int pid = router->child->pid();
  const Result<uint64_t> before = resident_bytes(pid);
  Result<uint64_t> full = before;
  Result<double> cpu_before = 0.0;
  RelayLoad load{.request = chat_request(kSmallPrompt, true), .connections = streams, .requests = streams};
  load.hold_s = hold_s;
  load.when_all_stream = [&] { cpu_before = processor_time_s(pid); };
  const Result<RelayResult> result = run_relay_load(router->port, load);
  full = resident_bytes(pid);
  const Result<double> cpu = processor_time_s(pid);
  if (!result) return result.error();
  if (!before || !full || !cpu || !cpu_before) return Error{ErrorCode::kUnavailable, "the router ended"};
  const Result<std::string> metrics = fetch({"127.0.0.1", router->port}, "/metrics");
  if (!metrics) return metrics.error();
  const double stall_ms = 1e3 * metric_sum(*metrics, "kindred_router_loop_late_max_seconds");
  const double bytes = static_cast<double>(*full - *before) / static_cast<double>(streams);
  const double event_us = 1e6 * (*cpu - *cpu_before) / (static_cast<double>(streams) * hold_s);
  bed.json["streams"] = {{"streams", streams},
                         {"bytes_per_stream", bytes},
                         {"longest_stall_ms", stall_ms},
                         {"processor_us_per_event", event_us},
                         {"events_per_s", streams}};
  if (!bed.options.limit.empty()) bed.json["streams"]["limit"] = bed.options.limit;
  if (!bed.options.output.json) {
    fmt::print(
        "\n  {} streams of one event a second: {:.1f} KiB a stream, {:.1f} us of processor time an event, longest "
        "stall of the router's loop {:.0f} ms\n",
        streams, bytes / 1024, event_us, stall_ms);
    if (!bed.options.limit.empty()) fmt::print("  no more because of {}\n", bed.options.limit);
  }
  return {};
}

Status measure_relay(const RelayOptions& options) {
  Result<Bed> bed = set_up(options);
  if (!bed) return std::move(bed).error();
  bed->json = {{"bench", "relay"}, {"machine", machine_json(bed->machine)}, {"targets", Json::array()}};
  if (!options.output.json) {
    fmt::print("{}\n{} connections, {} requests a round, streams of {} events\n\nnginx's configuration:\n{}",
               machine_text(bed->machine), options.connections, options.requests, kEvents,
               nginx_config(bed->targets[0].port, bed->backend->plain_port(), bed->folder.path()));
    fmt::print("\n");
    for (const RelayTarget& target : bed->targets) {
      if (!target.version.empty()) fmt::print("{} {}\n", target.name, target.version);
    }
    for (const std::string& peer : bed->absent) fmt::print("not measured: {}\n", peer);
  }
  bed->json["absent"] = bed->absent;
  {
    Progress progress("measuring", static_cast<size_t>(options.rounds) * bed->targets.size());
    size_t done = 0;
    for (int64_t round = 0; round < options.rounds; ++round) {
      for (size_t t = 0; t < bed->targets.size(); ++t) {
        if (Status measured = measure_target(*bed, t); !measured) return measured;
        progress.set(++done);
      }
    }
  }
  report_costs(*bed);
  if (Status drawn = draw_all(*bed); !drawn) return drawn;
  if (Status measured = measure_streams(*bed); !measured) return measured;
  if (options.output.json) fmt::print("{}\n", dump_json(bed->json));
  return {};
}

}  // namespace

int bench_relay(Args args) {
  RelayOptions options;
  ConfigSchema schema("bench relay [--connections N] [--streams N]",
                      "Measures the router as a data plane beside nginx and the routers that are installed: processor "
                      "time per request and event, latency, memory per stream.");
  schema.integer("connections", &options.connections, 1, 4096, "of clients, kept alive");
  schema.integer("requests", &options.requests, 64, 10'000'000, "a target serves in each round");
  schema.integer("rounds", &options.rounds, 1, 1000, "all targets in turn; medians are printed");
  schema.integer("streams", &options.streams, 0, 20'000, "held open at one event a second; 0: leave that out");
  schema.integer("hold_s", &options.hold_s, 1, 3600, "for so long");
  schema.integer("layers", &options.layers, 1, 256, "MoE layers in the expert counts of prefill replies");
  schema.integer("experts", &options.experts, 8, 1024, "experts of a layer");
  schema.integer("threads", &options.threads, 1, 256, "more than 1: also a router with so many");
  schema.text("nginx", &options.nginx, "nginx to start");
  schema.text("vllm_router", &options.peers.vllm_router, "vllm-router to start, if it is there");
  schema.text("sglang_router", &options.peers.sglang_router, "sglang-router to start, if it is there");
  schema.text("smg", &options.peers.smg, "smg to start, if it is there");
  options.output.declare(schema, /*draws=*/true);
  if (const auto status = parse_bench_flags(schema, args)) return *status;
  fit_to_descriptors(options);
  if (const Status done = measure_relay(options); !done) return fail("bench relay", done.error());
  return 0;
}

}  // namespace kindred::cli

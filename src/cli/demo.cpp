// `kindred demo`: a PD-disaggregated cluster on this machine, real prompts through it by two policies,
// and a table of what routing by expert signature changed.

#include <fmt/format.h>
#include <signal.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <map>

#include "base/config.h"
#include "base/json.h"
#include "cli/chat_load.h"
#include "cli/commands.h"
#include "cli/local_cluster.h"
#include "cli/prompts.h"
#include "cli/terminal.h"
#include "expert/fit.h"

namespace kindred::cli {
namespace {

constexpr uint32_t kDecodeWorkers = 3;
constexpr size_t kConcurrency = 36;       // all of a stretch at once, 12 a decode worker: the gain grows with the batch
constexpr int64_t kMeasuredTokens = 240;  // so that decode, not prefill, is where requests spend their time
constexpr int64_t kReplayedTokens = 32;

struct DemoOptions {
  int64_t port = 8000;
  bool once = false;
  std::string root;     // holds models/ and data/
  std::string picture;  // SVG of the table
};

// The processes of the demo: a worker that does both phases is the reference for outputs, and a second
// router sends the same prompts to the same workers by turns.
struct DemoCluster {
  LocalCluster cluster;
  LocalCluster::Server single = 0, locality = 0, round_robin = 0;

  static Result<DemoCluster> start(const ClusterPlan& plan, uint16_t port, const std::string& cohorts);
  const net::Endpoint& router() const { return cluster.endpoint(locality); }
};

Result<DemoCluster> DemoCluster::start(const ClusterPlan& plan, uint16_t port, const std::string& cohorts) {
  Result<LocalCluster> started = LocalCluster::start(plan);
  if (!started) return std::move(started).error();
  DemoCluster demo{std::move(*started)};
  Result<LocalCluster::Server> single = demo.cluster.launch_worker("single", "both");
  if (!single) return std::move(single).error();
  // tau 0: no second-nearest worker joins a band of one. Among three workers it would be a third of the
  // cluster, and similar requests would be spread over two workers of three.
  Result<LocalCluster::Server> locality = demo.cluster.launch_router(
      "router", port, {"--decode-policy", "locality-band", "--cohorts", cohorts, "--tau", "0"});
  if (!locality) return std::move(locality).error();
  Result<LocalCluster::Server> round_robin =
      demo.cluster.launch_router("round-robin router", 0, {"--decode-policy", "round-robin"});
  if (!round_robin) return std::move(round_robin).error();
  demo.single = *single, demo.locality = *locality, demo.round_robin = *round_robin;
  if (Status ready = demo.cluster.wait_ready(); !ready) return std::move(ready).error();
  return demo;
}

struct PolicyRun {
  explicit PolicyRun(std::string policy) : name(std::move(policy)) {}

  std::string name;
  DecodeWork work;
  std::vector<double> ttft_s, tpot_s;
  size_t requests = 0, failed = 0;
  std::string first_error;
};

struct Outcome {
  PolicyRun round_robin = PolicyRun("round-robin"), locality = PolicyRun("locality-band");
  std::map<std::string, std::vector<uint32_t>> placed;  // domain -> requests per decode worker
  size_t replayed = 0, equal = 0;
  double prefill_tokens = 0;
  double seconds = 0;

  bool all_held() const {
    return round_robin.failed + locality.failed == 0 && replayed > 0 && equal == replayed &&
           round_robin.work.prompt_tokens + locality.work.prompt_tokens == 0 &&
           active_change(round_robin.work, locality.work) < 0;
  }
};

std::string call_id(const PolicyRun& run, const Prompt& prompt, size_t index) {
  return fmt::format("demo-{}-{}-{}", run.name, prompt.domain, index);
}

// One stretch of traffic through one router. The prefix cache is off, so that neither policy profits
// from what the other one left there.
Status drive(const DemoCluster& cluster, const net::Endpoint& router, std::span<const Prompt> prompts,
             size_t first_index, PolicyRun& run, Progress& progress, size_t& progressed) {
  std::vector<ChatCall> calls;
  for (size_t i = 0; i < prompts.size(); ++i) {
    ChatCall call;
    call.id = call_id(run, prompts[i], first_index + i);
    call.domain = prompts[i].domain;
    call.prompt = prompts[i].text;
    call.max_tokens = kMeasuredTokens;
    call.temperature = 0.8;
    call.seed = static_cast<int64_t>(first_index + i);
    call.ignore_eos = true;  // equal lengths, equal batches: the policies differ in nothing else
    call.prefix_cache = false;
    calls.push_back(std::move(call));
  }
  const Result<DecodeWork> before = decode_work(cluster.cluster);
  if (!before) return before.error();
  LoadOptions load;
  load.concurrency = kConcurrency;
  load.on_answer = [&](size_t, const ChatAnswer& answer) {
    progress.set(++progressed);
    ++run.requests;
    if (!answer.status.ok()) {
      if (run.failed++ == 0) run.first_error = answer.status.error().message;
      return;
    }
    run.ttft_s.push_back(answer.ttft_s);
    if (const std::optional<double> tpot = answer.tpot_s()) run.tpot_s.push_back(*tpot);
  };
  run_chats(router, calls, load);
  const Result<DecodeWork> after = decode_work(cluster.cluster);
  if (!after) return after.error();
  run.work += *after - *before;
  return {};
}

// Both policies over all prompts, in the order A B B A, so that a drift of the machine hits both alike.
Status compare(const DemoCluster& cluster, std::span<const Prompt> prompts, Outcome& outcome) {
  const size_t half = prompts.size() / 2;
  const auto first = prompts.subspan(0, half), second = prompts.subspan(half);
  Progress progress("sending prompts, both policies", prompts.size() * 2);
  size_t progressed = 0;
  const net::Endpoint &locality = cluster.router(), &round_robin = cluster.cluster.endpoint(cluster.round_robin);
  Status sent = drive(cluster, round_robin, first, 0, outcome.round_robin, progress, progressed);
  if (sent) sent = drive(cluster, locality, first, 0, outcome.locality, progress, progressed);
  if (sent) sent = drive(cluster, locality, second, half, outcome.locality, progress, progressed);
  if (sent) sent = drive(cluster, round_robin, second, half, outcome.round_robin, progress, progressed);
  return sent;
}

// Which decode worker each of the locality run's requests went to, as the router's own decisions say.
Status read_placement(const DemoCluster& cluster, std::span<const Prompt> prompts, Outcome& outcome) {
  const Result<std::string> text = fetch(cluster.router(), "/status?decisions=1024");
  if (!text) return text.error();
  const Json status = parse_json(*text);
  if (!status.is_object() || !status.contains("decisions"))
    return Error{ErrorCode::kCorrupt, "/status holds no decisions"};
  std::map<std::string, std::string> worker_of;
  for (const Json& decision : status["decisions"]) {
    worker_of[decision.value("request_id", "")] = decision.value("decode_worker", "");
  }
  const std::vector<net::Endpoint> decode = cluster.cluster.decode();
  for (size_t i = 0; i < prompts.size(); ++i) {
    std::vector<uint32_t>& row = outcome.placed[prompts[i].domain];
    row.resize(decode.size());
    const std::string& url = worker_of[call_id(outcome.locality, prompts[i], i)];
    for (size_t w = 0; w < decode.size(); ++w) row[w] += url == decode[w].url() ? 1 : 0;
  }
  return {};
}

// Each prompt once more, alone: through the router, and at a worker that does both phases itself.
// Alone, because kernels may round differently at other batch sizes.
Status replay(const DemoCluster& cluster, std::span<const Prompt> prompts, Outcome& outcome) {
  std::vector<ChatCall> calls;
  for (size_t i = 0; i < prompts.size(); ++i) {
    ChatCall call;
    call.prompt = prompts[i].text;
    call.max_tokens = kReplayedTokens;
    call.temperature = i % 2 == 0 ? 0 : 0.8;  // greedy and seeded sampling
    call.seed = static_cast<int64_t>(i);
    call.prefix_cache = false;
    calls.push_back(std::move(call));
  }
  Progress progress("replaying one at a time", prompts.size() * 2);
  size_t progressed = 0;
  LoadOptions load;
  load.on_answer = [&](size_t, const ChatAnswer&) { progress.set(++progressed); };
  const std::vector<ChatAnswer> routed = run_chats(cluster.router(), calls, load);
  const std::vector<ChatAnswer> alone = run_chats(cluster.cluster.endpoint(cluster.single), calls, load);
  for (size_t i = 0; i < calls.size(); ++i) {
    ++outcome.replayed;
    const bool both = routed[i].status.ok() && alone[i].status.ok();
    if (both && routed[i].text == alone[i].text && routed[i].completion_tokens == alone[i].completion_tokens)
      ++outcome.equal;
  }
  return {};
}

std::string check_line(bool held, const std::string& text) { return fmt::format("  {} {}\n", held ? "✓" : "✗", text); }

std::string report(const Outcome& outcome) {
  std::string out = "\nwhere the prompts went (locality-band)\n\n";
  Table placed({"domain", "decode 0", "decode 1", "decode 2"});
  for (const auto& [domain, row] : outcome.placed) {
    std::vector<std::string> cells = {domain};
    for (const uint32_t n : row) cells.push_back(n == 0 ? "-" : std::to_string(n));
    placed.row(std::move(cells));
  }
  out += placed.text() + "\nwhat it changed\n\n";

  Table policies({"policy", "active experts a step", "batch", "TTFT p50 ms", "p99", "TPOT p50 ms", "p99"});
  for (const PolicyRun* run : {&outcome.round_robin, &outcome.locality}) {
    policies.row({run->name, fmt::format("{:.2f}", run->work.active_per_step()),
                  fmt::format("{:.1f}", run->work.batch()), fmt::format("{:.1f}", 1e3 * quantile(run->ttft_s, 0.5)),
                  fmt::format("{:.1f}", 1e3 * quantile(run->ttft_s, 0.99)),
                  fmt::format("{:.2f}", 1e3 * quantile(run->tpot_s, 0.5)),
                  fmt::format("{:.2f}", 1e3 * quantile(run->tpot_s, 0.99))});
  }
  out += policies.text() + "\n";

  const double change = 100 * active_change(outcome.round_robin.work, outcome.locality.work);
  const size_t failed = outcome.round_robin.failed + outcome.locality.failed;
  const double decode_prompt = outcome.round_robin.work.prompt_tokens + outcome.locality.work.prompt_tokens;
  out += check_line(
      change < 0,
      fmt::format("distinct experts a decode step touches in a layer: {:+.1f} % against round-robin, in steps of "
                  "equal batch size",
                  change));
  out += check_line(
      outcome.equal == outcome.replayed,
      fmt::format("{} of {} outputs equal a single worker's, replayed one at a time", outcome.equal, outcome.replayed));
  out += check_line(decode_prompt == 0,
                    fmt::format("{:.0f} prompt tokens evaluated by decode workers ({:.0f} by the prefill worker)",
                                decode_prompt, outcome.prefill_tokens));
  out += check_line(
      failed == 0,
      fmt::format("{} of {} requests failed{}", failed, outcome.round_robin.requests + outcome.locality.requests,
                  failed > 0 ? ": " + outcome.round_robin.first_error + outcome.locality.first_error : ""));
  out +=
      "\n  The bundled model fits in the cache, so fewer experts do not yet mean less time here: see\n"
      "  \"When it pays\" in the README.\n";
  return out;
}

void print_next_steps(const DemoCluster& cluster, const std::string& model) {
  const std::string url = cluster.router().url();
  fmt::print(R"(
the cluster stays up until Ctrl-C; in another terminal:

  curl {0}/v1/chat/completions -d '{{"messages":[{{"role":"user","content":"def fibonacci(n):"}}],"max_tokens":40}}'

  build/release/kindred status --watch

  # pip install openai
  python3 -c '
from openai import OpenAI
client = OpenAI(base_url="{0}/v1", api_key="none")
for chunk in client.chat.completions.create(model="{1}", max_tokens=40, stream=True,
        messages=[{{"role": "user", "content": "Wie funktioniert ein Dateisystem?"}}]):
    print(chunk.choices[0].delta.content or "", end="", flush=True)'

)",
             url, model);
  std::fflush(stdout);
}

// Until Ctrl-C or SIGTERM; 1 if the cluster dies first.
int stay_up(DemoCluster& cluster) {
  sigset_t stop;
  sigemptyset(&stop);
  sigaddset(&stop, SIGINT);
  sigaddset(&stop, SIGTERM);
  pthread_sigmask(SIG_BLOCK, &stop, nullptr);
  constexpr timespec kPoll{0, 500'000'000};
  while (sigtimedwait(&stop, nullptr, &kPoll) < 0) {
    if (const std::optional<std::string> name = cluster.cluster.dead()) {
      fmt::print(stderr, "kindred demo: {} has stopped\n", *name);
      return 1;
    }
  }
  fmt::print("stopping\n");
  return 0;
}

Status fit_demo_cohorts(const std::string& activations_path, const std::string& cohorts_path) {
  Result<expert::Activations> activations = expert::load_activations(activations_path);
  if (!activations) return std::move(activations).error();
  expert::FitOptions options;
  options.workers = kDecodeWorkers;
  Result<expert::FitReport> fitted = expert::fit_cohorts(*activations, options);
  if (!fitted) return std::move(fitted).error();
  fmt::print("fitted {} cohorts on {} recorded requests: rho {:.2f}, {} of {} layers kept\n", kDecodeWorkers,
             activations->requests(), fitted->mask.peak_rho(), fitted->mask.kept, fitted->mask.order.size());
  return fitted->model.save(cohorts_path);
}

Result<int> demo(const DemoOptions& options) {
  const auto began = std::chrono::steady_clock::now();
  const std::string root = options.root.empty() ? find_root() : options.root;
  Result<std::vector<Prompt>> prompts = load_prompts(root + "/data/prompts/demo.jsonl");
  if (!prompts) return std::move(prompts).error();
  Result<ScratchDir> scratch = ScratchDir::make();
  if (!scratch) return std::move(scratch).error();
  const std::string cohorts = scratch->path() + "/cohorts.safetensors";
  ClusterPlan plan;
  plan.model = root + "/models/kindred-tiny-moe-q8_0.gguf";
  plan.log_dir = scratch->path();
  plan.decode_workers = kDecodeWorkers;
  if (Status fitted = fit_demo_cohorts(root + "/models/kindred-tiny-moe.activations.safetensors", cohorts); !fitted) {
    return std::move(fitted).error();
  }

  fmt::print("starting 1 prefill worker, {} decode workers and the router on :{}\n", kDecodeWorkers, options.port);
  std::fflush(stdout);
  Result<DemoCluster> cluster = DemoCluster::start(plan, static_cast<uint16_t>(options.port), cohorts);
  if (!cluster) return std::move(cluster).error();

  Outcome outcome;
  if (Status sent = compare(*cluster, *prompts, outcome); !sent) return std::move(sent).error();
  if (Status read = read_placement(*cluster, *prompts, outcome); !read) return std::move(read).error();
  if (Status done = replay(*cluster, *prompts, outcome); !done) return std::move(done).error();
  const Result<std::string> prefill = fetch(cluster->cluster.prefill(), "/metrics");
  if (prefill) outcome.prefill_tokens = metric_sum(*prefill, "kindred_prompt_tokens_evaluated_total");
  // The replay must not have made a decode worker evaluate a prompt either.
  const Result<DecodeWork> whole = decode_work(cluster->cluster);
  if (!whole) return whole.error();
  outcome.locality.work.prompt_tokens = whole->prompt_tokens - outcome.round_robin.work.prompt_tokens;
  outcome.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();

  const std::string table = report(outcome);
  fmt::print("{}\n  took {:.0f} s\n", table, outcome.seconds);
  if (!options.picture.empty()) {
    if (Status drawn = write_file(options.picture, text_as_svg(table.substr(1), "$ ./dev demo")); !drawn)
      return std::move(drawn).error();
  }
  if (options.once) return outcome.all_held() ? 0 : 1;
  // The reference worker and the other router are not needed any more.
  cluster->cluster.stop(cluster->round_robin);
  cluster->cluster.stop(cluster->single);
  print_next_steps(*cluster, "kindred-tiny-moe");
  return stay_up(*cluster);
}

}  // namespace

int run_demo(Args args) {
  DemoOptions options;
  ConfigSchema schema(
      "demo [--once]",
      "Starts 1 prefill and 3 decode workers on the bundled model and a router over them, sends prompts by\n"
      "round-robin and by expert locality, and shows the difference.");
  schema.integer("port", &options.port, 1, 65535, "the router's port");
  schema.flag("once", &options.once, "exit when done: 0 only if every check held");
  schema.text("root", &options.root, "folder that holds models/ and data/");
  schema.text("picture", &options.picture, "also write the table as SVG to this file");
  if (Status parsed = schema.parse_flags(args); !parsed) {
    return fail("demo", parsed.error(), 2);
  }
  if (schema.help_requested()) {
    fmt::print("{}", schema.help());
    return 0;
  }
  const Result<int> done = demo(options);
  if (!done) {
    return fail("demo", done.error());
  }
  return *done;
}

}  // namespace kindred::cli

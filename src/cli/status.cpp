// `kindred status`: a running router's /status, for people.
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <ctime>
#include <string>

#include "base/config.h"
#include "base/json.h"
#include "cli/chat_load.h"
#include "cli/commands.h"
#include "cli/experiment_text.h"
#include "cli/terminal.h"

namespace kindred::cli {
namespace {

constexpr int64_t kBarCells = 12;
constexpr size_t kDecisionsShown = 10;

// Names come from workers and clients: control characters in them must not reach the terminal.
std::string clean(std::string text) {
  std::replace_if(text.begin(), text.end(), [](unsigned char c) { return c < 0x20 || c == 0x7f; }, '?');
  return text;
}

std::string text_of(const Json& object, const char* name) {
  const auto it = object.find(name);
  if (it == object.end() || it->is_null()) return "-";
  if (it->is_string()) return clean(it->get<std::string>());
  return dump_json(*it);
}

double number_of(const Json& object, const char* name) {
  const auto it = object.find(name);
  return it != object.end() && it->is_number() ? it->get<double>() : 0;
}

const Json& list_of(const Json& object, const char* name) {
  static const Json kEmpty = Json::array();
  const auto it = object.find(name);
  return it != object.end() && it->is_array() ? *it : kEmpty;
}

std::string without_scheme(std::string url) { return url.starts_with("http://") ? url.substr(7) : url; }

std::string shortened(std::string text, size_t most) {
  return text.size() <= most ? text : text.substr(0, most - 1) + "…";
}

std::string duration(double seconds) {
  if (seconds < 120) return fmt::format("{:.0f} s", seconds);
  if (seconds < 7200) return fmt::format("{:.0f} min", seconds / 60);
  return fmt::format("{:.0f} h", seconds / 3600);
}

std::string bar(double value, double most) {
  const auto full = most <= 0 ? 0 : std::min<int64_t>(kBarCells, std::lround(value / most * kBarCells));
  std::string out;
  for (int64_t i = 0; i < kBarCells; ++i) out += i < full ? "█" : "·";
  return out;
}

std::string workers_text(const Json& status) {
  const Json& workers = list_of(status, "workers");
  double most = 1;
  for (const Json& worker : workers) most = std::max(most, number_of(worker, "in_flight"));
  Table table({"worker", "role", "health", "since", "in flight", "", "cohort", "model"});
  std::string remarks;
  for (const Json& worker : workers) {
    const Json& models = list_of(worker, "models");
    const std::string model = models.empty() || !models[0].is_string() ? "-" : clean(models[0].get<std::string>());
    const double in_flight = number_of(worker, "in_flight");
    table.row({without_scheme(text_of(worker, "url")), text_of(worker, "role"), text_of(worker, "health"),
               duration(number_of(worker, "health_age_s")), fmt::format("{:.0f}", in_flight), bar(in_flight, most),
               text_of(worker, "cohort"), shortened(model, 32)});
    if (worker.contains("paced")) {
      remarks += fmt::format("  {}: paced by '{}', its times are not its machine's\n",
                             without_scheme(text_of(worker, "url")), text_of(worker, "paced"));
    }
    if (worker.contains("problem")) {
      remarks += fmt::format("  {}: {}\n", without_scheme(text_of(worker, "url")), text_of(worker, "problem"));
    }
  }
  return table.text() + (remarks.empty() ? "" : "\n" + remarks);
}

// Who has only one engine is shown if it has said anything.
bool shows_engines(const Json& worker) {
  const Json& engines = list_of(worker, "engines");
  return engines.size() > 1 || (engines.size() == 1 && text_of(engines[0], "trace") == "fresh");
}

std::string engines_text(const Json& status) {
  const auto policy = status.find("engine_policy");
  if (policy == status.end() || !policy->is_object()) return {};
  Table table({"worker", "engine", "trace", "age", "running", "waiting", "to prefill", "queued", "KV", "sent since",
               "score", "in flight"});
  size_t rows = 0;
  for (const Json& worker : list_of(status, "workers")) {
    if (!shows_engines(worker)) continue;
    for (const Json& engine : list_of(worker, "engines")) {
      const bool fresh = text_of(engine, "trace") == "fresh";
      const auto whole = [&](const char* name) {
        return fresh ? fmt::format("{:.0f}", number_of(engine, name)) : std::string("-");
      };
      const bool seen = text_of(engine, "trace_age_s") != "-";
      table.row({without_scheme(text_of(worker, "url")), text_of(engine, "rank"), text_of(engine, "trace"),
                 seen ? fmt::format("{:.2f} s", number_of(engine, "trace_age_s")) : std::string("-"), whole("running"),
                 whole("waiting"), whole("remaining_prefill_tokens"), whole("waiting_prefill_tokens"),
                 fresh ? fmt::format("{:.0f} %", 100 * number_of(engine, "kv_usage")) : std::string("-"),
                 fmt::format("{:.0f}", number_of(engine, "compensation_tokens")), whole("score"),
                 fmt::format("{:.0f}", number_of(engine, "in_flight"))});
      ++rows;
    }
  }
  std::string out =
      fmt::format("\nengines, by {}\n{}", text_of(*policy, "name"), rows == 0 ? "  none yet\n" : table.text());
  if (const auto last = policy->find("explain"); last != policy->end() && last->is_object()) {
    out +=
        fmt::format("  last: {} engine {}, {} ({:.0f} tokens to prefill)\n", without_scheme(text_of(*last, "worker")),
                    text_of(*last, "rank"), text_of(*last, "reason"), number_of(*last, "prefill_tokens"));
  }
  return out;
}

std::string clock_time(double unix_s) {
  const auto seconds = static_cast<std::time_t>(unix_s);
  std::tm local{};
  localtime_r(&seconds, &local);
  return fmt::format("{:02}:{:02}:{:02}", local.tm_hour, local.tm_min, local.tm_sec);
}

std::string refit_text(const Json& status) {
  const auto refit = status.find("refit");
  if (refit == status.end() || !refit->is_object()) return {};
  std::string out = fmt::format("  refit    {} fits, {:.0f} requests in the window", text_of(*refit, "fits"),
                                number_of(*refit, "window_requests"));
  if (const auto last = refit->find("last"); last != refit->end() && last->is_object()) {
    out += fmt::format(", the last at {} in {:.0f} ms, shift {:.3f}", clock_time(number_of(*last, "unix_s")),
                       number_of(*last, "duration_ms"), number_of(*last, "shift"));
  }
  for (const char* why : {"last_skip", "last_error"}) {
    if (text_of(*refit, why) != "-") out += fmt::format("\n           {}", text_of(*refit, why));
  }
  return out + "\n";
}

std::string policy_text(const Json& status) {
  const Json policy = status.value("policy", Json::object());
  std::string out = fmt::format("  decode   {}", text_of(policy, "decode"));
  if (text_of(policy, "decode") == "locality-band") {
    out += fmt::format(" (tau {}, load cap {})", text_of(policy, "tau"), text_of(policy, "load_cap"));
  }
  if (text_of(policy, "decode") == "domain" || text_of(policy, "decode") == "marginal-cost")
    out += fmt::format(" (load cap {})", text_of(policy, "load_cap"));
  out += fmt::format(", ties {}\n  prefill  {}\n", text_of(policy, "tie_break"), text_of(policy, "prefill"));
  const auto cohorts = status.find("cohorts");
  if (cohorts == status.end() || !cohorts->is_object()) return out + "  cohorts  none\n" + refit_text(status);
  out += fmt::format("  cohorts  {} of {}, rho {}, {} of {} layers, {} samples\n", text_of(*cohorts, "count"),
                     text_of(*cohorts, "model"), shortened(text_of(*cohorts, "rho"), 6),
                     list_of(*cohorts, "kept_layers").size(), list_of(*cohorts, "layers").size(),
                     text_of(*cohorts, "samples"));
  return out + refit_text(status);
}

std::string decisions_text(const Json& status) {
  Table table({"time", "request", "prefill", "decode", "reason", "similarity", "band", "fallback", "prompt"});
  size_t shown = 0;
  for (const Json& decision : list_of(status, "decisions")) {
    if (shown++ == kDecisionsShown) break;
    const bool similar = decision.contains("similarity") && decision["similarity"].is_number();
    const std::string fallback = text_of(decision, "fallback");
    table.row({clock_time(number_of(decision, "unix_s")), shortened(text_of(decision, "request_id"), 14),
               without_scheme(text_of(decision, "prefill_worker")), without_scheme(text_of(decision, "decode_worker")),
               text_of(decision, "reason"),
               similar ? fmt::format("{:.3f}", number_of(decision, "similarity")) : std::string("-"),
               text_of(decision, "band_size"), fallback == "none" ? "-" : fallback,
               fmt::format("{:.0f}", number_of(decision, "prompt_tokens"))});
  }
  return shown == 0 ? "  none yet\n" : table.text();
}

std::string render(const Json& status, const std::string& url) {
  const bool ready = status.value("ready", false);
  return fmt::format(
      "kindred router at {}: {}, {:.0f} requests in flight, {:.0f} decisions\n\n{}{}\npolicy\n{}\nlast "
      "decisions\n{}",
      url, ready ? "ready" : "not ready, " + text_of(status, "not_ready_reason"),
      number_of(status, "requests_in_flight"), number_of(status, "decisions_total"), workers_text(status),
      engines_text(status), policy_text(status), decisions_text(status));
}

// Sleeps; true if Ctrl-C or SIGTERM, which are blocked, came meanwhile.
bool interrupted_within(int64_t ms, const sigset_t& signals) {
  const timespec time{ms / 1000, (ms % 1000) * 1'000'000};
  return sigtimedwait(&signals, nullptr, &time) > 0;
}

struct StatusArguments {
  std::string url = "http://127.0.0.1:8000";
  bool watch = false, raw_json = false, experiment = false;
  int64_t interval_ms = 1'000;
};

// Prints once; `first`: onto a screen that holds something else. Error: no router there.
Status show(const StatusArguments& options, const net::Endpoint& endpoint, bool first = true) {
  const auto text =
      fetch(endpoint, options.experiment ? "/experiment" : "/status?decisions=" + std::to_string(kDecisionsShown));
  if (!text) {
    return Error{text.error().code, fmt::format("no router answers at {}: {}", options.url, text.error().message)};
  }
  const Json status = parse_json(*text);
  if (!status.is_object() || !status.contains(options.experiment ? "arms" : "workers")) {
    return Error{ErrorCode::kCorrupt, fmt::format("what answers at {} is not a kindred router", options.url)};
  }
  const std::string out = options.raw_json     ? *text
                          : options.experiment ? experiment_text(status)
                                               : render(status, options.url);
  if (!options.watch) {
    fmt::print("{}", out);
  } else {
    // Home, each line cleared behind its text, then the rest of the screen: no flicker.
    std::string screen = first ? "\x1b[2J\x1b[H" : "\x1b[H";
    for (const char c : out) screen += c == '\n' ? "\x1b[K\n" : std::string(1, c);
    fmt::print("{}\x1b[J", screen);
  }
  std::fflush(stdout);
  return {};
}

int watch(const StatusArguments& options, const net::Endpoint& endpoint) {
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGINT);
  sigaddset(&signals, SIGTERM);
  sigprocmask(SIG_BLOCK, &signals, nullptr);
  bool seen = false;
  for (;;) {
    const Status shown = show(options, endpoint, !seen);
    if (!shown && !seen) {
      return fail("status", shown.error());
    }
    // A router that was there may be restarting.
    if (!shown) fmt::print("\x1b[H{}\x1b[K\n\x1b[J", clean(shown.error().message));
    std::fflush(stdout);
    seen = true;
    if (interrupted_within(options.interval_ms, signals)) break;
  }
  fmt::print("\n");
  return 0;
}

}  // namespace

int run_status(Args args) {
  StatusArguments options;
  ConfigSchema schema("status [OPTIONS]", "Shows a running router: workers, policy, cohorts, last decisions.");
  schema.text("url", &options.url, "of the router");
  schema.flag("watch", &options.watch, "redraw until Ctrl-C");
  schema.flag("experiment", &options.experiment, "the switchback experiment that runs: arms, differences, intervals");
  schema.flag("json", &options.raw_json, "print the router's JSON as it is");
  schema.integer("interval_ms", &options.interval_ms, 50, 3'600'000, "between two drawings");
  if (Status parsed = schema.parse_flags(args); !parsed) {
    return fail("status", parsed.error(), 2);
  }
  if (schema.help_requested()) {
    fmt::print("{}", schema.help());
    return 0;
  }
  const auto endpoint = net::parse_endpoint(options.url);
  if (!endpoint) {
    fmt::print(stderr, "kindred status: --url: {}\n", endpoint.error().message);
    return 2;
  }
  if (options.watch) return watch(options, *endpoint);
  if (const Status shown = show(options, *endpoint); !shown) {
    return fail("status", shown.error());
  }
  return 0;
}

}  // namespace kindred::cli

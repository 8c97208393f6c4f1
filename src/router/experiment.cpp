#include "router/experiment.h"

#include <fmt/format.h>

#include <algorithm>
#include <boost/asio/steady_timer.hpp>
#include <charconv>
#include <map>
#include <set>

#include "policy/switching.h"
#include "router/core.h"
#include "router/exchange.h"

namespace kindred::router {
namespace {

constexpr size_t kMaxArms = 8;
constexpr size_t kMetricsBytes = 4 * 1024 * 1024;
constexpr std::chrono::milliseconds kMetricsWait{1'000};

Error bad_experiment(std::string message) { return invalid("experiment: " + std::move(message), "experiment"); }

// What a decode worker has done so far.
struct Steps {
  double steps = 0, active = 0;
};

// The sum over all series of exactly this name in Prometheus' text.
double sum_of(std::string_view text, std::string_view name) {
  double sum = 0;
  for (size_t at = 0; at < text.size();) {
    const size_t end = std::min(text.find('\n', at), text.size());
    const std::string_view line = text.substr(at, end - at);
    at = end + 1;
    if (!line.starts_with(name) || line.size() == name.size()) continue;
    if (line[name.size()] != '{' && line[name.size()] != ' ') continue;
    const std::string_view number = line.substr(line.rfind(' ') + 1);
    double value = 0;
    if (std::from_chars(number.data(), number.data() + number.size(), value).ec == std::errc{}) sum += value;
  }
  return sum;
}

// Of the decode workers that answer.
net::Task<std::map<fleet::WorkerId, Steps>> read_steps(CorePtr core) {
  std::map<fleet::WorkerId, Steps> out;
  const fleet::Snapshot snapshot = core->fleet.snapshot({.role = Role::kDecode});
  for (size_t i = 0; i < snapshot.ids.size(); ++i) {
    const fleet::WorkerId worker = snapshot.ids[i];
    if (!snapshot.views[i].available) continue;
    std::string target = "/metrics";
    const Result<std::string> text = co_await core->probe_client.get(
        core->endpoint(worker), std::move(target), kMetricsBytes, kMetricsWait, core->closing.token());
    if (!text) continue;
    out[worker] = {sum_of(*text, "kindred_decode_steps_total"), sum_of(*text, "kindred_decode_active_experts_total")};
  }
  co_return out;
}

// Mean per step over the workers that answered both times and were not restarted between.
std::optional<double> active_per_step(const std::map<fleet::WorkerId, Steps>& before,
                                      const std::map<fleet::WorkerId, Steps>& after) {
  Steps sum;
  for (const auto& [worker, then] : before) {
    const auto now = after.find(worker);
    if (now == after.end() || now->second.steps < then.steps) continue;
    sum.steps += now->second.steps - then.steps;
    sum.active += now->second.active - then.active;
  }
  return sum.steps > 0 && sum.active > 0 ? std::optional(sum.active / sum.steps) : std::nullopt;
}

}  // namespace

Result<std::unique_ptr<Experiment>> Experiment::make(const ExperimentOptions& options, const Clock& clock) {
  if (options.arms.size() < 2 || options.arms.size() > kMaxArms) {
    return bad_experiment(fmt::format("{} arms; accepted: 2 to {}", options.arms.size(), kMaxArms));
  }
  if (options.seam_ms >= options.slice_ms) {
    return bad_experiment(fmt::format("a seam of {} ms leaves nothing of a slice of {} ms", options.seam_ms.count(),
                                      options.slice_ms.count()));
  }
  if (!(options.level > 0 && options.level < 1)) return bad_experiment("level: accepted: above 0 and below 1");
  Policies policies;
  ExperimentPlan plan;
  for (const ExperimentArm& arm : options.arms) {
    if (std::ranges::find(plan.arms, arm.name) != plan.arms.end()) {
      return bad_experiment(fmt::format("two arms are called '{}'", arm.name));
    }
    plan.arms.push_back(arm.name);
    auto prefill = policy::make_prefill_policy(arm.prefill);
    if (!prefill) return std::move(prefill).error();
    auto decode = policy::make_decode_policy(arm.decode);
    if (!decode) return std::move(decode).error();
    policy::DecodePolicyOptions whole = arm.decode;
    if ((*decode)->wants_counts()) whole.name = "least-loaded";
    auto plain = policy::make_decode_policy(whole);
    if (!plain) return std::move(plain).error();
    policies.prefill.push_back(*std::move(prefill));
    policies.decode.push_back(*std::move(decode));
    policies.plain.push_back(*std::move(plain));
  }
  using Seconds = std::chrono::duration<double>;
  plan.slice_s = Seconds(options.slice_ms).count();
  plan.seam_s = Seconds(options.seam_ms).count();
  plan.seed = options.seed;
  plan.level = options.level;
  return std::unique_ptr<Experiment>(new Experiment(std::move(plan), std::move(policies), clock));
}

std::unique_ptr<policy::PrefillPolicy> Experiment::prefill_policy() {
  return std::make_unique<policy::SwitchingPrefill>(std::move(policies_.prefill), [this] { return arm(); });
}

std::unique_ptr<policy::DecodePolicy> Experiment::decode_policy() {
  return std::make_unique<policy::SwitchingDecode>(std::move(policies_.decode), [this] { return arm(); });
}

std::unique_ptr<policy::DecodePolicy> Experiment::plain_policy() {
  return std::make_unique<policy::SwitchingDecode>(std::move(policies_.plain), [this] { return arm(); });
}

void Experiment::finished(const Exchange& exchange) {
  if (exchange.outcome != Outcome::kOk || !exchange.writer.started()) return;
  const RequestNotes& notes = exchange.notes;
  std::optional<double> ttft_s, tpot_s;
  if (notes.first_event && notes.last_event) {
    ttft_s = seconds_between(exchange.arrived, *notes.first_event);
    const uint64_t tokens = notes.best_usage().output_tokens.value_or(0);
    if (tokens > 1) {
      tpot_s = seconds_between(*notes.first_event, *notes.last_event) / static_cast<double>(tokens - 1);
    }
  }
  const std::lock_guard lock(mutex_);
  ledger_.request(seconds_between(started_, exchange.arrived), now_s(), ttft_s, tpot_s);
}

Json Experiment::report() const {
  const std::lock_guard lock(mutex_);
  return ledger_.report(now_s());
}

net::Task<void> Experiment::watch(CorePtr core) {
  Experiment& self = *core->experiment;
  const ExperimentPlan& plan = self.ledger_.plan();
  net::asio::steady_timer timer(core->executor);
  const auto registration = core->closing.token().on_cancel([&timer] { timer.cancel(); });
  // The clock may be another than the timer's, so it is asked again.
  const auto until = [&](double time_s) -> net::Task<void> {
    while (!core->closing.cancelled() && self.now_s() < time_s) {
      const double left_s = std::min(time_s - self.now_s(), 1.0);
      timer.expires_after(std::chrono::milliseconds(1 + static_cast<int64_t>(left_s * 1e3)));
      co_await timer.async_wait(net::kNoThrow);
    }
  };
  while (!core->closing.cancelled()) {
    const uint64_t slice = self.ledger_.slice_at(self.now_s());
    const double begin_s = static_cast<double>(slice) * plan.slice_s;
    co_await until(begin_s + plan.seam_s);
    const auto steps = co_await read_steps(core);
    const double events = core->metrics.stream_events.value(), from_s = self.now_s();
    co_await until(begin_s + plan.slice_s);
    if (core->closing.cancelled()) co_return;
    const double more = core->metrics.stream_events.value() - events, took_s = self.now_s() - from_s;
    const auto then = co_await read_steps(core);
    // Not if it woke too late to tell this slice from the next.
    if (self.ledger_.slice_at(self.now_s()) != slice + 1 || took_s <= 0) continue;
    const std::lock_guard lock(self.mutex_);
    self.ledger_.window(slice, more / took_s, active_per_step(steps, then));
  }
}

}  // namespace kindred::router

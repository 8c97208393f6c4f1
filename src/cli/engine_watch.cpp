#include "cli/engine_watch.h"

#include <algorithm>
#include <utility>

#include "cli/chat_load.h"

namespace kindred::cli {
namespace {

constexpr auto kWatchEvery = std::chrono::seconds(1);

// Tokens between the engines with the most and the least of what came between two samples.
double prompt_gap(const EngineSample& before, const EngineSample& after) {
  std::vector<double> done;
  for (const auto& [engine, tokens] : after.prompt_tokens) {
    const auto earlier = before.prompt_tokens.find(engine);
    done.push_back(tokens - (earlier == before.prompt_tokens.end() ? 0 : earlier->second));
  }
  if (done.empty()) return 0;
  const auto [least, most] = std::ranges::minmax(done);
  return most - least;
}

double sum_of(const EngineSample::ByEngine& values) {
  double sum = 0;
  for (const auto& [engine, value] : values) sum += value;
  return sum;
}

}  // namespace

double EngineSample::in_engines() const { return sum_of(running) + waiting; }

EngineSample read_engine_sample(const std::string& metrics, std::chrono::steady_clock::time_point at) {
  return EngineSample{.at = at,
                      .prompt_tokens = metric_by_label(metrics, "kindred_prompt_tokens_evaluated_total", "engine"),
                      .running = metric_by_label(metrics, "vllm:num_requests_running", "engine"),
                      .kv = metric_by_label(metrics, "vllm:kv_cache_usage_perc", "engine"),
                      .waiting = metric_sum(metrics, "vllm:num_requests_waiting"),
                      .preemptions = metric_sum(metrics, "vllm:num_preemptions_total"),
                      .paced_steps = metric_sum(metrics, "kindred_paced_steps_total"),
                      .pace_overruns = metric_sum(metrics, "kindred_pace_overruns_total")};
}

Result<EngineSample> sample_engines(const net::Endpoint& worker) {
  const Result<std::string> page = fetch(worker, "/metrics");
  if (!page) return page.error();
  return read_engine_sample(*page, std::chrono::steady_clock::now());
}

EngineUse engine_use(std::span<const EngineSample> samples, std::chrono::steady_clock::time_point until) {
  EngineUse out;
  double windows = 0, engines = 0;
  for (size_t i = 1; i < samples.size() && (i == 1 || samples[i].at <= until); ++i) {
    const double window_s = std::chrono::duration<double>(samples[i].at - samples[i - 1].at).count();
    if (window_s <= 0) continue;
    out.gap_tokens_per_s += prompt_gap(samples[i - 1], samples[i]) / window_s;
    out.running += sum_of(samples[i].running);
    out.kv += sum_of(samples[i].kv);
    engines += static_cast<double>(samples[i].running.size());
    ++windows;
  }
  if (windows == 0 || engines == 0) return {};
  out.gap_tokens_per_s /= windows;
  out.running /= engines;
  out.kv /= engines;
  return out;
}

EngineWatch::EngineWatch(net::Endpoint worker)
    : worker_(std::move(worker)), thread_([this](const std::stop_token& stop) { watch(stop); }) {}

std::vector<EngineSample> EngineWatch::finish() {
  thread_.request_stop();
  thread_.join();
  return std::move(samples_);
}

void EngineWatch::watch(const std::stop_token& stop) {
  auto next = std::chrono::steady_clock::now();
  while (!stop.stop_requested()) {
    // A look that fails is left out: the next one spans two seconds.
    if (Result<EngineSample> sample = sample_engines(worker_)) samples_.push_back(*std::move(sample));
    next += kWatchEvery;
    std::this_thread::sleep_until(next);
  }
}

}  // namespace kindred::cli

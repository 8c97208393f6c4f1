#include "router/refitter.h"

#include <fmt/format.h>

#include <algorithm>
#include <boost/asio/post.hpp>

#include "base/rng.h"

namespace kindred::router {
namespace {

using namespace std::chrono_literals;

// How soon a worker that has come or gone is noticed, if the interval is longer.
constexpr std::chrono::milliseconds kTickMs = 200ms;

net::Task<void> refit_loop(CorePtr core) {
  net::asio::steady_timer timer(core->executor);
  const auto wake = core->closing.token().on_cancel([&timer] { timer.cancel(); });
  while (!core->closing.cancelled()) {
    timer.expires_after(std::min(kTickMs, core->settings()->options.refit.interval_ms));
    co_await timer.async_wait(net::kNoThrow);
    if (!core->closing.cancelled()) core->refitter->tick();
  }
}

bool is_gone(const fleet::WorkerStatus& worker, std::chrono::milliseconds grace_ms) {
  // One that was never reached is still loading its model.
  const bool away = worker.removed || worker.health == fleet::Health::kDown;
  return away && worker.state_age_s >= std::chrono::duration<double>(grace_ms).count();
}

}  // namespace

Refitter::Refitter(Core& core, Fit fit)
    : core_(core),
      fit_(std::move(fit)),
      window_({.span_ms = core.settings()->options.refit.window_ms}),
      last_start_(core.clock.now()) {}

void Refitter::observe(std::string_view fingerprint, std::shared_ptr<const expert::ExpertCounts> counts) {
  const std::lock_guard lock(window_mutex_);
  window_.add(core_.clock.now(), fingerprint, std::move(counts));
}

size_t Refitter::window_requests() const {
  const std::lock_guard lock(window_mutex_);
  return window_.size();
}

void Refitter::tidy_window(MonotonicTime now) {
  const std::lock_guard lock(window_mutex_);
  window_.drop_older_than_span(now);
  core_.metrics.refit_window_requests.set(static_cast<double>(window_.size()));
  core_.metrics.refit_dropped.add(static_cast<double>(window_.dropped() - dropped_seen_));
  dropped_seen_ = window_.dropped();
}

bool Refitter::tick() {
  if (stopped_) return false;
  const MonotonicTime now = core_.clock.now();
  const SettingsPtr settings = core_.settings();
  const RefitSettings& refit = settings->options.refit;
  tidy_window(now);
  give_up_cohorts_of_the_gone();
  if (running_) return false;
  const bool due = now - last_start_ >= refit.interval_ms;
  std::vector<fleet::WorkerId> joining = newcomers();
  // Newcomers are tried at once, and again when the window is another one. Without cohorts there is nothing
  // to halve.
  const bool try_now = joining != joining_ || now - began_ >= refit.window_ms;
  const bool joined = core_.cohorts() != nullptr && !joining.empty() && try_now;
  if (!due && !joined) return false;
  expert::RefitTask task = task_for(joining.size(), due);
  joining_ = std::move(joining);
  if (due) last_start_ = now;
  if (task.owned.empty() && task.newcomers == 0) return false;
  start(std::move(task));
  return true;
}

void Refitter::give_up_cohorts_of_the_gone() {
  const std::vector<fleet::WorkerStatus> workers = core_.fleet.status(/*all=*/true);
  const auto serves = [](const fleet::WorkerStatus& worker) {
    return worker.cohort >= 0 && worker.health == fleet::Health::kUp;
  };
  if (std::ranges::none_of(workers, serves)) return;
  const std::chrono::milliseconds grace_ms = core_.settings()->options.refit.grace_ms;
  for (const fleet::WorkerStatus& worker : workers) {
    if (worker.cohort < 0 || !is_gone(worker, grace_ms)) continue;
    core_.fleet.set_cohort(worker.id, -1);
    ++status_.merges;
    core_.metrics.refit_merges.add();
    core_.log.info("{} is gone: the others share its cohort {}", worker.spec.url, worker.cohort);
  }
}

// Decode workers that are up and have no cohort.
std::vector<fleet::WorkerId> Refitter::newcomers() const {
  std::vector<fleet::WorkerId> out;
  const auto model = core_.cohorts();
  const bool from_file = model && !core_.settings()->options.cohorts.empty();
  const std::string fitted_for = from_file ? model->data().model_fingerprint : std::string();
  for (const fleet::WorkerStatus& worker : core_.fleet.status()) {
    const bool up = worker.spec.role == Role::kDecode && worker.health == fleet::Health::kUp && !worker.removed;
    if (!up || worker.cohort >= 0) continue;
    if (fitted_for.empty() || worker.description.fingerprint == fitted_for) out.push_back(worker.id);
  }
  return out;
}

// Of the model that the fit is for: the file's if it says one; else the present one while it has traffic.
std::string Refitter::fingerprint(std::span<const expert::WindowEntry> window) const {
  if (const auto model = core_.cohorts()) {
    const std::string& present = model->data().model_fingerprint;
    const bool from_file = !core_.settings()->options.cohorts.empty();
    if (!present.empty() &&
        (from_file || std::ranges::find(window, present, &expert::WindowEntry::fingerprint) != window.end())) {
      return present;
    }
  }
  return expert::most_frequent_fingerprint(window);
}

expert::RefitTask Refitter::task_for(size_t newcomers, bool move_all) const {
  expert::RefitTask task;
  const SettingsPtr settings = core_.settings();
  task.previous = core_.cohorts();
  {
    const std::lock_guard lock(window_mutex_);
    task.window = window_.entries();
  }
  task.fingerprint = fingerprint(task.window);
  for (const fleet::WorkerStatus& worker : core_.fleet.status(/*all=*/true)) {
    if (worker.cohort >= 0) task.owned.push_back(static_cast<uint32_t>(worker.cohort));
  }
  std::ranges::sort(task.owned);
  task.newcomers = static_cast<uint32_t>(newcomers);
  task.move_all = move_all;
  task.idf_from_window = settings->options.cohorts.empty();
  task.min_requests = settings->options.refit.min_requests;
  task.seed = mix64(settings->options.refit.seed + started_);
  return task;
}

void Refitter::start(expert::RefitTask task) {
  running_ = true;
  moves_all_ = task.move_all;
  ++started_;
  began_ = core_.clock.now();
  core_.metrics.refit_running.set(1);
  // The thread before has posted its result, which has been taken: joining it costs nothing.
  thread_ = std::jthread([self = weak_from_this(), executor = core_.executor, fit = fit_,
                          task = std::move(task)](std::stop_token stop) mutable {
    task.stop = std::move(stop);
    auto report = std::make_shared<Result<expert::RefitReport>>(fit(task));
    task = {};
    net::asio::post(executor, [self = std::move(self), report = std::move(report)] {
      if (const auto refitter = self.lock()) refitter->finished(*report);
    });
  });
}

void Refitter::stop() {
  stopped_ = true;
  if (!thread_.joinable()) return;
  thread_.request_stop();
  thread_.join();
}

void Refitter::finished(const Result<expert::RefitReport>& report) {
  running_ = false;
  core_.metrics.refit_running.set(0);
  if (stopped_) return;
  if (report) {
    install(*report);
    return;
  }
  const Error& error = report.error();
  if (error.code == ErrorCode::kUnavailable) {
    ++status_.skipped;
    core_.metrics.refit_skipped.add();
    status_.last_skip = error.message;
    return;
  }
  ++status_.failures;
  core_.metrics.refit_failures.add();
  if (status_.last_error != error.message) core_.log.warn("refit: {}; the old cohorts stay", error.message);
  status_.last_error = error.message;
}

void Refitter::install(const expert::RefitReport& report) {
  core_.set_cohorts(report.model);
  for (size_t i = 0; i < joining_.size() && i < report.newcomer_rows.size(); ++i) {
    // Who left meanwhile takes nothing; its row waits for the next one.
    if (core_.fleet.removed(joining_[i])) continue;
    core_.fleet.set_cohort(joining_[i], static_cast<int32_t>(report.newcomer_rows[i]));
    const bool split = i < report.split_rows.size();
    if (split) {
      ++status_.splits;
      core_.metrics.refit_splits.add();
    }
    core_.log.info("{} takes cohort {}{}", core_.endpoint(joining_[i]).url(), report.newcomer_rows[i],
                   split ? fmt::format(", half of cohort {}", report.split_rows[i]) : std::string());
  }
  const double took_s = seconds_between(began_, core_.clock.now());
  core_.metrics.refit_s.observe(took_s);
  if (moves_all_) {
    ++status_.fits;
    core_.metrics.refit_fits.add();
    core_.metrics.refit_shift.set(report.mean_shift());
    status_.last = {.unix_s = core_.clock.unix_seconds(),
                    .duration_s = took_s,
                    .requests = report.requests,
                    .shift = report.mean_shift()};
  }
  joining_.clear();
  status_.last_skip.clear();
  status_.last_error.clear();
}

void start_refitting(const CorePtr& core) {
  if (core->refitter) KINDRED_CHECK(Core::spawn(core, refit_loop(core), /*standing=*/true));
}

}  // namespace kindred::router

#include "fleet/fleet.h"

#include <fmt/format.h>

#include <algorithm>

namespace kindred::fleet {
namespace {

// Why a worker that answers cannot be used in the role it was configured for, or empty.
std::string role_problem(Role configured, const Description& said) {
  const bool whole = configured == Role::kBoth;
  if (said.dialect == Dialect::kOpenAi) {
    if (whole) return {};
    return fmt::format("configured as a {} worker but does not speak the kindred dialect", to_string(configured));
  }
  if (said.role == Role::kBoth || said.role == configured) return {};
  return fmt::format("configured as a {} worker but says its role is {}", to_string(configured), to_string(said.role));
}

}  // namespace

LoadGuard::LoadGuard(std::shared_ptr<std::atomic<int64_t>> cell, int64_t load) : cell_(std::move(cell)), load_(load) {
  cell_->fetch_add(load_, std::memory_order_relaxed);
}

LoadGuard& LoadGuard::operator=(LoadGuard&& other) noexcept {
  if (this != &other) {
    release();
    cell_ = std::move(other.cell_);
    load_ = std::exchange(other.load_, 0);
  }
  return *this;
}

void LoadGuard::release() {
  if (!cell_) return;
  cell_->fetch_sub(std::exchange(load_, 0), std::memory_order_relaxed);
  cell_.reset();
}

std::string_view to_string(Health health) {
  switch (health) {
    case Health::kUnknown: return "unknown";
    case Health::kUp: return "up";
    case Health::kDown: return "down";
  }
  return "?";
}

Fleet::Worker& Fleet::at(WorkerId id) const {
  KINDRED_CHECK(id < workers_.size());
  return *workers_[id];
}

WorkerId Fleet::add(WorkerSpec spec) {
  const std::lock_guard lock(mutex_);
  auto worker = std::make_unique<Worker>();
  worker->spec = std::move(spec);
  worker->since = clock_.now();
  workers_.push_back(std::move(worker));
  return static_cast<WorkerId>(workers_.size() - 1);
}

size_t Fleet::size() const {
  const std::lock_guard lock(mutex_);
  return workers_.size();
}

size_t Fleet::count(Role role) const {
  const std::lock_guard lock(mutex_);
  return static_cast<size_t>(
      std::count_if(workers_.begin(), workers_.end(), [&](const auto& w) { return w->spec.role == role; }));
}

std::string Fleet::url(WorkerId id) const {
  const std::lock_guard lock(mutex_);
  return at(id).spec.url;
}

Health Fleet::health(WorkerId id) const {
  const std::lock_guard lock(mutex_);
  return at(id).health;
}

Description Fleet::description(WorkerId id) const {
  const std::lock_guard lock(mutex_);
  return at(id).description;
}

void Fleet::assign_cohorts(size_t cohorts) {
  const std::lock_guard lock(mutex_);
  size_t next = 0;
  for (const auto& worker : workers_) {
    if (worker->spec.role != Role::kDecode) continue;
    worker->cohort = next < cohorts ? static_cast<int32_t>(next) : -1;
    ++next;
  }
}

bool Fleet::set_health(Worker& worker, Health health, std::string problem) {
  worker.problem = std::move(problem);
  if (worker.health == health) return false;
  worker.health = health;
  worker.since = clock_.now();
  return true;
}

bool Fleet::report_up(WorkerId id, Description description) {
  const std::lock_guard lock(mutex_);
  Worker& worker = at(id);
  worker.failures = 0;
  std::string problem = role_problem(worker.spec.role, description);
  worker.description = std::move(description);
  const Health health = problem.empty() ? Health::kUp : Health::kDown;
  return set_health(worker, health, std::move(problem));
}

bool Fleet::report_failure(WorkerId id, std::string why) {
  const std::lock_guard lock(mutex_);
  Worker& worker = at(id);
  ++worker.failures;
  if (worker.health == Health::kUp && worker.failures < options_.failures_until_out) return false;
  // A worker that was never reached stays unknown: it may still be loading its model.
  return set_health(worker, worker.health == Health::kUnknown ? Health::kUnknown : Health::kDown, std::move(why));
}

bool Fleet::report_out(WorkerId id, std::string why) {
  const std::lock_guard lock(mutex_);
  return set_health(at(id), Health::kDown, std::move(why));
}

LoadGuard Fleet::take(WorkerId id, int64_t load) {
  const std::lock_guard lock(mutex_);
  return LoadGuard(at(id).in_flight, load);
}

bool Fleet::decode_up(std::string_view model, std::string_view fingerprint) const {
  return std::any_of(workers_.begin(), workers_.end(), [&](const auto& w) {
    return w->spec.role == Role::kDecode && w->health == Health::kUp && w->description.fingerprint == fingerprint &&
           (model.empty() || w->description.serves(model));
  });
}

bool Fleet::suits(const Worker& worker, WorkerId id, const Query& query) const {
  if (worker.health != Health::kUp) return false;
  if (std::find(query.exclude.begin(), query.exclude.end(), id) != query.exclude.end()) return false;
  if (!query.model.empty() && !worker.description.serves(query.model)) return false;
  if (!query.fingerprint.empty() && worker.description.fingerprint != query.fingerprint) return false;
  return !query.paired || decode_up(query.model, worker.description.fingerprint);
}

Snapshot Fleet::snapshot(const Query& query) const {
  const std::lock_guard lock(mutex_);
  Snapshot out;
  for (size_t i = 0; i < workers_.size(); ++i) {
    const Worker& worker = *workers_[i];
    const auto id = static_cast<WorkerId>(i);
    if (worker.spec.role != query.role) continue;
    const bool available = suits(worker, id, query);
    out.available += available ? 1 : 0;
    out.views.push_back({.url = worker.spec.url,
                         .load = static_cast<double>(worker.in_flight->load(std::memory_order_relaxed)),
                         .available = available,
                         .cohort = worker.cohort});
    out.ids.push_back(id);
  }
  return out;
}

Serving Fleet::serving(std::string_view model) const {
  const std::lock_guard lock(mutex_);
  Serving out;
  for (const auto& worker : workers_) {
    if (!model.empty() && !worker->description.serves(model)) continue;
    out.known = out.known || !worker->description.models.empty();
    if (worker->health != Health::kUp) continue;
    switch (worker->spec.role) {
      case Role::kPrefill:
        ++out.prefill_up;
        out.paired = out.paired || decode_up(model, worker->description.fingerprint);
        break;
      case Role::kDecode: ++out.decode_up; break;
      case Role::kBoth: ++out.plain_up; break;
    }
  }
  return out;
}

std::vector<ServedModel> Fleet::models() const {
  const std::lock_guard lock(mutex_);
  std::vector<ServedModel> out;
  for (const auto& worker : workers_) {
    for (const std::string& id : worker->description.models) {
      const auto same = [&](const ServedModel& model) { return model.id == id; };
      if (std::any_of(out.begin(), out.end(), same)) continue;
      out.push_back({id, worker->description.max_model_len_tokens});
    }
  }
  return out;
}

std::vector<WorkerStatus> Fleet::status() const {
  const std::lock_guard lock(mutex_);
  std::vector<WorkerStatus> out;
  for (size_t i = 0; i < workers_.size(); ++i) {
    const Worker& worker = *workers_[i];
    WorkerStatus& status = out.emplace_back();
    status.id = static_cast<WorkerId>(i);
    status.spec = worker.spec;
    status.health = worker.health;
    status.problem = worker.problem;
    status.state_age_s = seconds_between(worker.since, clock_.now());
    status.in_flight = worker.in_flight->load(std::memory_order_relaxed);
    status.cohort = worker.cohort;
    status.description = worker.description;
  }
  return out;
}

}  // namespace kindred::fleet

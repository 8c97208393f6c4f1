#include "fleet/fleet.h"

#include <fmt/format.h>

#include <algorithm>
#include <vector>

#include "fleet/other_routers.h"

namespace kindred::fleet {
namespace {

constexpr std::string_view kNotReached = "not reached yet";

// Why a worker that answers cannot be used in the role it was configured for, or empty.
std::string role_problem(Role configured, const Description& said) {
  if (configured != Role::kBoth && !disaggregates(said.dialect)) {
    return fmt::format("configured as a {} worker but does not speak a dialect that has any (kindred, vllm, sglang)",
                       to_string(configured));
  }
  // vLLM does not say, SGLang is started as one of the three, a kindred worker may be all of them.
  const bool any = said.dialect == Dialect::kVllm || !disaggregates(said.dialect) ||
                   (said.dialect == Dialect::kKindred && said.role == Role::kBoth);
  if (any || said.role == configured) return {};
  return fmt::format("configured as a {} worker but says its role is {}", to_string(configured), to_string(said.role));
}

}  // namespace

std::string_view to_string(Health health) {
  switch (health) {
    case Health::kUnknown: return "unknown";
    case Health::kUp: return "up";
    case Health::kDown: return "down";
  }
  return "?";
}

std::string_view to_string(LoadSource source) {
  switch (source) {
    case LoadSource::kRequests: return "requests";
    case LoadSource::kTokens: return "tokens";
    case LoadSource::kPolled: return "polled";
    case LoadSource::kPressure: return "pressure";
  }
  return "?";
}

std::optional<LoadSource> parse_load_source(std::string_view name) {
  for (const LoadSource source :
       {LoadSource::kRequests, LoadSource::kTokens, LoadSource::kPolled, LoadSource::kPressure}) {
    if (name == to_string(source)) return source;
  }
  return std::nullopt;
}

Fleet::Worker& Fleet::at(WorkerId id) const {
  KINDRED_CHECK(id < workers_.size());
  return *workers_[id];
}

void Fleet::set_options(const FleetOptions& options) {
  const std::lock_guard lock(mutex_);
  options_ = options;
}

void Fleet::drain(WorkerId id) {
  const std::lock_guard lock(mutex_);
  Worker& worker = at(id);
  if (!worker.removed) worker.draining = true;
}

WorkerId Fleet::add(WorkerSpec spec) {
  const std::lock_guard lock(mutex_);
  auto worker = std::make_unique<Worker>();
  worker->spec = std::move(spec);
  worker->problem = std::string(kNotReached);
  worker->since = clock_.now();
  set_engines(*worker, 1);
  worker->experts = std::make_shared<ExpertLoad>(clock_);
  workers_.push_back(std::move(worker));
  const auto id = static_cast<WorkerId>(workers_.size() - 1);
  members_.push_back(id);
  return id;
}

void Fleet::remove(WorkerId id) {
  const std::lock_guard lock(mutex_);
  Worker& worker = at(id);
  if (worker.removed) return;
  worker.removed = true;
  worker.health = Health::kDown;
  worker.problem = "removed";
  worker.since = clock_.now();
  std::erase(members_, id);
}

void Fleet::restore(WorkerId id) {
  const std::lock_guard lock(mutex_);
  Worker& worker = at(id);
  worker.draining = false;
  if (!worker.removed) return;
  worker.removed = false;
  worker.health = Health::kUnknown;
  worker.problem = std::string(kNotReached);
  worker.since = clock_.now();
  worker.failures = 0;
  worker.breaker = {};
  worker.outage_seen = false;
  worker.load.reset();
  for (EngineState& engine : worker.engines) engine.load.reset();
  members_.insert(std::lower_bound(members_.begin(), members_.end(), id), id);
}

bool Fleet::removed(WorkerId id) const {
  const std::lock_guard lock(mutex_);
  return at(id).removed;
}

size_t Fleet::size() const {
  const std::lock_guard lock(mutex_);
  return members_.size();
}

size_t Fleet::recorded() const {
  const std::lock_guard lock(mutex_);
  return workers_.size();
}

size_t Fleet::count(Role role) const {
  const std::lock_guard lock(mutex_);
  return static_cast<size_t>(
      std::count_if(members_.begin(), members_.end(), [&](WorkerId id) { return workers_[id]->spec.role == role; }));
}

std::string Fleet::url(WorkerId id) const {
  const std::lock_guard lock(mutex_);
  return at(id).spec.url;
}

Role Fleet::role(WorkerId id) const {
  const std::lock_guard lock(mutex_);
  return at(id).spec.role;
}

Health Fleet::health(WorkerId id) const {
  const std::lock_guard lock(mutex_);
  return at(id).health;
}

Dialect Fleet::dialect(WorkerId id) const {
  const std::lock_guard lock(mutex_);
  return at(id).description.dialect;
}

Description Fleet::description(WorkerId id) const {
  const std::lock_guard lock(mutex_);
  return at(id).description;
}

void Fleet::assign_cohorts(size_t cohorts) {
  const std::lock_guard lock(mutex_);
  size_t next = 0;
  for (const WorkerId id : members_) {
    Worker& worker = *workers_[id];
    if (worker.spec.role != Role::kDecode) continue;
    worker.cohort = next < cohorts ? static_cast<int32_t>(next) : -1;
    ++next;
  }
}

void Fleet::set_cohort(WorkerId id, int32_t cohort) {
  const std::lock_guard lock(mutex_);
  at(id).cohort = cohort;
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
  if (worker.removed) return false;
  worker.failures = 0;
  std::string problem = role_problem(worker.spec.role, description);
  if (description.dialect == Dialect::kKindred) resize_engines(worker, description.engines);
  else set_engines(worker, description.engines);
  worker.description = std::move(description);
  const Health health = problem.empty() ? Health::kUp : Health::kDown;
  if (health == Health::kUp && std::exchange(worker.outage_seen, false)) worker.breaker.recovered(clock_.now());
  return set_health(worker, health, std::move(problem));
}

void Fleet::report_ranks(WorkerId id, std::shared_ptr<const expert::RankMap> ranks) {
  std::shared_ptr<ExpertLoad> experts;
  {
    const std::lock_guard lock(mutex_);
    experts = at(id).experts;
  }
  experts->set_ranks(std::move(ranks));
}

bool Fleet::report_failure(WorkerId id, std::string why) {
  const std::lock_guard lock(mutex_);
  Worker& worker = at(id);
  if (worker.removed) return false;
  ++worker.failures;
  if (worker.health == Health::kDown) worker.outage_seen = true;
  if (worker.health == Health::kUp && worker.failures < options_.failures_until_out) return false;
  // A worker that was never reached stays unknown: it may still be loading its model.
  if (worker.health == Health::kUp) worker.outage_seen = true;
  return set_health(worker, worker.health == Health::kUnknown ? Health::kUnknown : Health::kDown, std::move(why));
}

bool Fleet::report_out(WorkerId id, std::string why) {
  const std::lock_guard lock(mutex_);
  Worker& worker = at(id);
  if (worker.removed) return false;
  worker.outage_seen = worker.outage_seen || worker.health != Health::kUnknown;
  return set_health(worker, Health::kDown, std::move(why));
}

bool Fleet::report_refused(WorkerId id, std::string why) {
  const std::lock_guard lock(mutex_);
  Worker& worker = at(id);
  if (worker.removed) return false;
  worker.breaker.fault(options_.breaker, clock_.now(), worker.ledger->probes.load(std::memory_order_relaxed));
  return set_health(worker, Health::kDown, std::move(why));
}

bool Fleet::report_fault(WorkerId id, Fault fault) {
  const std::lock_guard lock(mutex_);
  Worker& worker = at(id);
  if (worker.removed) return false;
  const MonotonicTime now = clock_.now();
  if (fault == Fault::kAnswer && worker.breaker.at_the_edge(options_.breaker)) {
    const bool others = std::any_of(members_.begin(), members_.end(), [&](WorkerId other) {
      return other != id && workers_[other]->spec.role == worker.spec.role && usable(*workers_[other], now);
    });
    if (!others) return false;
  }
  return worker.breaker.fault(options_.breaker, now, worker.ledger->probes.load(std::memory_order_relaxed));
}

bool Fleet::report_answered(WorkerId id) {
  const std::lock_guard lock(mutex_);
  Worker& worker = at(id);
  return !worker.removed && worker.breaker.answered(options_.breaker, clock_.now());
}

bool Fleet::report_completed(WorkerId id) {
  const std::lock_guard lock(mutex_);
  Worker& worker = at(id);
  return !worker.removed && worker.breaker.completed(options_.breaker, clock_.now());
}

void Fleet::report_load(WorkerId id, const LoadReport& load) {
  if (!load.requests()) return;
  const std::lock_guard lock(mutex_);
  Worker& worker = at(id);
  worker.load = load;
  worker.load_at = clock_.now();
  worker.in_flight_then = worker.ledger->requests.load(std::memory_order_relaxed);
}

bool Fleet::load_known(const Worker& worker, MonotonicTime now) const {
  return worker.load && now - worker.load_at <= options_.load_max_age_ms;
}

double Fleet::load_of(const Worker& worker, MonotonicTime now) const {
  const auto requests = static_cast<double>(worker.ledger->requests.load(std::memory_order_relaxed));
  switch (options_.load) {
    case LoadSource::kRequests: break;
    case LoadSource::kTokens: return static_cast<double>(worker.ledger->tokens.load(std::memory_order_relaxed));
    case LoadSource::kPolled:
      if (!load_known(worker, now)) break;
      return std::max(0.0, *worker.load->requests() + requests - static_cast<double>(worker.in_flight_then));
    case LoadSource::kPressure:
      if (const std::optional<double> pressure = pressure_load(worker, now)) return *pressure;
      return static_cast<double>(worker.ledger->tokens.load(std::memory_order_relaxed));
  }
  return requests;
}

double Fleet::unit_of(LegLoad load) const {
  const std::lock_guard lock(mutex_);
  return unit(load);
}

double Fleet::unit(LegLoad load) const {
  const bool tokens = options_.load == LoadSource::kTokens || options_.load == LoadSource::kPressure;
  return static_cast<double>(tokens ? std::max<int64_t>(load.tokens, 1) : load.requests);
}

bool Fleet::usable(const Worker& worker, MonotonicTime now) const {
  return worker.health == Health::kUp && !worker.draining &&
         worker.breaker.admits(options_.breaker, now, worker.ledger->probes.load(std::memory_order_relaxed));
}

bool Fleet::decode_up(std::string_view model, std::string_view fingerprint, MonotonicTime now) const {
  return std::any_of(members_.begin(), members_.end(), [&](WorkerId id) {
    const Worker* w = workers_[id].get();
    return w->spec.role == Role::kDecode && usable(*w, now) && w->description.fingerprint == fingerprint &&
           (model.empty() || w->description.serves(model));
  });
}

bool Fleet::suits(const Worker& worker, WorkerId id, const Query& query, MonotonicTime now) const {
  if (!usable(worker, now)) return false;
  if (std::find(query.exclude.begin(), query.exclude.end(), id) != query.exclude.end()) return false;
  if (!query.model.empty() && !worker.description.serves(query.model)) return false;
  if (query.dialect && worker.description.dialect != *query.dialect) return false;
  if (!query.fingerprint.empty() && worker.description.fingerprint != query.fingerprint) return false;
  return !query.paired || decode_up(query.model, worker.description.fingerprint, now);
}

// In requests, whatever load is counted in.
double Fleet::requests_of(const Worker& worker, MonotonicTime now) const {
  const bool in_requests = options_.load == LoadSource::kRequests || options_.load == LoadSource::kPolled;
  return in_requests ? load_of(worker, now)
                     : static_cast<double>(worker.ledger->requests.load(std::memory_order_relaxed));
}

Snapshot Fleet::snapshot(const Query& query) const {
  const std::lock_guard lock(mutex_);
  Snapshot out;
  const MonotonicTime now = clock_.now();
  std::vector<PartlyKnown> known;  // beside views, if asked for
  const policy::StepLaw law = query.experts ? steps_->law() : policy::StepLaw{};
  for (const WorkerId id : members_) {
    const Worker& worker = *workers_[id];
    if (worker.spec.role != query.role) continue;
    const bool available = suits(worker, id, query, now);
    out.available += available ? 1 : 0;
    const double share = worker.breaker.share(options_.breaker, now);
    double load = load_of(worker, now);
    if (share < 1) load = (load + unit(query.load)) / share - unit(query.load);
    out.views.push_back(
        {.url = worker.spec.url, .load = load, .available = available, .cohort = worker.cohort, .share = share});
    out.ids.push_back(id);
    if (!query.experts) continue;
    policy::WorkerView& view = out.views.back();
    view.law = law;
    view.slowness = steps_->slowness(id);
    known.push_back({.state = worker.experts->state(),
                     .known = static_cast<double>(worker.ledger->requests.load(std::memory_order_relaxed)),
                     .requests = requests_of(worker, now),
                     .ranks = worker.experts->ranks()});
  }
  if (!query.experts) return out;
  const bool polled = options_.load == LoadSource::kPolled;
  if (polled) estimate_requests(known);
  const auto joining = static_cast<double>(query.load.requests);
  for (size_t i = 0; i < known.size(); ++i) {
    policy::WorkerView& view = out.views[i];
    view.requests = known[i].requests = (known[i].requests + joining) / view.share - joining;
    if (polled) view.load = view.requests;  // polled loads are in requests
  }
  if (polled) add_unknown(known);
  for (size_t i = 0; i < known.size(); ++i) {
    out.views[i].ranks = known[i].ranks.get();
    out.ranks.push_back(std::move(known[i].ranks));
    out.experts.push_back(std::move(known[i].state));
    if (const ExpertState* state = out.experts.back().get()) {
      out.views[i].unused = state->unused;
      out.views[i].used = state->used;
    }
  }
  return out;
}

Serving Fleet::serving(std::string_view model) const {
  const std::lock_guard lock(mutex_);
  Serving out;
  const MonotonicTime now = clock_.now();
  for (const WorkerId id : members_) {
    const Worker* worker = workers_[id].get();
    if (!model.empty() && !worker->description.serves(model)) continue;
    out.known = out.known || !worker->description.models.empty();
    if (!usable(*worker, now)) continue;
    switch (worker->spec.role) {
      case Role::kPrefill:
        ++out.prefill_up;
        if (decode_up(model, worker->description.fingerprint, now)) {
          out.paired = true;
          out.paired_by.at(static_cast<size_t>(worker->description.dialect)) = true;
        }
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
  for (const WorkerId id : members_) {
    const Worker* worker = workers_[id].get();
    for (const std::string& name : worker->description.models) {
      const auto same = [&](const ServedModel& model) { return model.id == name; };
      if (std::any_of(out.begin(), out.end(), same)) continue;
      ServedModel served{name, worker->description.max_model_len_tokens, {}};
      for (const auto& [adapter, parent] : worker->description.adapters) {
        if (adapter == name) served.parent = parent;
      }
      out.push_back(std::move(served));
    }
  }
  return out;
}

WorkerStatus Fleet::status_of(const Worker& worker, WorkerId id) const {
  WorkerStatus out;
  out.id = id;
  out.spec = worker.spec;
  out.health = worker.health;
  out.problem = worker.problem;
  out.state_age_s = seconds_between(worker.since, clock_.now());
  out.breaker = worker.breaker.state(options_.breaker, clock_.now());
  out.share = worker.breaker.share(options_.breaker, clock_.now());
  out.in_flight = worker.ledger->requests.load(std::memory_order_relaxed);
  out.tokens_in_flight = worker.ledger->tokens.load(std::memory_order_relaxed);
  if (load_known(worker, clock_.now())) out.load = worker.load;
  out.load_age_s = worker.load ? seconds_between(worker.load_at, clock_.now()) : -1;
  out.cohort = worker.cohort;
  out.removed = worker.removed;
  out.draining = worker.draining && !worker.removed;
  out.description = worker.description;
  out.engines = engine_status(worker);
  return out;
}

WorkerStatus Fleet::worker_status(WorkerId id) const {
  const std::lock_guard lock(mutex_);
  return status_of(at(id), id);
}

std::vector<WorkerStatus> Fleet::status(bool all) const {
  const std::lock_guard lock(mutex_);
  std::vector<WorkerStatus> out;
  for (size_t i = 0; i < workers_.size(); ++i) {
    WorkerStatus status = status_of(*workers_[i], static_cast<WorkerId>(i));
    if (all || !status.removed || status.in_flight > 0) out.push_back(std::move(status));
  }
  return out;
}

}  // namespace kindred::fleet

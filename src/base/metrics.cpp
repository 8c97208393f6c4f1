#include "base/metrics.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>

#include "base/result.h"

namespace kindred {
namespace {

std::string number(double value) {
  if (std::isinf(value)) return value > 0 ? "+Inf" : "-Inf";
  return fmt::format("{}", value);
}

// {a="b",le="0.5"}, or nothing. `extra` is appended as it is.
std::string label_text(const Labels& labels, std::string_view extra = {}) {
  std::string out;
  for (const auto& [name, value] : labels) {
    out += out.empty() ? "" : ",";
    out += name + "=\"";
    for (const char c : value) {
      if (c == '\n') {
        out += "\\n";
        continue;
      }
      if (c == '\\' || c == '"') out.push_back('\\');
      out.push_back(c);
    }
    out.push_back('"');
  }
  if (!extra.empty()) {
    out += out.empty() ? "" : ",";
    out += extra;
  }
  return out.empty() ? out : "{" + out + "}";
}

}  // namespace

Histogram::Histogram(std::span<const double> bounds)
    : bounds_(bounds.begin(), bounds.end()), buckets_(bounds.size() + 1) {
  KINDRED_CHECK(std::is_sorted(bounds_.begin(), bounds_.end()));
}

void Histogram::observe(double value) {
  const auto at = std::lower_bound(bounds_.begin(), bounds_.end(), value) - bounds_.begin();
  buckets_[static_cast<size_t>(at)].fetch_add(1, std::memory_order_relaxed);
  sum_.fetch_add(value, std::memory_order_relaxed);
  count_.fetch_add(1, std::memory_order_relaxed);
}

std::span<const double> latency_bounds_s() {
  static constexpr std::array<double, 16> kBounds = {0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2,
                                                     0.5,   1,     2,     5,    10,   20,   30,  60};
  return kBounds;
}

std::span<const double> decision_bounds_s() {
  static constexpr std::array<double, 13> kBounds = {1e-6, 2e-6, 5e-6, 1e-5, 2e-5, 5e-5, 1e-4,
                                                     2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2};
  return kBounds;
}

Registry::Series& Registry::series(Kind kind, std::string_view name, std::string_view help, Labels&& labels) {
  auto family = std::find_if(families_.begin(), families_.end(), [&](const auto& f) { return f->name == name; });
  if (family == families_.end()) {
    families_.push_back(std::make_unique<Family>(Family{std::string(name), std::string(help), kind, {}}));
    family = families_.end() - 1;
  }
  KINDRED_CHECK((*family)->kind == kind);
  for (const auto& s : (*family)->series) {
    if (s->labels == labels) return *s;
  }
  (*family)->series.push_back(std::make_unique<Series>());
  (*family)->series.back()->labels = std::move(labels);
  return *(*family)->series.back();
}

Counter& Registry::counter(std::string_view name, std::string_view help, Labels labels) {
  const std::lock_guard lock(mutex_);
  Series& s = series(Kind::kCounter, name, help, std::move(labels));
  if (!s.counter) s.counter = std::make_unique<Counter>();
  return *s.counter;
}

Gauge& Registry::gauge(std::string_view name, std::string_view help, Labels labels) {
  const std::lock_guard lock(mutex_);
  Series& s = series(Kind::kGauge, name, help, std::move(labels));
  if (!s.gauge) s.gauge = std::make_unique<Gauge>();
  return *s.gauge;
}

Histogram& Registry::histogram(std::string_view name, std::string_view help, std::span<const double> bounds,
                               Labels labels) {
  const std::lock_guard lock(mutex_);
  Series& s = series(Kind::kHistogram, name, help, std::move(labels));
  if (!s.histogram) s.histogram = std::make_unique<Histogram>(bounds);
  return *s.histogram;
}

std::string Registry::render() const {
  static constexpr std::array<const char*, 3> kTypes = {"counter", "gauge", "histogram"};
  const std::lock_guard lock(mutex_);
  std::string out;
  for (const auto& family : families_) {
    out += fmt::format("# HELP {} {}\n# TYPE {} {}\n", family->name, family->help, family->name,
                       kTypes[static_cast<size_t>(family->kind)]);
    for (const auto& s : family->series) {
      if (s->counter) out += fmt::format("{}{} {}\n", family->name, label_text(s->labels), number(s->counter->value()));
      if (s->gauge) out += fmt::format("{}{} {}\n", family->name, label_text(s->labels), number(s->gauge->value()));
      if (!s->histogram) continue;
      uint64_t cumulative = 0;
      for (size_t i = 0; i <= s->histogram->bounds().size(); ++i) {
        cumulative += s->histogram->bucket(i);
        const bool last = i == s->histogram->bounds().size();
        const std::string le = fmt::format("le=\"{}\"", last ? "+Inf" : number(s->histogram->bounds()[i]));
        out += fmt::format("{}_bucket{} {}\n", family->name, label_text(s->labels, le), cumulative);
      }
      out += fmt::format("{}_sum{} {}\n", family->name, label_text(s->labels), number(s->histogram->sum()));
      // The buckets' total, not count_: a scrape between two adds must still be consistent.
      out += fmt::format("{}_count{} {}\n", family->name, label_text(s->labels), cumulative);
    }
  }
  return out;
}

}  // namespace kindred

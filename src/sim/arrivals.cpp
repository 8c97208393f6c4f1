// Arrivals drawn from a process (trace_reader.h).
#include <fmt/format.h>

#include <cmath>
#include <numbers>

#include "base/rng.h"
#include "sim/trace_reader.h"

namespace kindred::sim {
namespace {

constexpr uint64_t kMostDrawn = 50'000'000;

Error refused_arrival(const char* field, double got, std::string_view accepted) {
  return invalid(fmt::format("{}: got {}; accepted: {}", field, got, accepted), field);
}

Status check_arrivals(const ArrivalOptions& o) {
  if (o.requests == 0 || o.requests > kMostDrawn) {
    return refused_arrival("requests", static_cast<double>(o.requests), fmt::format("1 to {}", kMostDrawn));
  }
  if (!(o.rate_per_s > 0 && o.rate_per_s <= 1e9)) return refused_arrival("rate_per_s", o.rate_per_s, "above 0, to 1e9");
  if (!(o.burstiness >= 0.01 && o.burstiness <= 1e6)) {
    return refused_arrival("burstiness", o.burstiness, "0.01 to 1e6; 1 is Poisson");
  }
  if (o.least_prompt_tokens == 0 || o.least_prompt_tokens > o.most_prompt_tokens) {
    return refused_arrival("prompt_tokens", o.least_prompt_tokens, "at least 1, at most their upper end");
  }
  if (o.least_output_tokens == 0 || o.least_output_tokens > o.most_output_tokens) {
    return refused_arrival("output_tokens", o.least_output_tokens, "at least 1, at most their upper end");
  }
  return {};
}

// Box and Muller.
double normal(Rng& rng) {
  const double radius = std::sqrt(-2 * std::log(1 - rng.uniform()));
  return radius * std::cos(2 * std::numbers::pi * rng.uniform());
}

// Of mean 1. Marsaglia and Tsang, ACM TOMS 26, 2000; for shapes below 1 by their remark: Gamma(k) is
// Gamma(k + 1) U^(1/k).
double gamma(double shape, Rng& rng) {
  const double k = shape < 1 ? shape + 1 : shape;
  const double d = k - 1.0 / 3, c = 1 / std::sqrt(9 * d);
  double value = 0;
  for (;;) {
    const double x = normal(rng);
    const double v = std::pow(1 + c * x, 3);
    if (v <= 0) continue;
    const double u = 1 - rng.uniform();
    if (std::log(u) < x * x / 2 + d - d * v + d * std::log(v)) {
      value = d * v;
      break;
    }
  }
  if (shape < 1) value *= std::pow(1 - rng.uniform(), 1 / shape);
  return value / shape;
}

double between_arrivals(const ArrivalOptions& options, Rng& rng) {
  const double mean = options.burstiness == 1 ? -std::log(1 - rng.uniform()) : gamma(options.burstiness, rng);
  return mean / options.rate_per_s;
}

}  // namespace

Result<Trace> draw_arrivals(const ArrivalOptions& options) {
  if (Status good = check_arrivals(options); !good) return std::move(good).error();
  Trace trace;
  // Times and lengths come from generators of their own, so that one can be changed without the other.
  Rng times(mix64(options.seed)), lengths(mix64(options.seed ^ 0x6c656e));
  const auto between = [&lengths](uint32_t least, uint32_t most) {
    return least + static_cast<uint32_t>(lengths.below(uint64_t{most} - least + 1));
  };
  double at_s = 0;
  trace.requests.reserve(options.requests);
  for (uint64_t i = 0; i < options.requests; ++i) {
    at_s += between_arrivals(options, times);
    TraceRequest request{.arrival_s = at_s};
    request.prompt_tokens = between(options.least_prompt_tokens, options.most_prompt_tokens);
    request.output_tokens = between(options.least_output_tokens, options.most_output_tokens);
    trace.requests.push_back(std::move(request));
  }
  return trace;
}

Result<Trace> draw_arrivals(const ArrivalOptions& options, const Trace& lengths) {
  if (Status good = check_arrivals(options); !good) return std::move(good).error();
  if (lengths.requests.empty()) return invalid("lengths: there is no request to draw them from", "lengths");
  Trace trace;
  trace.domains = lengths.domains;
  trace.block_tokens = lengths.block_tokens;
  Rng times(mix64(options.seed)), rows(mix64(options.seed ^ 0x6c656e));
  double at_s = 0;
  trace.requests.reserve(options.requests);
  for (uint64_t i = 0; i < options.requests; ++i) {
    at_s += between_arrivals(options, times);
    TraceRequest request = lengths.requests[rows.below(lengths.requests.size())];
    request.arrival_s = at_s;
    trace.requests.push_back(std::move(request));
  }
  return trace;
}

}  // namespace kindred::sim

#include "fleet/engine_trace.h"

#include <fmt/format.h>

#include <limits>

#include "base/json.h"
#include "base/msgpack.h"

namespace kindred::fleet {
namespace {

constexpr uint64_t kVersion = 1;
// Room for fields of later versions.
constexpr MsgpackLimits kLimits{.bytes = 64 << 10, .values = 4096, .depth = 4};

// Reads fields and keeps the first error.
class TraceFields {
 public:
  explicit TraceFields(const MsgpackDocument& document) : document_(document) {}

  uint64_t integer(std::string_view name, uint64_t most) {
    const auto at = document_.member(document_.root(), name);
    const auto value = at ? document_.unsigned_integer(*at) : std::nullopt;
    if (value && *value <= most) return *value;
    fail(name, fmt::format("a whole number from 0 to {}", most));
    return 0;
  }

  bool has(std::string_view name) const { return document_.member(document_.root(), name).has_value(); }

  double real(std::string_view name, double most) {
    const auto at = document_.member(document_.root(), name);
    const auto value = at ? document_.number(*at) : std::nullopt;
    if (value && *value >= 0 && *value <= most) return *value;  // not NaN either
    fail(name, fmt::format("a number from 0 to {}", most));
    return 0;
  }

  std::vector<uint64_t> integers(std::string_view name, size_t most) {
    std::vector<uint64_t> out;
    const auto list = document_.member(document_.root(), name);
    if (list && document_.kind(*list) == MsgpackDocument::Kind::kArray && document_.size(*list) <= most) {
      auto at = document_.first(*list);
      for (uint32_t i = 0; i < document_.size(*list); ++i, at = document_.next(at)) {
        if (const auto value = document_.unsigned_integer(at)) out.push_back(*value);
      }
      if (out.size() == document_.size(*list)) return out;
    }
    fail(name, fmt::format("a list of at most {} whole numbers", most));
    return {};
  }

  const Status& status() const { return status_; }

 private:
  void fail(std::string_view name, const std::string& accepted) {
    if (!status_) return;
    status_ = Error{ErrorCode::kCorrupt, fmt::format("trace: {}: accepted: {}", name, accepted), std::string(name)};
  }

  const MsgpackDocument& document_;
  Status status_;
};

}  // namespace

std::string encode_trace(const EngineTrace& trace) {
  return dump_msgpack({{"v", kVersion},
                       {"rank", trace.rank},
                       {"epoch", trace.epoch},
                       {"sequence", trace.sequence},
                       {"time_s", trace.time_s},
                       {"remaining_prefill_tokens", trace.remaining_prefill_tokens},
                       {"waiting_prefill_tokens", trace.waiting_prefill_tokens},
                       {"running", trace.running},
                       {"waiting", trace.waiting},
                       {"kv_usage", trace.kv_usage},
                       {"kv_tokens", trace.kv_tokens},
                       {"expert_pressure", trace.expert_pressure},
                       {"received", trace.received}});
}

Result<EngineTrace> parse_trace(std::span<const uint8_t> bytes) {
  const auto document = MsgpackDocument::parse(bytes, kLimits);
  if (!document) return Error{ErrorCode::kCorrupt, "trace: " + document.error().message};
  if (document->kind(document->root()) != MsgpackDocument::Kind::kMap) {
    return Error{ErrorCode::kCorrupt, "trace: accepted: a map"};
  }
  constexpr uint64_t kAny = std::numeric_limits<uint64_t>::max();
  constexpr uint32_t kMostRequests = std::numeric_limits<uint32_t>::max();
  constexpr double kLatest = 1e12, kMostPressure = static_cast<double>(kMostTraceTokens);
  TraceFields in(*document);
  if (in.integer("v", kVersion) != kVersion && in.status()) {
    return Error{ErrorCode::kCorrupt, "trace: v: accepted: 1", "v"};
  }
  EngineTrace out;
  out.rank = static_cast<uint32_t>(in.integer("rank", kMostEngines - 1));
  out.epoch = in.integer("epoch", kAny);
  out.sequence = in.integer("sequence", kAny);
  out.time_s = in.real("time_s", kLatest);
  out.remaining_prefill_tokens = in.integer("remaining_prefill_tokens", kMostTraceTokens);
  out.waiting_prefill_tokens = in.integer("waiting_prefill_tokens", kMostTraceTokens);
  out.running = static_cast<uint32_t>(in.integer("running", kMostRequests));
  out.waiting = static_cast<uint32_t>(in.integer("waiting", kMostRequests));
  out.kv_usage = in.real("kv_usage", 1);
  if (in.has("kv_tokens")) out.kv_tokens = in.integer("kv_tokens", kMostTraceTokens);
  out.expert_pressure = in.real("expert_pressure", kMostPressure);
  out.received = in.integers("received", kReceived);
  if (!in.status()) return in.status().error();
  return out;
}

}  // namespace kindred::fleet

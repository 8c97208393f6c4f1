#include "engine/pace.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <thread>

#include "base/config.h"
#include "base/json.h"

namespace kindred::engine {
namespace {

constexpr double kMostPaceUs = 1e6;
constexpr uint32_t kMostPaceLayers = 1024;
constexpr size_t kMostPaceText = 256;

struct PaceNumber {
  const char* key;
  double PaceProfile::*field;
};
constexpr auto kPaceNumbers = std::to_array<PaceNumber>({
    {"step_us", &PaceProfile::step_us},
    {"prefill_us_per_token", &PaceProfile::prefill_us_per_token},
    {"per_sequence_us", &PaceProfile::per_sequence_us},
    {"expert_us", &PaceProfile::expert_us},
});
constexpr auto kPaceOthers = std::to_array<std::string_view>({"v", "name", "source", "layers"});

Error pace_error(std::string_view key, const Json* got, std::string_view accepted) {
  const std::string given = got == nullptr ? "it is missing" : "got " + dump_json(*got).substr(0, 80);
  return invalid(fmt::format("{}: {}; accepted: {}", key, given, accepted), std::string(key));
}

const Json* member(const Json& object, const char* key) {
  const auto found = object.find(key);
  return found == object.end() ? nullptr : &*found;
}

Status check_keys(const Json& object) {
  for (const auto& item : object.items()) {
    const std::string& key = item.key();
    const bool number = std::any_of(kPaceNumbers.begin(), kPaceNumbers.end(),
                                    [&key](const PaceNumber& known) { return key == known.key; });
    if (number || std::find(kPaceOthers.begin(), kPaceOthers.end(), key) != kPaceOthers.end()) continue;
    return invalid(fmt::format("unknown key '{}'; accepted: v, name, source, step_us, prefill_us_per_token, "
                               "per_sequence_us, expert_us, layers",
                               key.substr(0, 80)),
                   key);
  }
  return {};
}

Status read_pace_text(const Json& object, const char* key, std::string& to) {
  const Json* value = member(object, key);
  if (value == nullptr || !value->is_string() || value->get_ref<const std::string&>().empty() ||
      value->get_ref<const std::string&>().size() > kMostPaceText) {
    return pace_error(key, value, fmt::format("a text of 1 to {} bytes", kMostPaceText));
  }
  to = value->get<std::string>();
  return {};
}

}  // namespace

std::chrono::nanoseconds PaceProfile::step_time(uint32_t prefill_tokens, uint32_t batch,
                                                double distinct_experts) const {
  const double us =
      step_us + prefill_us_per_token * prefill_tokens + per_sequence_us * batch + expert_us * layers * distinct_experts;
  return std::chrono::nanoseconds(std::llround(us * 1e3));
}

Result<PaceProfile> parse_pace_profile(std::string_view json) {
  const Json object = parse_json(json);
  if (!object.is_object()) return invalid("a pace profile is one JSON object (and JSON has no NaN)");
  if (Status known = check_keys(object); !known) return std::move(known).error();
  const Json* version = member(object, "v");
  if (version == nullptr || *version != 1) return pace_error("v", version, "1");
  PaceProfile profile;
  if (Status read = read_pace_text(object, "name", profile.name); !read) return std::move(read).error();
  if (Status read = read_pace_text(object, "source", profile.source); !read) return std::move(read).error();
  for (const PaceNumber& number : kPaceNumbers) {
    const Json* value = member(object, number.key);
    const double us = value != nullptr && value->is_number() ? value->get<double>() : -1;
    if (!(us >= 0 && us <= kMostPaceUs)) return pace_error(number.key, value, "microseconds from 0 to 1000000");
    profile.*number.field = us;
  }
  const Json* layers = member(object, "layers");
  if (layers == nullptr || !layers->is_number_unsigned() || layers->get<uint64_t>() == 0 ||
      layers->get<uint64_t>() > kMostPaceLayers) {
    return pace_error("layers", layers, fmt::format("a whole number from 1 to {}", kMostPaceLayers));
  }
  profile.layers = layers->get<uint32_t>();
  if (profile.step_time(1, 1, 1).count() == 0) return invalid("all times are 0: nothing would be paced", "step_us");
  return profile;
}

Result<PaceProfile> load_pace_profile(const std::string& path) {
  const auto text = read_file(path);
  if (!text) return text.error();
  auto profile = parse_pace_profile(*text);
  if (!profile) {
    return Error{profile.error().code, fmt::format("{}: {}", path, profile.error().message), profile.error().field};
  }
  return profile;
}

void SystemSleeper::sleep_until(MonotonicTime time) { std::this_thread::sleep_until(time); }

Pacer::Pacer(PaceProfile profile, const Clock& clock, Sleeper& sleeper, Registry& metrics)
    : profile_(std::move(profile)),
      clock_(clock),
      sleeper_(sleeper),
      steps_(metrics.counter("kindred_paced_steps_total", "Steps that were padded to a profile's time.")),
      overruns_(metrics.counter("kindred_pace_overruns_total",
                                "Steps that took longer than the profile's time: figures with many of them are not "
                                "the profile's.")) {
  metrics
      .gauge("kindred_paced", "1: steps are padded to a profile's times, so times are not this machine's.",
             {{"profile", profile_.name}})
      .set(1);
}

void Pacer::begin_step() { begin_ = running_ ? end_ : clock_.now(); }

void Pacer::end_step(uint32_t prefill_tokens, uint32_t batch, double distinct_experts) {
  const std::chrono::nanoseconds wanted = profile_.step_time(prefill_tokens, batch, std::max(distinct_experts, 0.0));
  const MonotonicTime now = clock_.now();
  end_ = begin_ + std::min<std::chrono::nanoseconds>(wanted, kLongestPacedStep);
  running_ = true;
  steps_.add();
  if (now > end_ || distinct_experts < 0 || wanted > kLongestPacedStep) overruns_.add();
  if (now < end_) {
    sleeper_.sleep_until(end_);
  } else {
    end_ = now;  // no debt: the next step has its own whole time
  }
}

}  // namespace kindred::engine

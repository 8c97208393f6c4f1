#include "router/history.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "router/prompt_prefix.h"

namespace kindred::router {
namespace {

constexpr std::string_view kLookups = "kindred_router_history_lookups_total";
constexpr std::string_view kLookupsHelp =
    "Prompts looked up in the history of signatures: known, known to less than the share that is asked for, not known.";

}  // namespace

Result<std::unique_ptr<History>> History::make(const HistoryOptions& options) {
  if (options.shapes.empty()) return std::unique_ptr<History>();
  std::vector<std::pair<std::string, RoutedShape>> shapes;
  for (const std::string& text : options.shapes) {
    const size_t equals = text.rfind('=');
    std::string model = equals == std::string::npos ? std::string() : text.substr(0, equals);
    const auto shape = parse_routed_shape(std::string_view(text).substr(equals == std::string::npos ? 0 : equals + 1));
    if (!shape) {
      return invalid(fmt::format("history_shape: '{}'; accepted: [MODEL=]LAYERSxEXPERTSxTOP_K, such as 48x128x8", text),
                     "history_shape");
    }
    if (std::ranges::find(shapes, model, &std::pair<std::string, RoutedShape>::first) != shapes.end()) {
      return invalid(fmt::format("history_shape: '{}': there is one for the same model already", text),
                     "history_shape");
    }
    shapes.emplace_back(std::move(model), *shape);
  }
  return std::unique_ptr<History>(new History(std::move(shapes), options.bytes));
}

History::History(std::vector<std::pair<std::string, RoutedShape>> shapes, size_t limit_bytes)
    : shapes_(std::move(shapes)),
      limit_bytes_(limit_bytes),
      hits_(registry_.counter(kLookups, kLookupsHelp, {{"result", "hit"}})),
      short_(registry_.counter(kLookups, kLookupsHelp, {{"result", "short"}})),
      misses_(registry_.counter(kLookups, kLookupsHelp, {{"result", "miss"}})),
      asked_(registry_.counter("kindred_router_history_asked_total",
                               "Requests whose prefill server was asked which experts the prompt selects.")),
      learned_(registry_.counter("kindred_router_history_learned_total", "Prompts whose experts were learned.")),
      evicted_(registry_.counter("kindred_router_history_evicted_total",
                                 "Prefixes forgotten for lack of room, least recently used first.")) {}

std::optional<RoutedShape> History::shape(std::string_view model) const {
  std::optional<RoutedShape> any;
  for (const auto& [name, shape] : shapes_) {
    if (name == model) return shape;
    if (name.empty()) any = shape;
  }
  return any;
}

HistoryKey History::key(std::string_view model, std::string_view fingerprint, std::string_view prompt) {
  return {.pieces = prompt_pieces(fmt::format("{}\n{}", fingerprint, model), prompt, kMostPieces),
          .prompt_bytes = prompt.size()};
}

KnownPrefix History::find(const HistoryKey& key, double least_share) {
  std::shared_ptr<const Prefix> found;
  size_t pieces = key.pieces.size();
  {
    const std::lock_guard lock(mutex_);
    for (; pieces > 0; --pieces) {
      const auto at = by_hash_.find(key.pieces[pieces - 1]);
      if (at == by_hash_.end()) continue;
      entries_.splice(entries_.begin(), entries_, at->second);
      found = at->second->prefix;
      break;
    }
  }
  if (!found) {
    misses_.add();
    return {};
  }
  const double share = static_cast<double>(pieces * kPieceBytes) / static_cast<double>(key.prompt_bytes);
  (share < least_share ? short_ : hits_).add();
  return {.counts = share < least_share ? nullptr : widened(*found), .share = share};
}

std::shared_ptr<const expert::ExpertCounts> History::widened(const Prefix& prefix) {
  auto out = std::make_shared<expert::ExpertCounts>(*prefix.shape);
  out->tokens = prefix.counts.tokens;
  std::ranges::copy(prefix.counts.cells, out->data.begin());
  return out;
}

bool History::asks(double known_share, double sample) {
  if (known_share >= kKnownWell) return false;
  // The whole part of n x sample grows at every (1 / sample)-th.
  const auto number = static_cast<double>(askable_.fetch_add(1));
  if (std::floor((number + 1) * sample) <= std::floor(number * sample)) return false;
  asked_.add();
  return true;
}

void History::refused(RoutedExpertsReader::Fault fault) {
  registry_
      .counter("kindred_router_history_refused_total",
               "Answers from which nothing was learned: without the field, cut off, or with something wrong in it.",
               {{"reason", std::string(RoutedExpertsReader::to_string(fault))}})
      .add();
}

Result<std::shared_ptr<const expert::ExpertCounts>> History::learn(const HistoryKey& key, RoutedExpertsReader& answer) {
  Result<RoutedExperts> told = answer.take();
  if (!told) {
    refused(answer.fault());
    return std::move(told).error();
  }
  learned_.add();
  const auto shape = std::make_shared<const expert::ExpertShape>(std::move(told->shape));
  std::shared_ptr<const Prefix> last;
  // Prefixes that end in one piece are one entry: that of the most tokens.
  std::vector<std::pair<size_t, std::shared_ptr<const Prefix>>> ends;
  for (PrefixCounts& prefix : told->prefixes) {
    const double share = static_cast<double>(prefix.tokens) / static_cast<double>(told->tokens);
    const auto end_bytes = static_cast<size_t>(share * static_cast<double>(key.prompt_bytes));
    const size_t pieces = std::min(end_bytes / kPieceBytes, key.pieces.size());
    last = std::make_shared<const Prefix>(Prefix{.shape = shape, .counts = std::move(prefix)});
    if (pieces == 0) continue;
    if (!ends.empty() && ends.back().first == pieces) ends.back().second = last;
    else ends.emplace_back(pieces, last);
  }
  {
    const std::lock_guard lock(mutex_);
    for (auto& [pieces, prefix] : ends) put(key.pieces[pieces - 1], std::move(prefix));
  }
  return widened(*last);
}

void History::put(fleet::BlockHash hash, std::shared_ptr<const Prefix> prefix) {
  const size_t more = bytes_of(*prefix);
  if (const auto known = by_hash_.find(hash); known != by_hash_.end()) {
    bytes_ -= bytes_of(*known->second->prefix);
    entries_.erase(known->second);
    by_hash_.erase(known);
  }
  if (more > limit_bytes_) return;
  while (bytes_ + more > limit_bytes_) drop_oldest();
  entries_.push_front({.hash = hash, .prefix = std::move(prefix)});
  by_hash_.emplace(hash, entries_.begin());
  bytes_ += more;
}

void History::drop_oldest() {
  bytes_ -= bytes_of(*entries_.back().prefix);
  by_hash_.erase(entries_.back().hash);
  entries_.pop_back();
  evicted_.add();
}

size_t History::bytes() const {
  const std::lock_guard lock(mutex_);
  return bytes_;
}

size_t History::entries() const {
  const std::lock_guard lock(mutex_);
  return entries_.size();
}

Json History::status() const {
  return {{"prefixes", entries()},       {"bytes", bytes()},
          {"limit_bytes", limit_bytes_}, {"hits", hits_.value()},
          {"short", short_.value()},     {"misses", misses_.value()},
          {"asked", asked_.value()},     {"learned", learned_.value()},
          {"evicted", evicted_.value()}};
}

std::string History::metrics() {
  registry_.gauge("kindred_router_history_bytes", "Bytes of the history of signatures.")
      .set(static_cast<double>(bytes()));
  registry_.gauge("kindred_router_history_prefixes", "Prefixes of prompts in it.").set(static_cast<double>(entries()));
  return registry_.render();
}

}  // namespace kindred::router

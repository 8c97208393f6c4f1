#include "sim/dispatch.h"

#include <utility>

namespace kindred::sim {
namespace {

constexpr std::string_view kModel = "simulated";
constexpr size_t kIndexBytes = 64ULL << 20;

}  // namespace

Dispatcher::Dispatcher(const Clock& clock, DispatchOptions options)
    : options_(std::move(options)), fleet_(clock, options_.fleet), room_(clock, options_.decode_inflight) {}

Result<std::unique_ptr<Dispatcher>> Dispatcher::make(const Clock& clock, DispatchOptions options) {
  std::unique_ptr<Dispatcher> out(new Dispatcher(clock, std::move(options)));
  auto prefill = policy::make_prefill_policy(out->options_.prefill);
  if (!prefill) return std::move(prefill).error();
  auto decode = policy::make_decode_policy(out->options_.decode);
  if (!decode) return std::move(decode).error();
  policy::DecodePolicyOptions plain = out->options_.decode;
  if ((*decode)->wants_counts()) plain.name = "least-loaded";  // as the router does for whole requests
  auto whole = policy::make_decode_policy(plain);
  if (!whole) return std::move(whole).error();
  if (out->options_.engine) {
    auto engine = policy::make_engine_policy(*out->options_.engine);
    if (!engine) return std::move(engine).error();
    out->engine_ = *std::move(engine);
  }
  out->prefill_ = *std::move(prefill);
  out->decode_ = *std::move(decode);
  out->plain_ = *std::move(whole);
  if (out->prefill_->wants_prefix() || out->options_.decode.held_weight > 0) {
    out->index_ = std::make_unique<fleet::PrefixIndex>(
        fleet::PrefixIndexOptions{.budget_bytes = kIndexBytes, .workers = out->options_.workers});
  }
  return out;
}

fleet::WorkerId Dispatcher::add(Role role, std::string url) {
  return fleet_.add({.url = std::move(url), .role = role, .dialect = fleet::Dialect::kKindred});
}

void Dispatcher::up(fleet::WorkerId worker, uint32_t engines) {
  fleet::Description said;
  said.dialect = fleet::Dialect::kKindred;
  said.models = {std::string(kModel)};
  said.role = fleet_.role(worker);
  said.engines = engines;
  if (options_.cohorts) said.fingerprint = options_.cohorts->data().model_fingerprint;
  if (said.fingerprint.empty()) said.fingerprint = kModel;
  fleet_.report_up(worker, std::move(said));
}

void Dispatcher::assign_cohorts() {
  if (options_.cohorts) fleet_.assign_cohorts(options_.cohorts->cohorts());
}

void Dispatcher::arrived(Routed& request, std::span<const uint64_t> pieces, uint32_t piece_tokens) {
  if (!index_) return;
  index_->match(pieces, found_);
  for (const auto& one : found_) {
    request.held.emplace_back(one.worker, static_cast<double>(one.blocks) * piece_tokens);
  }
}

bool Dispatcher::reserve(Routed& request) {
  if (options_.decode_inflight <= 0) return true;
  const fleet::Snapshot pool = fleet_.snapshot({.role = Role::kDecode, .model = kModel});
  std::vector<fleet::WorkerId> there;
  for (size_t i = 0; i < pool.ids.size(); ++i) {
    if (pool.views[i].available) there.push_back(pool.ids[i]);
  }
  fleet::DecodeRoom::Answer answer = room_.reserve(kModel, there, 1);
  if (!answer.guard) return false;
  request.room = *std::move(answer.guard);
  return true;
}

fleet::Ask Dispatcher::ask(const Routed& request, std::span<const fleet::WorkerId> exclude, fleet::LegLoad load) const {
  return {.model = kModel,
          .prompt_tokens = index_ || engine_ ? static_cast<double>(request.prompt_tokens) : 0,
          .held = request.held,
          .exclude = exclude,
          .load = load,
          .key = request.key,
          .label = request.label};
}

fleet::LegLoad Dispatcher::whole_load(const Routed& request) const {
  return {.requests = 1, .tokens = request.prompt_tokens + options_.output_tokens_guess};
}

std::optional<fleet::WorkerId> Dispatcher::begin(Routed& request, std::optional<fleet::Choice> choice,
                                                 fleet::LegLoad load) {
  if (!choice) return std::nullopt;
  request.leg = fleet_.take(choice->worker, load, choice->decision.inclusion);
  last_ = std::move(choice->decision);
  return choice->worker;
}

std::optional<Destination> Dispatcher::begin_on_engine(Routed& request, Role role, const fleet::Ask& asked) {
  std::optional<fleet::EngineChoice> choice = fleet::choose_engine(fleet_, *engine_, role, asked, request.assigned);
  if (!choice) return std::nullopt;
  request.leg = fleet_.take(choice->engine, asked.load, static_cast<int64_t>(choice->prefill_tokens));
  last_ = std::move(choice->decision);
  return Destination{.worker = choice->engine.worker, .engine = choice->engine.rank};
}

std::optional<Destination> Dispatcher::prefill(Routed& request) {
  request.leg.release();
  const fleet::LegLoad load = {.requests = 1, .tokens = request.prompt_tokens};
  fleet::Ask asked = ask(request, request.tried_prefill, load);
  asked.dialect = fleet::Dialect::kKindred;
  std::optional<Destination> to;
  if (engine_) to = begin_on_engine(request, Role::kPrefill, asked);
  else if (const auto worker = begin(request, fleet::choose_prefill(fleet_, *prefill_, asked), load))
    to = Destination{.worker = *worker};
  if (to) request.tried_prefill.push_back(to->worker);
  return to;
}

std::optional<fleet::WorkerId> Dispatcher::decode(Routed& request, const expert::ExpertCounts* counts) {
  request.leg.release();
  request.place.release();
  const fleet::LegLoad load = whole_load(request);
  fleet::Ask asked = ask(request, request.tried_decode, load);
  const std::string fingerprint =
      request.tried_prefill.empty() ? std::string() : fleet_.description(request.tried_prefill.back()).fingerprint;
  asked.fingerprint = fingerprint;
  asked.counts = decode_->wants_counts() ? counts : nullptr;
  const auto worker =
      begin(request, fleet::choose_decode(fleet_, room_, *decode_, options_.cohorts.get(), asked), load);
  if (!worker) return worker;
  request.tried_decode.push_back(*worker);
  request.place = room_.occupy(*worker, 1);
  request.room.release();
  return worker;
}

std::optional<Destination> Dispatcher::whole(Routed& request) {
  request.leg.release();
  const fleet::LegLoad load = whole_load(request);
  const fleet::Ask asked = ask(request, request.tried_decode, load);
  std::optional<Destination> to;
  if (engine_) {
    to = begin_on_engine(request, Role::kBoth, asked);
  } else if (const auto worker =
                 begin(request, fleet::choose_whole(fleet_, *prefill_, *plain_, Role::kBoth, asked), load)) {
    to = Destination{.worker = *worker};
  }
  if (to) request.tried_decode.push_back(to->worker);
  return to;
}

void Dispatcher::stored(fleet::WorkerId worker, std::span<const uint64_t> chain) {
  if (index_) index_->store(worker, chain);
}

void Dispatcher::evicted(fleet::WorkerId worker, std::span<const uint64_t> pieces) {
  if (index_) index_->remove(worker, pieces);
}

void Dispatcher::cleared(fleet::WorkerId worker) {
  if (index_) index_->clear(worker);
}

}  // namespace kindred::sim

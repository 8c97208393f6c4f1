#include "picker/choice.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <utility>

#include "net/resolver.h"
#include "router/decide.h"
#include "router/decode_room.h"
#include "router/engine_leg.h"
#include "router/headers.h"
#include "router/health.h"
#include "router/leg_load.h"
#include "router/models.h"
#include "router/prefixes.h"

namespace kindred::picker {
namespace {

using router::ApiError;
using router::Core;
using router::Exchange;
using router::PromptTarget;

// Kindred workers hand over by the router's own protocol, which a gateway does not speak.
constexpr std::array kSidecarDialects = {fleet::Dialect::kVllm, fleet::Dialect::kSglang};

std::vector<fleet::WorkerId> members(const Core& core) {
  std::vector<fleet::WorkerId> out;
  for (const Role role : {Role::kBoth, Role::kDecode, Role::kPrefill}) {
    const fleet::Snapshot of = core.fleet.snapshot({.role = role});
    out.insert(out.end(), of.ids.begin(), of.ids.end());
  }
  return out;
}

// Those that may not be the destination: a gateway needs an address, not a name.
std::vector<fleet::WorkerId> left_out(const Core& core, const Subset& subset) {
  std::vector<fleet::WorkerId> out = members(core);
  std::erase_if(out, [&](fleet::WorkerId id) {
    const net::Endpoint& endpoint = core.endpoint(id);
    const bool wanted = !subset || std::ranges::find(*subset, endpoint.text()) != subset->end();
    return wanted && net::is_address(endpoint.host);
  });
  return out;
}

// What only the picker may say, as far as the client has said it.
std::vector<std::string> not_the_clients(const net::Headers& headers) {
  std::vector<std::string> out;
  for (const net::Header& header : headers) {
    const std::string_view name = header.name;
    const bool ours = name.starts_with("x-kindred-") || name == kPrefillerHeader ||
                      net::equals_ignore_case(name, router::kRankHeader);
    if (ours && std::ranges::find(out, name) == out.end()) out.emplace_back(name);
  }
  return out;
}

// Whether it is a completion, chat or not, of which all is known.
bool generates(const Exchange& exchange, const Hints& hints) {
  return hints.body_seen && exchange.request.head.method == "POST" && exchange.completes();
}

// The fields of the body, into the exchange; or what is wrong with them. What is no completion may be anything.
// `renamed`: the model was an alias, and the body is another one now.
std::optional<ApiError> read_body(Core& core, Exchange& exchange, bool generate, bool& renamed) {
  net::Request& request = exchange.request;
  if (request.head.method != "POST" || (request.body.empty() && !generate)) return std::nullopt;
  request.body.reserve(request.body.size() + net::kBodyPadding);
  Result<router::RequestScan> scan =
      router::RequestScanner::of(exchange.loop.executor).scan(request.body, request.body.capacity());
  if (!scan && !generate) return std::nullopt;
  if (!scan) return router::api_error(scan.error());
  exchange.scan = *std::move(scan);
  Result<std::string> label = router::domain_label(request.head.headers);
  if (!label) return router::api_error(label.error());
  exchange.label = *std::move(label);
  if (!generate && !exchange.scan.model) return std::nullopt;
  const std::optional<std::string> named = exchange.scan.model;
  auto unknown = router::name_model(core, exchange);
  renamed = named && *named != exchange.model;
  return unknown;
}

// The headers that go with the leg, beside the endpoint's.
void add_headers(const Core& core, const PromptTarget& target, const fleet::LoadGuard& guard, const Exchange& exchange,
                 Picked& picked) {
  net::RequestHead head;
  router::add_engine_headers(core, target, guard, head);
  head.headers.set(router::kRequestIdHeader, exchange.id);
  for (const net::Header& header : head.headers) {
    std::string name(header.name);
    // As HTTP/2 has names.
    for (char& letter : name) letter = letter >= 'A' && letter <= 'Z' ? static_cast<char>(letter | 0x20) : letter;
    std::erase(picked.remove, name);
    picked.set.add(name, header.value);
  }
}

class Chooser {
 public:
  Chooser(router::CorePtr core, Exchange& exchange, const Hints& hints, Picked& picked, Charge& charge)
      : core_(std::move(core)),
        exchange_(exchange),
        picked_(picked),
        charge_(charge),
        generate_(generates(exchange, hints)),
        excluded_(left_out(*core_, hints.subset)) {}

  net::Task<std::optional<ApiError>> run() {
    if (auto wrong = read_body(*core_, exchange_, generate_, picked_.changed)) co_return wrong;
    if (generate_ && core_->prefixes) exchange_.prefix = co_await core_->prefixes->look_up(core_, exchange_);
    picked_.remove = not_the_clients(exchange_.request.head.headers);
    const fleet::Serving serving = core_->fleet.serving(exchange_.model);
    if (generate_) {
      for (const fleet::Dialect dialect : kSidecarDialects) {
        if (!serving.paired_by.at(static_cast<size_t>(dialect))) continue;
        if (auto full = router::reserve_decode_room(*core_, exchange_)) co_return full;
        if (pick_pair(dialect)) co_return std::nullopt;
      }
      exchange_.decode_room.release();
    }
    if (pick_whole(Role::kBoth)) co_return std::nullopt;
    // Lists of models, tokens and the like: prefill workers know.
    if (!generate_ && pick_whole(Role::kPrefill)) co_return std::nullopt;
    co_return nobody(serving);
  }

 private:
  bool pick_pair(fleet::Dialect dialect) {
    const auto prefill = router::decide_prefill(*core_, exchange_, dialect, names_);
    if (!prefill) return false;
    const fleet::Description said = core_->fleet.description(prefill->worker);
    const router::DecodeAsk ask = {.prefill = prefill,
                                   .fingerprint = said.fingerprint,
                                   .exclude = excluded_,
                                   .load = router::whole_load(exchange_.scan)};
    const auto decode = router::decide_decode(*core_, exchange_, ask);
    if (!decode) return false;
    charge_.worker = decode->worker;
    charge_.leg = ask.load;
    charge_.load = core_->fleet.take(decode->worker, ask.load, decode->inclusion);
    charge_.place = router::occupy_decode_room(*core_, exchange_, decode->worker, ask.load.requests);
    charge_.prefill = router::take(*core_, *prefill, router::prefill_load(exchange_.scan));
    picked_.endpoint = core_->endpoint(decode->worker).text();
    add_headers(*core_, {.worker = decode->worker}, charge_.load, exchange_, picked_);
    std::erase(picked_.remove, kPrefillerHeader);
    picked_.set.add(kPrefillerHeader, core_->endpoint(prefill->worker).text());
    return true;
  }

  bool pick_whole(Role role) {
    const bool by_engine = generate_ && exchange_.settings->engine_policy != nullptr;
    const auto target = router::decide_whole(*core_, exchange_, role, by_engine, excluded_);
    if (!target) return false;
    charge_.worker = target->worker;
    charge_.leg = router::whole_load(exchange_.scan);
    charge_.load = router::take(*core_, *target, charge_.leg);
    picked_.endpoint = core_->endpoint(target->worker).text();
    add_headers(*core_, *target, charge_.load, exchange_, picked_);
    auto changed = router::engine_body(*core_, exchange_, *target, charge_.load, exchange_.request.body);
    if (changed && *changed) {
      exchange_.request.body = *std::move(*changed);
      picked_.changed = true;
    }
    return true;
  }

  ApiError nobody(const fleet::Serving& serving) const {
    std::string why = router::unserved_reason(*core_, exchange_.model);
    if (why.empty() && serving.plain_up == 0 && generate_) {
      why =
          "only prefill and decode workers are up, and none of a kind that a gateway can pair; let `kindred router` "
          "do it";
    } else if (why.empty()) {
      why = "none of the endpoints that may be chosen is up";
    }
    return router::no_worker(std::move(why));
  }

  router::CorePtr core_;
  Exchange& exchange_;
  Picked& picked_;
  Charge& charge_;
  const bool generate_;
  const std::vector<fleet::WorkerId> excluded_;
  const std::vector<fleet::WorkerId> names_ = left_out(*core_, {});  // who has no address
};

}  // namespace

net::Task<std::optional<ApiError>> choose(router::CorePtr core, Exchange& exchange, const Hints& hints, Picked& picked,
                                          Charge& charge) {
  Chooser chooser(std::move(core), exchange, hints, picked, charge);
  auto refused = co_await chooser.run();
  exchange.scan.prompt = {};  // points into the body
  picked.body = std::move(exchange.request.body);
  co_return refused;
}

void served_by(Core& core, std::string_view endpoint, Charge& charge) {
  if (endpoint.empty() || !charge.worker || core.endpoint(*charge.worker).text() == endpoint) return;
  for (const fleet::WorkerId id : members(core)) {
    if (core.endpoint(id).text() != endpoint) continue;
    charge.worker = id;
    charge.load = core.fleet.take(id, charge.leg);
    charge.place.release();
    return;
  }
}

}  // namespace kindred::picker

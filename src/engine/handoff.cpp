#include "engine/handoff.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <iterator>
#include <limits>

#include "base/bytes.h"
#include "engine/openai_json.h"
#include "engine/openai_request.h"

namespace kindred::engine {
namespace {

namespace dom = simdjson::dom;

constexpr size_t kMostNameBytes = 512;
constexpr int64_t kMostCount = std::numeric_limits<int32_t>::max();

std::string_view finish_name(FinishReason reason) {
  switch (reason) {
    case FinishReason::kStop: return "stop";
    case FinishReason::kLength: return "length";
    case FinishReason::kNone:
    case FinishReason::kCancelled: break;
  }
  return "";
}

std::string usage_text(const Usage& usage) {
  return fmt::format(R"({{"prompt_tokens":{},"cached_tokens":{},"completion_tokens":{}}})", usage.prompt_tokens,
                     usage.cached_tokens, usage.completion_tokens);
}

void append_choice(const HandoffChoice& choice, std::string& out) {
  fmt::format_to(std::back_inserter(out), R"({{"seed":"{}","held":"{}","text":"{}","finish":"{}","tokens":[)",
                 hex64(choice.seed), base64_encode(choice.held), base64_encode(choice.progress.text),
                 finish_name(choice.progress.finish));
  for (size_t i = 0; i < choice.progress.tokens.size(); ++i) {
    const TokenRecord& token = choice.progress.tokens[i];
    fmt::format_to(std::back_inserter(out), R"({}{{"id":{},"logprob":{},"top":[)", i ? "," : "", token.token,
                   logprob_text(token.logprob));
    for (size_t t = 0; t < token.top.size(); ++t)
      fmt::format_to(std::back_inserter(out), "{}[{},{}]", t ? "," : "", token.top[t].token,
                     logprob_text(token.top[t].logprob));
    out += "]}";
  }
  out += "]}";
}

std::string state_text(const HandoffState& state) {
  std::string out = R"({"id":)" + json_string(state.id);
  out += fmt::format(R"(,"created":{},"model":{},"max_tokens":{},"prompt":[)", state.created, json_string(state.model),
                     state.max_tokens);
  for (size_t i = 0; i < state.prompt.size(); ++i)
    fmt::format_to(std::back_inserter(out), "{}{}", i ? "," : "", state.prompt[i]);
  out += R"(],"usage":)" + usage_text(state.usage) + R"(,"choices":[)";
  for (size_t i = 0; i < state.choices.size(); ++i) {
    if (i > 0) out += ',';
    append_choice(state.choices[i], out);
  }
  out += ']';
  if (state.counts)
    out += R"(,"expert_counts":)" + expert::counts_to_json(*state.counts, state.suffix ? &*state.suffix : nullptr);
  if (state.gates) out += R"(,"expert_gates":)" + expert::gates_to_json(*state.gates);
  return out + '}';
}

// ---- parsing ----

bool is_hex(std::string_view text, size_t digits) {
  return text.size() == digits &&
         std::all_of(text.begin(), text.end(), [](char c) { return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f'); });
}

std::string bounded_text(FieldReader& in, std::string_view name) {
  const std::string_view text = in.required_text(name);
  if (text.empty() || text.size() > kMostNameBytes)
    in.fail(name, fmt::format("{}: must have 1 to {} bytes", name, kMostNameBytes));
  return std::string(text.substr(0, kMostNameBytes));
}

std::string base64_text(FieldReader& in, std::string_view name) {
  const auto bytes = base64_decode(in.required_text(name));
  if (bytes) return std::string(as_text(*bytes));
  in.fail(name, fmt::format("{}: not base64", name));
  return {};
}

Usage read_usage(FieldReader& state) {
  Usage out;
  const auto object = state.object("usage");
  if (!object) {
    state.fail("usage", "state.usage is missing");
    return out;
  }
  FieldReader in(*object, "state.usage.");
  out.prompt_tokens = static_cast<uint32_t>(in.required_integer("prompt_tokens", 0, kMostCount));
  out.cached_tokens = static_cast<uint32_t>(in.required_integer("cached_tokens", 0, kMostCount));
  out.completion_tokens = static_cast<uint32_t>(in.required_integer("completion_tokens", 0, kMostCount));
  state.adopt(in.status());
  return out;
}

std::vector<Token> read_ids(FieldReader& state, const HandoffLimits& limits) {
  std::vector<Token> out;
  const auto list = state.array("prompt");
  if (!list || list->size() == 0 || list->size() >= limits.context_tokens) {
    state.fail("prompt", fmt::format("state.prompt: must be 1 to {} token ids", limits.context_tokens - 1));
    return out;
  }
  out.reserve(list->size());
  for (const dom::element item : *list) {
    int64_t id = -1;
    if (item.type() != dom::element_type::INT64 || item.get(id) != simdjson::SUCCESS || id < 0 ||
        id >= limits.vocabulary) {
      state.fail("prompt", fmt::format("state.prompt: {} is not a token id below {}", shown(item), limits.vocabulary));
      return out;
    }
    out.push_back(static_cast<Token>(id));
  }
  return out;
}

float read_logprob(dom::element value) {
  double out = kLeastLogprob;
  if (!value.is_number() || value.get(out) != simdjson::SUCCESS) return kLeastLogprob;
  return static_cast<float>(std::max(out, double{kLeastLogprob}));
}

// One of a token's alternatives: [id, logprob].
bool read_alternative(dom::element item, const HandoffLimits& limits, TokenLogprob& out) {
  dom::array pair;
  int64_t id = -1;
  dom::element first, second;
  if (item.get(pair) != simdjson::SUCCESS || pair.size() != 2 || pair.at(0).get(first) != simdjson::SUCCESS ||
      pair.at(1).get(second) != simdjson::SUCCESS || first.type() != dom::element_type::INT64 ||
      first.get(id) != simdjson::SUCCESS || id < 0 || id >= limits.vocabulary)
    return false;
  out = {static_cast<Token>(id), read_logprob(second)};
  return true;
}

TokenRecord read_token(FieldReader& in, const HandoffLimits& limits) {
  TokenRecord out;
  out.token = static_cast<Token>(in.required_integer("id", 0, int64_t{limits.vocabulary} - 1));
  if (const auto logprob = in.any("logprob")) out.logprob = read_logprob(*logprob);
  const auto top = in.array("top");
  if (!top) return out;
  if (top->size() > static_cast<size_t>(kMaxLogprobs)) in.fail("top", "top: too many alternatives");
  for (const dom::element item : *top) {
    TokenLogprob alternative;
    if (in.failed()) break;
    if (!read_alternative(item, limits, alternative)) in.fail("top", "top: accepted: pairs of token id and logprob");
    out.top.push_back(alternative);
  }
  return out;
}

void read_tokens(FieldReader& in, const std::string& path, const HandoffLimits& limits, size_t most,
                 ChoiceProgress& out) {
  const auto list = in.array("tokens");
  if (!list || list->size() == 0 || list->size() > most)
    return in.fail("tokens", fmt::format("{}tokens: must be 1 to {} tokens", path, most));
  for (const dom::element item : *list) {
    dom::object object;
    if (item.get(object) != simdjson::SUCCESS) return in.fail_type("tokens", item, "objects");
    FieldReader token(object, path + "tokens.");
    out.tokens.push_back(read_token(token, limits));
    in.adopt(token.status());
    if (in.failed()) return;
  }
}

HandoffChoice read_choice(FieldReader& in, const std::string& path, const HandoffLimits& limits, size_t most_tokens) {
  HandoffChoice out;
  const std::string_view seed = in.required_text("seed");
  if (!is_hex(seed, 16)) in.fail("seed", path + "seed: must be 16 hex digits");
  std::from_chars(seed.data(), seed.data() + seed.size(), out.seed, 16);
  out.held = base64_text(in, "held");
  out.progress.text = base64_text(in, "text");
  const std::string_view finish = in.required_text("finish");
  if (finish == "stop") {
    out.progress.finish = FinishReason::kStop;
  } else if (finish == "length") {
    out.progress.finish = FinishReason::kLength;
  } else if (!finish.empty()) {
    in.fail_type("finish", *in.any("finish"), "\"\", \"stop\", \"length\"");
  }
  read_tokens(in, path, limits, most_tokens, out.progress);
  // A choice that goes on needs room for a token.
  if (out.progress.finish == FinishReason::kNone && out.progress.tokens.size() >= most_tokens)
    in.fail("tokens", path + "tokens: as many as max_tokens, but not finished");
  return out;
}

void read_choices(FieldReader& state, const HandoffLimits& limits, HandoffState& out) {
  const auto list = state.array("choices");
  if (!list || list->size() == 0 || list->size() > kMaxChoices)
    return state.fail("choices", fmt::format("state.choices: must be 1 to {} choices", kMaxChoices));
  bool goes_on = false;
  for (const dom::element item : *list) {
    const std::string path = fmt::format("state.choices[{}].", out.choices.size());
    dom::object object;
    if (item.get(object) != simdjson::SUCCESS) return state.fail_type("choices", item, "objects");
    FieldReader choice(object, path);
    out.choices.push_back(read_choice(choice, path, limits, out.max_tokens));
    state.adopt(choice.status());
    if (state.failed()) return;
    goes_on |= out.choices.back().progress.finish == FinishReason::kNone;
  }
  if (!goes_on) state.fail("choices", "state.choices: all are finished");
}

void read_counts(FieldReader& state, HandoffState& out) {
  const auto counts = state.object("expert_counts");
  if (!counts) return;
  const auto parse = [&](dom::element element, std::optional<expert::ExpertCounts>& to) {
    auto parsed = expert::counts_from_json(simdjson::minify(element));
    if (!parsed) return state.fail("expert_counts", "state.expert_counts: " + parsed.error().message);
    to = std::move(*parsed);
  };
  parse(*state.any("expert_counts"), out.counts);
  dom::element suffix;
  if (!state.failed() && counts->at_key("suffix").get(suffix) == simdjson::SUCCESS) parse(suffix, out.suffix);
}

void read_gates(FieldReader& state, HandoffState& out) {
  if (!state.object("expert_gates")) return;
  auto gates = expert::gates_from_json(simdjson::minify(*state.any("expert_gates")));
  if (!gates) return state.fail("expert_gates", "state.expert_gates: " + gates.error().message);
  out.gates = std::move(*gates);
}

HandoffState read_state(FieldReader& in, const HandoffLimits& limits) {
  HandoffState out;
  out.id = bounded_text(in, "id");
  out.created = in.required_integer("created", 0, std::numeric_limits<int64_t>::max());
  out.model = bounded_text(in, "model");
  out.prompt = read_ids(in, limits);
  if (in.failed()) return out;
  const auto room = static_cast<int64_t>(limits.context_tokens - out.prompt.size());
  out.max_tokens = static_cast<uint32_t>(in.required_integer("max_tokens", 1, room));
  out.usage = read_usage(in);
  if (in.failed()) return out;
  read_choices(in, limits, out);
  read_counts(in, out);
  read_gates(in, out);
  return out;
}

Lease read_lease(FieldReader& in, const HandoffLimits& limits) {
  Lease out;
  out.id = in.required_text("id");
  // It becomes part of a URL.
  const bool safe = !out.id.empty() && out.id.size() <= 64 && std::all_of(out.id.begin(), out.id.end(), [](char c) {
    return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '-' || c == '_';
  });
  if (!safe) in.fail("id", "lease.id: must be 1 to 64 letters, digits, '-' or '_'");
  out.hash = in.required_text("hash");
  if (!is_hex(out.hash, 32)) in.fail("hash", "lease.hash: must be 32 hex digits");
  const auto most = static_cast<int64_t>(std::min<uint64_t>(limits.lease_bytes, std::numeric_limits<int64_t>::max()));
  out.bytes = static_cast<uint64_t>(in.required_integer("bytes", 1, most));
  return out;
}

}  // namespace

std::string write_prefill_reply(const PrefillReply& reply) {
  std::string out = fmt::format(R"({{"v":1,"finished":{},"content_type":{},"first":)", reply.finished,
                                json_string(reply.content_type));
  append_json_string(out, reply.first);
  fmt::format_to(std::back_inserter(out), R"(,"usage":{},"n":{},"max_tokens":{},"fingerprint":{})",
                 usage_text(reply.usage), reply.n, reply.max_tokens, json_string(reply.fingerprint));
  if (reply.counts)
    out += R"(,"expert_counts":)" + expert::counts_to_json(*reply.counts, reply.suffix ? &*reply.suffix : nullptr);
  if (reply.lease)
    out += fmt::format(R"(,"lease":{{"id":{},"bytes":{},"hash":{},"ttl_ms":{}}})", json_string(reply.lease->id),
                       reply.lease->bytes, json_string(reply.lease->hash), reply.lease->ttl.count());
  if (reply.lease) fmt::format_to(std::back_inserter(out), R"(,"releases":{})", kMostReleases);
  if (reply.state) out += R"(,"state":)" + state_text(*reply.state);
  return out + '}';
}

Result<Handoff> parse_handoff(std::string_view json, const HandoffLimits& limits) {
  dom::parser parser;
  const auto object = parse_object(parser, json, "the handoff");
  if (!object) return object.error();
  FieldReader in(*object);
  in.required_integer("v", 1, 1);
  Handoff out;
  const auto from = net::parse_endpoint(in.required_text("from"));
  if (from) {
    out.from = *from;
  } else {
    in.fail("from", "from: " + from.error().message);
  }
  out.fingerprint = bounded_text(in, "fingerprint");
  const auto lease = in.object("lease");
  const auto state = in.object("state");
  if (!lease) in.fail("lease", "lease is missing");
  if (!state) in.fail("state", "state is missing");
  if (in.failed()) return in.status().error();
  FieldReader lease_reader(*lease, "lease.");
  out.lease = read_lease(lease_reader, limits);
  in.adopt(lease_reader.status());
  FieldReader state_reader(*state, "state.");
  if (!in.failed()) out.state = read_state(state_reader, limits);
  in.adopt(state_reader.status());
  if (in.failed()) return in.status().error();
  return out;
}

ChoiceState choice_state(const HandoffChoice& choice) {
  ChoiceState out;
  out.seed = choice.seed;
  out.held = choice.held;
  out.finish = choice.progress.finish;
  for (const TokenRecord& token : choice.progress.tokens) out.generated.push_back(token.token);
  return out;
}

}  // namespace kindred::engine

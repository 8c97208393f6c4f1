#include "engine/openai_request.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <limits>
#include <map>

#include "base/rng.h"
#include "engine/openai_json.h"

namespace kindred::engine {
namespace {

namespace dom = simdjson::dom;

constexpr int64_t kMostTokens = std::numeric_limits<int32_t>::max();

// Fields that only routers may send, and not in the body: on other engines some of them make a worker
// connect to an address of the sender's choice, or die.
bool is_internal_field(std::string_view name) {
  static constexpr auto kNames = std::to_array<std::string_view>(
      {"ec_transfer_params", "do_remote_prefill", "do_remote_decode", "remote_block_ids", "remote_engine_id",
       "remote_host", "remote_port", "disagg_prefill_dp_rank", "data_parallel_rank", "routed_dp_rank"});
  return name.starts_with("kv_transfer") || name.starts_with("bootstrap_") ||
         std::find(kNames.begin(), kNames.end(), name) != kNames.end();
}

void check_internal_fields(FieldReader& in) {
  for (const auto& [name, value] : in.fields()) {
    if (is_internal_field(name) && !value.is_null())
      in.fail(name, fmt::format("{}: belongs between a router and its workers and is not accepted from clients", name));
  }
}

bool is_empty_list(dom::element value) {
  dom::array list;
  return value.get(list) == simdjson::SUCCESS && list.size() == 0;
}

bool is_text(dom::element value, std::string_view expected) {
  std::string_view text;
  return value.get(text) == simdjson::SUCCESS && text == expected;
}

void check_unsupported(FieldReader& in) {
  for (const std::string_view name : {"tools", "functions"}) {
    const auto value = in.any(name);
    if (value && !is_empty_list(*value))
      in.fail(name, fmt::format("{}: tool calling is not supported by this server", name));
  }
  for (const std::string_view name : {"tool_choice", "function_call"}) {
    const auto value = in.any(name);
    if (value && !is_text(*value, "none"))
      in.fail(name, fmt::format("{}: got {}, accepted: \"none\" (tool calling is not supported by this server)", name,
                                shown(*value)));
  }
  if (const auto format = in.any("response_format")) {
    dom::element type;
    if (format->at_key("type").get(type) != simdjson::SUCCESS || !is_text(type, "text"))
      in.fail("response_format",
              "response_format: accepted: {\"type\":\"text\"} (structured output is not supported by this server)");
  }
  for (const std::string_view name :
       {"guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs", "grammar"}) {
    if (in.any(name)) in.fail(name, fmt::format("{}: structured output is not supported by this server", name));
  }
}

Status check_model(FieldReader& in, std::string_view served) {
  const auto model = in.text("model");
  if (in.failed()) return in.status();
  if (!model || *model == served) return {};
  return Error{ErrorCode::kNotFound,
               fmt::format("model: {} is not served here; served: {}", shown(*in.any("model")), served), "model"};
}

std::string content_of(FieldReader& message) {
  const auto content = message.any("content");
  if (!content) {
    message.fail("content", "content is missing: every message needs a string or a list of text parts");
    return {};
  }
  std::string_view text;
  if (content->get(text) == simdjson::SUCCESS) return std::string(text);
  dom::array parts;
  if (content->get(parts) != simdjson::SUCCESS) {
    message.fail_type("content", *content, "a string or a list of text parts");
    return {};
  }
  std::string joined;
  bool first = true;
  for (const dom::element part : parts) {
    dom::element type, value;
    if (part.at_key("type").get(type) != simdjson::SUCCESS || !is_text(type, "text") ||
        part.at_key("text").get(value) != simdjson::SUCCESS || value.get(text) != simdjson::SUCCESS) {
      message.fail("content", R"(content: every part must be {"type":"text","text":"…"}; only text is supported)");
      return {};
    }
    if (!first) joined += '\n';
    first = false;
    joined += text;
  }
  return joined;
}

std::vector<ChatMessage> read_messages(FieldReader& in) {
  std::vector<ChatMessage> out;
  const auto list = in.array("messages");
  if (in.failed()) return out;
  if (!list || list->size() == 0) {
    in.fail("messages", "messages: at least one message is needed");
    return out;
  }
  for (const dom::element item : *list) {
    const std::string path = fmt::format("messages[{}].", out.size());
    dom::object object;
    if (item.get(object) != simdjson::SUCCESS) {
      in.fail("messages",
              fmt::format("messages[{}]: got {}, accepted: an object with role and content", out.size(), shown(item)));
      return out;
    }
    FieldReader message(object, path);
    ChatMessage read;
    read.role = message.required_text("role");
    // OpenAI's newer name for the system prompt; templates do not know it.
    if (read.role == "developer") read.role = "system";
    if (!message.failed() && read.role != "system" && read.role != "user" && read.role != "assistant")
      message.fail_type("role", *message.any("role"), "system, developer, user, assistant");
    for (const std::string_view name : {"tool_calls", "function_call"}) {
      const auto value = message.any(name);
      if (value && !is_empty_list(*value))
        message.fail(name, fmt::format("{}{}: tool calling is not supported by this server", path, name));
    }
    if (!message.failed()) read.content = content_of(message);
    if (message.failed()) {
      in.adopt(message.status());
      return out;
    }
    out.push_back(std::move(read));
  }
  return out;
}

std::vector<Token> read_tokens(FieldReader& in, std::string_view name, dom::array list, uint32_t vocabulary) {
  std::vector<Token> out;
  out.reserve(list.size());
  for (const dom::element item : list) {
    int64_t id = -1;
    if (item.type() != dom::element_type::INT64 || item.get(id) != simdjson::SUCCESS || id < 0 || id >= vocabulary) {
      in.fail(name,
              fmt::format("{}[{}]: got {}, accepted: a token id below {}", name, out.size(), shown(item), vocabulary));
      return out;
    }
    out.push_back(static_cast<Token>(id));
  }
  return out;
}

// A string, a list of one string, a list of token ids, or a list of one list of token ids.
void read_prompt(FieldReader& in, uint32_t vocabulary, GenerationRequest& out) {
  constexpr std::string_view kAccepted = "a string or a list of token ids";
  auto prompt = in.any("prompt");
  if (!prompt) return in.fail("prompt", "prompt is missing");
  dom::array list;
  if (prompt->get(list) == simdjson::SUCCESS && list.size() > 0) {
    const dom::element first = *list.begin();
    if (first.is_string() || first.is_array()) {
      if (list.size() > 1) return in.fail("prompt", "prompt: several prompts in one request are not supported");
      prompt = first;
    }
  }
  std::string_view text;
  if (prompt->get(text) == simdjson::SUCCESS) {
    if (text.empty()) return in.fail("prompt", "prompt: must not be empty");
    out.prompt_text = text;
  } else if (prompt->get(list) == simdjson::SUCCESS) {
    if (list.size() == 0) return in.fail("prompt", "prompt: must not be empty");
    out.prompt_tokens = read_tokens(in, "prompt", list, vocabulary);
  } else {
    in.fail_type("prompt", *prompt, kAccepted);
  }
}

void read_stop(FieldReader& in, GenerationRequest& out) {
  const auto stop = in.any("stop");
  if (!stop) return;
  const auto add = [&](dom::element item) {
    std::string_view text;
    if (item.get(text) != simdjson::SUCCESS)
      return in.fail_type("stop", item, fmt::format("a string or a list of at most {} strings", kMaxStopStrings));
    if (text.empty() || text.size() > kMaxStopBytes)
      return in.fail("stop", fmt::format("stop: every stop string must have 1 to {} bytes", kMaxStopBytes));
    out.stop.emplace_back(text);
  };
  dom::array list;
  if (stop->get(list) != simdjson::SUCCESS) return add(*stop);
  if (list.size() > kMaxStopStrings)
    return in.fail("stop", fmt::format("stop: got {} strings, accepted: at most {}", list.size(), kMaxStopStrings));
  for (const dom::element item : list) add(item);
}

void read_logit_bias(FieldReader& in, uint32_t vocabulary, SamplingParams& out) {
  const auto bias = in.object("logit_bias");
  if (!bias) return;
  std::map<Token, double> by_token;  // the last of equal keys wins, as in JSON readers elsewhere
  for (const auto& [key, value] : *bias) {
    uint32_t id = 0;
    const auto [end, error] = std::from_chars(key.data(), key.data() + key.size(), id);
    double by = 0;
    if (error != std::errc() || end != key.data() + key.size() || id >= vocabulary)
      return in.fail("logit_bias", fmt::format("logit_bias: keys must be token ids below {}", vocabulary));
    if (!value.is_number() || value.get(by) != simdjson::SUCCESS || !(by >= -100 && by <= 100))
      return in.fail("logit_bias",
                     fmt::format("logit_bias[{}]: got {}, accepted: a number from -100 to 100", id, shown(value)));
    by_token[static_cast<Token>(id)] = by;
  }
  out.logit_bias.assign(by_token.begin(), by_token.end());
}

void read_logprobs(FieldReader& in, GenerationRequest& out) {
  if (out.api == Api::kCompletions) {
    out.sampling.logprobs = static_cast<int32_t>(in.integer("logprobs", 0, kMaxLogprobs).value_or(-1));
    return;
  }
  const bool wanted = in.boolean("logprobs").value_or(false);
  const auto top = in.integer("top_logprobs", 0, kMaxLogprobs);
  if (top && *top > 0 && !wanted) in.fail("top_logprobs", "top_logprobs: needs \"logprobs\": true");
  if (wanted) out.sampling.logprobs = static_cast<int32_t>(top.value_or(0));
}

void read_sampling(FieldReader& in, uint32_t vocabulary, GenerationRequest& out) {
  SamplingParams& s = out.sampling;
  s.temperature = in.real("temperature", 0, 2).value_or(s.temperature);
  s.top_p = in.real("top_p", 0, 1).value_or(s.top_p);
  if (s.top_p <= 0) in.fail_type("top_p", *in.any("top_p"), "a number above 0, at most 1");
  s.presence_penalty = in.real("presence_penalty", -2, 2).value_or(s.presence_penalty);
  s.frequency_penalty = in.real("frequency_penalty", -2, 2).value_or(s.frequency_penalty);
  s.repetition_penalty = in.real("repetition_penalty", 0, 100).value_or(s.repetition_penalty);
  if (s.repetition_penalty <= 0)
    in.fail_type("repetition_penalty", *in.any("repetition_penalty"), "a number above 0, at most 100");
  read_logit_bias(in, vocabulary, s);
  s.min_tokens = static_cast<uint32_t>(in.integer("min_tokens", 0, kMostTokens).value_or(0));
  s.ignore_eos = in.boolean("ignore_eos").value_or(false);
  if (const auto seed = in.integer("seed", std::numeric_limits<int64_t>::min(), std::numeric_limits<int64_t>::max()))
    out.seed = static_cast<uint64_t>(*seed);
}

void read_length(FieldReader& in, GenerationRequest& out) {
  // Both are checked, the newer name wins.
  for (const std::string_view name : {"max_tokens", "max_completion_tokens"}) {
    if (const auto most = in.integer(name, 1, kMostTokens)) out.max_tokens = static_cast<uint32_t>(*most);
  }
}

void read_stream(FieldReader& in, GenerationRequest& out) {
  out.stream = in.boolean("stream").value_or(false);
  const auto options = in.object("stream_options");
  if (!options) return;
  FieldReader reader(*options, "stream_options.");
  out.include_usage = reader.boolean("include_usage").value_or(false) && out.stream;
  in.adopt(reader.status());
}

void check_completions_only(FieldReader& in, uint32_t n) {
  if (in.boolean("echo").value_or(false)) in.fail("echo", "echo: not supported by this server");
  if (const auto suffix = in.text("suffix"); suffix && !suffix->empty())
    in.fail("suffix", "suffix: not supported by this server");
  if (const auto best_of = in.integer("best_of", 1, kMaxChoices); best_of && *best_of > n)
    in.fail("best_of", fmt::format("best_of: got {}, accepted: at most n ({})", *best_of, n));
}

}  // namespace

Result<GenerationRequest> parse_generation_request(Api api, std::string_view body, const RequestLimits& limits) {
  dom::parser parser;
  const auto object = parse_object(parser, body, "the request body");
  if (!object) return object.error();
  FieldReader in(*object);
  GenerationRequest out;
  out.api = api;

  check_internal_fields(in);
  check_unsupported(in);
  in.adopt(check_model(in, limits.served_model));
  if (in.failed()) return in.status().error();

  if (api == Api::kChat) {
    out.messages = read_messages(in);
  } else {
    read_prompt(in, limits.vocabulary, out);
  }
  read_stream(in, out);
  out.n = static_cast<uint32_t>(in.integer("n", 1, kMaxChoices).value_or(1));
  read_length(in, out);
  read_stop(in, out);
  read_sampling(in, limits.vocabulary, out);
  read_logprobs(in, out);
  out.return_token_ids = in.boolean("return_token_ids").value_or(false);
  out.return_expert_counts = in.boolean("return_expert_counts").value_or(false);
  out.return_expert_gates = in.boolean("return_expert_gates").value_or(false);
  out.cache_prompt = in.boolean("cache_prompt").value_or(true);
  constexpr auto kLeast = std::numeric_limits<int64_t>::min(), kMost = std::numeric_limits<int64_t>::max();
  out.priority = in.integer("priority", kLeast, kMost).value_or(0);
  if (api == Api::kCompletions) check_completions_only(in, out.n);
  if (in.failed()) return in.status().error();
  return out;
}

Result<TokenizeRequest> parse_tokenize_request(std::string_view body, const RequestLimits& limits) {
  dom::parser parser;
  const auto object = parse_object(parser, body, "the request body");
  if (!object) return object.error();
  FieldReader in(*object);
  TokenizeRequest out;
  in.adopt(check_model(in, limits.served_model));
  out.add_special_tokens = in.boolean("add_special_tokens").value_or(true);
  out.add_generation_prompt = in.boolean("add_generation_prompt").value_or(true);
  if (in.any("messages")) {
    out.messages = read_messages(in);
  } else {
    out.prompt = std::string(in.required_text("prompt"));
  }
  if (in.failed()) return in.status().error();
  return out;
}

Result<std::vector<Token>> parse_detokenize_request(std::string_view body, const RequestLimits& limits) {
  dom::parser parser;
  const auto object = parse_object(parser, body, "the request body");
  if (!object) return object.error();
  FieldReader in(*object);
  in.adopt(check_model(in, limits.served_model));
  std::vector<Token> out;
  if (const auto list = in.array("tokens")) {
    out = read_tokens(in, "tokens", *list, limits.vocabulary);
  } else {
    in.fail("tokens", "tokens is missing");
  }
  if (in.failed()) return in.status().error();
  return out;
}

Result<std::vector<std::string>> parse_release_request(std::string_view body) {
  dom::parser parser;
  const auto object = parse_object(parser, body, "the request body");
  if (!object) return object.error();
  std::vector<std::string> leases;
  dom::element list;
  if ((*object)["leases"].get(list) == simdjson::SUCCESS) {
    const Error bad = invalid(fmt::format("'leases' must be a list of 1 to {} ids", kMostReleases), "leases");
    dom::array ids;
    if (list.get(ids) != simdjson::SUCCESS || ids.size() == 0 || ids.size() > kMostReleases) return bad;
    for (const dom::element id : ids) {
      std::string_view text;
      if (id.get(text) != simdjson::SUCCESS) return bad;
      leases.emplace_back(text);
    }
    return leases;
  }
  FieldReader in(*object);
  leases.emplace_back(in.required_text("lease"));
  if (in.failed()) return in.status().error();
  return leases;
}

Result<uint32_t> resolve_max_tokens(const GenerationRequest& request, size_t prompt_tokens, const TokenLimits& limits) {
  const uint32_t context_tokens = limits.context_tokens;
  constexpr uint32_t kCompletionsDefault = 16;
  const std::string field = request.api == Api::kChat ? "messages" : "prompt";
  if (prompt_tokens >= context_tokens)
    return Error{ErrorCode::kTooLarge,
                 fmt::format("the prompt has {} tokens, and the context holds {} with at least one to generate",
                             prompt_tokens, context_tokens),
                 field};
  const auto room = static_cast<uint32_t>(context_tokens - prompt_tokens);
  if (request.max_tokens && *request.max_tokens > room)
    return Error{ErrorCode::kTooLarge,
                 fmt::format("the prompt has {} tokens and max_tokens asks for {} more, but the context holds {}",
                             prompt_tokens, *request.max_tokens, context_tokens),
                 "max_tokens"};
  uint32_t most = request.api == Api::kChat ? room : std::min(kCompletionsDefault, room);
  // The first token of each choice needs no cell of its own: it is drawn from the prompt's last one.
  if (limits.kv_tokens > prompt_tokens)
    most = std::min(most, static_cast<uint32_t>((limits.kv_tokens - prompt_tokens) / request.n + 1));
  if (request.max_tokens) most = *request.max_tokens;
  if (request.sampling.min_tokens > most)
    return invalid(
        fmt::format("min_tokens: got {}, accepted: at most max_tokens ({})", request.sampling.min_tokens, most),
        "min_tokens");
  return most;
}

uint64_t choice_seed(uint64_t request_seed, uint32_t choice) {
  return choice == 0 ? request_seed : mix64(request_seed ^ choice);
}

}  // namespace kindred::engine

#include "router/request_scan.h"

#include <fmt/format.h>
#include <simdjson.h>

#include <algorithm>
#include <array>
#include <boost/asio/execution/context.hpp>
#include <boost/asio/execution_context.hpp>
#include <boost/asio/query.hpp>
#include <charconv>

namespace kindred::router {
namespace {

namespace asio = boost::asio;
namespace ondemand = simdjson::ondemand;
using simdjson::error_code;

// Deeper than any schema in use; simdjson itself would go to 1024.
constexpr size_t kMaxDepth = 128;

// Of a body after which the parser's memory is kept: five times as much.
constexpr size_t kMostKeptBytes = 1024 * 1024;

// On vLLM and SGLang these name a peer, a lease or a rank: a client that sets them can read another
// request's KV or kill an engine.
constexpr std::array<std::string_view, 5> kForbidden = {"kv_transfer_params", "ec_transfer_params",
                                                        "disaggregated_params", "routed_dp_rank", "data_parallel_rank"};
constexpr std::array<std::string_view, 2> kForbiddenPrefixes = {"bootstrap_", "disagg_"};

enum Seen : unsigned {
  kModel = 1,
  kStream = 2,
  kCount = 4,
  kMaxTokens = 8,
  kMaxCompletionTokens = 16,
  kPrompt = 32,
  kMessages = 64,
  kPriority = 128,
  kMaxOutputTokens = 256,
  kInput = 512,
  kSystem = 1024,
  kInstructions = 2048,
};

static_assert(simdjson::SIMDJSON_PADDING <= 64, "net::kBodyPadding is what request bodies carry");

Error not_json(std::string_view why) { return invalid(fmt::format("the request body is not valid JSON: {}", why)); }

Error not_json(error_code code) {
  if (code == simdjson::DEPTH_ERROR) return not_json(fmt::format("nested deeper than {} levels", kMaxDepth));
  return not_json(simdjson::error_message(code));
}

Error wrong_type(std::string_view field, std::string_view accepted) {
  return invalid(fmt::format("'{}' must be {}", field, accepted), std::string(field));
}

std::string_view trimmed(std::string_view text) {
  const size_t last = text.find_last_not_of(" \t\r\n");
  return text.substr(0, last == std::string_view::npos ? 0 : last + 1);
}

bool is_number_text(std::string_view token) {
  return trimmed(token).find_first_not_of("0123456789+-.eE") == std::string_view::npos;
}

// simdjson skips a value by counting brackets, which lets broken JSON pass; walking it does not.
error_code walk(ondemand::value value, size_t depth) {
  if (depth > kMaxDepth) return simdjson::DEPTH_ERROR;
  ondemand::json_type type{};
  if (const error_code code = value.type().get(type)) return code;
  switch (type) {
    case ondemand::json_type::array: {
      ondemand::array array;
      if (const error_code code = value.get_array().get(array)) return code;
      for (auto item : array) {
        ondemand::value inner;
        if (const error_code code = item.get(inner)) return code;
        if (const error_code code = walk(inner, depth + 1)) return code;
      }
      return simdjson::SUCCESS;
    }
    case ondemand::json_type::object: {
      ondemand::object object;
      if (const error_code code = value.get_object().get(object)) return code;
      for (auto field : object) {
        ondemand::value inner;
        if (const error_code code = field.value().get(inner)) return code;
        if (const error_code code = walk(inner, depth + 1)) return code;
      }
      return simdjson::SUCCESS;
    }
    case ondemand::json_type::boolean: return value.get_bool().error();
    case ondemand::json_type::null: {
      bool null = false;
      if (const error_code code = value.is_null().get(null)) return code;
      return null ? simdjson::SUCCESS : simdjson::N_ATOM_ERROR;
    }
    // The spelling of numbers and escapes is the worker's to judge, but not where they end: an untouched string
    // before a colon would be skipped as if it were a key, and a number with the string that is stuck to it.
    case ondemand::json_type::number:
      return is_number_text(value.raw_json_token()) ? simdjson::SUCCESS : simdjson::NUMBER_ERROR;
    case ondemand::json_type::string: return value.get_raw_json_string().error();
  }
  return simdjson::INCORRECT_TYPE;
}

class Scanner {
 public:
  explicit Scanner(ondemand::document& document) : document_(document) {}

  Result<RequestScan> run() {
    ondemand::object object;
    if (const error_code code = document_.get_object().get(object)) {
      if (code == simdjson::INCORRECT_TYPE) return invalid("the request body must be a JSON object");
      return not_json(code);
    }
    for (auto field : object) {
      std::string_view key;
      // Unescaped, so that "kv\u005ftransfer_params" is what it will be to the worker.
      if (const error_code code = field.unescaped_key().get(key)) return not_json(code);
      if (is_forbidden_field(key)) {
        return invalid(fmt::format("'{}' may not be set by a client", key), std::string(key));
      }
      ondemand::value value;
      if (const error_code code = field.value().get(value)) return not_json(code);
      if (Status taken = take(key, value); !taken) return std::move(taken).error();
    }
    if (document_.current_location().error() == simdjson::SUCCESS) return not_json("something follows the object");
    if (max_completion_tokens_) out_.max_tokens = max_completion_tokens_;
    if (!out_.max_tokens) out_.max_tokens = max_output_tokens_;
    out_.prompt = !messages_.empty() ? messages_ : !prompt_.empty() ? prompt_ : input_;
    out_.preamble = system_.empty() ? instructions_ : system_;
    return std::move(out_);
  }

 private:
  Status take(std::string_view key, ondemand::value value) {
    if (key == "model") return take_model(value);
    if (key == "stream") return take_stream(value);
    if (key == "n") {
      std::optional<uint64_t> n;
      if (Status taken = take_count(key, kCount, value, n); !taken) return taken;
      out_.n = n.value_or(1);
      return {};
    }
    if (key == "max_tokens") return take_count(key, kMaxTokens, value, out_.max_tokens);
    if (key == "max_completion_tokens") return take_count(key, kMaxCompletionTokens, value, max_completion_tokens_);
    if (key == "max_output_tokens") return take_count(key, kMaxOutputTokens, value, max_output_tokens_);
    if (key == "prompt") return take_span(key, kPrompt, value, prompt_);
    if (key == "messages") return take_span(key, kMessages, value, messages_);
    if (key == "input") return take_span(key, kInput, value, input_);
    if (key == "system") return take_span(key, kSystem, value, system_);
    if (key == "instructions") return take_span(key, kInstructions, value, instructions_);
    if (key == "vllm_xargs") return take_extra(key, value);
    if (key == "priority") return take_priority(value);
    // Vendor fields, whose types are the worker's to judge.
    if (key == "return_expert_counts" || key == "return_expert_gates") {
      bool wants = false;
      if (value.get_bool().get(wants) == simdjson::SUCCESS) {
        out_.wants_counts = out_.wants_counts || wants;
        return {};
      }
    }
    if (const error_code code = walk(value, 2)) return not_json(code);
    return {};
  }

  Status once(std::string_view key, unsigned bit) {
    if ((seen_ & bit) != 0) return invalid(fmt::format("'{}' is given twice", key), std::string(key));
    seen_ |= bit;
    return {};
  }

  Status take_model(ondemand::value value) {
    if (Status first = once("model", kModel); !first) return first;
    if (value.type().value_unsafe() != ondemand::json_type::string) return wrong_type("model", "a string");
    std::string_view text;
    if (const error_code code = value.get_string().get(text)) return not_json(code);
    out_.model = std::string(text);
    return {};
  }

  // The official SDKs send null for what was left out.
  Status take_stream(ondemand::value value) {
    if (Status first = once("stream", kStream); !first) return first;
    const ondemand::json_type type = value.type().value_unsafe();
    if (type == ondemand::json_type::null) return check(walk(value, 2));
    if (type != ondemand::json_type::boolean) return wrong_type("stream", "true or false");
    return check(value.get_bool().get(out_.stream));
  }

  Status take_count(std::string_view key, unsigned bit, ondemand::value value, std::optional<uint64_t>& out) {
    if (Status first = once(key, bit); !first) return first;
    const ondemand::json_type type = value.type().value_unsafe();
    if (type == ondemand::json_type::null) return check(walk(value, 2));
    int64_t number = 0;
    if (type != ondemand::json_type::number || value.get_int64().get(number) != simdjson::SUCCESS || number < 0) {
      return wrong_type(key, "a non-negative integer");
    }
    out = static_cast<uint64_t>(number);
    return {};
  }

  // The worker judges what it is, but vLLM's scheduler would fail on what is no int64.
  Status take_priority(ondemand::value value) {
    if (Status first = once("priority", kPriority); !first) return first;
    const ondemand::json_type type = value.type().value_unsafe();
    out_.has_priority = type != ondemand::json_type::null;
    if (type == ondemand::json_type::number) {
      const std::string_view text = trimmed(value.raw_json_token());
      int64_t number = 0;
      const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
      if (error == std::errc::result_out_of_range && text.find_first_of(".eE") == std::string_view::npos) {
        return invalid(fmt::format("'priority' is {}; accepted: {} to {}", text.substr(0, 32), INT64_MIN, INT64_MAX),
                       "priority");
      }
    }
    return check(walk(value, 2));
  }

  // vLLM hands these on to where `kv_transfer_params` goes.
  Status take_extra(std::string_view key, ondemand::value value) {
    if (value.type().value_unsafe() != ondemand::json_type::object) return check(walk(value, 2));
    ondemand::object object;
    if (const error_code code = value.get_object().get(object)) return not_json(code);
    for (auto field : object) {
      std::string_view name;
      if (const error_code code = field.unescaped_key().get(name)) return not_json(code);
      if (is_forbidden_field(name)) {
        std::string full = fmt::format("{}.{}", key, name);
        return invalid(fmt::format("'{}' may not be set by a client", full), std::move(full));
      }
      ondemand::value inner;
      if (const error_code code = field.value().get(inner)) return not_json(code);
      if (const error_code code = walk(inner, 3)) return not_json(code);
    }
    return {};
  }

  Status take_span(std::string_view key, unsigned bit, ondemand::value value, std::string_view& out) {
    if (Status first = once(key, bit); !first) return first;
    const ondemand::json_type type = value.type().value_unsafe();
    const bool chat = bit == kMessages;
    if (type != ondemand::json_type::array && (chat || type != ondemand::json_type::string)) {
      // What is no prompt to route by is the worker's to judge; `prompt` is a template in Responses.
      const bool other = bit != kPrompt || type == ondemand::json_type::object || type == ondemand::json_type::null;
      if (!chat && other) return check(walk(value, 2));
      return wrong_type(key, chat ? "a list of messages" : "a string or a list");
    }
    const std::string_view token = value.raw_json_token();
    if (type == ondemand::json_type::string) {
      out = trimmed(token);
      return check(value.get_raw_json_string().error());
    }
    if (const error_code code = walk(value, 2)) return not_json(code);
    const char* end = nullptr;
    if (const error_code code = document_.current_location().get(end)) return not_json(code);
    out = trimmed({token.data(), static_cast<size_t>(end - token.data())});
    return {};
  }

  static Status check(error_code code) {
    if (code != simdjson::SUCCESS) return not_json(code);
    return {};
  }

  ondemand::document& document_;
  RequestScan out_;
  std::optional<uint64_t> max_completion_tokens_, max_output_tokens_;
  std::string_view prompt_, messages_, input_, system_, instructions_;
  unsigned seen_ = 0;
};

// How a context owns one; Asio finds it by its type.
class ScannerService final : public asio::execution_context::service {
 public:
  using key_type = ScannerService;
  explicit ScannerService(asio::execution_context& context) : asio::execution_context::service(context) {}

  RequestScanner scanner;

 private:
  void shutdown() override {}
};

}  // namespace

bool is_forbidden_field(std::string_view name) {
  if (std::find(kForbidden.begin(), kForbidden.end(), name) != kForbidden.end()) return true;
  return std::any_of(kForbiddenPrefixes.begin(), kForbiddenPrefixes.end(),
                     [&](std::string_view prefix) { return name.starts_with(prefix); });
}

struct RequestScanner::Impl {
  ondemand::parser parser;
};

RequestScanner::RequestScanner() : impl_(std::make_unique<Impl>()) {}
RequestScanner::~RequestScanner() = default;

RequestScanner& RequestScanner::of(const boost::asio::any_io_executor& executor) {
  return asio::use_service<ScannerService>(asio::query(executor, asio::execution::context)).scanner;
}

Result<RequestScan> scan_request(std::string_view body, size_t capacity_bytes) {
  return RequestScanner().scan(body, capacity_bytes);
}

Result<RequestScan> RequestScanner::scan(std::string_view body, size_t capacity_bytes) {
  // One huge body is no reason to hold as much for good.
  if (impl_->parser.capacity() > kMostKeptBytes) impl_ = std::make_unique<Impl>();
  ondemand::parser& parser = impl_->parser;
  simdjson::padded_string copy;
  if (capacity_bytes < body.size() + simdjson::SIMDJSON_PADDING) copy = simdjson::padded_string(body);
  const simdjson::padded_string_view padded =
      copy.size() == 0 ? simdjson::padded_string_view(body.data(), body.size(), capacity_bytes)
                       : simdjson::padded_string_view(copy);
  ondemand::document document;
  if (const error_code code = parser.iterate(padded).get(document)) return not_json(code);
  Result<RequestScan> scan = Scanner(document).run();
  // These point into what was parsed; move them back to the caller's bytes.
  const auto move_back = [&](std::string_view& text) {
    if (!text.empty()) text = body.substr(static_cast<size_t>(text.data() - copy.data()), text.size());
  };
  if (scan && copy.size() != 0) {
    move_back(scan->prompt);
    move_back(scan->preamble);
  }
  return scan;
}

}  // namespace kindred::router

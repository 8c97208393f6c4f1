#include "live/request.h"

#include <fmt/format.h>

#include <algorithm>

#include "live/prompt.h"

namespace kindred::live {
namespace {

// What a body may ask for at most; the context bounds it again.
constexpr uint64_t kMostOutputTokens = 1U << 20;

const Json* field_of(const Json& root, const char* name) {
  const auto found = root.find(name);
  return found == root.end() || found->is_null() ? nullptr : &*found;
}

Status read_flag(const Json& root, const char* name, bool& out) {
  const Json* const found = field_of(root, name);
  if (found == nullptr) return {};
  if (!found->is_boolean()) return invalid(fmt::format("'{}': accepted: true, false", name), name);
  out = found->get<bool>();
  return {};
}

Status read_content(const Json& content, size_t at, std::vector<uint32_t>& out) {
  const std::string field = fmt::format("messages[{}].content", at);
  if (content.is_string()) {
    append_tokens(content.get_ref<const std::string&>(), out);
    return {};
  }
  if (!content.is_array())
    return invalid(fmt::format("'{}': accepted: a string or a list of text parts", field), field);
  for (const Json& part : content) {
    const Json* const text = part.is_object() ? field_of(part, "text") : nullptr;
    if (text == nullptr || !text->is_string()) {
      return invalid(fmt::format("'{}': only parts of type text are accepted here", field), field);
    }
    append_tokens(text->get_ref<const std::string&>(), out);
  }
  return {};
}

Status read_messages(const Json& messages, std::vector<uint32_t>& out) {
  if (!messages.is_array() || messages.empty()) {
    return invalid("'messages': accepted: a list of at least one message", "messages");
  }
  for (size_t i = 0; i < messages.size(); ++i) {
    const Json& message = messages[i];
    const Json* const role = message.is_object() ? field_of(message, "role") : nullptr;
    if (role == nullptr || !role->is_string()) {
      return invalid(fmt::format("'messages[{}].role' is missing or no string", i),
                     fmt::format("messages[{}].role", i));
    }
    append_role(role->get_ref<const std::string&>(), out);
    const Json* const content = field_of(message, "content");
    if (content == nullptr) continue;  // a message of tool calls has none
    if (Status read = read_content(*content, i, out); !read) return read;
  }
  append_role("assistant", out);
  return {};
}

Status read_prompt(const Json& prompt, std::vector<uint32_t>& out) {
  constexpr std::string_view kAccepted = "'prompt': accepted: one string, or one list of token ids from 0 to 2^32 - 1";
  if (prompt.is_string()) {
    append_tokens(prompt.get_ref<const std::string&>(), out);
  } else if (prompt.is_array()) {
    for (const Json& token : prompt) {
      if (!token.is_number_unsigned() || token.get<uint64_t>() > UINT32_MAX) {
        return invalid(std::string(kAccepted), "prompt");
      }
      out.push_back(token.get<uint32_t>());
    }
  } else {
    return invalid(std::string(kAccepted), "prompt");
  }
  if (out.empty()) return invalid("'prompt' is empty", "prompt");
  return {};
}

Status read_tokens(bool chat, const Json& root, std::vector<uint32_t>& out) {
  const char* const name = chat ? "messages" : "prompt";
  const Json* const found = field_of(root, name);
  if (found == nullptr) return invalid(fmt::format("'{}' is required", name), name);
  return chat ? read_messages(*found, out) : read_prompt(*found, out);
}

Status read_output(const Json& root, const RequestLimits& limits, LiveRequest& out) {
  const uint32_t left = limits.context_tokens - std::min(limits.context_tokens, out.prompt_tokens());
  if (left == 0) {
    return Error{ErrorCode::kTooLarge,
                 fmt::format("the prompt has {} tokens, and the context holds {}, the answer included",
                             out.prompt_tokens(), limits.context_tokens),
                 out.chat ? "messages" : "prompt"};
  }
  out.output_tokens = std::min(limits.default_output_tokens, left);
  for (const char* const name : {"max_completion_tokens", "max_tokens"}) {
    const Json* const found = field_of(root, name);
    if (found == nullptr) continue;
    if (!found->is_number_unsigned() || found->get<uint64_t>() == 0 || found->get<uint64_t>() > kMostOutputTokens) {
      return invalid(fmt::format("'{}': accepted: whole numbers from 1 to {}", name, kMostOutputTokens), name);
    }
    if (found->get<uint64_t>() > left) {
      return Error{ErrorCode::kTooLarge,
                   fmt::format("'{}' is {}, the prompt has {} tokens, and the context holds {}", name,
                               found->get<uint64_t>(), out.prompt_tokens(), limits.context_tokens),
                   name};
    }
    out.output_tokens = found->get<uint32_t>();
    out.limited = true;
    break;
  }
  return {};
}

Status read_rest(const Json& root, const RequestLimits& limits, LiveRequest& out) {
  if (const Json* const model = field_of(root, "model"); model != nullptr) {
    if (!model->is_string()) return invalid("'model' must be a string", "model");
    if (model->get_ref<const std::string&>() != limits.model) {
      return Error{ErrorCode::kNotFound,
                   fmt::format("the model '{}' does not exist; served here: {}", model->get_ref<const std::string&>(),
                               limits.model),
                   "model"};
    }
  }
  if (const Json* const n = field_of(root, "n"); n != nullptr && *n != 1) {
    return invalid("'n': a mock worker makes one choice; accepted: 1", "n");
  }
  bool cache = true;
  for (const auto& [name, field] : {std::pair{"stream", &out.stream}, std::pair{"cache_prompt", &cache},
                                    std::pair{"return_expert_counts", &out.return_expert_counts}}) {
    if (Status read = read_flag(root, name, *field); !read) return read;
  }
  if (const Json* const options = field_of(root, "stream_options"); options != nullptr) {
    if (!options->is_object()) return invalid("'stream_options' must be an object", "stream_options");
    if (Status read = read_flag(*options, "include_usage", out.include_usage); !read) return read;
  }
  if (cache) out.pieces = piece_hashes(out.tokens, limits.piece_tokens);
  if (const Json* const transfer = field_of(root, "kv_transfer_params"); transfer != nullptr) {
    if (!transfer->is_object()) return invalid("'kv_transfer_params' must be an object", "kv_transfer_params");
    out.transfer = *transfer;
  }
  if (const Json* const room = field_of(root, "bootstrap_room"); room != nullptr) {
    if (!room->is_number_unsigned()) {
      return invalid("'bootstrap_room': accepted: whole numbers from 0 to 2^64 - 1", "bootstrap_room");
    }
    out.room = room->get<uint64_t>();
  }
  return {};
}

Result<Json> parse_object(std::string_view body) {
  Json root = parse_json(body);
  if (!root.is_object()) return invalid("the body is not a JSON object");
  return root;
}

}  // namespace

ApiFailure api_failure(const Error& error) {
  const auto make = [&](int status, const char* type, const char* code) {
    return ApiFailure{.status = status, .type = type, .code = code, .message = error.message, .param = error.field};
  };
  switch (error.code) {
    case ErrorCode::kInvalid: return make(400, "invalid_request_error", "invalid_value");
    case ErrorCode::kTooLarge: return make(400, "invalid_request_error", "context_length_exceeded");
    case ErrorCode::kNotFound: return make(404, "invalid_request_error", "model_not_found");
    case ErrorCode::kExhausted: return make(429, "rate_limit_error", "queue_full");
    default: return make(500, "server_error", "internal_error");
  }
}

std::string failure_body(const ApiFailure& failure) {
  Json error = {{"message", failure.message}, {"type", failure.type}, {"code", failure.code}, {"param", nullptr}};
  if (!failure.param.empty()) error["param"] = failure.param;
  return dump_json(Json{{"error", std::move(error)}});
}

Result<LiveRequest> parse_live_request(bool chat, std::string_view body, const RequestLimits& limits) {
  const Result<Json> root = parse_object(body);
  if (!root) return root.error();
  LiveRequest out;
  out.chat = chat;
  if (Status read = read_tokens(chat, *root, out.tokens); !read) return read.error();
  out.hash = prompt_hash(out.tokens);
  if (Status read = read_output(*root, limits, out); !read) return read.error();
  if (Status read = read_rest(*root, limits, out); !read) return read.error();
  return out;
}

Result<std::vector<uint32_t>> parse_tokenize(std::string_view body) {
  const Result<Json> root = parse_object(body);
  if (!root) return root.error();
  std::vector<uint32_t> out;
  if (Status read = read_tokens(root->contains("messages"), *root, out); !read) return read.error();
  return out;
}

}  // namespace kindred::live

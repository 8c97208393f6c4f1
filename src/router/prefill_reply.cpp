#include "router/prefill_reply.h"

#include <fmt/format.h>
#include <simdjson.h>

#include <algorithm>

#include "base/bytes.h"

namespace kindred::router {
namespace {

namespace ondemand = simdjson::ondemand;
using simdjson::error_code;

static_assert(simdjson::SIMDJSON_PADDING <= PrefillReply::kPadding);

// More choices than any engine accepts; bounds what a reply can do to the load of a worker.
constexpr uint64_t kMostChoices = 4096;

Error corrupt(std::string_view what) {
  return Error{ErrorCode::kCorrupt, fmt::format("the prefill worker's reply is malformed: {}", what)};
}

// What goes into a header of ours must be no more than a media type.
bool is_media_type(std::string_view text) {
  return text.size() <= 128 && std::all_of(text.begin(), text.end(), [](char c) { return c >= ' ' && c <= '~'; }) &&
         (text.starts_with("text/event-stream") || text.starts_with("application/json"));
}

error_code raw_object(ondemand::value value, std::string_view& out) {
  ondemand::object object;
  if (const error_code code = value.get_object().get(object)) return code;
  return object.raw_json().get(out);
}

error_code read_usage(ondemand::value value, uint64_t& prompt_tokens) {
  ondemand::object usage;
  if (const error_code code = value.get_object().get(usage)) return code;
  return usage["prompt_tokens"].get_uint64().get(prompt_tokens);
}

error_code read_lease(ondemand::value value, PrefillReply& out) {
  ondemand::object lease;
  if (const error_code code = value.get_object().get(lease)) return code;
  if (const error_code code = lease.raw_json().get(out.lease)) return code;
  if (const error_code code = lease.reset().error()) return code;
  std::string_view text;
  if (const error_code code = lease["id"].get_string().get(text)) return code;
  out.lease_id = std::string(text);
  const error_code code = lease["ttl_ms"].get_uint64().get(out.lease_ttl_ms);
  return code == simdjson::NO_SUCH_FIELD ? simdjson::SUCCESS : code;
}

error_code read_text(ondemand::value value, std::string& out) {
  std::string_view text;
  if (const error_code code = value.get_string().get(text)) return code;
  out = std::string(text);
  return simdjson::SUCCESS;
}

// `version` stays 0 until `v` is read.
error_code take(std::string_view key, ondemand::value value, PrefillReply& out, uint64_t& version) {
  if (key == "v") return value.get_uint64().get(version);
  if (key == "finished") return value.get_bool().get(out.finished);
  if (key == "content_type") return read_text(value, out.content_type);
  if (key == "first") return read_text(value, out.first);
  if (key == "usage") return read_usage(value, out.prompt_tokens);
  if (key == "n") return value.get_uint64().get(out.n);
  if (key == "releases") return value.get_uint64().get(out.releases);
  if (key == "fingerprint") return read_text(value, out.fingerprint);
  const bool optional = key == "expert_counts" || key == "lease" || key == "state";
  if (!optional) return simdjson::SUCCESS;
  bool null = false;
  if (const error_code code = value.is_null().get(null)) return code;
  if (null) return simdjson::SUCCESS;
  if (key == "expert_counts") return raw_object(value, out.expert_counts);
  if (key == "state") return raw_object(value, out.state);
  return read_lease(value, out);
}

}  // namespace

Result<PrefillReply> PrefillReply::parse(std::string bytes) {
  PrefillReply out;
  const size_t size = bytes.size();
  bytes.resize(size + simdjson::SIMDJSON_PADDING, ' ');
  out.bytes_ = std::move(bytes);

  ondemand::parser parser;
  ondemand::document document;
  const simdjson::padded_string_view padded(out.bytes_.data(), size, out.bytes_.size());
  if (parser.iterate(padded).get(document) != simdjson::SUCCESS) return corrupt("not JSON");
  ondemand::object object;
  if (document.get_object().get(object) != simdjson::SUCCESS) return corrupt("not an object");
  uint64_t version = 0;
  for (auto field : object) {
    std::string_view key;
    ondemand::value value;
    if (field.unescaped_key().get(key) != simdjson::SUCCESS || field.value().get(value) != simdjson::SUCCESS) {
      return corrupt("not JSON");
    }
    if (take(key, value, out, version) != simdjson::SUCCESS) return corrupt(fmt::format("field '{}'", key));
  }
  if (version != 1) return corrupt("'v' is not 1");
  if (!is_media_type(out.content_type)) return corrupt("'content_type' is neither an event stream nor JSON");
  if (out.n == 0 || out.n > kMostChoices) return corrupt("'n' is out of range");
  if (!out.finished && (out.lease_id.empty() || out.state.empty())) return corrupt("'lease' or 'state' is missing");
  return out;
}

std::string PrefillReply::handoff(std::string_view from) const {
  std::string out;
  out.reserve(256 + lease.size() + state.size());
  out += R"({"v":1,"from":)";
  append_json_string(out, from);
  out += R"(,"fingerprint":)";
  append_json_string(out, fingerprint);
  out += R"(,"lease":)";
  out += lease;
  out += R"(,"state":)";
  out += state;
  out += '}';
  return out;
}

void PrefillReply::forget_transfer() {
  expert_counts = lease = state = {};
  std::string().swap(bytes_);  // an assignment would keep its memory
  std::string().swap(first);
}

}  // namespace kindred::router

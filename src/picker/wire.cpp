#include "picker/wire.h"

#include <algorithm>
#include <string_view>
#include <utility>

#include "net/ascii.h"
#include "picker/conversation.h"

namespace kindred::picker {
namespace {

namespace ext_proc = envoy::service::ext_proc::v3;
namespace core = envoy::config::core::v3;

net::Headers read_headers(const core::HeaderMap& map) {
  net::Headers out;
  for (const core::HeaderValue& header : map.headers()) {
    out.add(header.key(), header.raw_value().empty() ? header.value() : header.raw_value());
  }
  return out;
}

const google::protobuf::Value* find(const core::Metadata& metadata, std::string_view space, std::string_view key) {
  const auto in = metadata.filter_metadata().find(std::string(space));
  if (in == metadata.filter_metadata().end()) return nullptr;
  const auto at = in->second.fields().find(std::string(key));
  return at == in->second.fields().end() ? nullptr : &at->second;
}

// A list, or as some gateways send it, one string with commas.
std::optional<std::vector<std::string>> read_subset(const core::Metadata& metadata) {
  const google::protobuf::Value* value = find(metadata, kSubsetNamespace, kSubsetKey);
  if (value == nullptr) return std::nullopt;
  std::vector<std::string> out;
  for (const auto& one : value->list_value().values()) out.push_back(one.string_value());
  std::string_view rest = value->string_value();
  while (!rest.empty()) {
    const size_t comma = std::min(rest.find(','), rest.size());
    const std::string_view one = net::trim(rest.substr(0, comma));
    if (!one.empty()) out.emplace_back(one);
    rest.remove_prefix(std::min(comma + 1, rest.size()));
  }
  return out;
}

void write_mutation(const ToProxy& message, ext_proc::HeaderMutation& out) {
  for (const net::Header& header : message.set) {
    core::HeaderValueOption* option = out.add_set_headers();
    option->mutable_header()->set_key(std::string(header.name));
    option->mutable_header()->set_raw_value(std::string(header.value));
    option->set_append_action(core::HeaderValueOption::OVERWRITE_IF_EXISTS_OR_ADD);
  }
  for (const std::string& name : message.remove) out.add_remove_headers(name);
}

void write_common(ToProxy& message, ext_proc::CommonResponse& out) {
  if (message.set.size() > 0 || !message.remove.empty()) write_mutation(message, *out.mutable_header_mutation());
  if (message.streamed) {
    ext_proc::StreamedBodyResponse* body = out.mutable_body_mutation()->mutable_streamed_response();
    body->set_body(std::move(message.body));
    body->set_end_of_stream(message.end_of_stream);
  } else if (message.replaced) {
    out.mutable_body_mutation()->set_body(std::move(message.body));
  }
  out.set_clear_route_cache(!message.endpoint.empty());  // routes may look at the header
}

void write_immediate(ToProxy& message, ext_proc::ImmediateResponse& out) {
  out.mutable_status()->set_code(static_cast<uint32_t>(message.status));
  write_mutation(message, *out.mutable_headers());
  out.set_body(std::move(message.body));
  out.set_details(message.details);
}

}  // namespace

std::optional<FromProxy> read_message(ext_proc::ProcessingRequest& message) {
  FromProxy out;
  const auto body = [&](Part part, ext_proc::HttpBody& from) {
    out.part = part;
    out.body = std::move(*from.mutable_body());
    out.end_of_stream = from.end_of_stream();
  };
  const auto head = [&](Part part, const ext_proc::HttpHeaders& from) {
    out.part = part;
    out.headers = read_headers(from.headers());
    out.end_of_stream = from.end_of_stream();
  };
  switch (message.request_case()) {
    case ext_proc::ProcessingRequest::kRequestHeaders:
      head(Part::kRequestHeaders, message.request_headers());
      out.subset = read_subset(message.metadata_context());
      break;
    case ext_proc::ProcessingRequest::kResponseHeaders: {
      head(Part::kResponseHeaders, message.response_headers());
      const auto* served = find(message.metadata_context(), kLbNamespace, kServedKey);
      if (served != nullptr) out.served = served->string_value();
      break;
    }
    case ext_proc::ProcessingRequest::kRequestBody: body(Part::kRequestBody, *message.mutable_request_body()); break;
    case ext_proc::ProcessingRequest::kResponseBody: body(Part::kResponseBody, *message.mutable_response_body()); break;
    case ext_proc::ProcessingRequest::kRequestTrailers: out.part = Part::kRequestTrailers; break;
    case ext_proc::ProcessingRequest::kResponseTrailers: out.part = Part::kResponseTrailers; break;
    case ext_proc::ProcessingRequest::REQUEST_NOT_SET: return std::nullopt;
  }
  out.observing = message.observability_mode();
  if (message.has_protocol_config()) {
    out.request_mode = static_cast<BodyMode>(message.protocol_config().request_body_mode());
    out.response_mode = static_cast<BodyMode>(message.protocol_config().response_body_mode());
  }
  return out;
}

ext_proc::ProcessingResponse write_message(ToProxy message) {
  ext_proc::ProcessingResponse out;
  if (!message.endpoint.empty()) {
    google::protobuf::Struct space;
    (*space.mutable_fields())[std::string(kEndpointHeader)].set_string_value(message.endpoint);
    *(*out.mutable_dynamic_metadata()->mutable_fields())[std::string(kLbNamespace)].mutable_struct_value() =
        std::move(space);
  }
  switch (message.part) {
    case Part::kRequestHeaders: write_common(message, *out.mutable_request_headers()->mutable_response()); break;
    case Part::kResponseHeaders: write_common(message, *out.mutable_response_headers()->mutable_response()); break;
    case Part::kRequestBody: write_common(message, *out.mutable_request_body()->mutable_response()); break;
    case Part::kResponseBody: write_common(message, *out.mutable_response_body()->mutable_response()); break;
    case Part::kRequestTrailers: out.mutable_request_trailers(); break;
    case Part::kResponseTrailers: out.mutable_response_trailers(); break;
    case Part::kImmediate: write_immediate(message, *out.mutable_immediate_response()); break;
  }
  return out;
}

}  // namespace kindred::picker

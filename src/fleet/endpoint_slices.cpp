#include "fleet/endpoint_slices.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <optional>

#include "base/json.h"

namespace kindred::fleet {
namespace {

constexpr std::string_view kRoleLabel = "kindred/role";
constexpr int kGone = 410;

Error bad_slices(std::string what) { return Error{ErrorCode::kCorrupt, "EndpointSlices: " + std::move(what)}; }

const Json* member(const Json& object, std::string_view name) {
  if (!object.is_object()) return nullptr;
  const auto found = object.find(name);
  return found == object.end() || found->is_null() ? nullptr : &*found;
}

std::string text(const Json* value) {
  return value != nullptr && value->is_string() ? value->get<std::string>() : std::string();
}

// Names of Kubernetes objects; nothing else may get into a request's target.
bool is_name(std::string_view name) {
  return !name.empty() && name.size() <= 253 && std::ranges::all_of(name, [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '-' || c == '.';
  });
}

bool condition(const Json& endpoint, std::string_view name, bool otherwise) {
  const Json* conditions = member(endpoint, "conditions");
  const Json* found = conditions == nullptr ? nullptr : member(*conditions, name);
  return found != nullptr && found->is_boolean() ? found->get<bool>() : otherwise;
}

std::optional<uint16_t> port_of(const Json& slice, const std::string& wanted) {
  uint16_t number = 0;
  const auto [end, error] = std::from_chars(wanted.data(), wanted.data() + wanted.size(), number);
  if (!wanted.empty() && error == std::errc{} && end == wanted.data() + wanted.size()) return number;
  const Json* ports = member(slice, "ports");
  if (ports == nullptr || !ports->is_array()) return std::nullopt;
  for (const Json& port : *ports) {
    if (!wanted.empty() && text(member(port, "name")) != wanted) continue;
    const Json* value = member(port, "port");
    if (value == nullptr || !value->is_number_unsigned() || value->get<uint64_t>() > UINT16_MAX) continue;
    return value->get<uint16_t>();
  }
  return std::nullopt;
}

Role role_of(const Json& slice, const KubernetesService& service) {
  if (service.role) return *service.role;
  const Json* metadata = member(slice, "metadata");
  const Json* labels = metadata == nullptr ? nullptr : member(*metadata, "labels");
  return parse_role(labels == nullptr ? std::string() : text(member(*labels, kRoleLabel))).value_or(Role::kBoth);
}

std::vector<WantedWorker> read_slice(const Json& slice, const KubernetesService& service) {
  std::vector<WantedWorker> out;
  const std::string family = text(member(slice, "addressType"));
  if (family != "IPv4" && family != "IPv6") return out;
  const auto port = port_of(slice, service.port);
  const Json* endpoints = member(slice, "endpoints");
  if (!port || endpoints == nullptr || !endpoints->is_array()) return out;
  const Role role = role_of(slice, service);
  for (const Json& endpoint : *endpoints) {
    if (out.size() >= EndpointSlices::kMaxEndpoints) break;
    // All addresses of an endpoint are the same one; the first is used.
    const Json* addresses = member(endpoint, "addresses");
    if (addresses == nullptr || !addresses->is_array() || addresses->empty()) continue;
    const std::string address = text(&addresses->front());
    const bool ready = condition(endpoint, "ready", true);  // unknown counts as ready, says the API
    const bool draining = condition(endpoint, "terminating", false) && condition(endpoint, "serving", ready);
    if (address.empty() || (!ready && !draining)) continue;
    const bool bracketed = family == "IPv6";
    out.push_back({.url = fmt::format("http://{}{}{}:{}", bracketed ? "[" : "", address, bracketed ? "]" : "", *port),
                   .role = role,
                   .draining = draining});
  }
  return out;
}

}  // namespace

Result<KubernetesService> parse_kubernetes_service(std::string_view given) {
  const auto wrong = [&] {
    return invalid(
        fmt::format("kubernetes_service: got '{}', accepted: NAMESPACE/NAME[:PORT][=prefill|decode|both]", given),
        "kubernetes_service");
  };
  KubernetesService out;
  std::string_view rest = given;
  if (const size_t equals = rest.find('='); equals != std::string_view::npos) {
    out.role = parse_role(rest.substr(equals + 1));
    if (!out.role) return wrong();
    rest = rest.substr(0, equals);
  }
  if (const size_t colon = rest.find(':'); colon != std::string_view::npos) {
    out.port = rest.substr(colon + 1);
    if (!is_name(out.port)) return wrong();
    rest = rest.substr(0, colon);
  }
  const size_t slash = rest.find('/');
  if (slash == std::string_view::npos) return wrong();
  out.ns = rest.substr(0, slash);
  out.name = rest.substr(slash + 1);
  if (!is_name(out.ns) || !is_name(out.name)) return wrong();
  return out;
}

std::string KubernetesService::list_target() const {
  return fmt::format(
      "/apis/discovery.k8s.io/v1/namespaces/{}/endpointslices?labelSelector=kubernetes.io%2Fservice-name%3D{}", ns,
      name);
}

std::string KubernetesService::watch_target(std::string_view version, int seconds) const {
  return fmt::format("{}&watch=1&allowWatchBookmarks=true&timeoutSeconds={}&resourceVersion={}", list_target(), seconds,
                     version);
}

Status EndpointSlices::list(std::string_view json) {
  const Json root = parse_json(json);
  const Json* metadata = member(root, "metadata");
  const std::string version = metadata == nullptr ? std::string() : text(member(*metadata, "resourceVersion"));
  const Json* items = member(root, "items");
  // An empty list is given as null by some servers.
  if (version.empty() || (items != nullptr && !items->is_array())) return bad_slices("the answer is not a list");
  if (items != nullptr && items->size() > kMaxSlices) return bad_slices(fmt::format("{} slices", items->size()));
  std::map<std::string, std::vector<WantedWorker>> slices;
  if (items != nullptr) {
    for (const Json& slice : *items) {
      const Json* own = member(slice, "metadata");
      if (own == nullptr) return bad_slices("a slice has no metadata");
      slices[text(member(*own, "name"))] = read_slice(slice, service_);
    }
  }
  slices_ = std::move(slices);
  version_ = version;
  return {};
}

Status EndpointSlices::event(std::string_view line) {
  const Json root = parse_json(line);
  const std::string type = text(member(root, "type"));
  const Json* object = member(root, "object");
  if (type.empty() || object == nullptr) return bad_slices("a line of the watch is no event");
  if (type == "ERROR") {
    const Json* code = member(*object, "code");
    const bool gone = code != nullptr && code->is_number_integer() && code->get<int64_t>() == kGone;
    return Error{gone ? ErrorCode::kUnavailable : ErrorCode::kCorrupt,
                 fmt::format("EndpointSlices: the server says: {}", text(member(*object, "message")))};
  }
  const Json* metadata = member(*object, "metadata");
  const std::string version = metadata == nullptr ? std::string() : text(member(*metadata, "resourceVersion"));
  if (version.empty()) return bad_slices("an event has no resourceVersion");
  const std::string name = text(member(*metadata, "name"));
  if (type == "ADDED" || type == "MODIFIED") {
    if (!slices_.contains(name) && slices_.size() >= kMaxSlices) return bad_slices("too many slices");
    slices_[name] = read_slice(*object, service_);
  } else if (type == "DELETED") {
    slices_.erase(name);
  }  // BOOKMARK, and whatever comes later, only moves the version
  version_ = version;
  return {};
}

std::vector<WantedWorker> EndpointSlices::workers() const {
  std::vector<WantedWorker> out;
  for (const auto& [name, workers] : slices_) out.insert(out.end(), workers.begin(), workers.end());
  // While an address moves between slices it may be in both: ready wins.
  std::ranges::sort(out, [](const WantedWorker& a, const WantedWorker& b) {
    return a.url != b.url ? a.url < b.url : a.draining < b.draining;
  });
  const auto same = [](const WantedWorker& a, const WantedWorker& b) { return a.url == b.url; };
  out.erase(std::unique(out.begin(), out.end(), same), out.end());
  return out;
}

}  // namespace kindred::fleet

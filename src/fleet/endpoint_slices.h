// The workers behind Kubernetes Services, from their EndpointSlices (discovery.k8s.io/v1): a list, then a stream
// of changes. Pure: whoever speaks to the API server gives it what that says.
//
// Thread-safety: none.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "fleet/worker_list.h"

namespace kindred::fleet {

// NAMESPACE/NAME[:PORT][=ROLE]. PORT: a number, or a port's name; the first port if missing. ROLE: prefill, decode
// or both; if missing, that of the Service's label kindred/role (Services hand their labels on to their slices).
struct KubernetesService {
  std::string ns, name, port;
  std::optional<Role> role;

  std::string list_target() const;                                        // of GET
  std::string watch_target(std::string_view version, int seconds) const;  // the same, for changes since then
};
// Error: kInvalid, naming the accepted form.
Result<KubernetesService> parse_kubernetes_service(std::string_view text);

class EndpointSlices {
 public:
  explicit EndpointSlices(KubernetesService service) : service_(std::move(service)) {}

  // The answer to a GET of the list; replaces everything. Error: kCorrupt.
  Status list(std::string_view json);
  // One line of a watch. Errors: kCorrupt; kUnavailable when the server wants the list to be read again (410: what
  // has happened since is forgotten).
  Status event(std::string_view line);

  // Where the next watch begins.
  const std::string& version() const { return version_; }
  // One per address, in order of address. Those that terminate but still serve are draining; those that are not
  // ready are left out. An address in several slices counts once.
  std::vector<WantedWorker> workers() const;

  static constexpr size_t kMaxSlices = 1024;
  static constexpr size_t kMaxEndpoints = 1000;  // per slice: Kubernetes' own limit

 private:
  KubernetesService service_;
  std::string version_;
  std::map<std::string, std::vector<WantedWorker>> slices_;  // by name
};

}  // namespace kindred::fleet

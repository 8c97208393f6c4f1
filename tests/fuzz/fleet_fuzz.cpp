// What workers and lists of workers say of themselves: loads, models, versions, EndpointSlices, workers files.
#include <string>

#include "fleet/describe.h"
#include "fleet/dialect.h"
#include "fleet/endpoint_slices.h"
#include "fleet/load_report.h"
#include "fleet/worker_list.h"
#include "fuzz.h"

using namespace kindred;
using namespace kindred::fleet;

namespace {

void check(const LoadReport& report) {
  if (const auto requests = report.requests()) KINDRED_CHECK(*requests >= 0);
  if (report.kv_usage) KINDRED_CHECK(*report.kv_usage >= 0);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string text(reinterpret_cast<const char*>(data), size);
  for (const Dialect dialect : {Dialect::kVllm, Dialect::kSglang, Dialect::kLlamaServer, Dialect::kKindred}) {
    check(parse_load_metrics(dialect, text));
  }
  check(parse_sglang_loads(text));
  (void)parse_models(text);
  (void)parse_server_info(text);
  (void)parse_dialect(text);
  if (const auto workers = parse_worker_list(text, 8)) KINDRED_CHECK(workers->size() <= 8);
  if (const auto service = parse_kubernetes_service(text)) KINDRED_CHECK(!service->name.empty());
  EndpointSlices slices(KubernetesService{.ns = "a", .name = "b", .port = {}, .role = {}});
  (void)slices.list(text);
  (void)slices.event(text);
  (void)slices.workers();
  return 0;
}

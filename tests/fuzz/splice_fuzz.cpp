// Splicing of request bodies: whatever the scanner lets through can be spliced, and only the fields that are named
// have changed. The router relies on it.
#include <string>

#include "fuzz.h"
#include "router/request_scan.h"
#include "router/splice.h"

using namespace kindred;
using namespace kindred::router;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string body(reinterpret_cast<const char*>(data), size);
  const auto scan = scan_request(body, body.size());
  const auto spliced = splice(body, {{"max_tokens", "1"},
                                     {"max_completion_tokens", "1", /*add=*/false},
                                     {"n", std::nullopt},
                                     {"stream", "false"},
                                     {"added", "{\"a\":[1]}"}});
  (void)raw_field(body, "messages");
  if (!scan) return 0;
  KINDRED_CHECK(spliced.ok());
  const auto again = scan_request(*spliced, spliced->size());
  KINDRED_CHECK(again.ok());
  KINDRED_CHECK(again->max_tokens == 1U && again->n == 1 && !again->stream);
  KINDRED_CHECK(again->model == scan->model && again->prompt == scan->prompt);
  const auto added = raw_field(*spliced, "added");
  KINDRED_CHECK(added.ok() && *added && **added == "{\"a\":[1]}");
  return 0;
}

// API key files, trace parents and what clients present.
#include <string>

#include "fuzz.h"
#include "router/keys.h"
#include "router/trace.h"

using namespace kindred;
using namespace kindred::router;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string text(reinterpret_cast<const char*>(data), size);
  const auto ring = KeyRing::parse(text, "fuzz");
  if (ring) {
    for (const KeyRing::Key& key : ring->keys()) KINDRED_CHECK(!key.name.empty());
  }
  net::Headers headers;
  headers.add("Authorization", text);
  headers.add("traceparent", text);
  const std::string_view presented = presented_key(headers);
  KINDRED_CHECK(presented.size() <= text.size());
  if (ring) (void)ring->find(presented);
  if (const auto parent = parse_traceparent(headers)) {
    KINDRED_CHECK(parent->trace_id.size() == 32 && parent->span_id.size() == 16);
  }
  return 0;
}

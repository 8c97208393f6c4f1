// The decoder of expert counts and base64: what is accepted is whole, and the same after a round trip.
#include <string>

#include "base/bytes.h"
#include "expert/counts.h"
#include "fuzz.h"

using namespace kindred;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string text(reinterpret_cast<const char*>(data), size);
  const auto counts = expert::counts_from_json(text, false, 4096);
  if (counts) {
    KINDRED_CHECK(counts->data.size() == counts->shape.cells() && counts->shape.cells() <= 4096);
    KINDRED_CHECK(counts->rows_sum_to_tokens());
    const auto again = expert::counts_from_json(expert::counts_to_json(*counts), false, 4096);
    KINDRED_CHECK(again.ok() && again->data == counts->data && again->shape == counts->shape);
  }
  if (const auto bytes = base64_decode(text)) KINDRED_CHECK(base64_encode(*bytes) == text);
  return 0;
}

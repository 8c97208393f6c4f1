// The field scanner of request bodies, and what reads the ends of answers.
#include <string>

#include "fuzz.h"
#include "router/prefill_reply.h"
#include "router/request_notes.h"
#include "router/request_scan.h"

using namespace kindred;
using namespace kindred::router;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string body(reinterpret_cast<const char*>(data), size);
  const auto copied = scan_request(body, body.size());
  std::string padded = body;
  padded.reserve(body.size() + 64);
  const auto in_place = scan_request(padded, padded.capacity());
  KINDRED_CHECK(copied.ok() == in_place.ok());
  if (copied) {
    KINDRED_CHECK(copied->model == in_place->model && copied->stream == in_place->stream && copied->n == in_place->n &&
                  copied->max_tokens == in_place->max_tokens && copied->prompt == in_place->prompt);
    if (!copied->prompt.empty()) {
      KINDRED_CHECK(copied->prompt.data() >= body.data() &&
                    copied->prompt.data() + copied->prompt.size() <= body.data() + body.size());
    }
  }
  (void)usage_in(body);
  if (auto reply = PrefillReply::parse(body)) (void)reply->handoff("http://127.0.0.1:1");
  return 0;
}

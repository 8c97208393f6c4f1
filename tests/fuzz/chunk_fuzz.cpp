// The chunk tracker: the same payload and the same end however the bytes arrive, decoded or only followed.
#include <string>

#include "fuzz.h"
#include "net/chunked.h"

using namespace kindred;
using namespace kindred::net;

namespace {

struct Outcome {
  std::string payload;
  size_t consumed = 0;
  bool done = false, failed = false;
  bool operator==(const Outcome&) const = default;
};

Outcome follow(std::string_view text, uint8_t step, bool in_place) {
  ChunkTracker tracker({64, 256});
  Outcome out;
  for (const std::string_view piece : fuzz::pieces(text, step)) {
    if (in_place) {
      std::string copy(piece);
      const ChunkTracker::Decoded decoded = tracker.decode_in_place(copy);
      out.payload += copy.substr(0, decoded.payload_bytes);
      out.consumed += decoded.consumed;
    } else {
      std::string_view rest = piece, payload;
      while (!rest.empty() && !tracker.done() && !tracker.failed()) {
        const size_t used = tracker.next(rest, payload);
        KINDRED_CHECK(used <= rest.size() && payload.size() <= used);
        out.payload += payload;
        out.consumed += used;
        rest.remove_prefix(used);
      }
    }
    if (tracker.done() || tracker.failed()) break;
  }
  out.done = tracker.done();
  out.failed = tracker.failed();
  // How far a malformed body was read depends on how it came; that it is one does not.
  if (out.failed) out.consumed = 0, out.payload.clear();
  return out;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  fuzz::Input input(data, size);
  const uint8_t step = input.byte();
  const Outcome whole = follow(input.rest(), 0, false);
  KINDRED_CHECK(!(whole.done && whole.failed));
  KINDRED_CHECK(follow(input.rest(), 0, true) == whole);
  KINDRED_CHECK(follow(input.rest(), step, false) == whole);
  KINDRED_CHECK(follow(input.rest(), step, true) == whole);
  ChunkTracker tracker({64, 256});
  const size_t tracked = tracker.track(input.rest());
  KINDRED_CHECK(tracker.done() == whole.done && tracker.failed() == whole.failed && tracked == whole.consumed);
  return 0;
}

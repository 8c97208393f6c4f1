// The SSE splitter and the stream watch: the same events however the bytes arrive.
#include <string>
#include <vector>

#include "fuzz.h"
#include "net/sse.h"
#include "router/stream_watch.h"

using namespace kindred;
using namespace kindred::net;
using namespace kindred::router;

namespace {

std::vector<std::string> split(std::string_view text, uint8_t step, bool& fits) {
  SseSplitter splitter(512);
  std::vector<std::string> events;
  fits = true;
  for (const std::string_view piece : fuzz::pieces(text, step)) {
    fits = splitter.feed(piece);
    while (auto event = splitter.next()) events.push_back(*std::move(event));
    if (!fits) break;
  }
  return events;
}

StreamWatch watch(std::string_view text, uint8_t step) {
  StreamWatch watch;
  for (const std::string_view piece : fuzz::pieces(text, step)) watch.feed(piece);
  return watch;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  fuzz::Input input(data, size);
  const uint8_t step = input.byte();
  bool fits_whole = false, fits_cut = false;
  const std::vector<std::string> whole = split(input.rest(), 0, fits_whole);
  const std::vector<std::string> cut = split(input.rest(), step, fits_cut);
  KINDRED_CHECK(fits_whole == fits_cut);
  // With an event over the limit the splitter stops, and how many came before depends on the pieces.
  KINDRED_CHECK(!fits_whole || whole == cut);
  const StreamWatch one = watch(input.rest(), 0), many = watch(input.rest(), step);
  KINDRED_CHECK(one.events() == many.events() && one.tokens() == many.tokens() && one.done() == many.done());
  KINDRED_CHECK(one.inside_event() == many.inside_event() && one.may_end_event() == many.may_end_event());
  // The watch also counts events without data.
  KINDRED_CHECK(!fits_whole || whole.size() <= one.events());
  return 0;
}

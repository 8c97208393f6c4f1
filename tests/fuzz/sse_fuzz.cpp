// The SSE splitter and counter: the same events however the bytes arrive.
#include <string>
#include <vector>

#include "fuzz.h"
#include "net/sse.h"

using namespace kindred;
using namespace kindred::net;

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

size_t count(std::string_view text, uint8_t step, bool& inside) {
  SseCounter counter;
  size_t events = 0;
  for (const std::string_view piece : fuzz::pieces(text, step)) events += counter.feed(piece);
  inside = counter.inside_event();
  return events;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  fuzz::Input input(data, size);
  const uint8_t step = input.byte();
  bool fits_whole = false, fits_cut = false, inside_whole = false, inside_cut = false;
  const std::vector<std::string> whole = split(input.rest(), 0, fits_whole);
  const std::vector<std::string> cut = split(input.rest(), step, fits_cut);
  KINDRED_CHECK(fits_whole == fits_cut);
  // With an event over the limit the splitter stops, and how many came before depends on the pieces.
  KINDRED_CHECK(!fits_whole || whole == cut);
  const size_t counted = count(input.rest(), 0, inside_whole);
  KINDRED_CHECK(count(input.rest(), step, inside_cut) == counted && inside_whole == inside_cut);
  // The counter also counts events without data.
  KINDRED_CHECK(!fits_whole || whole.size() <= counted);
  return 0;
}

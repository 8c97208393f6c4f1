// Turns token bytes into text for the client: holds back incomplete UTF-8 and whatever may be the
// beginning of a stop string.
//
// The bytes held are its whole state: no stop string can begin in bytes that were given out, so another
// worker goes on from `held()` as if nothing had happened.
//
// Thread-safety: none.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace kindred::engine {

class TextAssembler {
 public:
  explicit TextAssembler(std::vector<std::string> stops, std::string held = {})
      : stops_(std::move(stops)), held_(std::move(held)) {}

  struct Step {
    std::string text;      // ready for the client
    bool stopped = false;  // a stop string is complete; `text` ends before it and nothing is held
  };
  Step append(std::string_view bytes);

  // Generation ended without a stop string: everything held, valid UTF-8 or not.
  std::string finish();

  const std::string& held() const { return held_; }

 private:
  std::vector<std::string> stops_;
  std::string held_;
};

}  // namespace kindred::engine

// The chunked transfer coding (RFC 9112 §7.1), strictly and within bounds.
//
// Thread-safety: none; plain values.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

namespace kindred::net {

struct ChunkLimits {
  size_t extension_bytes = 1024;    // of one chunk
  size_t trailer_bytes = 8 * 1024;  // of all trailers
};

// Follows the framing of a chunked body that arrives in arbitrary pieces. It never keeps bytes: they
// may be relayed as they are, or decoded where they lie.
class ChunkTracker {
 public:
  explicit ChunkTracker(ChunkLimits limits = {}) : limits_(limits) {}

  // Consumes `wire` up to the end of a run of payload, of the body, or of `wire`, whichever comes
  // first, and returns how many bytes that was; `payload` is the run, at the end of them, or empty.
  // After an error: 0.
  size_t next(std::string_view wire, std::string_view& payload);

  // Consumes `wire` up to the end of the body and returns how many bytes that was.
  size_t track(std::string_view wire);

  // The same, moving the payload to the front of `wire`.
  struct Decoded {
    size_t consumed = 0;
    size_t payload_bytes = 0;
  };
  Decoded decode_in_place(std::span<char> wire);

  bool done() const { return state_ == State::kDone; }  // the empty line behind the last chunk has come
  bool failed() const { return state_ == State::kFailed; }
  // Between two chunks: whole chunks may be inserted here. False before and after the last chunk's end.
  bool at_border() const { return state_ == State::kSizeFirst; }

  // What is missing until the body is between two chunks again, for who has to end one that broke off:
  // so many bytes of payload, then `framing`.
  struct Gap {
    uint64_t payload_bytes = 0;
    std::string_view framing = {};
  };
  // Nothing where a size line is cut, or the body's end.
  std::optional<Gap> gap() const;

 private:
  enum class State : uint8_t {
    kSizeFirst,    // the first digit of a chunk's size
    kSize,         // more digits
    kExtension,    // from ';' to CR
    kSizeLf,       // LF of the size line
    kData,         // payload
    kDataCr,       // CR behind the payload
    kDataLf,       // LF behind it
    kTrailer,      // start of a line behind the last chunk
    kTrailerName,  // before its ':'
    kTrailerValue,
    kTrailerLf,  // LF of a trailer
    kEndLf,      // LF of the empty line
    kDone,
    kFailed,
  };

  size_t take_size_line(std::string_view wire);
  State step(char byte);
  State size_digit(char byte);
  State trailer(char byte);

  ChunkLimits limits_;
  State state_ = State::kSizeFirst;
  uint64_t left_ = 0;  // the size being read; then what is left of the chunk
  int size_digits_ = 0;
  size_t extension_bytes_ = 0;
  size_t trailer_bytes_ = 0;
};

}  // namespace kindred::net

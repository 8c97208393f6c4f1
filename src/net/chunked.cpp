#include "net/chunked.h"

#include <algorithm>
#include <cstring>

#include "net/ascii.h"

namespace kindred::net {
namespace {

// A field value or a chunk extension may hold these; CR and LF are handled before.
bool is_text(char byte) { return byte == '\t' || (static_cast<unsigned char>(byte) >= 0x20 && byte != 0x7f); }

constexpr int kSizeDigits = 16;  // what 64 bits hold, leading zeros included

}  // namespace

ChunkTracker::State ChunkTracker::size_digit(char byte) {
  const int digit = hex_value(byte);
  if (digit < 0 || ++size_digits_ > kSizeDigits) return State::kFailed;
  left_ = left_ * 16 + static_cast<uint64_t>(digit);
  return State::kSize;
}

ChunkTracker::State ChunkTracker::trailer(char byte) {
  if (++trailer_bytes_ > limits_.trailer_bytes || !is_text(byte)) return State::kFailed;
  if (state_ == State::kTrailerValue) return State::kTrailerValue;
  // White space at the start would continue the line before (obs-fold); a name is neither empty nor
  // followed by white space.
  if (byte == ' ' || byte == '\t') return State::kFailed;
  if (byte != ':') return State::kTrailerName;
  return state_ == State::kTrailerName ? State::kTrailerValue : State::kFailed;
}

ChunkTracker::State ChunkTracker::step(char byte) {
  switch (state_) {
    case State::kSizeFirst:
      left_ = 0;
      size_digits_ = 0;
      extension_bytes_ = 0;
      return size_digit(byte);
    case State::kSize:
      if (byte == '\r') return State::kSizeLf;
      if (byte == ';') return State::kExtension;
      return size_digit(byte);
    case State::kExtension:
      if (byte == '\r') return State::kSizeLf;
      if (++extension_bytes_ > limits_.extension_bytes || !is_text(byte)) return State::kFailed;
      return State::kExtension;
    case State::kSizeLf:
      if (byte != '\n') return State::kFailed;
      return left_ == 0 ? State::kTrailer : State::kData;
    case State::kDataCr: return byte == '\r' ? State::kDataLf : State::kFailed;
    case State::kDataLf: return byte == '\n' ? State::kSizeFirst : State::kFailed;
    case State::kTrailer:
      if (byte == '\r') return State::kEndLf;
      return trailer(byte);
    case State::kTrailerName: return trailer(byte);
    case State::kTrailerValue:
      if (byte == '\r') return State::kTrailerLf;
      return trailer(byte);
    case State::kTrailerLf: return byte == '\n' ? State::kTrailer : State::kFailed;
    case State::kEndLf: return byte == '\n' ? State::kDone : State::kFailed;
    case State::kData:
    case State::kDone:
    case State::kFailed: break;
  }
  return State::kFailed;
}

std::optional<ChunkTracker::Gap> ChunkTracker::gap() const {
  switch (state_) {
    case State::kSizeFirst: return Gap{};
    case State::kData: return Gap{left_, "\r\n"};
    case State::kDataCr: return Gap{0, "\r\n"};
    case State::kDataLf: return Gap{0, "\n"};
    default: return std::nullopt;
  }
}

// A whole size line without an extension, as nearly all are: its length, or 0.
size_t ChunkTracker::take_size_line(std::string_view wire) {
  uint64_t size = 0;
  size_t at = 0;
  for (; at < wire.size() && at < static_cast<size_t>(kSizeDigits); ++at) {
    const int digit = hex_value(wire[at]);
    if (digit < 0) break;
    size = size * 16 + static_cast<uint64_t>(digit);
  }
  if (at == 0 || at + 2 > wire.size() || wire[at] != '\r' || wire[at + 1] != '\n') return 0;
  left_ = size;
  extension_bytes_ = 0;
  state_ = size == 0 ? State::kTrailer : State::kData;
  return at + 2;
}

size_t ChunkTracker::next(std::string_view wire, std::string_view& payload) {
  payload = {};
  size_t at = 0;
  while (at < wire.size()) {
    if (state_ == State::kData) {
      const size_t run = static_cast<size_t>(std::min<uint64_t>(left_, wire.size() - at));
      left_ -= run;
      if (left_ == 0) state_ = State::kDataCr;
      payload = wire.substr(at, run);
      return at + run;
    }
    if (state_ == State::kDone || state_ == State::kFailed) return state_ == State::kDone ? at : 0;
    if (state_ == State::kDataCr && wire.substr(at).starts_with("\r\n")) {
      state_ = State::kSizeFirst;
      at += 2;
      continue;
    }
    if (state_ == State::kSizeFirst) {
      const size_t used = take_size_line(wire.substr(at));
      at += used;
      if (used > 0) continue;
    }
    state_ = step(wire[at]);
    if (state_ == State::kFailed) return 0;
    ++at;
  }
  return at;
}

size_t ChunkTracker::track(std::string_view wire) {
  size_t at = 0;
  std::string_view payload;
  while (at < wire.size() && !done() && !failed()) at += next(wire.substr(at), payload);
  return failed() ? 0 : at;
}

ChunkTracker::Decoded ChunkTracker::decode_in_place(std::span<char> wire) {
  const std::string_view text(wire.data(), wire.size());
  Decoded decoded;
  std::string_view payload;
  while (decoded.consumed < text.size() && !done() && !failed()) {
    decoded.consumed += next(text.substr(decoded.consumed), payload);
    if (payload.empty()) continue;
    std::memmove(wire.data() + decoded.payload_bytes, payload.data(), payload.size());
    decoded.payload_bytes += payload.size();
  }
  return decoded;
}

}  // namespace kindred::net

// Text encodings of bytes. All functions are pure and thread-safe.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"

namespace kindred {

std::string base64_encode(std::span<const uint8_t> bytes);
std::string base64_encode(std::string_view bytes);

// Standard alphabet, padding required, no white space. Error: kCorrupt.
Result<std::vector<uint8_t>> base64_decode(std::string_view text);

// 16 lower-case hex digits.
std::string hex64(uint64_t value);
// Exactly 16 hex digits, of either case.
std::optional<uint64_t> parse_hex64(std::string_view text);

// 8 bytes, as ZeroMQ feeds number their messages.
std::string big_endian64(uint64_t value);
std::optional<uint64_t> parse_big_endian64(std::string_view bytes);

std::string_view as_text(std::span<const uint8_t> bytes);
std::span<const uint8_t> as_bytes(std::string_view text);

// Appends `text` to `out` as a JSON string with its quotes. `text` should be UTF-8; each byte that is
// not becomes U+FFFD, so the result is always valid JSON.
void append_json_string(std::string& out, std::string_view text);
std::string json_string(std::string_view text);

// The length of the longest prefix of `text` that does not end inside a UTF-8 sequence. Malformed
// bytes count as complete: only a tail that more bytes could still make valid is left out.
size_t utf8_complete_prefix(std::string_view text);

}  // namespace kindred

#include "base/bytes.h"

#include <array>
#include <bit>
#include <charconv>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace kindred {
namespace {

constexpr std::string_view kAlphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

// kDecode[i][c]: the six bits of character c at place i of its group of four, or kBad. A group is then
// four look-ups and ORs without a branch, and whether any character was wrong is asked once at the end.
constexpr uint32_t kBad = 1U << 24;  // above the 24 bits of a group

constexpr std::array<std::array<uint32_t, 256>, 4> make_decode_tables() {
  std::array<std::array<uint32_t, 256>, 4> tables{};
  for (size_t place = 0; place < 4; ++place) {
    tables[place].fill(kBad);
    for (size_t i = 0; i < kAlphabet.size(); ++i) {
      tables[place][static_cast<uint8_t>(kAlphabet[i])] = static_cast<uint32_t>(i << (18 - 6 * place));
    }
  }
  return tables;
}
constexpr std::array<std::array<uint32_t, 256>, 4> kDecode = make_decode_tables();

#if defined(__x86_64__)
__attribute__((target("avx2"))) inline __m256i between(__m256i text, char low, char high) {
  return _mm256_andnot_si256(_mm256_cmpgt_epi8(text, _mm256_set1_epi8(high)),
                             _mm256_cmpgt_epi8(text, _mm256_set1_epi8(static_cast<char>(low - 1))));
}

// Takes as many whole groups of 32 characters off the front as it may write 32 bytes for, of which 24 count (the method
// of Muła and Lemire, "Faster Base64 Encoding and Decoding Using AVX2 Instructions", 2018, with ranges compared instead
// of looked up). False: a character was wrong.
__attribute__((target("avx2"))) bool decode_wide(const uint8_t*& from, const uint8_t* end, uint8_t*& to) {
  // Of each four bytes the first three, the other way round; then the two halves side by side.
  const __m256i bytes = _mm256_setr_epi8(2, 1, 0, 6, 5, 4, 10, 9, 8, 14, 13, 12, -1, -1, -1, -1, 2, 1, 0, 6, 5, 4, 10,
                                         9, 8, 14, 13, 12, -1, -1, -1, -1);
  const __m256i halves = _mm256_setr_epi32(0, 1, 2, 4, 5, 6, 3, 7);
  __m256i good = _mm256_set1_epi8(-1);
  // Twelve characters more are there, so that there is room for the eight bytes that do not count.
  for (; end - from >= 44; from += 32, to += 24) {
    const __m256i text = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    const __m256i upper = between(text, 'A', 'Z'), lower = between(text, 'a', 'z'), digit = between(text, '0', '9');
    const __m256i plus = _mm256_cmpeq_epi8(text, _mm256_set1_epi8('+')),
                  slash = _mm256_cmpeq_epi8(text, _mm256_set1_epi8('/'));
    __m256i shift = _mm256_or_si256(_mm256_and_si256(upper, _mm256_set1_epi8(-'A')),
                                    _mm256_and_si256(lower, _mm256_set1_epi8(26 - 'a')));
    shift = _mm256_or_si256(shift, _mm256_and_si256(digit, _mm256_set1_epi8(52 - '0')));
    shift = _mm256_or_si256(shift, _mm256_and_si256(plus, _mm256_set1_epi8(62 - '+')));
    shift = _mm256_or_si256(shift, _mm256_and_si256(slash, _mm256_set1_epi8(63 - '/')));
    const __m256i known =
        _mm256_or_si256(_mm256_or_si256(_mm256_or_si256(upper, lower), digit), _mm256_or_si256(plus, slash));
    good = _mm256_and_si256(good, known);
    const __m256i sixes = _mm256_add_epi8(text, shift);
    const __m256i twelves = _mm256_maddubs_epi16(sixes, _mm256_set1_epi32(0x01400140));
    const __m256i words = _mm256_madd_epi16(twelves, _mm256_set1_epi32(0x00011000));
    const __m256i packed = _mm256_permutevar8x32_epi32(_mm256_shuffle_epi8(words, bytes), halves);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), packed);
  }
  return _mm256_movemask_epi8(good) == -1;
}
#endif

// Bytes of the UTF-8 sequence that starts with `lead`, or 0 if none can.
size_t utf8_sequence_bytes(uint8_t lead) {
  if (lead < 0x80) return 1;
  if (lead >= 0xc2 && lead <= 0xdf) return 2;
  if (lead >= 0xe0 && lead <= 0xef) return 3;
  if (lead >= 0xf0 && lead <= 0xf4) return 4;
  return 0;
}

// Whether `byte` may follow `lead` as the second byte (RFC 3629: no overlong forms, no surrogates).
bool utf8_second_ok(uint8_t lead, uint8_t byte) {
  switch (lead) {
    case 0xe0: return byte >= 0xa0 && byte <= 0xbf;
    case 0xed: return byte >= 0x80 && byte <= 0x9f;
    case 0xf0: return byte >= 0x90 && byte <= 0xbf;
    case 0xf4: return byte >= 0x80 && byte <= 0x8f;
    default: return (byte & 0xc0) == 0x80;
  }
}

// How many bytes at `at` form a valid sequence or, when the text ends first, a valid beginning of
// one (then `cut` is set). 0: malformed.
size_t utf8_scan(std::string_view text, size_t at, bool& cut) {
  cut = false;
  const auto lead = static_cast<uint8_t>(text[at]);
  const size_t want = utf8_sequence_bytes(lead);
  for (size_t i = 1; i < want; ++i) {
    if (at + i == text.size()) {
      cut = true;
      return i;
    }
    const auto byte = static_cast<uint8_t>(text[at + i]);
    if (i == 1 ? !utf8_second_ok(lead, byte) : (byte & 0xc0) != 0x80) return 0;
  }
  return want;
}

}  // namespace

std::string base64_encode(std::span<const uint8_t> bytes) {
  std::string out;
  out.reserve((bytes.size() + 2) / 3 * 4);
  size_t i = 0;
  for (; i + 3 <= bytes.size(); i += 3) {
    const uint32_t word = uint32_t{bytes[i]} << 16 | uint32_t{bytes[i + 1]} << 8 | bytes[i + 2];
    for (int shift = 18; shift >= 0; shift -= 6) out.push_back(kAlphabet[word >> shift & 63]);
  }
  if (const size_t rest = bytes.size() - i; rest > 0) {
    const uint32_t word = uint32_t{bytes[i]} << 16 | (rest == 2 ? uint32_t{bytes[i + 1]} << 8 : 0);
    out.push_back(kAlphabet[word >> 18 & 63]);
    out.push_back(kAlphabet[word >> 12 & 63]);
    out.push_back(rest == 2 ? kAlphabet[word >> 6 & 63] : '=');
    out.push_back('=');
  }
  return out;
}

std::string base64_encode(std::string_view bytes) { return base64_encode(as_bytes(bytes)); }

Result<std::vector<uint8_t>> base64_decode(std::string_view text) {
  const Error bad{ErrorCode::kCorrupt, "not base64 (standard alphabet, padded)"};
  if (text.size() % 4 != 0) return bad;
  size_t padding = 0;
  while (padding < 2 && padding < text.size() && text[text.size() - 1 - padding] == '=') ++padding;

  std::vector<uint8_t> out(text.size() / 4 * 3);
  const auto* from = reinterpret_cast<const uint8_t*>(text.data());
  const auto group = [&](const uint8_t* at) {
    return kDecode[0][at[0]] | kDecode[1][at[1]] | kDecode[2][at[2]] | kDecode[3][at[3]];
  };
  uint8_t* to = out.data();
  uint32_t seen = 0;
  const uint8_t* const end = from + (padding > 0 ? text.size() - 4 : text.size());
#if defined(__x86_64__)
  static const bool wide = __builtin_cpu_supports("avx2") != 0;
  if (wide && !decode_wide(from, end, to)) return bad;
#endif
  for (; from != end; from += 4, to += 3) {
    const uint32_t word = group(from);
    seen |= word;
    to[0] = static_cast<uint8_t>(word >> 16);
    to[1] = static_cast<uint8_t>(word >> 8);
    to[2] = static_cast<uint8_t>(word);
  }
  if (padding > 0) {
    const std::array<uint8_t, 4> last{from[0], from[1], padding == 1 ? from[2] : uint8_t{'A'}, 'A'};
    const uint32_t word = group(last.data());
    // Bits below the last byte must be zero, so that every byte string has one encoding.
    if ((word & (padding == 1 ? 0xffU : 0xffffU)) != 0) return bad;
    seen |= word;
    *to++ = static_cast<uint8_t>(word >> 16);
    if (padding == 1) *to++ = static_cast<uint8_t>(word >> 8);
    out.resize(static_cast<size_t>(to - out.data()));
  }
  if ((seen & kBad) != 0) return bad;
  return out;
}

std::string hex64(uint64_t value) {
  // Ids of requests and traces come from here: eight nibbles at a time, one a byte, then to digits.
  std::array<char, 16> text;
  for (const size_t half : {size_t{8}, size_t{0}}) {
    uint64_t nibbles = value & 0xffffffff;
    value >>= 32;
    nibbles = (nibbles | nibbles << 16) & 0x0000ffff0000ffff;
    nibbles = (nibbles | nibbles << 8) & 0x00ff00ff00ff00ff;
    nibbles = (nibbles | nibbles << 4) & 0x0f0f0f0f0f0f0f0f;
    // A byte above 9 has bit 4 set after adding 6.
    const uint64_t letters = ((nibbles + 0x0606060606060606) >> 4) & 0x0101010101010101;
    uint64_t digits = nibbles + 0x3030303030303030 + letters * ('a' - '0' - 10);
    // The highest nibble is the highest byte, and the first character.
    if constexpr (std::endian::native == std::endian::little) digits = __builtin_bswap64(digits);
    std::memcpy(text.data() + half, &digits, 8);
  }
  return {text.data(), text.size()};
}

std::optional<uint64_t> parse_hex64(std::string_view text) {
  uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value, 16);
  if (text.size() != 16 || error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

std::string big_endian64(uint64_t value) {
  std::string out(8, '\0');
  for (size_t i = 8; i-- > 0; value >>= 8) out[i] = static_cast<char>(value);
  return out;
}

std::optional<uint64_t> parse_big_endian64(std::string_view bytes) {
  if (bytes.size() != 8) return std::nullopt;
  uint64_t value = 0;
  for (const char byte : bytes) value = value << 8 | static_cast<uint8_t>(byte);
  return value;
}

std::string_view as_text(std::span<const uint8_t> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

std::span<const uint8_t> as_bytes(std::string_view text) {
  return {reinterpret_cast<const uint8_t*>(text.data()), text.size()};
}

void append_json_string(std::string& out, std::string_view text) {
  out.push_back('"');
  for (size_t i = 0; i < text.size();) {
    const auto byte = static_cast<uint8_t>(text[i]);
    if (byte == '"' || byte == '\\') {
      out.push_back('\\');
      out.push_back(static_cast<char>(byte));
      ++i;
    } else if (byte < 0x20) {
      static constexpr char kShort[] = "btn\0fr";  // 0x08 … 0x0d; 0x0b has no short form
      if (byte >= 8 && byte <= 13 && byte != 11) {
        out.push_back('\\');
        out.push_back(kShort[byte - 8U]);
      } else {
        out += "\\u00";
        out.push_back("0123456789abcdef"[byte >> 4]);
        out.push_back("0123456789abcdef"[byte & 15]);
      }
      ++i;
    } else {
      bool cut = false;
      const size_t bytes = utf8_scan(text, i, cut);
      if (bytes == 0 || cut) {
        out += "\xef\xbf\xbd";
        ++i;
      } else {
        out.append(text.substr(i, bytes));
        i += bytes;
      }
    }
  }
  out.push_back('"');
}

std::string json_string(std::string_view text) {
  std::string out;
  append_json_string(out, text);
  return out;
}

size_t utf8_complete_prefix(std::string_view text) {
  for (size_t back = 1; back <= 3 && back <= text.size(); ++back) {
    const size_t at = text.size() - back;
    if ((static_cast<uint8_t>(text[at]) & 0xc0) == 0x80) continue;
    bool cut = false;
    const size_t bytes = utf8_scan(text, at, cut);
    return bytes > 0 && cut ? at : text.size();
  }
  return text.size();
}

}  // namespace kindred

// Reads which experts each token of a prompt selected out of an SGLang server's answer, as it comes, and folds it
// into counts of the prompt's prefixes; nothing of the answer is kept.
//
// The wire, as SGLang 0.5.22 and 0.5.23 have it (python/sglang/srt: entrypoints/openai/protocol.py SglExt,
// state_capturer/): `routed_experts` is base64 of little-endian int32 [tokens, layers, top_k], without a shape. It is
// in `sglext` of a chat completion or completion; streamed, in `sglext` of an event of its own, whose `choices` are
// empty, before the one with `usage`; in `meta_info` of /generate, streamed in the last event. `layers` counts all
// hidden layers; those without experts are zeros. `prompt_tokens` is in `usage` or `meta_info`.
//
// Untrusted: whatever bytes come, memory stays at counts of a few dozen prefixes, time at O(bytes), and an answer of
// which anything is wrong gives an error and no counts.
//
// Thread-safety: none; one answer each.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "expert/counts.h"

namespace kindred::router {

struct RoutedShape {
  uint32_t layers = 0;  // all hidden ones
  uint32_t experts = 0;
  uint32_t top_k = 0;

  size_t cells() const { return size_t{layers} * experts; }
  bool operator==(const RoutedShape&) const = default;
};

// "48x128x8". Nothing where it is anything else, or more than kMostCells.
std::optional<RoutedShape> parse_routed_shape(std::string_view text);

// Counts of a prompt's first `tokens` tokens: [layers with experts, experts], row-major.
struct PrefixCounts {
  uint64_t tokens = 0;
  std::vector<uint16_t> cells;
};

struct RoutedExperts {
  expert::ExpertShape shape;           // of the layers that have experts
  uint64_t tokens = 0;                 // of the whole prompt
  std::vector<PrefixCounts> prefixes;  // each longer than the one before; the last is as much as was counted
};

class RoutedExpertsReader {
 public:
  static constexpr size_t kMostCells = 1U << 20;
  static constexpr uint64_t kMostTokens = 1U << 22;  // of an answer
  // That are counted, so that any count fits 16 bits; the experts of so long a prompt change no more.
  static constexpr uint64_t kCountedTokens = 65'535;
  static constexpr uint64_t kFirstMark = 32;  // tokens of the shortest prefix; each further one is half as long again

  // What can be wrong with an answer; for counters.
  enum class Fault { kNone, kMissing, kEncoding, kExpert, kLayers, kTokens, kCut };
  static constexpr size_t kFaults = 7;
  static std::string_view to_string(Fault fault);

  explicit RoutedExpertsReader(RoutedShape shape);

  void feed(std::string_view bytes);
  // Once the answer is there as a whole. Error: kNotFound where the server told nothing, else kCorrupt; fault() says
  // the same for a counter.
  Result<RoutedExperts> take();
  Fault fault() const { return fault_; }

 private:
  enum class State { kOutside, kString, kAfterString, kValue, kBase64, kNumber };
  enum class Key { kOther, kExperts, kPromptTokens };

  void scan(char byte);
  void value_begins(char byte);
  size_t decode(std::string_view text);  // how much of it was base64
  void byte_decoded(uint8_t byte);
  void selected(int32_t expert);
  void row_ended();
  void token_ended();
  void encoding_ended();
  void wrong(Fault fault, std::string why);
  Status check();

  const RoutedShape shape_;
  Fault fault_ = Fault::kNone;
  std::string why_;

  State state_ = State::kOutside;
  Key key_ = Key::kOther;
  bool escaped_ = false;
  std::array<char, 16> name_{};  // of the string under way, as far as a key of ours may be long
  size_t name_size_ = 0;
  uint64_t number_ = 0;
  std::optional<uint64_t> prompt_tokens_;
  bool found_ = false, whole_ = false;  // the field's beginning, its end

  uint32_t bits_ = 0, characters_ = 0, padding_ = 0;  // of a group of four
  uint32_t word_ = 0, word_bytes_ = 0;
  std::vector<uint32_t> row_;      // of one token in one layer
  std::vector<uint64_t> seen_in_;  // by expert: the last row that had it
  uint64_t rows_ = 0, tokens_ = 0, next_mark_ = kFirstMark;
  uint32_t layer_ = 0;
  std::vector<uint16_t> counts_;     // [layers, experts]
  std::vector<uint64_t> zero_rows_;  // by layer
  std::vector<PrefixCounts> prefixes_;
};

}  // namespace kindred::router

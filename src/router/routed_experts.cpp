#include "router/routed_experts.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>

namespace kindred::router {
namespace {

constexpr std::string_view kExpertsKey = "routed_experts", kPromptTokensKey = "prompt_tokens";
// A prefill server generates a token, or, with speculative decoding, a few; their rows may follow the prompt's.
constexpr uint64_t kMostOwnTokens = 16;
constexpr uint8_t kNoDigit = 0xff;

constexpr std::array<uint8_t, 256> base64_digits() {
  std::array<uint8_t, 256> out{};
  out.fill(kNoDigit);
  constexpr std::string_view kAlphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  for (size_t i = 0; i < kAlphabet.size(); ++i) out.at(static_cast<uint8_t>(kAlphabet[i])) = static_cast<uint8_t>(i);
  return out;
}
constexpr std::array<uint8_t, 256> kDigits = base64_digits();

}  // namespace

std::optional<RoutedShape> parse_routed_shape(std::string_view text) {
  std::array<uint32_t, 3> numbers{};
  for (size_t i = 0; i < numbers.size(); ++i) {
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), numbers.at(i));
    if (error != std::errc{} || numbers.at(i) == 0) return std::nullopt;
    text.remove_prefix(static_cast<size_t>(end - text.data()));
    const bool last = i + 1 == numbers.size();
    if (last != text.empty() || (!last && text.front() != 'x')) return std::nullopt;
    if (!last) text.remove_prefix(1);
  }
  const RoutedShape out = {.layers = numbers[0], .experts = numbers[1], .top_k = numbers[2]};
  if (out.top_k > out.experts || out.cells() > RoutedExpertsReader::kMostCells) return std::nullopt;
  return out;
}

std::string_view RoutedExpertsReader::to_string(Fault fault) {
  switch (fault) {
    case Fault::kNone: break;
    case Fault::kMissing: return "missing";
    case Fault::kEncoding: return "encoding";
    case Fault::kExpert: return "expert";
    case Fault::kLayers: return "layers";
    case Fault::kTokens: return "tokens";
    case Fault::kCut: return "cut";
  }
  return "none";
}

RoutedExpertsReader::RoutedExpertsReader(RoutedShape shape)
    : shape_(shape), seen_in_(shape.experts, 0), counts_(shape.cells(), 0), zero_rows_(shape.layers, 0) {
  row_.reserve(shape.top_k);
}

void RoutedExpertsReader::wrong(Fault fault, std::string why) {
  if (fault_ != Fault::kNone) return;
  fault_ = fault;
  why_ = std::move(why);
}

void RoutedExpertsReader::feed(std::string_view bytes) {
  while (!bytes.empty() && fault_ == Fault::kNone) {
    if (state_ == State::kBase64) {
      bytes.remove_prefix(decode(bytes));
      continue;
    }
    scan(bytes.front());
    bytes.remove_prefix(1);
  }
}

// Only as much of JSON as tells keys from what is written in strings: in these, every quote has a backslash before it.
void RoutedExpertsReader::scan(char byte) {
  switch (state_) {
    case State::kString:
      if (escaped_) {
        escaped_ = false;
        name_size_ = name_.size() + 1;  // no key of ours
      } else if (byte == '\\') {
        escaped_ = true;
      } else if (byte == '"') {
        state_ = State::kAfterString;
      } else {
        if (name_size_ < name_.size()) name_.at(name_size_) = byte;
        name_size_ = std::min(name_size_ + 1, name_.size() + 1);
      }
      return;
    case State::kAfterString: {
      if (byte == ' ' || byte == '\t' || byte == '\n' || byte == '\r') return;
      const std::string_view name(name_.data(), name_size_ <= name_.size() ? name_size_ : 0);
      key_ = name == kExpertsKey ? Key::kExperts : name == kPromptTokensKey ? Key::kPromptTokens : Key::kOther;
      state_ = byte == ':' && key_ != Key::kOther ? State::kValue : State::kOutside;
      return;
    }
    case State::kValue:
      if (byte != ' ' && byte != '\t' && byte != '\n' && byte != '\r') value_begins(byte);
      return;
    case State::kNumber:
      if (byte >= '0' && byte <= '9') {
        number_ = std::min<uint64_t>(number_ * 10 + static_cast<uint64_t>(byte - '0'), kMostTokens + 1);
        return;
      }
      prompt_tokens_ = number_;
      state_ = State::kOutside;
      return;
    case State::kOutside:
    case State::kBase64:
      if (byte != '"') return;
      state_ = State::kString;
      name_size_ = 0;
  }
}

void RoutedExpertsReader::value_begins(char byte) {
  state_ = State::kOutside;
  if (key_ == Key::kPromptTokens && byte >= '0' && byte <= '9') {
    state_ = State::kNumber;
    number_ = static_cast<uint64_t>(byte - '0');
  } else if (key_ == Key::kExperts && byte == '"') {
    // Several choices, or prompts, have one each; the first is the prompt's as well as any.
    state_ = found_ ? State::kString : State::kBase64;
    name_size_ = name_.size() + 1;
    found_ = true;
  } else if (byte == '"') {
    state_ = State::kString;
    name_size_ = name_.size() + 1;
  }
}

size_t RoutedExpertsReader::decode(std::string_view text) {
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (c == '"') {
      encoding_ended();
      return i + 1;
    }
    const uint8_t digit = kDigits.at(static_cast<uint8_t>(c));
    const bool pads = c == '=' && characters_ >= 2;
    if (!pads && (digit == kNoDigit || padding_ > 0)) {
      wrong(Fault::kEncoding, "routed_experts is not base64");
      return text.size();
    }
    padding_ += pads ? 1 : 0;
    bits_ = (bits_ << 6U) | (pads ? 0 : digit);
    if (++characters_ < 4) continue;
    for (uint32_t byte = 0; byte + padding_ < 3; ++byte) byte_decoded(static_cast<uint8_t>(bits_ >> (16 - 8 * byte)));
    if (fault_ != Fault::kNone) return text.size();
    bits_ = 0;
    characters_ = 0;
  }
  return text.size();
}

void RoutedExpertsReader::byte_decoded(uint8_t byte) {
  word_ |= static_cast<uint32_t>(byte) << (8 * word_bytes_);
  if (++word_bytes_ < 4) return;
  const auto expert = static_cast<int32_t>(word_);
  word_ = 0;
  word_bytes_ = 0;
  selected(expert);
}

void RoutedExpertsReader::selected(int32_t expert) {
  if (expert < 0 || static_cast<uint32_t>(expert) >= shape_.experts) {
    wrong(Fault::kExpert, fmt::format("token {}, layer {}: expert {} of {}", tokens_, layer_, expert, shape_.experts));
    return;
  }
  row_.push_back(static_cast<uint32_t>(expert));
  if (row_.size() == shape_.top_k) row_ended();
}

void RoutedExpertsReader::row_ended() {
  ++rows_;
  // A layer without experts writes nothing where zeros are. With one expert a token, that cannot be told apart.
  const bool zeros = shape_.top_k > 1 && std::ranges::all_of(row_, [](uint32_t e) { return e == 0; });
  if (zeros) {
    ++zero_rows_[layer_];
  } else {
    const bool counted = tokens_ < kCountedTokens;
    for (const uint32_t expert : row_) {
      if (seen_in_[expert] == rows_) {
        wrong(Fault::kExpert, fmt::format("token {}, layer {}: expert {} twice", tokens_, layer_, expert));
      }
      seen_in_[expert] = rows_;
      if (counted) ++counts_[size_t{layer_} * shape_.experts + expert];
    }
  }
  row_.clear();
  if (++layer_ == shape_.layers) token_ended();
}

void RoutedExpertsReader::token_ended() {
  layer_ = 0;
  if (++tokens_ > kMostTokens) {
    wrong(Fault::kTokens, fmt::format("more than {} tokens", kMostTokens));
  } else if (tokens_ == next_mark_ && tokens_ <= kCountedTokens) {
    prefixes_.push_back({.tokens = tokens_, .cells = counts_});
    next_mark_ += next_mark_ / 2;
  }
}

void RoutedExpertsReader::encoding_ended() {
  state_ = State::kOutside;
  whole_ = true;
  if (characters_ != 0) wrong(Fault::kEncoding, "routed_experts is not base64: its end is missing");
  else if (word_bytes_ != 0 || !row_.empty() || layer_ != 0) {
    wrong(Fault::kTokens, fmt::format("routed_experts is no whole number of tokens of {} layers with {} experts each",
                                      shape_.layers, shape_.top_k));
  }
}

Status RoutedExpertsReader::check() {
  if (fault_ == Fault::kNone && !found_) wrong(Fault::kMissing, "the answer has no routed_experts");
  if (fault_ == Fault::kNone && !whole_) wrong(Fault::kCut, "the answer ends inside routed_experts");
  if (fault_ == Fault::kNone && tokens_ == 0) wrong(Fault::kTokens, "routed_experts has no tokens");
  if (fault_ == Fault::kNone && prompt_tokens_ &&
      (tokens_ < *prompt_tokens_ || tokens_ > *prompt_tokens_ + kMostOwnTokens)) {
    wrong(Fault::kTokens, fmt::format("routed_experts has {} tokens by this shape, and the prompt {}: is it {} layers "
                                      "with {} experts a token?",
                                      tokens_, *prompt_tokens_, shape_.layers, shape_.top_k));
  }
  for (uint32_t l = 0; l < shape_.layers && fault_ == Fault::kNone; ++l) {
    if (zero_rows_[l] == 0 || zero_rows_[l] == tokens_) continue;
    wrong(Fault::kLayers, fmt::format("layer {} has experts for some tokens, and none for {}", l, zero_rows_[l]));
  }
  if (fault_ == Fault::kNone && std::ranges::all_of(zero_rows_, [&](uint64_t rows) { return rows == tokens_; })) {
    wrong(Fault::kLayers, "no layer has experts");
  }
  if (fault_ == Fault::kNone) return {};
  return Error{fault_ == Fault::kMissing ? ErrorCode::kNotFound : ErrorCode::kCorrupt, why_};
}

Result<RoutedExperts> RoutedExpertsReader::take() {
  if (Status checked = check(); !checked) return std::move(checked).error();
  const uint64_t counted = std::min(tokens_, kCountedTokens);
  if (prefixes_.empty() || prefixes_.back().tokens != counted) {
    prefixes_.push_back({.tokens = counted, .cells = std::move(counts_)});
  }
  RoutedExperts out;
  out.tokens = tokens_;
  out.shape = {.layers = {}, .experts = shape_.experts, .top_k = shape_.top_k};
  for (uint32_t l = 0; l < shape_.layers; ++l) {
    if (zero_rows_[l] == 0) out.shape.layers.push_back(l);
  }
  for (PrefixCounts& prefix : prefixes_) {
    auto to = prefix.cells.begin();
    for (const uint32_t l : out.shape.layers) {
      to = std::copy_n(prefix.cells.begin() + static_cast<ptrdiff_t>(size_t{l} * shape_.experts), shape_.experts, to);
    }
    prefix.cells.erase(to, prefix.cells.end());
  }
  out.prefixes = std::move(prefixes_);
  return out;
}

}  // namespace kindred::router

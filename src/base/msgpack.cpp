#include "base/msgpack.h"

#include <bit>

#include "base/json.h"

namespace kindred {

// What nlohmann's reader calls. It recurses per level, so the depth is checked here, before it goes down.
class MsgpackReader {
 public:
  using number_integer_t = Json::number_integer_t;
  using number_unsigned_t = Json::number_unsigned_t;
  using number_float_t = Json::number_float_t;
  using string_t = Json::string_t;
  using binary_t = Json::binary_t;

  MsgpackReader(MsgpackDocument& out, const MsgpackLimits& limits) : out_(out), limits_(limits) {}

  bool null() { return add({.kind = Kind::kNull}); }
  bool boolean(bool value) { return add({.kind = Kind::kBool, .bits = value ? 1U : 0U}); }
  bool number_integer(number_integer_t value) {
    return add({.kind = Kind::kInteger, .negative = value < 0, .bits = static_cast<uint64_t>(value)});
  }
  bool number_unsigned(number_unsigned_t value) { return add({.kind = Kind::kInteger, .bits = value}); }
  bool number_float(number_float_t value, const string_t&) {
    return add({.kind = Kind::kReal, .bits = std::bit_cast<uint64_t>(value)});
  }
  bool string(string_t& value) { return add_text(value); }
  bool binary(binary_t& value) { return add_text({reinterpret_cast<const char*>(value.data()), value.size()}); }
  bool key(string_t& value) { return add_text(value); }
  bool start_object(size_t) { return open(Kind::kMap); }
  bool end_object() { return close(); }
  bool start_array(size_t) { return open(Kind::kArray); }
  bool end_array() { return close(); }
  bool parse_error(size_t, const std::string&, const Json::exception&) { return false; }

  bool too_large() const { return too_large_; }

 private:
  using Kind = MsgpackDocument::Kind;

  bool add(MsgpackDocument::Value value) {
    if (out_.values_.size() >= limits_.values) {
      too_large_ = true;
      return false;
    }
    if (!open_.empty()) ++out_.values_[open_.back()].size;
    out_.values_.push_back(value);
    out_.values_.back().end = static_cast<uint32_t>(out_.values_.size());
    return true;
  }
  bool add_text(std::string_view text) {
    const size_t at = out_.texts_.size();
    out_.texts_ += text;
    return add({.kind = Kind::kText, .size = static_cast<uint32_t>(text.size()), .bits = at});
  }
  bool open(Kind kind) {
    if (open_.size() >= limits_.depth) {
      too_large_ = true;
      return false;
    }
    if (!add({.kind = kind})) return false;
    open_.push_back(static_cast<uint32_t>(out_.values_.size() - 1));
    return true;
  }
  bool close() {
    out_.values_[open_.back()].end = static_cast<uint32_t>(out_.values_.size());
    open_.pop_back();
    return true;
  }

  MsgpackDocument& out_;
  const MsgpackLimits& limits_;
  std::vector<uint32_t> open_;
  bool too_large_ = false;
};

Result<MsgpackDocument> MsgpackDocument::parse(std::span<const uint8_t> bytes, const MsgpackLimits& limits) {
  if (bytes.size() > limits.bytes) return Error{ErrorCode::kTooLarge, "the MessagePack document is too long"};
  MsgpackDocument out;
  MsgpackReader reader(out, limits);
  if (Json::sax_parse(bytes.begin(), bytes.end(), &reader, Json::input_format_t::msgpack)) return out;
  if (reader.too_large()) return Error{ErrorCode::kTooLarge, "too many or too deep MessagePack values"};
  return Error{ErrorCode::kCorrupt, "not one MessagePack document"};
}

std::optional<uint64_t> MsgpackDocument::integer(At at) const {
  if (values_[at].kind != Kind::kInteger) return std::nullopt;
  return values_[at].bits;
}

std::optional<uint64_t> MsgpackDocument::unsigned_integer(At at) const {
  if (values_[at].kind != Kind::kInteger || values_[at].negative) return std::nullopt;
  return values_[at].bits;
}

std::optional<double> MsgpackDocument::number(At at) const {
  const Value& value = values_[at];
  if (value.kind == Kind::kReal) return std::bit_cast<double>(value.bits);
  if (value.kind != Kind::kInteger) return std::nullopt;
  return value.negative ? static_cast<double>(static_cast<int64_t>(value.bits)) : static_cast<double>(value.bits);
}

std::optional<std::string_view> MsgpackDocument::text(At at) const {
  if (values_[at].kind != Kind::kText) return std::nullopt;
  return std::string_view(texts_).substr(values_[at].bits, values_[at].size);
}

std::optional<MsgpackDocument::At> MsgpackDocument::member(At at, std::string_view key) const {
  if (values_[at].kind != Kind::kMap) return std::nullopt;
  At child = first(at);
  for (uint32_t i = 0; i + 1 < size(at); i += 2) {
    const At value = next(child);
    if (text(child) == key) return value;
    child = next(value);
  }
  return std::nullopt;
}

std::optional<MsgpackDocument::At> MsgpackDocument::element(At at, uint32_t index) const {
  if (values_[at].kind != Kind::kArray || index >= size(at)) return std::nullopt;
  At child = first(at);
  for (uint32_t i = 0; i < index; ++i) child = next(child);
  return child;
}

void MsgpackDocument::append_canonical(At at, std::string& out) const {
  for (At i = at; i < values_[at].end; ++i) {
    const Value& value = values_[i];
    out += static_cast<char>(value.kind);
    if (value.kind == Kind::kText) {
      out += std::to_string(value.size) + ":";
      out += *text(i);
    } else {
      out += std::to_string(value.kind == Kind::kArray || value.kind == Kind::kMap ? value.size : value.bits) + ";";
    }
  }
}

}  // namespace kindred

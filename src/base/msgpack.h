// MessagePack documents from strangers, as a flat list of values: no recursion, no tree, a bound on everything.
//
// Thread-safety: plain values and pure functions.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"

namespace kindred {

struct MsgpackLimits {
  size_t bytes = 4ULL << 20;
  size_t values = 1ULL << 20;  // 24 bytes each
  size_t depth = 8;
};

class MsgpackDocument {
 public:
  enum class Kind : uint8_t { kNull, kBool, kInteger, kReal, kText, kArray, kMap };

  // Where a value stands in the list; its children follow it, keys of maps too.
  using At = uint32_t;

  // Error: kCorrupt (malformed, something behind the document, a key that is no text) or kTooLarge.
  static Result<MsgpackDocument> parse(std::span<const uint8_t> bytes, const MsgpackLimits& limits = {});

  At root() const { return 0; }
  Kind kind(At at) const { return values_[at].kind; }
  // Elements of an array, or keys and values of a map together; 0 for others.
  uint32_t size(At at) const { return values_[at].size; }
  // To visit children: first() and then next() of each, size() times.
  At first(At at) const { return at + 1; }
  At next(At at) const { return values_[at].end; }

  // An integer from -2^63 to 2^64-1, in 64 bits.
  std::optional<uint64_t> integer(At at) const;
  std::optional<uint64_t> unsigned_integer(At at) const;  // not below 0
  std::optional<double> number(At at) const;              // real or integer; may be NaN
  std::optional<std::string_view> text(At at) const;      // of a string or of bytes
  // The value of the map's key, if it is there.
  std::optional<At> member(At at, std::string_view key) const;
  std::optional<At> element(At at, uint32_t index) const;  // of an array
  // The value's own bytes in a form that is equal for equal values, appended.
  void append_canonical(At at, std::string& out) const;

 private:
  friend class MsgpackReader;
  struct Value {
    Kind kind = Kind::kNull;
    bool negative = false;  // integers
    uint32_t size = 0;      // children, or bytes of a text
    uint32_t end = 0;       // behind the last child
    uint64_t bits = 0;      // the number, or where a text begins
  };
  static_assert(sizeof(Value) == 24);

  std::vector<Value> values_;
  std::string texts_;
};

}  // namespace kindred

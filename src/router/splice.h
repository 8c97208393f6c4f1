// Changes top-level fields of a JSON object by splicing bytes: what is not named keeps its place, its order, the
// spelling of its numbers and its escapes, byte for byte. No tree is built.
//
// Thread-safety: plain values and pure functions; O(body) for a call, whatever the number of edits.
#pragma once

#include <initializer_list>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "base/result.h"

namespace kindred::router {

// One change. A field that is given several times (an error where routing reads it, else the worker's matter)
// is changed in all places.
struct Edit {
  std::string_view field;                 // unescaped; found also where the body spells it with escapes
  std::optional<std::string_view> value;  // raw JSON; none: the field is removed
  bool add = true;                        // a missing field is added, as the last one
};

// `object`: one JSON object, which may have white space around it. Error: kInvalid if it is none; only as much is
// checked as is needed to find its top-level fields, so pass what has been scanned (router/request_scan.h).
Result<std::string> splice(std::string_view object, std::span<const Edit> edits);
inline Result<std::string> splice(std::string_view object, std::initializer_list<Edit> edits) {
  return splice(object, std::span<const Edit>(edits.begin(), edits.size()));
}

// The raw JSON of a top-level field, without the white space around it; the last one if there are several, as
// most parsers have it. Points into `object`. Error: kInvalid as above.
Result<std::optional<std::string_view>> raw_field(std::string_view object, std::string_view field);

}  // namespace kindred::router

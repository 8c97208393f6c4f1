// Reading the fields of an untrusted JSON object, for the request and handoff parsers.
#pragma once

#include <simdjson.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "base/result.h"

namespace kindred::engine {

// Reads typed fields and keeps the first error, so that a parser is a list of reads with one check at
// its end. A field that is absent or null gives nullopt, and so does every field in error.
//
// Thread-safety: none. The parser that made the object must outlive the reader.
class FieldReader {
 public:
  // `path` stands before field names in errors, e.g. "messages[0].".
  explicit FieldReader(simdjson::dom::object object, std::string path = {}) : object_(object), path_(std::move(path)) {}

  std::optional<simdjson::dom::element> any(std::string_view name) const;
  std::optional<bool> boolean(std::string_view name);
  std::optional<int64_t> integer(std::string_view name, int64_t least, int64_t most);
  std::optional<double> real(std::string_view name, double least, double most);
  std::optional<std::string_view> text(std::string_view name);
  std::optional<simdjson::dom::object> object(std::string_view name);
  std::optional<simdjson::dom::array> array(std::string_view name);

  // As above, but absence is an error too.
  int64_t required_integer(std::string_view name, int64_t least, int64_t most);
  std::string_view required_text(std::string_view name);

  void fail(std::string_view name, std::string message);
  void fail_type(std::string_view name, simdjson::dom::element got, std::string_view accepted);
  void adopt(Status status);  // keeps its error, if it has one

  bool failed() const { return !status_.ok(); }
  const Status& status() const { return status_; }
  const simdjson::dom::object& fields() const { return object_; }

 private:
  simdjson::dom::object object_;
  std::string path_;
  Status status_;
};

// The value as JSON, cut to what an error message can hold.
std::string shown(simdjson::dom::element value);

// Parses `text`, which must be one JSON object. `text` is copied. Errors: kInvalid.
Result<simdjson::dom::object> parse_object(simdjson::dom::parser& parser, std::string_view text, std::string_view what);

}  // namespace kindred::engine

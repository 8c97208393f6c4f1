#include "base/json.h"

namespace kindred {

Json parse_json(std::string_view text) { return Json::parse(text, nullptr, /*allow_exceptions=*/false); }

std::string dump_json(const Json& value, int indent) {
  return value.dump(indent, ' ', false, Json::error_handler_t::replace);
}

std::string dump_msgpack(const Json& value) {
  std::string out;
  Json::to_msgpack(value, out);
  return out;
}

}  // namespace kindred

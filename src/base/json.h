// JSON documents as trees, for what is small and not on the per-request path. Parser and serialiser are
// compiled once, in json.cpp: each costs seconds in every file that instantiates it.
//
// Thread-safety: pure functions.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace kindred {

using Json = nlohmann::json;

// A discarded value, which is neither object nor array nor anything else, if `text` is not one JSON value.
Json parse_json(std::string_view text);

// On one line, or indented by `indent` spaces. What is not UTF-8 is replaced, never thrown over: names and
// labels come from files and from other programs.
std::string dump_json(const Json& value, int indent = -1);

// As MessagePack.
std::string dump_msgpack(const Json& value);

}  // namespace kindred

// The options that `kindred picker` has beside those of `kindred router`.
#pragma once

#include <cstdint>
#include <string>

#include "base/config.h"

namespace kindred::cli {

struct PickerArguments {
  std::string host = "127.0.0.1";
  int64_t port = 9002, streams = 8192, stream_ms = 3'600'000;
  std::string tls_cert, tls_key;

  bool operator==(const PickerArguments&) const = default;

  // The arguments must outlive the schema.
  void add_to(ConfigSchema& schema);
};

}  // namespace kindred::cli

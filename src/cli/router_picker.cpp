#include "cli/router_picker.h"

#include "cli/router_limits.h"

namespace kindred::cli {

void PickerArguments::add_to(ConfigSchema& schema) {
  schema.text("picker_host", &host, "address on which gateways reach the picker by gRPC");
  schema.integer("picker_port", &port, 0, 65535, "its port; 0 takes a free one");
  schema.integer("picker_streams", &streams, 1, 1'000'000,
                 "requests of gateways open at a time; more are answered 429");
  schema.integer("picker_stream_ms", &stream_ms, 1'000, kDayMs, "the longest that one may be open");
  schema.text("picker_tls_cert", &tls_cert, "PEM file; with it gRPC is under TLS");
  schema.text("picker_tls_key", &tls_key, "its key, as PEM");
}

}  // namespace kindred::cli

// The options of `kindred router` that are about connections and callers.
#pragma once

#include <cstdint>
#include <string>

#include "base/config.h"
#include "router/options.h"

namespace kindred::cli {

struct EdgeArguments {
  int64_t head_bytes = 64 * 1024, headers = 128;
  int64_t head_timeout_ms = 30'000, body_timeout_ms = 120'000, idle_timeout_ms = 75'000, write_timeout_ms = 60'000;
  int64_t connections = 16'384;
  int64_t upstream_connections = 16'384, upstream_idle_connections = 256;
  int64_t upstream_idle_ms = 60'000, upstream_wait_ms = 5'000, upstream_connect_ms = 5'000;
  std::string admin_host = "127.0.0.1";
  int64_t admin_port = -1;
  std::string admin_key_file, api_keys_file, upstream_api_key_file;
  std::string access_log = "none", access_log_file;
  std::string tls_cert, tls_key, tls_client_ca, upstream_ca, upstream_cert, upstream_key;
  std::string otlp_endpoint;
  double trace_sample = 1;

  // The arguments must outlive the schema.
  void add_to(ConfigSchema& schema);
  // Reads the files of secrets. Error: kInvalid, naming the option.
  Status apply(router::RouterOptions& out) const;

 private:
  Status apply_secrets(router::EdgeOptions& out) const;
};

}  // namespace kindred::cli

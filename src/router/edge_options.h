// What stands between a client's socket and the request flow: limits of connections, who may call, what
// is written down.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "net/http_client.h"
#include "net/http_server.h"
#include "router/access_log.h"

namespace kindred::router {

struct EdgeOptions {
  net::ServerOptions server;    // of both listeners; its body_bytes is RouterOptions::body_bytes
  net::ClientOptions upstream;  // of requests to workers; its `tls` verifies those whose URL is https

  // PEM files of both listeners; empty: in clear. With a `tls_client_ca` clients must present a certificate.
  std::string tls_cert, tls_key, tls_client_ca;

  // With a port, metrics, status and everything that changes the router are answered there and not on the
  // public listener.
  std::string admin_host = "127.0.0.1";
  std::optional<uint16_t> admin_port;
  std::string admin_key;  // that operators must present; empty: none

  // Who may call (router/keys.h): a file, a text of the same form, or both. Neither: everybody.
  std::string api_keys_file, api_keys;

  AccessLogFormat access_log = AccessLogFormat::kNone;
  std::string access_log_file;  // empty: standard error

  std::string otlp_endpoint;  // URL of a collector of traces; empty: none
  double trace_sample = 1;    // share of the traces begun here that are recorded
};

}  // namespace kindred::router

#include "cli/router_edge.h"
#include "cli/router_limits.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>

#include "net/tls.h"
#include "router/keys.h"

namespace kindred::cli {
namespace {

using std::chrono::milliseconds;

constexpr int64_t kMillion = 1'000'000;

}  // namespace

void EdgeArguments::add_to(ConfigSchema& schema) {
  schema.text("admin_host", &admin_host, "address of the admin listener");
  schema.integer("admin_port", &admin_port, -1, 65535,
                 "port of its own for metrics, status and changes; 0 takes a free one, -1: on the public port");
  schema.text("admin_key_file", &admin_key_file,
              "file with the key that operators' paths ask for; or KINDRED_ADMIN_KEY in the environment");
  schema.text("api_keys_file", &api_keys_file,
              "keys of clients, `name:key` or `name:sha256:<hex>` a line, with limits rpm=N and tpm=N; also "
              "KINDRED_API_KEYS, separated by commas");
  schema.text("upstream_api_key_file", &upstream_api_key_file,
              "file with the key that workers get; or KINDRED_UPSTREAM_API_KEY");
  schema.choice("access_log", &access_log, {"none", "text", "json"}, "a line for each request, never its content");
  schema.text("access_log_file", &access_log_file, "where it goes; empty: standard error");
  schema.text("tls_cert", &tls_cert, "PEM file with the certificate and its chain; a new one is taken as it comes");
  schema.text("tls_key", &tls_key, "PEM file with its key");
  schema.text("tls_client_ca", &tls_client_ca, "PEM file; clients must present a certificate of one of these");
  schema.text("upstream_ca", &upstream_ca,
              "PEM file that workers with https URLs are verified by; empty: the system's");
  schema.text("upstream_cert", &upstream_cert, "PEM file with the router's own certificate, for workers that ask");
  schema.text("upstream_key", &upstream_key, "PEM file with its key");
  schema.text("otlp_endpoint", &otlp_endpoint, "URL of an OpenTelemetry collector, as http://host:4318");
  schema.real("trace_sample", &trace_sample, 0, 1, "share of the traces begun here that are recorded");
  schema.integer("connections", &connections, 1, kMillion, "client connections at once; more: 503 and close");
  schema.integer("head_bytes", &head_bytes, 1024, 16 << 20, "longest request or response head");
  schema.integer("headers", &headers, 8, 10'000, "headers in one head");
  schema.integer("head_timeout_ms", &head_timeout_ms, 1, kDayMs, "for a client to send a head it has begun");
  schema.integer("body_timeout_ms", &body_timeout_ms, 1, kDayMs, "for a client to send a whole body");
  schema.integer("idle_timeout_ms", &idle_timeout_ms, 1, kDayMs, "a client connection may wait between requests");
  schema.integer("write_timeout_ms", &write_timeout_ms, 1, kDayMs, "a client may take nothing of its answer");
  schema.integer("upstream_connections", &upstream_connections, 1, kMillion,
                 "connections to one worker at once, idle ones included");
  schema.integer("upstream_idle_connections", &upstream_idle_connections, 0, kMillion,
                 "idle connections kept to one worker");
  schema.integer("upstream_idle_ms", &upstream_idle_ms, 1, kDayMs, "an idle connection to a worker is kept");
  schema.integer("upstream_wait_ms", &upstream_wait_ms, 0, kDayMs,
                 "a request may wait for a connection to a worker; then it goes elsewhere");
  schema.integer("upstream_connect_ms", &upstream_connect_ms, 1, kDayMs, "for a worker to accept a connection");
}

Status EdgeArguments::apply(router::RouterOptions& out) const {
  net::HeadLimits head;
  head.head_bytes = static_cast<size_t>(head_bytes);
  head.header_count = static_cast<size_t>(headers);

  net::ServerOptions& server = out.edge.server;
  server.head = head;
  server.connections = static_cast<size_t>(connections);
  server.head_timeout_ms = milliseconds(head_timeout_ms);
  server.body_timeout_ms = milliseconds(body_timeout_ms);
  server.idle_timeout_ms = milliseconds(idle_timeout_ms);
  server.write_timeout_ms = milliseconds(write_timeout_ms);

  net::ClientOptions& upstream = out.edge.upstream;
  upstream.head = head;
  upstream.connections_per_endpoint = static_cast<size_t>(upstream_connections);
  upstream.idle_per_endpoint = static_cast<size_t>(upstream_idle_connections);
  upstream.idle_timeout_ms = milliseconds(upstream_idle_ms);
  upstream.wait_timeout_ms = milliseconds(upstream_wait_ms);
  upstream.connect_timeout_ms = milliseconds(upstream_connect_ms);

  out.edge.admin_host = admin_host;
  if (admin_port >= 0) out.edge.admin_port = static_cast<uint16_t>(admin_port);
  out.edge.access_log = access_log == "json"   ? router::AccessLogFormat::kJson
                        : access_log == "text" ? router::AccessLogFormat::kText
                                               : router::AccessLogFormat::kNone;
  out.edge.access_log_file = access_log_file;
  out.edge.tls_cert = tls_cert;
  out.edge.tls_key = tls_key;
  out.edge.tls_client_ca = tls_client_ca;
  out.edge.otlp_endpoint = otlp_endpoint;
  out.edge.trace_sample = trace_sample;
  auto tls = net::TlsClient::make({upstream_ca, upstream_cert, upstream_key});
  if (!tls) return std::move(tls).error();
  upstream.tls = *std::move(tls);
  return apply_secrets(out.edge);
}

Status EdgeArguments::apply_secrets(router::EdgeOptions& out) const {
  auto admin = router::read_secret(admin_key_file, "KINDRED_ADMIN_KEY", "admin_key_file");
  if (!admin) return std::move(admin).error();
  out.admin_key = *std::move(admin);
  auto upstream = router::read_secret(upstream_api_key_file, "KINDRED_UPSTREAM_API_KEY", "upstream_api_key_file");
  if (!upstream) return std::move(upstream).error();
  if (!upstream->empty()) out.upstream.authorization = "Bearer " + *upstream;
  out.api_keys_file = api_keys_file;
  if (const char* keys = std::getenv("KINDRED_API_KEYS"); keys != nullptr) {
    out.api_keys = keys;
    std::replace(out.api_keys.begin(), out.api_keys.end(), ',', '\n');
  }
  return {};
}

}  // namespace kindred::cli

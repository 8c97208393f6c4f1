#include "cli/router_edge.h"

#include <chrono>

namespace kindred::cli {
namespace {

using std::chrono::milliseconds;

constexpr int64_t kDayMs = 86'400'000;
constexpr int64_t kMillion = 1'000'000;

}  // namespace

void EdgeArguments::add_to(ConfigSchema& schema) {
  schema.text("admin_host", &admin_host, "address of the admin listener");
  schema.integer("admin_port", &admin_port, -1, 65535,
                 "port of its own for metrics, status and changes; 0 takes a free one, -1: on the public port");
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
  return {};
}

}  // namespace kindred::cli

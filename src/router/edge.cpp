#include "router/edge.h"

#include <random>

#include "base/metrics.h"

namespace kindred::router {
namespace {

uint64_t trace_seed() {
  std::random_device device;
  return (static_cast<uint64_t>(device()) << 32) ^ device();
}

}  // namespace

Edge::Edge(const EdgeOptions& options, const Clock& clock)
    : limiter(clock), trace_ids(trace_seed()), options_(options) {}

Result<std::shared_ptr<Edge>> Edge::make(const EdgeOptions& options, const Clock& clock) {
  std::shared_ptr<Edge> edge(new Edge(options, clock));  // the constructor is private
  if (!options.api_keys_file.empty() || !options.api_keys.empty()) {
    auto keys = KeyStore::load(options.api_keys_file, options.api_keys);
    if (!keys) return std::move(keys).error();
    edge->keys_ = *std::move(keys);
  }
  if (options.access_log != AccessLogFormat::kNone) {
    auto log = AccessLog::open(options.access_log, options.access_log_file);
    if (!log) return std::move(log).error();
    edge->access_log_ = *std::move(log);
  }
  if (options.tls_cert.empty() != options.tls_key.empty()) {
    return invalid("tls_cert and tls_key are given together, or neither", "tls_key");
  }
  if (!options.tls_client_ca.empty() && options.tls_cert.empty()) {
    return invalid("tls_client_ca needs tls_cert and tls_key", "tls_client_ca");
  }
  if (!options.tls_cert.empty()) {
    auto tls = net::TlsServer::load({options.tls_cert, options.tls_key, options.tls_client_ca});
    if (!tls) return std::move(tls).error();
    edge->tls_ = *std::move(tls);
  }
  if (!options.otlp_endpoint.empty()) {
    auto target = parse_otlp_endpoint(options.otlp_endpoint);
    if (!target) return std::move(target).error();
    edge->otlp_ = *std::move(target);
  }
  return edge;
}

std::string Edge::metrics() const {
  uint64_t lost = 0;
  {
    const std::lock_guard lock(mutex_);
    lost = lost_before_ + (access_log_ ? access_log_->lost() : 0);
  }
  Registry registry;
  registry.counter("kindred_router_access_lines_lost_total", "Lines of the access log that could not be written.")
      .add(static_cast<double>(lost));
  return registry.render();
}

Status Edge::reload() {
  Status first;
  if (keys_) {
    first = keys_->reload();
    if (first) limiter.keep_only(*keys_->current());
  }
  if (tls_) {
    Status read = tls_->reload();
    if (first && !read) first = std::move(read);
  }
  if (const auto log = access_log()) {
    Status reopened = log->reopen();
    if (first && !reopened) first = std::move(reopened);
  }
  return first;
}

}  // namespace kindred::router

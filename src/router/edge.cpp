#include "router/edge.h"

#include <random>

namespace kindred::router {
namespace {

uint64_t random_seed() {
  std::random_device device;
  return (static_cast<uint64_t>(device()) << 32) ^ device();
}

}  // namespace

Edge::Edge(const EdgeOptions& options, const Clock& clock)
    : limiter(clock), trace_ids(random_seed()), options_(options) {}

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
  return edge;
}

Status Edge::reload() {
  Status first;
  if (keys_) {
    first = keys_->reload();
    if (first) limiter.keep_only(*keys_->current());
  }
  if (access_log_) {
    Status reopened = access_log_->reopen();
    if (first && !reopened) first = std::move(reopened);
  }
  return first;
}

}  // namespace kindred::router

// What the requests of all listeners share before and behind their flow: API keys and their limits, secrets,
// the access log, ids of traces.
//
// Thread-safe; one per router.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "base/clock.h"
#include "base/result.h"
#include "net/tls.h"
#include "router/access_log.h"
#include "router/edge_options.h"
#include "router/keys.h"
#include "router/otlp.h"
#include "router/rate_limit.h"
#include "router/trace.h"

namespace kindred::router {

class Edge {
 public:
  // Error: kInvalid or that of a file, naming the option. `clock` is borrowed.
  static Result<std::shared_ptr<Edge>> make(const EdgeOptions& options, const Clock& clock);

  // Reads the API keys and the certificate again and opens the access log anew. What cannot be read stays as it was;
  // the first error is returned.
  Status reload();

  bool takes_keys() const { return keys_ != nullptr; }
  std::shared_ptr<const KeyRing> keys() const { return keys_->current(); }  // only if takes_keys()
  const std::string& admin_key() const { return options_.admin_key; }       // empty: none
  // A client's credentials are the router's business and not the worker's.
  bool strips_credentials() const { return takes_keys() || !options_.upstream.authorization.empty(); }
  // Whether anybody wants to know about tokens and workers of a request.
  bool watches() const { return access_log() != nullptr || takes_keys() || export_share().has_value(); }
  const std::shared_ptr<net::TlsServer>& tls() const { return tls_; }  // of the listeners; null: in clear

  const std::optional<OtlpTarget>& otlp() const { return otlp_; }  // where spans go; nothing: nowhere
  std::optional<double> export_share() const { return otlp_ ? std::optional(options_.trace_sample) : std::nullopt; }
  SpanQueue& spans() { return spans_; }

  RateLimiter limiter;
  TraceIds trace_ids;

  // In force now; null: none.
  std::shared_ptr<AccessLog> access_log() const {
    const std::lock_guard lock(mutex_);
    return access_log_;
  }
  void set_access_log(std::shared_ptr<AccessLog> log) {
    const std::lock_guard lock(mutex_);
    if (access_log_) lost_before_ += access_log_->lost();
    access_log_ = std::move(log);
  }
  std::string metrics() const;  // Prometheus' text

 private:
  Edge(const EdgeOptions& options, const Clock& clock);

  const EdgeOptions options_;
  std::shared_ptr<KeyStore> keys_;
  mutable std::mutex mutex_;  // guards the two below
  std::shared_ptr<AccessLog> access_log_;
  uint64_t lost_before_ = 0;  // by logs that were in force earlier
  std::shared_ptr<net::TlsServer> tls_;
  std::optional<OtlpTarget> otlp_;
  SpanQueue spans_;
};

}  // namespace kindred::router

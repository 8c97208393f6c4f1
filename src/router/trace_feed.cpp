#include "router/trace_feed.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <charconv>

#include "base/bytes.h"
#include "fleet/engine_trace.h"
#include "router/feed_loop.h"

namespace kindred::router {

class TraceFeed::Loop final : FeedLoop<net::ZmqSocket>::Handler {
 public:
  explicit Loop(fleet::Fleet& fleet) : fleet_(fleet), feed_(*this) {}
  Loop(const Loop&) = delete;
  Loop& operator=(const Loop&) = delete;
  ~Loop() override { feed_.stop(); }

  Status add(fleet::WorkerId worker, const std::string& endpoint) {
    // A trace has about 2.5 KB at most; what is older than the queue is long replaced.
    const net::ZmqLimits limits = {.message_bytes = 64 << 10};
    Result<net::ZmqSocket> socket = net::ZmqSocket::connect(context_, net::ZmqKind::kSubscriber, endpoint, limits);
    if (!socket) return std::move(socket).error();
    feed_.add(worker, *std::move(socket));
    return {};
  }
  void remove(fleet::WorkerId worker) { feed_.remove(worker); }

  TraceFeedStatus status() const {
    return {.traces = traces_, .ignored = ignored_, .errors = errors_, .subscriptions = feed_.size()};
  }

 private:
  const net::ZmqSocket& awaited(const net::ZmqSocket& socket) const override { return socket; }
  void reset(fleet::WorkerId, net::ZmqSocket&) override {}
  void removed(fleet::WorkerId) override {}  // its traces age

  void serve(fleet::WorkerId worker, net::ZmqSocket& socket) override {
    for (size_t i = 0; i < FeedLoop<net::ZmqSocket>::kBurst; ++i) {
      const auto parts = socket.receive();
      if (!parts) break;
      // The number on the socket is of no use here: each trace is the whole state of its engine.
      if (parts->size() != 3 || (*parts)[0] != fleet::kTraceTopic) {
        ++errors_;
        continue;
      }
      const Result<fleet::EngineTrace> trace = fleet::parse_trace(as_bytes((*parts)[2]));
      if (!trace) ++errors_;
      else if (fleet_.report_trace(worker, *trace)) ++traces_;
      else ++ignored_;
    }
  }

  fleet::Fleet& fleet_;
  const net::ZmqContext context_;
  std::atomic<uint64_t> traces_{0}, ignored_{0}, errors_{0};
  FeedLoop<net::ZmqSocket> feed_;  // last: its thread uses the rest
};

TraceFeed::TraceFeed(fleet::Fleet& fleet) : loop_(std::make_unique<Loop>(fleet)) {}
TraceFeed::~TraceFeed() = default;

Status TraceFeed::add(fleet::WorkerId worker, const std::string& endpoint) { return loop_->add(worker, endpoint); }
void TraceFeed::remove(fleet::WorkerId worker) { loop_->remove(worker); }
TraceFeedStatus TraceFeed::status() const { return loop_->status(); }

Result<TraceSources> parse_trace_sources(const std::vector<std::string>& entries) {
  TraceSources out;
  for (const std::string& entry : entries) {
    const size_t equals = entry.find('=');
    const auto worker = net::parse_endpoint(entry.substr(0, equals));
    const std::string endpoint = equals == std::string::npos ? std::string() : entry.substr(equals + 1);
    if (!worker || !endpoint.starts_with("tcp://") || endpoint.size() > 256) {
      return invalid(fmt::format("traces: got '{}', accepted: WORKER_URL=tcp://host:port", entry), "traces");
    }
    out.emplace_back(worker->url(), endpoint);
  }
  return out;
}

std::string trace_endpoint(const TraceSources& sources, const net::Endpoint& worker, std::string_view named) {
  const auto source = std::ranges::find(sources, worker.url(), &TraceSources::value_type::first);
  if (source != sources.end()) return source->second;
  const size_t colon = named.rfind(':');
  if (!named.starts_with("tcp://") || colon == std::string_view::npos) return {};
  uint16_t port = 0;
  const char* const end = named.data() + named.size();
  const auto [at, error] = std::from_chars(named.data() + colon + 1, end, port);
  if (error != std::errc{} || at != end || port == 0) return {};
  return "tcp://" + net::Endpoint{worker.host, port}.text();
}

}  // namespace kindred::router

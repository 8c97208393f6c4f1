// The tasks behind --workers-file, --kubernetes-service and changing names.
#include <fmt/format.h>

#include <fstream>

#include "base/config.h"
#include "fleet/endpoint_slices.h"
#include "net/resolver.h"
#include "net/tls.h"
#include "router/membership.h"

namespace kindred::router {
namespace {

using namespace std::chrono_literals;

constexpr std::chrono::milliseconds kFirstBackoff{500};
constexpr std::chrono::milliseconds kLongestBackoff{30'000};
constexpr int kWatchSeconds = 300;                       // then the server ends the watch, and a new one begins
constexpr size_t kSlicesBytes = 32ULL * 1024 * 1024;     // 1,000 endpoints are about 300 kB
constexpr size_t kSliceEventBytes = 4ULL * 1024 * 1024;  // of one line
constexpr size_t kTokenBytes = 64 * 1024;

// Sleeps, unless the router closes. False: it does.
net::Task<bool> sleep_for(Core& core, std::chrono::milliseconds time) {
  net::asio::steady_timer timer(core.executor, time);
  const auto wake = core.closing.token().on_cancel([&timer] { timer.cancel(); });
  if (!core.closing.cancelled()) co_await timer.async_wait(net::kNoThrow);
  co_return !core.closing.cancelled();
}

// Takes a list in, and says once what came of it.
class Source {
 public:
  Source(CorePtr core, Origin origin, std::string name)
      : core_(std::move(core)), origin_(origin), name_(std::move(name)) {}

  void use(std::span<const fleet::WantedWorker> wanted) {
    const MembershipChange change = reconcile(core_, origin_, wanted);
    if (change.added + change.removed + change.drained > 0) {
      core_->log.info("{}: {} workers: {} added, {} removed, {} draining", name_, wanted.size(), change.added,
                      change.removed, change.drained);
    }
    if (change.refused.empty()) problem_.clear();
    else failed(fmt::format("{}", fmt::join(change.refused, "; ")));
  }

  void failed(const std::string& why) {
    core_->metrics.membership_error(to_string(origin_));
    if (why != problem_) core_->log.warn("{}: {}; the workers stay as they are", name_, why);
    problem_ = why;
  }

 private:
  CorePtr core_;
  Origin origin_;
  std::string name_, problem_;
};

Result<std::string> read_bounded(const std::string& path, size_t most) {
  std::ifstream in(path, std::ios::binary);
  std::string text(most + 1, '\0');
  in.read(text.data(), static_cast<std::streamsize>(text.size()));
  // A directory opens and then fails to read.
  if (in.bad() || (!in && !in.eof())) return Error{ErrorCode::kIo, fmt::format("cannot read {}", path)};
  text.resize(static_cast<size_t>(in.gcount()));
  if (text.size() > most) return Error{ErrorCode::kTooLarge, fmt::format("{} has more than {} bytes", path, most)};
  return text;
}

// Read whole and compared, once per interval: a change is seen whatever makes it (a rename, a mounted ConfigMap
// whose links move, an editor), which notifications of the kernel do not promise.
net::Task<void> watch_file(CorePtr core) {
  const std::string path = core->settings()->options.workers_file;
  Source source(core, Origin::kFile, path);
  std::optional<std::string> before;
  for (bool open = true; open;) {
    const Result<std::string> text = read_bounded(path, fleet::kMaxWorkerListBytes);
    if (!text) {
      source.failed(text.error().message);
      before.reset();
    } else if (before != *text) {
      before = *text;
      const auto wanted = fleet::parse_worker_list(*text, kMaxWorkers);
      if (wanted) source.use(*wanted);
      else source.failed(wanted.error().message);
    }
    open = co_await sleep_for(*core, core->settings()->options.workers_file_interval_ms);
  }
}

net::ClientOptions client_options(const RouterOptions& options) {
  net::ClientOptions out;
  out.idle_per_endpoint = 1;
  // The file was read when the core was made.
  net::TlsClientFiles files;
  files.ca = options.kubernetes_ca_file;
  if (auto tls = net::TlsClient::make(std::move(files))) out.tls = *std::move(tls);
  return out;
}

class KubernetesWatch {
 public:
  KubernetesWatch(CorePtr core, net::Endpoint api, fleet::KubernetesService service, size_t number)
      : core_(std::move(core)),
        api_(std::move(api)),
        service_(service),
        slices_(service),
        number_(number),
        client_(core_->executor, client_options(core_->settings()->options)) {}

  net::Task<void> run() {
    std::chrono::milliseconds backoff = kFirstBackoff;
    bool listed = false;
    while (!core_->closing.cancelled()) {
      Status ok = co_await step(listed);
      if (ok) {
        listed = true;
        backoff = kFirstBackoff;
        continue;
      }
      listed = false;  // whatever went wrong, the list is the truth
      if (ok.error().code != ErrorCode::kUnavailable || !expired_) fail(ok.error().message);
      expired_ = false;
      const bool open = co_await sleep_for(*core_, backoff);
      if (!open) co_return;
      backoff = std::min(backoff * 2, kLongestBackoff);
    }
  }

 private:
  net::Task<Status> step(bool listed) {
    if (listed) co_return co_await watch();
    co_return co_await list();
  }

  net::Task<Result<std::unique_ptr<net::ClientResponse>>> get(std::string target, std::chrono::milliseconds read_ms) {
    net::RequestHead head;
    head.method = "GET";
    head.target = std::move(target);
    head.headers.add("Accept", "application/json");
    // Read each time: the kubelet renews it.
    const std::string token_file = core_->settings()->options.kubernetes_token_file;
    if (!token_file.empty()) {
      Result<std::string> token = read_bounded(token_file, kTokenBytes);
      if (!token) co_return std::move(token).error();
      while (!token->empty() && (token->back() == '\n' || token->back() == ' ')) token->pop_back();
      head.headers.add("Authorization", "Bearer " + *token);
    }
    const std::span<const std::string_view> no_body;
    net::RequestDeadlines deadlines;
    deadlines.head_ms = 30'000ms;
    deadlines.read_ms = read_ms;
    co_return co_await client_.send(api_, std::move(head), no_body, core_->closing.token(), deadlines);
  }

  net::Task<Status> list() {
    auto response = co_await get(service_.list_target(), 30'000ms);
    if (!response) co_return std::move(response).error();
    const int status = (*response)->head().status;
    const Result<std::string> body = co_await (*response)->read_all(kSlicesBytes);
    if (!body) co_return body.error();
    if (status != 200) co_return Error{ErrorCode::kIo, fmt::format("the API server answers with status {}", status)};
    if (Status read = slices_.list(*body); !read) co_return read;
    publish();
    co_return Status();
  }

  // Until the server ends it, which is how it should end.
  net::Task<Status> watch() {
    auto response =
        co_await get(service_.watch_target(slices_.version(), kWatchSeconds), (kWatchSeconds + 30) * 1000ms);
    if (!response) co_return std::move(response).error();
    const int status = (*response)->head().status;
    if (status != 200) {
      expired_ = status == 410;
      co_return Error{expired_ ? ErrorCode::kUnavailable : ErrorCode::kIo,
                      fmt::format("the API server answers a watch with status {}", status)};
    }
    std::string line;
    for (;;) {
      auto piece = co_await (*response)->read_some();
      if (!piece) co_return std::move(piece).error();
      if (piece->empty()) co_return Status();
      std::string_view rest = *piece;
      for (size_t end = rest.find('\n'); end != std::string_view::npos; end = rest.find('\n')) {
        line += rest.substr(0, end);
        rest.remove_prefix(end + 1);
        if (Status read = slices_.event(line); !read) {
          expired_ = read.error().code == ErrorCode::kUnavailable;
          co_return read;
        }
        line.clear();
        publish();
      }
      if (line.size() + rest.size() > kSliceEventBytes) {
        co_return Error{ErrorCode::kTooLarge, "an event of the watch is too long"};
      }
      line += rest;
    }
  }

  // All services together are one list.
  void publish() {
    core_->kubernetes_workers[number_] = slices_.workers();
    std::vector<fleet::WantedWorker> all;
    for (const auto& [number, workers] : core_->kubernetes_workers)
      all.insert(all.end(), workers.begin(), workers.end());
    source_.use(all);
  }
  void fail(const std::string& why) { source_.failed(why); }

  CorePtr core_;
  net::Endpoint api_;
  fleet::KubernetesService service_;
  fleet::EndpointSlices slices_;
  size_t number_;
  net::HttpClient client_;
  Source source_{core_, Origin::kKubernetes, fmt::format("kubernetes {}/{}", service_.ns, service_.name)};
  bool expired_ = false;
};

net::Task<void> watch_kubernetes(CorePtr core, net::Endpoint api, fleet::KubernetesService service, size_t number) {
  KubernetesWatch watch(std::move(core), std::move(api), std::move(service), number);
  co_await watch.run();
}

// Looks at the addresses behind workers' names.
net::Task<void> watch_names(CorePtr core) {
  for (;;) {
    const bool open = co_await sleep_for(*core, core->settings()->options.dns_interval_ms);
    if (!open) co_return;
    // By number, as workers may come meanwhile.
    for (fleet::WorkerId id = 0; id < core->workers.size(); ++id) {
      if (core->closing.cancelled()) co_return;
      if (core->fleet.removed(id) || net::is_address(core->endpoint(id).host)) continue;
      for (Loop& loop : core->loops) {
        co_await run_on(loop, loop.client.refresh(core->endpoint(id), loop.closing.token()));
      }
      co_await core->probe_client.refresh(core->endpoint(id), core->closing.token());
    }
  }
}

}  // namespace

void start_watching(const CorePtr& core) {
  KINDRED_CHECK(Core::spawn(core, watch_names(core), /*standing=*/true));
  const SettingsPtr settings = core->settings();
  const RouterOptions& options = settings->options;
  if (!options.workers_file.empty()) {
    KINDRED_CHECK(Core::spawn(core, watch_file(core), /*standing=*/true));
  }
  size_t number = 0;
  for (const std::string& text : options.kubernetes_services) {
    // Both were checked when the core was made.
    auto service = fleet::parse_kubernetes_service(text);
    auto api = net::parse_endpoint(options.kubernetes_api);
    KINDRED_CHECK(service.ok() && api.ok());
    KINDRED_CHECK(
        Core::spawn(core, watch_kubernetes(core, *std::move(api), *std::move(service), number++), /*standing=*/true));
  }
}

}  // namespace kindred::router

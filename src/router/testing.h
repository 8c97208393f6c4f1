// Test only: workers that play a script and speak the dialect, a router in front of them, and a
// client. All servers run on one loop thread; the client blocks the test's thread.
#pragma once

#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "expert/cohorts.h"
#include "expert/counts.h"
#include "fleet/fleet.h"
#include "net/http_server.h"
#include "net/testing.h"
#include "net/tls.h"
#include "router/router.h"

namespace kindred::router::testing {

using namespace std::chrono_literals;

// Waits until `holds` does, and says whether it did.
bool eventually(const std::function<bool()>& holds, std::chrono::milliseconds within = 3s);

// Keeps a scripted worker waiting. Thread-safe.
class Gate {
 public:
  void open() { open_ = true; }
  net::Task<void> wait();  // at most 10 s

 private:
  std::atomic<bool> open_{false};
};

net::Task<void> pause_for(std::chrono::milliseconds time);

// A leg as a worker saw it.
struct SeenLeg {
  std::string leg;  // X-Kindred-Leg, or empty
  std::string path;
  std::string request_id;
  std::string body;     // the client's part
  std::string handoff;  // decode only
  net::Headers headers;
};

// Answers a leg instead of the default. Runs on the loop.
using Script = std::function<net::Task<void>(const SeenLeg& leg, net::Request&, net::ResponseWriter&)>;

net::Headers json_type();
net::Headers events_type();

// Answers each leg with a status and an error code.
Script refuse(int status, std::string code);
// Hangs up without an answer.
net::Task<void> hang_up(const SeenLeg& leg, net::Request& request, net::ResponseWriter& writer);
// Says nothing until the router hangs up.
net::Task<void> hang(const SeenLeg& leg, net::Request& request, net::ResponseWriter& writer);

class FakeWorker {
 public:
  // A plain OpenAI-compatible server if `fingerprint` is empty.
  // Under TLS if `tls` is given.
  FakeWorker(net::testing::TestLoop& loop, Role role, std::string fingerprint = "f0",
             std::shared_ptr<net::TlsServer> tls = nullptr);
  ~FakeWorker() { kill(); }

  std::string url() const { return net::Endpoint{"127.0.0.1", port_, tls_ != nullptr}.url(); }
  void kill();               // closes listener and connections
  void revive();             // on the same port
  void play(Script script);  // for legs from now on; empty: the default
  void set_health(int status) { health_status_ = status; }
  // What GET `path` gives, /v1/models included; 404 without.
  void set_page(std::string path, std::string body);
  void remove_page(const std::string& path);
  void set_counts(std::string json);  // what prefill replies carry; empty: none
  // So many leases may be released by one call, it says; 1: nothing.
  void set_releases(size_t at_once) { releases_ = at_once; }
  size_t release_calls() const { return release_calls_; }
  void set_lease_ttl(std::chrono::milliseconds ttl) { lease_ttl_ms_ = ttl.count(); }
  void set_finished(bool finished) { finished_ = finished; }

  std::vector<SeenLeg> legs() const;
  size_t leg_count() const { return legs().size(); }
  std::vector<std::string> released() const;              // lease ids
  std::vector<std::string> renewed() const;               // lease ids, once per call
  size_t cancelled() const { return cancelled_.load(); }  // legs whose router hung up

  // The default answers, for scripts that only add to them.
  net::Task<void> answer_prefill(const SeenLeg& leg, net::ResponseWriter& writer);
  net::Task<void> answer_decode(const SeenLeg& leg, net::ResponseWriter& writer);
  net::Task<void> answer_plain(const SeenLeg& leg, net::ResponseWriter& writer);

  std::string model = "m";

 private:
  net::Task<void> handle(net::Request& request, net::ResponseWriter& writer);
  std::string models_json() const;

  net::testing::TestLoop& loop_;
  Role role_;
  std::string fingerprint_;
  std::shared_ptr<net::TlsServer> tls_;
  std::unique_ptr<net::HttpServer> server_;
  uint16_t port_ = 0;
  std::atomic<int> health_status_{200};
  std::atomic<bool> finished_{false};
  std::atomic<int64_t> lease_ttl_ms_{30'000};
  std::atomic<size_t> releases_{1}, release_calls_{0};
  std::atomic<size_t> cancelled_{0};
  mutable std::mutex mutex_;  // guards what follows
  Script script_;
  std::string counts_;
  std::map<std::string, std::string> pages_;
  std::vector<SeenLeg> legs_;
  std::vector<std::string> released_, renewed_;
};

struct Answer {
  int status = 0;
  net::Headers headers;
  std::string body;       // decoded
  bool complete = false;  // ended as its framing says
};

// What arrived of a response, with its head.
Answer parse_answer(const std::string& wire);
std::string request_text(const std::string& method, const std::string& path, const std::string& body = {},
                         const std::string& headers = {});

std::string chat_body(bool stream, const std::string& more = {});
expert::ExpertShape test_shape();        // 1 layer, 4 experts, top-1
std::string counts_on(uint32_t expert);  // all of 10 tokens on one expert
std::string cohort_file(const std::vector<uint32_t>& experts, const std::string& fingerprint = "f0");

using ConnectionPtr = std::unique_ptr<net::testing::RawConnection>;

// A fleet and its router. Workers first, then start().
class RouterTest : public ::testing::Test {
 protected:
  FakeWorker& add(Role role, std::string fingerprint = "f0", std::shared_ptr<net::TlsServer> tls = nullptr);
  void start(bool wait_until_ready = true);
  void TearDown() override;

  ConnectionPtr open(const std::string& method, const std::string& path, const std::string& body = {},
                     const std::string& headers = {});
  Answer call(const std::string& method, const std::string& path, const std::string& body = {},
              const std::string& headers = {});
  Answer chat(bool stream, const std::string& more = {});
  std::string metrics() { return call("GET", "/metrics").body; }
  bool has_metric(const std::string& line) { return metrics().find(line + "\n") != std::string::npos; }
  int64_t in_flight();  // of all workers
  bool ready() { return call("GET", "/ready").status == 200; }

  net::testing::TestLoop loop_;
  SystemClock clock_;
  RouterOptions options_;
  std::vector<std::unique_ptr<FakeWorker>> fakes_;
  std::unique_ptr<Router> router_;
  uint16_t port_ = 0;
};

class PdFlowTest : public RouterTest {
 protected:
  FakeWorker& prefill(std::string fingerprint = "f0") { return add(Role::kPrefill, std::move(fingerprint)); }
  FakeWorker& decode(std::string fingerprint = "f0") { return add(Role::kDecode, std::move(fingerprint)); }
};

// What a client gets when both legs give their default answers.
inline constexpr const char* kWholeStream =
    "data: {\"id\":\"c1\",\"choices\":[{\"index\":0,\"delta\":{\"content\":\"one\"}}]}\n\n"
    "data: {\"id\":\"c1\",\"choices\":[{\"index\":0,\"delta\":{\"content\":\"two\"}}]}\n\n"
    "data: {\"id\":\"c1\",\"choices\":[{\"index\":0,\"delta\":{\"content\":\"three [DONE] not yet\"}}]}\n\n"
    "data: [DONE]\n\n";

}  // namespace kindred::router::testing

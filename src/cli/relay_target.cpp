#include "cli/relay_target.h"

#include <fmt/format.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string_view>
#include <thread>

#include "cli/relay_load.h"

namespace kindred::cli {
namespace {

using namespace std::chrono_literals;

constexpr auto kStartWait = 60s;  // the Python launchers of other routers take their time

std::string local_url(uint16_t port) { return fmt::format("http://127.0.0.1:{}", port); }

bool in_path(const std::string& program) {
  if (program.find('/') != std::string::npos) return ::access(program.c_str(), X_OK) == 0;
  const char* path = std::getenv("PATH");
  std::string_view rest = path == nullptr ? "" : path;
  while (!rest.empty()) {
    const size_t end = std::min(rest.find(':'), rest.size());
    if (::access(fmt::format("{}/{}", rest.substr(0, end), program).c_str(), X_OK) == 0) return true;
    rest.remove_prefix(std::min(end + 1, rest.size()));
  }
  return false;
}

Result<RelayTarget> start(std::string name, uint16_t port, const std::vector<std::string>& args,
                          const std::string& folder, const std::string& program = {}) {
  Result<Child> child = Child::start(args, fmt::format("{}/{}.log", folder, port), program);
  if (!child) return std::move(child).error();
  RelayTarget target{.name = std::move(name), .version = {}, .port = port, .child = std::move(*child)};
  const auto until = std::chrono::steady_clock::now() + kStartWait;
  const RelayLoad one{.request = chat_request(16, false), .connections = 1, .requests = 1};
  while (!run_relay_load(port, one)) {
    if (!target.child->running() || std::chrono::steady_clock::now() > until) {
      return Error{ErrorCode::kTimeout,
                   fmt::format("{} does not answer on port {}:\n{}", target.name, port, target.child->log_tail())};
    }
    std::this_thread::sleep_for(50ms);
  }
  return target;
}

struct Peer {
  std::string_view name;
  std::string program;
  std::vector<std::string> args;  // {port}, {metrics} and {url} are filled in
};

std::vector<Peer> peers(const PeerPrograms& programs) {
  const std::vector<std::string> common = {"--host", "127.0.0.1",         "--port",   "{port}", "--worker-urls",
                                           "{url}",  "--prometheus-port", "{metrics}"};
  std::vector<std::string> launch = {"launch"};
  launch.insert(launch.end(), common.begin(), common.end());
  return {{"vllm-router", programs.vllm_router, common},
          {"sglang-router", programs.sglang_router, launch},
          {"smg", programs.smg, launch}};
}

// The last word of the first line that a program prints for `flag`; empty where it has no such flag.
std::string version_of(const std::string& program, const std::string& flag, const std::string& folder) {
  const std::string log = folder + "/version.log";
  const Result<int> status = run_program({program, flag}, log, kStartWait);
  if (!status || *status != 0) return {};
  std::ifstream in(log);
  std::string line;
  std::getline(in, line);
  return line.substr(line.find_last_of(" /") + 1);
}

// Adds processor time of `pid`'s threads, and of its children.
bool add_processor_time(int pid, double& total_s) {
  std::error_code error;
  const std::filesystem::directory_iterator tasks(fmt::format("/proc/{}/task", pid), error);
  if (error) return false;
  for (const auto& task : tasks) {
    // Nanoseconds on a processor come first.
    std::ifstream in(task.path() / "schedstat");
    double on_cpu_ns = 0;
    if (in >> on_cpu_ns) total_s += on_cpu_ns / 1e9;
    std::ifstream children(task.path() / "children");
    for (int child = 0; children >> child;) add_processor_time(child, total_s);
  }
  return true;
}

}  // namespace

Result<double> processor_time_s(int pid) {
  double total_s = 0;
  if (!add_processor_time(pid, total_s)) return Error{ErrorCode::kNotFound, fmt::format("process {} has ended", pid)};
  return total_s;
}

Result<uint64_t> resident_bytes(int pid) {
  std::ifstream in(fmt::format("/proc/{}/statm", pid));
  uint64_t pages = 0, resident = 0;
  if (!(in >> pages >> resident)) return Error{ErrorCode::kNotFound, fmt::format("process {} has ended", pid)};
  return resident * static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
}

std::string nginx_config(uint16_t port, uint16_t upstream_port, const std::string& folder) {
  return fmt::format(R"(daemon off;
master_process off;
worker_processes 1;
pid {2}/nginx.pid;
error_log stderr error;
events {{ worker_connections 32768; }}
http {{
  access_log off;
  client_body_temp_path {2}/body;
  proxy_temp_path {2}/proxy;
  fastcgi_temp_path {2}/fastcgi;
  uwsgi_temp_path {2}/uwsgi;
  scgi_temp_path {2}/scgi;
  client_max_body_size 0;
  client_body_buffer_size 1m;
  keepalive_requests 1000000000;
  upstream workers {{
    server 127.0.0.1:{1};
    keepalive 1024;
    keepalive_requests 1000000000;
  }}
  server {{
    listen 127.0.0.1:{0} backlog=4096;
    location / {{
      proxy_pass http://workers;
      proxy_http_version 1.1;
      proxy_set_header Connection "";
      proxy_buffering off;
      proxy_read_timeout 600s;
    }}
  }}
}}
)",
                     port, upstream_port, folder);
}

Result<RelayTarget> start_nginx(const std::string& program, const RelayBackend& backend, const std::string& folder) {
  if (!in_path(program)) {
    return Error{ErrorCode::kNotFound,
                 fmt::format("no program '{}': install Debian's nginx (`./dev bench relay` does), or name one with "
                             "--nginx",
                             program)};
  }
  Result<uint16_t> port = free_port();
  if (!port) return std::move(port).error();
  const std::string path = folder + "/nginx.conf";
  std::ofstream(path) << nginx_config(*port, backend.plain_port(), folder);
  Result<RelayTarget> nginx = start("nginx", *port, {"-p", folder, "-c", path}, folder, program);
  if (nginx) nginx->version = version_of(program, "-v", folder);
  return nginx;
}

Result<RelayTarget> start_router(const RelayBackend& backend, const std::string& folder, size_t threads) {
  Result<uint16_t> port = free_port();
  if (!port) return std::move(port).error();
  return start(
      threads == 1 ? "kindred" : fmt::format("kindred, {} threads", threads), *port,
      {"router", "--port", std::to_string(*port), "--worker", local_url(backend.plain_port()), "--threads",
       std::to_string(threads), "--max-inflight", "65536", "--connections", "65536", "--upstream-connections", "65536"},
      folder);
}

Result<RelayTarget> start_pd_router(const RelayBackend& backend, const std::string& cohorts,
                                    const std::string& folder) {
  Result<uint16_t> port = free_port();
  if (!port) return std::move(port).error();
  std::vector<std::string> args = {
      "router", "--port", std::to_string(*port), "--prefill", local_url(backend.prefill_port()), "--cohorts", cohorts};
  for (size_t i = 0; i < RelayBackend::kDecodeWorkers; ++i) {
    args.insert(args.end(), {"--decode", local_url(backend.decode_port(i))});
  }
  return start("kindred, PD and locality", *port, args, folder);
}

Peers start_peers(const PeerPrograms& programs, const RelayBackend& backend, const std::string& folder) {
  Peers out;
  for (const Peer& peer : peers(programs)) {
    if (!in_path(peer.program)) {
      out.absent.push_back(fmt::format("{}: no program '{}'", peer.name, peer.program));
      continue;
    }
    const Result<uint16_t> port = free_port(), metrics = free_port();
    if (!port || !metrics) {
      out.absent.push_back(fmt::format("{}: {}", peer.name, (port ? metrics : port).error().message));
      continue;
    }
    std::vector<std::string> args = peer.args;
    for (std::string& arg : args) {
      if (arg == "{port}") arg = std::to_string(*port);
      if (arg == "{metrics}") arg = std::to_string(*metrics);
      if (arg == "{url}") arg = local_url(backend.plain_port());
    }
    Result<RelayTarget> target = start(std::string(peer.name), *port, args, folder, peer.program);
    if (!target) {
      out.absent.push_back(target.error().message);
      continue;
    }
    target->version = version_of(peer.program, "--version", folder);
    out.started.push_back(std::move(*target));
  }
  return out;
}

}  // namespace kindred::cli

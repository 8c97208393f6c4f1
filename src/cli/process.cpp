#include "cli/process.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <thread>
#include <utility>

#include "base/config.h"

namespace kindred::cli {

Result<Child> Child::start(const std::vector<std::string>& args, const std::string& log_path,
                           const std::string& program) {
  std::vector<std::string> owned = args;
  owned.insert(owned.begin(), program.empty() ? "kindred" : program);
  std::vector<char*> argv;
  argv.reserve(owned.size() + 1);
  for (std::string& arg : owned) argv.push_back(arg.data());
  argv.push_back(nullptr);

  const int log = ::open(log_path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (log < 0) return Error{ErrorCode::kIo, fmt::format("cannot write {}: {}", log_path, std::strerror(errno))};
  const pid_t parent = ::getpid();
  const pid_t pid = ::fork();
  if (pid == 0) {
    // Between fork and exec: only async-signal-safe calls.
    ::prctl(PR_SET_PDEATHSIG, SIGTERM);
    if (::getppid() != parent) ::_exit(1);
    ::setpgid(0, 0);  // Ctrl-C is for the parent, which stops its children in order
    ::dup2(log, STDOUT_FILENO);
    ::dup2(log, STDERR_FILENO);
    if (program.empty()) {
      ::execv("/proc/self/exe", argv.data());
    } else {
      ::execvp(program.c_str(), argv.data());
    }
    ::_exit(127);
  }
  ::close(log);
  if (pid < 0) return Error{ErrorCode::kIo, fmt::format("cannot start a process: {}", std::strerror(errno))};
  return Child(pid, log_path);
}

Child::Child(Child&& other) noexcept
    : pid_(std::exchange(other.pid_, -1)), status_(other.status_), log_path_(std::move(other.log_path_)) {}

Child& Child::operator=(Child&& other) noexcept {
  if (this != &other) {
    stop();
    pid_ = std::exchange(other.pid_, -1);
    status_ = other.status_;
    log_path_ = std::move(other.log_path_);
  }
  return *this;
}

Child::~Child() { stop(); }

bool Child::running() {
  if (pid_ > 0 && ::waitpid(pid_, &status_, WNOHANG) == pid_) pid_ = -1;
  return pid_ > 0;
}

std::optional<int> Child::wait(std::chrono::milliseconds timeout) {
  const auto give_up = std::chrono::steady_clock::now() + timeout;
  while (running()) {
    if (std::chrono::steady_clock::now() >= give_up) return std::nullopt;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  return WIFSIGNALED(status_) ? 128 + WTERMSIG(status_) : WEXITSTATUS(status_);
}

void Child::stop() {
  if (pid_ <= 0) return;
  ::kill(pid_, SIGTERM);
  for (int i = 0; i < 300 && running(); ++i) std::this_thread::sleep_for(std::chrono::milliseconds(10));
  if (pid_ > 0) {
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
    pid_ = -1;
  }
}

std::string Child::log_tail() const {
  const Result<std::string> text = read_file(log_path_);
  if (!text) return {};
  constexpr size_t kTailBytes = 800;
  return text->size() <= kTailBytes ? *text : text->substr(text->size() - kTailBytes);
}

Result<int> run_program(const std::vector<std::string>& command, const std::string& log_path,
                        std::chrono::milliseconds timeout) {
  KINDRED_CHECK(!command.empty());
  Result<Child> child = Child::start({command.begin() + 1, command.end()}, log_path, command[0]);
  if (!child) return std::move(child).error();
  const std::optional<int> status = child->wait(timeout);
  if (!status) return Error{ErrorCode::kTimeout, fmt::format("{} took too long", command[0])};
  return *status;
}

Result<uint16_t> free_port() {
  const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(address);
  const bool ok = fd >= 0 && ::bind(fd, reinterpret_cast<sockaddr*>(&address), size) == 0 &&
                  ::getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size) == 0;
  const int error = errno;
  if (fd >= 0) ::close(fd);
  if (!ok) return Error{ErrorCode::kIo, fmt::format("no free port on 127.0.0.1: {}", std::strerror(error))};
  return ntohs(address.sin_port);
}

Result<ScratchDir> ScratchDir::make() {
  std::error_code error;
  std::string pattern = (std::filesystem::temp_directory_path(error) / "kindred-XXXXXX").string();
  if (error || ::mkdtemp(pattern.data()) == nullptr) {
    return Error{ErrorCode::kIo, fmt::format("cannot make a temporary folder {}: {}", pattern, std::strerror(errno))};
  }
  return ScratchDir(pattern);
}

ScratchDir::~ScratchDir() {
  if (path_.empty()) return;
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

}  // namespace kindred::cli

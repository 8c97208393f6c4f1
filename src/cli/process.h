// Child processes: mostly this program again, with other arguments.
//
// Thread-safety: none.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/result.h"

namespace kindred::cli {

// Owns a child: destroying it sends SIGTERM, waits a little, then SIGKILL. The child also gets
// SIGTERM from the kernel if this process dies first.
class Child {
 public:
  // `args` without the program's name; stdout and stderr go to `log_path`. `program`: looked up in PATH;
  // empty: this program.
  static Result<Child> start(const std::vector<std::string>& args, const std::string& log_path,
                             const std::string& program = {});
  Child(Child&& other) noexcept;
  Child& operator=(Child&& other) noexcept;
  ~Child();

  bool running();
  int pid() const { return pid_; }  // -1: it has ended
  // Its exit status, 128 + signal if it was killed; no value: still running after `timeout`.
  std::optional<int> wait(std::chrono::milliseconds timeout);
  // The last lines it wrote, for an error message.
  std::string log_tail() const;
  const std::string& log_path() const { return log_path_; }

 private:
  Child(pid_t pid, std::string log_path) : pid_(pid), log_path_(std::move(log_path)) {}
  void stop();

  pid_t pid_ = -1;  // -1: it has ended
  int status_ = 0;
  std::string log_path_;
};

// Runs `command` to its end; its output goes to `log_path`. Error: kTimeout (it is stopped), kIo.
Result<int> run_program(const std::vector<std::string>& command, const std::string& log_path,
                        std::chrono::milliseconds timeout);

// A TCP port on 127.0.0.1 that was free a moment ago.
Result<uint16_t> free_port();

// A fresh directory that is removed with all its files at the end.
class ScratchDir {
 public:
  static Result<ScratchDir> make();
  ScratchDir(ScratchDir&& other) noexcept : path_(std::exchange(other.path_, {})) {}
  ScratchDir& operator=(ScratchDir&&) = delete;
  ~ScratchDir();
  const std::string& path() const { return path_; }

 private:
  explicit ScratchDir(std::string path) : path_(std::move(path)) {}
  std::string path_;
};

}  // namespace kindred::cli

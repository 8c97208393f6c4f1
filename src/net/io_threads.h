// Threads that run one io_context each, for servers whose connections stay with the thread that serves them.
//
// Thread-safety: stop() may be called from any thread; the rest belongs to the one that made the object.
// Lifetime: what uses the executors is destroyed before this object, or is held by what the contexts run. At the end
// all contexts let go of that before any of them goes, so handlers of one may hold sockets and timers of another.
#pragma once

#include <boost/asio/any_io_executor.hpp>
#include <boost/asio/io_context.hpp>
#include <memory>
#include <vector>

#include "net/task.h"

namespace kindred::net {

class IoThreads {
 public:
  explicit IoThreads(size_t count);  // at least 1
  ~IoThreads();                      // run() has returned, or was never called
  IoThreads(const IoThreads&) = delete;
  IoThreads& operator=(const IoThreads&) = delete;

  std::vector<asio::any_io_executor> executors();
  asio::io_context& first();

  // The calling thread runs the first context, threads of their own the others. Returns once the first has nothing
  // left to do, or after stop(); the other threads have ended then.
  void run();
  void stop();

 private:
  class Context;
  std::vector<std::unique_ptr<Context>> contexts_;
};

}  // namespace kindred::net

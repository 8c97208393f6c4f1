#include "net/io_threads.h"

#include <boost/asio/executor_work_guard.hpp>
#include <thread>

#include "base/result.h"

namespace kindred::net {

class IoThreads::Context : public asio::io_context {
 public:
  Context() : asio::io_context(1) {}
  // Destroys all handlers that have not run; their sockets and timers may be any context's. Doing it again, as the
  // destructor does, finds nothing.
  void let_go() { shutdown(); }
};

IoThreads::IoThreads(size_t count) {
  KINDRED_CHECK(count > 0);
  for (size_t i = 0; i < count; ++i) contexts_.push_back(std::make_unique<Context>());
}

IoThreads::~IoThreads() {
  for (const auto& context : contexts_) context->let_go();
}

std::vector<asio::any_io_executor> IoThreads::executors() {
  std::vector<asio::any_io_executor> out;
  for (const auto& context : contexts_) out.emplace_back(context->get_executor());
  return out;
}

asio::io_context& IoThreads::first() { return *contexts_.front(); }

void IoThreads::run() {
  std::vector<asio::executor_work_guard<asio::io_context::executor_type>> busy;
  std::vector<std::jthread> others;
  for (size_t i = 1; i < contexts_.size(); ++i) {
    busy.push_back(asio::make_work_guard(*contexts_[i]));
    others.emplace_back([context = contexts_[i].get()] { context->run(); });
  }
  first().run();
  stop();
}

void IoThreads::stop() {
  for (const auto& context : contexts_) context->stop();
}

}  // namespace kindred::net

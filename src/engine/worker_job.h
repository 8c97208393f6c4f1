// A job in the engine, seen from the io thread: its events are carried over from the engine's thread
// and awaited here.
//
// Thread-safety: confined to the io thread, except what the engine calls. The io_context must outlive
// the engine, since events are posted to it.
#pragma once

#include <boost/asio/any_io_executor.hpp>
#include <memory>
#include <vector>

#include "base/result.h"
#include "engine/engine.h"
#include "engine/types.h"
#include "net/task.h"

namespace kindred::engine {

// Owns the job: destroying it before its last event cancels it.
class RunningJob {
 public:
  // Sets job.on_event. Errors: as Engine::submit.
  static Result<RunningJob> submit(Engine& engine, net::asio::any_io_executor executor, Job job);

  RunningJob(RunningJob&& other) noexcept;
  RunningJob& operator=(RunningJob&&) = delete;
  ~RunningJob();

  // The events that have come, oldest first; waits for at least one. Empty once cancel() was called, and
  // after the last event. What can pile up is bounded by the job's tokens.
  net::Task<std::vector<Event>> next();

  // At once: the engine frees the sequence within a step, and a waiting next() returns.
  void cancel();

 private:
  class Channel;
  RunningJob(Engine& engine, JobId id, std::shared_ptr<Channel> channel);

  Engine* engine_;  // not owned; outlives this
  JobId id_;
  std::shared_ptr<Channel> channel_;
};

}  // namespace kindred::engine

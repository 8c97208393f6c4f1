// Coroutines and cancellation for everything that waits on a socket or a timer.
//
// Nothing here throws for an event of the network: operations use `as_tuple` and turn error codes
// into Result. Cancellation is by closing what is being waited on: a CancelSource runs the callbacks
// registered with its tokens, and each callback closes a socket, stops a timer or tells the engine.
#pragma once

#include <boost/asio/as_tuple.hpp>
#include <boost/asio/awaitable.hpp>
#include <boost/asio/deferred.hpp>
#include <functional>
#include <list>
#include <memory>

namespace kindred::net {

namespace asio = boost::asio;

template <class T = void>
using Task = asio::awaitable<T>;

// co_await op(..., kNoThrow) gives a tuple (error_code, results...). Deferred, since use_awaitable would make one
// more coroutine of each operation.
inline constexpr auto kNoThrow = asio::as_tuple(asio::deferred);

// Cancellation of one request. Confined to the thread of one io_context.
class CancelToken;

class CancelSource {
 public:
  CancelSource();
  // Runs the callbacks registered now, once each, in order of registration. Later calls do nothing.
  void cancel();
  bool cancelled() const;
  CancelToken token() const;

 private:
  friend class CancelToken;
  struct State;
  std::shared_ptr<State> state_;
};

class CancelToken {
 public:
  // While a Registration lives its callback may be called (at most once); destroying it unregisters.
  class Registration {
   public:
    Registration() = default;
    Registration(Registration&& other) noexcept;
    Registration& operator=(Registration&& other) noexcept;
    ~Registration();

   private:
    friend class CancelToken;
    std::shared_ptr<CancelSource::State> state_;
    std::list<std::function<void()>>::iterator at_;
  };

  CancelToken() = default;  // never cancelled
  bool cancelled() const;
  // If cancellation has happened already, `callback` is called at once.
  [[nodiscard]] Registration on_cancel(std::function<void()> callback) const;

 private:
  friend class CancelSource;
  explicit CancelToken(std::shared_ptr<CancelSource::State> state) : state_(std::move(state)) {}
  std::shared_ptr<CancelSource::State> state_;
};

}  // namespace kindred::net

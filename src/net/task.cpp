#include "net/task.h"

#include <utility>

namespace kindred::net {

// The list keeps its nodes until their Registration goes, so that iterators stay valid whatever the
// callbacks do; a callback that has run is an empty function.
struct CancelSource::State {
  bool cancelled = false;
  std::list<std::function<void()>> callbacks;
};

CancelSource::CancelSource() : state_(std::make_shared<State>()) {}

void CancelSource::cancel() {
  if (state_->cancelled) return;
  const std::shared_ptr<State> state = state_;  // a callback may destroy this source
  state->cancelled = true;
  for (;;) {
    // From the front each time: a callback may unregister any other, the next one included.
    auto at = state->callbacks.begin();
    while (at != state->callbacks.end() && !*at) ++at;
    if (at == state->callbacks.end()) return;
    const std::function<void()> callback = std::exchange(*at, nullptr);
    callback();
  }
}

bool CancelSource::cancelled() const { return state_->cancelled; }

CancelToken CancelSource::token() const { return CancelToken(state_); }

bool CancelToken::cancelled() const { return state_ && state_->cancelled; }

CancelToken::Registration CancelToken::on_cancel(std::function<void()> callback) const {
  Registration registration;
  if (!state_) return registration;
  if (state_->cancelled) {
    callback();
    return registration;
  }
  registration.at_ = state_->callbacks.insert(state_->callbacks.end(), std::move(callback));
  registration.state_ = state_;
  return registration;
}

CancelToken::Registration::Registration(Registration&& other) noexcept
    : state_(std::exchange(other.state_, nullptr)), at_(other.at_) {}

CancelToken::Registration& CancelToken::Registration::operator=(Registration&& other) noexcept {
  // The old registration leaves with `old`, after this object holds the new one.
  Registration old;
  std::swap(old.state_, state_);
  std::swap(old.at_, at_);
  std::swap(state_, other.state_);
  std::swap(at_, other.at_);
  return *this;
}

CancelToken::Registration::~Registration() {
  if (state_) state_->callbacks.erase(at_);
}

}  // namespace kindred::net

// A value that is replaced as a whole while others read it: who has taken it keeps what they took.
//
// Thread-safety: all methods take one mutex, for as long as a pointer is copied.
#pragma once

#include <memory>
#include <mutex>
#include <utility>

namespace kindred {

template <class T>
class Current {
 public:
  std::shared_ptr<const T> get() const {
    const std::lock_guard lock(mutex_);
    return value_;
  }
  void set(std::shared_ptr<const T> value) {
    const std::lock_guard lock(mutex_);
    value_.swap(value);  // what was there goes after the lock
  }

 private:
  mutable std::mutex mutex_;
  std::shared_ptr<const T> value_;
};

}  // namespace kindred

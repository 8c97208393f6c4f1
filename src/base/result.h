// Errors as values. Untrusted input and the outside world give an Error; a state that our own code
// rules out aborts (KINDRED_CHECK). Exceptions of third-party code are caught where they are raised
// and never cross the per-request path.
//
// Thread-safety: plain values.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>

namespace kindred {

enum class ErrorCode {
  kInvalid,      // the caller's input is wrong: HTTP 400
  kNotFound,     // HTTP 404
  kTooLarge,     // a stated bound was passed: HTTP 413
  kExhausted,    // a bounded resource is full for now: HTTP 429
  kUnavailable,  // the other side is not there or refused: HTTP 503
  kTimeout,      // HTTP 504
  kCancelled,    // the caller went away
  kCorrupt,      // bytes that fail their own check (size, hash, format)
  kIo,           // file or socket failure
  kInternal,     // HTTP 500
};

std::string_view to_string(ErrorCode code);

struct Error {
  ErrorCode code = ErrorCode::kInternal;
  std::string message;     // for the person who has to fix it: what is wrong, where, what is accepted
  std::string field = {};  // the input field at fault, or empty
};

template <class T>
class [[nodiscard]] Result {
 public:
  Result(T value) : state_(std::in_place_index<0>, std::move(value)) {}
  Result(Error error) : state_(std::in_place_index<1>, std::move(error)) {}

  bool ok() const { return state_.index() == 0; }
  explicit operator bool() const { return ok(); }

  T& value() & { return std::get<0>(state_); }
  const T& value() const& { return std::get<0>(state_); }
  T&& value() && { return std::get<0>(std::move(state_)); }
  T& operator*() & { return value(); }
  const T& operator*() const& { return value(); }
  T&& operator*() && { return std::move(*this).value(); }
  T* operator->() { return &value(); }
  const T* operator->() const { return &value(); }

  const Error& error() const& { return std::get<1>(state_); }
  Error&& error() && { return std::get<1>(std::move(state_)); }

 private:
  std::variant<T, Error> state_;
};

// A Result without a value: ok, or an Error.
class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(Error error) : error_(std::move(error)) {}

  bool ok() const { return !error_.has_value(); }
  explicit operator bool() const { return ok(); }
  const Error& error() const& { return *error_; }
  Error&& error() && { return std::move(*error_); }

 private:
  std::optional<Error> error_;
};

inline Error invalid(std::string message, std::string field = {}) {
  return Error{ErrorCode::kInvalid, std::move(message), std::move(field)};
}

// For what only a bug can break. Prints and aborts, in every build.
#define KINDRED_CHECK(condition)                                                             \
  do {                                                                                       \
    if (!(condition)) {                                                                      \
      std::fprintf(stderr, "%s:%d: impossible state: %s\n", __FILE__, __LINE__, #condition); \
      std::abort();                                                                          \
    }                                                                                        \
  } while (false)

}  // namespace kindred

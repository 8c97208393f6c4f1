// Bytes read from a socket and not used yet.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <memory>
#include <span>
#include <string_view>
#include <utility>

namespace kindred::net {

// Starts small, as most of the ten thousand streams of a router carry an event a second, and doubles
// while reads fill it, so that large bodies take few system calls. Not thread-safe. Views and spans
// are valid until the next prepare().
class ReadBuffer {
 public:
  static constexpr size_t kFirstBytes = 4 * 1024;
  static constexpr size_t kLittleBytes = 1024;
  static constexpr size_t kMostBytes = 64 * 1024;

  ReadBuffer() = default;
  ReadBuffer(ReadBuffer&& other) noexcept { *this = std::move(other); }
  ReadBuffer& operator=(ReadBuffer&& other) noexcept {
    bytes_ = std::move(other.bytes_);
    capacity_ = std::exchange(other.capacity_, 0);
    begin_ = std::exchange(other.begin_, 0);
    end_ = std::exchange(other.end_, 0);
    was_filled_ = std::exchange(other.was_filled_, false);
    return *this;
  }

  std::string_view data() const { return {bytes_.get() + begin_, end_ - begin_}; }
  std::span<char> mutable_data() { return {bytes_.get() + begin_, end_ - begin_}; }
  size_t size() const { return end_ - begin_; }
  bool empty() const { return begin_ == end_; }
  void consume(size_t count) { begin_ += count; }

  // Room for at least one byte more.
  std::span<char> prepare() {
    if (begin_ == end_) begin_ = end_ = 0;
    if (capacity_ == 0) grow(kFirstBytes);
    const bool full = end_ == capacity_;
    if (begin_ > 0 && (full || begin_ >= capacity_ / 2)) {
      std::memmove(bytes_.get(), bytes_.get() + begin_, size());
      end_ -= begin_;
      begin_ = 0;
    }
    if (end_ == capacity_ || (was_filled_ && capacity_ < kMostBytes)) grow(capacity_ * 2);
    return {bytes_.get() + end_, capacity_ - end_};
  }

  void commit(size_t count) {
    end_ += count;
    was_filled_ = end_ == capacity_;
  }

  // For streams, whose pieces are small and which stay for long: the first memory is given back for less.
  void expect_little() {
    if (empty() && capacity_ == kFirstBytes && !was_filled_) {
      bytes_.reset();
      capacity_ = begin_ = end_ = 0;
      grow(kLittleBytes);
    }
  }

  // Whether it is worth handing on, once cleared.
  bool has_first_bytes() const { return capacity_ == kFirstBytes; }
  void clear() {
    begin_ = end_ = 0;
    was_filled_ = false;
  }

  void release_if_empty() {
    if (!empty()) return;
    bytes_.reset();
    capacity_ = begin_ = end_ = 0;
    was_filled_ = false;
  }

 private:
  void grow(size_t capacity) {
    auto larger = std::make_unique_for_overwrite<char[]>(capacity);  // reads fill it
    if (!empty()) std::memcpy(larger.get() + begin_, bytes_.get() + begin_, size());
    bytes_ = std::move(larger);
    capacity_ = capacity;
  }

  std::unique_ptr<char[]> bytes_;
  size_t capacity_ = 0;
  size_t begin_ = 0;
  size_t end_ = 0;
  bool was_filled_ = false;  // the last read took all the room there was
};

}  // namespace kindred::net

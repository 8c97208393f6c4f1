// Bytes read from a socket and not used yet.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <span>
#include <string_view>
#include <vector>

namespace kindred::net {

// Starts small, as most of the ten thousand streams of a router carry an event a second, and doubles
// while reads fill it, so that large bodies take few system calls. Not thread-safe. Views and spans
// are valid until the next prepare().
class ReadBuffer {
 public:
  static constexpr size_t kFirstBytes = 4 * 1024;
  static constexpr size_t kMostBytes = 64 * 1024;

  std::string_view data() const { return {bytes_.data() + begin_, end_ - begin_}; }
  std::span<char> mutable_data() { return {bytes_.data() + begin_, end_ - begin_}; }
  size_t size() const { return end_ - begin_; }
  bool empty() const { return begin_ == end_; }
  void consume(size_t count) { begin_ += count; }

  // Room for at least one byte more.
  std::span<char> prepare() {
    if (begin_ == end_) begin_ = end_ = 0;
    if (bytes_.empty()) bytes_.resize(kFirstBytes);
    const bool full = end_ == bytes_.size();
    if (begin_ > 0 && (full || begin_ >= bytes_.size() / 2)) {
      std::memmove(bytes_.data(), bytes_.data() + begin_, size());
      end_ -= begin_;
      begin_ = 0;
    }
    if (end_ == bytes_.size() || (was_filled_ && bytes_.size() < kMostBytes)) bytes_.resize(bytes_.size() * 2);
    return {bytes_.data() + end_, bytes_.size() - end_};
  }

  void commit(size_t count) {
    end_ += count;
    was_filled_ = end_ == bytes_.size();
  }

  void release_if_empty() {
    if (!empty()) return;
    bytes_ = {};
    begin_ = end_ = 0;
    was_filled_ = false;
  }

 private:
  std::vector<char> bytes_;
  size_t begin_ = 0;
  size_t end_ = 0;
  bool was_filled_ = false;  // the last read took all the room there was
};

}  // namespace kindred::net

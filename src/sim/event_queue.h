// What is to happen, in order of time; what happens at the same nanosecond goes in the order in which it was
// put in, so that a run depends on nothing but its input.
//
// Thread-safety: none. O(log events) each.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

namespace kindred::sim {

template <class Event>
class EventQueue {
 public:
  bool empty() const { return heap_.empty(); }
  size_t size() const { return heap_.size(); }
  int64_t next_ns() const { return heap_.front().at_ns; }  // not empty

  void push(int64_t at_ns, Event event) {
    heap_.push_back({at_ns, sequence_++, std::move(event)});
    std::push_heap(heap_.begin(), heap_.end(), later);
  }
  // The next one and its time. Not empty.
  std::pair<int64_t, Event> pop() {
    std::pop_heap(heap_.begin(), heap_.end(), later);
    Entry entry = std::move(heap_.back());
    heap_.pop_back();
    return {entry.at_ns, std::move(entry.event)};
  }

 private:
  struct Entry {
    int64_t at_ns;
    uint64_t sequence;
    Event event;
  };
  static bool later(const Entry& a, const Entry& b) {
    return a.at_ns != b.at_ns ? a.at_ns > b.at_ns : a.sequence > b.sequence;
  }

  std::vector<Entry> heap_;
  uint64_t sequence_ = 0;
};

}  // namespace kindred::sim

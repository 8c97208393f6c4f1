// The last decisions, for GET /status: which workers a request got and why. Nothing of its content.
//
// Thread-safety: all methods take one mutex.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fleet/fleet.h"

namespace kindred::router {

struct DecisionRecord {
  std::string request_id;
  int64_t unix_s = 0;
  std::string model;
  std::optional<fleet::WorkerId> prefill_worker;  // none for workers that do both
  fleet::WorkerId decode_worker = 0;
  std::string_view policy, prefill_reason, reason, fallback;  // static names
  std::optional<fleet::WorkerId> shadow_worker;               // that the shadow policy would have chosen
  std::vector<fleet::WorkerId> candidates;
  std::vector<std::pair<fleet::WorkerId, float>> scores;  // cosine to the worker's cohort, of those that have one
  std::optional<float> similarity;                        // of the worker chosen
  std::optional<size_t> band_size;
  uint64_t prompt_tokens = 0;         // 0: not known
  std::optional<double> known_share;  // of the prompt, by the history (router/history.h)
  // Of the worker that computed the prompt, where an engine policy chose: the engine, and what of the prompt it had to
  // compute, as far as is known.
  std::optional<uint32_t> rank;
  std::optional<uint64_t> prefill_tokens;
  double decision_s = 0;
};

class DecisionLog {
 public:
  explicit DecisionLog(size_t limit) : limit_(limit) {}

  void add(DecisionRecord record) {
    const std::lock_guard lock(mutex_);
    ++total_;
    if (limit_ == 0) return;
    if (records_.size() == limit_) records_.pop_front();
    records_.push_back(std::move(record));
  }
  // At most `most`, the newest first.
  std::vector<DecisionRecord> newest(size_t most) const {
    const std::lock_guard lock(mutex_);
    return {records_.rbegin(), records_.rbegin() + static_cast<ptrdiff_t>(std::min(most, records_.size()))};
  }
  uint64_t total() const {
    const std::lock_guard lock(mutex_);
    return total_;
  }

 private:
  const size_t limit_;
  mutable std::mutex mutex_;
  uint64_t total_ = 0;
  std::deque<DecisionRecord> records_;
};

}  // namespace kindred::router

// Online refit: cohorts that follow the traffic of the last seconds.
//
// The router keeps the expert counts of recent requests in a CountsWindow. From time to time refit() makes
// new centroids of them by the balanced k-means of the offline fit, started from the old ones, and aligns
// the result with the old ones by optimal assignment, so that each worker keeps the cohort nearest to its
// old one. A worker that joins takes half of the largest cohort.
//
// Rows. A cohort is a row of the model, and a worker owns a row for as long as it serves. Rows never move:
// what a worker leaves behind is an unowned row, which no decision looks at and the next newcomer reuses.
//
// Reference: ELDR (casys-kaist/ELDR), online clustering over a rolling window.
//
// Thread-safety: CountsWindow none; the functions are pure, equal arguments give equal results.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/clock.h"
#include "base/result.h"
#include "expert/cohorts.h"
#include "expert/counts.h"

namespace kindred::expert {

struct WindowEntry {
  MonotonicTime at;
  std::string fingerprint;                     // of the prefill worker's model
  std::shared_ptr<const ExpertCounts> counts;  // shared, so that a fit copies pointers on the request path's thread
};

struct WindowLimits {
  std::chrono::milliseconds span_ms{5'000};
  size_t entries = 8'192;
  size_t bytes = 256ULL << 20;  // of counts: 8,192 requests of 48 layers x 128 experts are 192 MiB
};

// The last requests' counts. It holds counts, not signatures: a fit makes signatures off the request path,
// and may need another idf for them.
class CountsWindow {
 public:
  explicit CountsWindow(WindowLimits limits) : limits_(limits) {}

  // Times must not go back. Drops what is too old, and beyond the bounds the oldest.
  void add(MonotonicTime at, std::string_view fingerprint, std::shared_ptr<const ExpertCounts> counts);
  void drop_older_than_span(MonotonicTime now);

  std::vector<WindowEntry> entries() const { return {entries_.begin(), entries_.end()}; }  // oldest first
  size_t size() const { return entries_.size(); }
  uint64_t dropped() const { return dropped_; }  // before their time, because of the bounds

 private:
  void drop_oldest();

  WindowLimits limits_;
  std::deque<WindowEntry> entries_;
  size_t bytes_ = 0;
  uint64_t dropped_ = 0;
};

// The model most requests of the window were for; ties go to the lower text. Empty: no entries.
std::string most_frequent_fingerprint(std::span<const WindowEntry> window);

struct RefitTask {
  std::shared_ptr<const CohortModel> previous;  // null: none yet
  std::string fingerprint;                      // which model's requests count
  std::vector<uint32_t> owned;                  // rows of `previous` that workers own, ascending, no duplicates
  uint32_t newcomers = 0;                       // workers that need a row
  bool move_all = true;                         // false: only newcomers get centroids, and whose half they take
  bool idf_from_window = false;                 // false: idf and mask stay those of `previous`, which must be there
  std::vector<WindowEntry> window;

  uint32_t min_requests = 1;  // with a signature; never fewer than cohorts
  uint32_t max_iterations = 25;
  uint64_t seed = 1;
};

struct RefitReport {
  std::shared_ptr<const CohortModel> model;
  std::vector<uint32_t> newcomer_rows;  // [newcomers]
  std::vector<uint32_t> split_rows;     // beside them: whose cohort was halved; empty for a first fit
  std::vector<float> shift;             // [owned]: 1 - cosine of old and new centroid; empty for a first fit
  uint64_t requests = 0;                // fitted on
  uint64_t other_model = 0, other_shape = 0, zero_signatures = 0;  // requests left out
  double cost = 0;                                                 // total cosine distance, 0 without move_all
  uint32_t iterations = 0;

  double mean_shift() const;
};

// Error: kUnavailable when the window holds too few requests (the old cohorts still hold; more requests
// will do); kInvalid when no request has a signature, or for a task that contradicts itself.
Result<RefitReport> refit(const RefitTask& task);

// The half of a cohort that a newcomer takes.
struct Split {
  uint32_t row = 0;          // which centroid was split: the nearest of most points
  std::vector<float> kept;   // its owner's half, the one nearer to the old centroid; [dims], unit length
  std::vector<float> given;  // the newcomer's
};
// `points`: [n, dims] unit rows; `centroids`: [k, dims]. Error: kUnavailable if no centroid is the nearest of
// two points.
Result<Split> split_largest(std::span<const float> points, std::span<const float> centroids, size_t dims,
                            uint64_t seed);

// `fresh` (rows [k, dims]) in the order in which they resemble `old` most: row r of the result belongs to row r
// of `old`. Exact.
std::vector<float> aligned(std::span<const float> old, std::span<const float> fresh, size_t dims);

}  // namespace kindred::expert

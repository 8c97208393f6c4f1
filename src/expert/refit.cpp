#include "expert/refit.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>

#include "base/rng.h"
#include "expert/assign.h"
#include "expert/kmeans.h"
#include "expert/signature.h"

namespace kindred::expert {
namespace {

// A fresh start replaces the warm one only if it is better by more than this share of the cost: equally
// good clusterings must not take turns.
constexpr double kWorthwhile = 0.01;
// Starts of a first fit and of a split, which have nothing to start from.
constexpr uint32_t kFreshRestarts = 4;

size_t bytes_of(const WindowEntry& entry) {
  return sizeof(WindowEntry) + entry.fingerprint.size() + entry.counts->data.size() * sizeof(uint32_t);
}

std::vector<const ExpertCounts*> counts_of(const RefitTask& task, const ExpertShape& shape, RefitReport& report) {
  std::vector<const ExpertCounts*> out;
  for (const WindowEntry& entry : task.window) {
    if (entry.fingerprint != task.fingerprint) ++report.other_model;
    else if (entry.counts->shape != shape || entry.counts->data.size() != shape.cells()) ++report.other_shape;
    else out.push_back(entry.counts.get());
  }
  return out;
}

std::vector<float> idf_of(std::span<const ExpertCounts* const> requests, size_t cells) {
  std::vector<uint32_t> df(cells, 0);
  for (const ExpertCounts* counts : requests) {
    for (size_t c = 0; c < cells; ++c) df[c] += counts->data[c] > 0 ? 1 : 0;
  }
  return inverse_document_frequency(df, requests.size());
}

// Without a cohort file: every layer, idf from the window, and the shape of the newest request.
CohortData data_from_window(const RefitTask& task) {
  CohortData data;
  for (const WindowEntry& entry : task.window) {
    if (entry.fingerprint == task.fingerprint) data.shape = entry.counts->shape;
  }
  data.model_fingerprint = task.fingerprint;
  data.layer_mask.assign(data.shape.layers.size(), 1);
  return data;
}

struct Sample {
  std::vector<float> points;  // [n, dims]
  size_t dims = 0;
  size_t size() const { return dims == 0 ? 0 : points.size() / dims; }
};

// By `from`, or, where it is null, by idf and mask of `data`.
Sample signatures_of_window(const CohortModel* from, const CohortData& data,
                            std::span<const ExpertCounts* const> requests, RefitReport& report) {
  Sample out;
  const auto kept = static_cast<size_t>(std::count(data.layer_mask.begin(), data.layer_mask.end(), 1));
  out.dims = kept * data.shape.experts;
  Signature signature;
  for (const ExpertCounts* counts : requests) {
    const bool made = from != nullptr ? from->signature(*counts, signature) == SignatureProblem::kNone
                                      : build_signature(counts->data, data.idf, data.layer_mask, signature);
    if (!made) {
      ++report.zero_signatures;
      continue;
    }
    out.points.insert(out.points.end(), signature.begin(), signature.end());
  }
  return out;
}

Status check_sample(const RefitTask& task, const Sample& sample, size_t cohorts, const RefitReport& report) {
  const size_t needed = std::max<size_t>(task.min_requests, cohorts);
  if (sample.size() >= needed) return {};
  if (sample.size() == 0 && report.zero_signatures >= needed) {
    return invalid(fmt::format("none of the {} requests in the window has a signature: their experts have no weight",
                               report.zero_signatures));
  }
  return Error{
      ErrorCode::kUnavailable,
      fmt::format("{} requests with a signature in the window, {} needed for {} cohorts (left out: {} of "
                  "another model, {} of another shape, {} without a signature)",
                  sample.size(), needed, cohorts, report.other_model, report.other_shape, report.zero_signatures)};
}

// From the old centroids, and from a fresh start in case the traffic has become another one.
Result<Clustering> cluster_again(const Points& points, const std::vector<float>& start, const RefitTask& task) {
  Result<Clustering> warm = kmeans_from(points, start, task.max_iterations);
  if (!warm) return warm;
  Result<Clustering> fresh =
      balanced_spherical_kmeans(points, {.clusters = static_cast<uint32_t>(start.size() / points.dims),
                                         .restarts = 1,
                                         .max_iterations = task.max_iterations,
                                         .seed = task.seed});
  if (!fresh || fresh->cost > (1 - kWorthwhile) * warm->cost) return warm;
  fresh->centroids = aligned(start, fresh->centroids, points.dims);
  return fresh;
}

// Rows for the newcomers: those that nobody owns first, then new ones behind.
std::vector<uint32_t> rows_for_newcomers(const RefitTask& task) {
  std::vector<uint32_t> out;
  for (uint32_t row = 0; out.size() < task.newcomers; ++row) {
    if (!std::binary_search(task.owned.begin(), task.owned.end(), row)) out.push_back(row);
  }
  return out;
}

std::span<const float> row_of(std::span<const float> rows, size_t row, size_t dims) {
  return rows.subspan(row * dims, dims);
}

// The new centroids: of the owned rows in their order, then of the newcomers.
Result<std::vector<float>> new_centroids(const RefitTask& task, const CohortModel* old, const Sample& sample,
                                         RefitReport& report) {
  const Points points{sample.points, sample.dims};
  const auto cohorts = static_cast<uint32_t>(task.owned.size() + task.newcomers);
  if (old == nullptr || task.owned.empty()) {
    Result<Clustering> first = balanced_spherical_kmeans(
        points,
        {.clusters = cohorts, .restarts = kFreshRestarts, .max_iterations = task.max_iterations, .seed = task.seed});
    if (!first) return std::move(first).error();
    report.cost = first->cost;
    report.iterations = first->iterations;
    return std::move(first->centroids);
  }
  std::vector<float> centroids;
  for (const uint32_t row : task.owned) {
    const auto centroid = old->centroid(row);
    centroids.insert(centroids.end(), centroid.begin(), centroid.end());
  }
  for (uint32_t i = 0; i < task.newcomers; ++i) {
    Result<Split> split = split_largest(sample.points, centroids, sample.dims, mix64(task.seed + i));
    if (!split) return std::move(split).error();
    std::copy(split->kept.begin(), split->kept.end(),
              centroids.begin() + static_cast<ptrdiff_t>(split->row * sample.dims));
    centroids.insert(centroids.end(), split->given.begin(), split->given.end());
    report.split_rows.push_back(split->row);  // an index of `centroids` until the caller knows the rows
  }
  if (!task.move_all) return centroids;
  Result<Clustering> moved = cluster_again(points, centroids, task);
  if (!moved) return std::move(moved).error();
  report.cost = moved->cost;
  report.iterations = moved->iterations;
  return std::move(moved->centroids);
}

Status check_task(const RefitTask& task) {
  const size_t rows = task.previous ? task.previous->cohorts() : 0;
  if (task.owned.size() + task.newcomers == 0) return invalid("refit: no worker to fit cohorts for", "owned");
  if (!task.idf_from_window && !task.previous) return invalid("refit: no cohorts to take idf and mask from");
  if (!std::is_sorted(task.owned.begin(), task.owned.end(), std::less_equal<>{}) ||
      (!task.owned.empty() && task.owned.back() >= rows)) {
    return invalid(fmt::format("refit: the owned rows are not ascending rows of {}", rows), "owned");
  }
  return {};
}

// Old rows where they were, new centroids over them.
std::vector<float> placed(const RefitTask& task, const CohortModel* old, std::span<const float> centroids, size_t dims,
                          const RefitReport& report) {
  std::vector<uint32_t> rows = task.owned;
  rows.insert(rows.end(), report.newcomer_rows.begin(), report.newcomer_rows.end());
  const size_t most = *std::max_element(rows.begin(), rows.end()) + 1;
  std::vector<float> out;
  if (old != nullptr) out = old->data().centroids;
  // Rows that nobody owns must hold something of unit length.
  while (out.size() < most * dims)
    out.insert(out.end(), centroids.begin(), centroids.begin() + static_cast<ptrdiff_t>(dims));
  for (size_t i = 0; i < rows.size(); ++i) {
    const auto from = row_of(centroids, i, dims);
    std::copy(from.begin(), from.end(), out.begin() + static_cast<ptrdiff_t>(rows[i] * dims));
  }
  return out;
}

}  // namespace

void CountsWindow::drop_oldest() {
  bytes_ -= bytes_of(entries_.front());
  entries_.pop_front();
}

void CountsWindow::add(MonotonicTime at, std::string_view fingerprint, std::shared_ptr<const ExpertCounts> counts) {
  drop_older_than_span(at);
  entries_.push_back({at, std::string(fingerprint), std::move(counts)});
  bytes_ += bytes_of(entries_.back());
  while (entries_.size() > limits_.entries || (bytes_ > limits_.bytes && entries_.size() > 1)) {
    drop_oldest();
    ++dropped_;
  }
}

void CountsWindow::drop_older_than_span(MonotonicTime now) {
  while (!entries_.empty() && now - entries_.front().at > limits_.span_ms) drop_oldest();
}

std::string most_frequent_fingerprint(std::span<const WindowEntry> window) {
  std::map<std::string_view, size_t> seen;
  for (const WindowEntry& entry : window) ++seen[entry.fingerprint];
  std::string_view best;
  size_t most = 0;
  for (const auto& [fingerprint, times] : seen) {
    if (times <= most) continue;
    best = fingerprint;
    most = times;
  }
  return std::string(best);
}

double RefitReport::mean_shift() const {
  double sum = 0;
  for (const float s : shift) sum += static_cast<double>(s);
  return shift.empty() ? 0 : sum / static_cast<double>(shift.size());
}

std::vector<float> aligned(std::span<const float> old, std::span<const float> fresh, size_t dims) {
  const size_t k = old.size() / dims;
  KINDRED_CHECK(dims > 0 && old.size() == fresh.size());
  std::vector<double> similarity(k * k);
  for (size_t r = 0; r < k; ++r) {
    for (size_t c = 0; c < k; ++c) {
      similarity[r * k + c] = static_cast<double>(dot(row_of(old, r, dims), row_of(fresh, c, dims)));
    }
  }
  const Result<std::vector<uint32_t>> order = best_permutation(similarity, k);
  KINDRED_CHECK(order.ok());  // finite, and k x k
  std::vector<float> out;
  out.reserve(fresh.size());
  for (const uint32_t from : *order) {
    const auto row = row_of(fresh, from, dims);
    out.insert(out.end(), row.begin(), row.end());
  }
  return out;
}

Result<Split> split_largest(std::span<const float> points, std::span<const float> centroids, size_t dims,
                            uint64_t seed) {
  const size_t k = centroids.size() / dims;
  std::vector<std::vector<float>> members(k);  // points, flat
  for (size_t begin = 0; begin < points.size(); begin += dims) {
    const auto point = points.subspan(begin, dims);
    size_t best = 0;
    float nearest = -2;
    for (size_t row = 0; row < k; ++row) {
      const float similarity = dot(point, row_of(centroids, row, dims));
      if (similarity > nearest) {
        nearest = similarity;
        best = row;
      }
    }
    members[best].insert(members[best].end(), point.begin(), point.end());
  }
  const auto largest = std::max_element(members.begin(), members.end(),
                                        [](const auto& a, const auto& b) { return a.size() < b.size(); });
  if (largest == members.end() || largest->size() < 2 * dims) {
    return Error{ErrorCode::kUnavailable, "no cohort has two requests in the window that a newcomer could share"};
  }
  Result<Clustering> halves =
      balanced_spherical_kmeans({*largest, dims}, {.clusters = 2, .restarts = kFreshRestarts, .seed = seed});
  if (!halves) return std::move(halves).error();
  Split out;
  out.row = static_cast<uint32_t>(largest - members.begin());
  const auto old = row_of(centroids, out.row, dims);
  const auto first = row_of(halves->centroids, 0, dims), second = row_of(halves->centroids, 1, dims);
  const bool first_stays = dot(first, old) >= dot(second, old);
  const auto kept = first_stays ? first : second, given = first_stays ? second : first;
  out.kept.assign(kept.begin(), kept.end());
  out.given.assign(given.begin(), given.end());
  return out;
}

Result<RefitReport> refit(const RefitTask& task) {
  if (Status good = check_task(task); !good) return std::move(good).error();
  RefitReport report;
  const CohortModel* old = task.previous.get();
  // Centroids of another model's experts say nothing about this one's.
  if (task.idf_from_window && old != nullptr && old->data().model_fingerprint != task.fingerprint) old = nullptr;
  // Where only newcomers get centroids, the others' must stay in the space they were made in.
  const bool new_idf = old == nullptr || (task.idf_from_window && task.move_all);
  CohortData data = new_idf ? data_from_window(task) : old->data();
  const std::vector<const ExpertCounts*> requests = counts_of(task, data.shape, report);
  if (new_idf) data.idf = idf_of(requests, data.shape.cells());
  if (old != nullptr && old->data().shape != data.shape) old = nullptr;
  const Sample sample = signatures_of_window(new_idf ? nullptr : old, data, requests, report);
  const size_t cohorts = task.owned.size() + task.newcomers;
  if (Status enough = check_sample(task, sample, cohorts, report); !enough) return std::move(enough).error();

  Result<std::vector<float>> centroids = new_centroids(task, old, sample, report);
  if (!centroids) return std::move(centroids).error();
  report.requests = sample.size();
  report.newcomer_rows = rows_for_newcomers(task);
  const auto row_at = [&](uint32_t i) {
    return i < task.owned.size() ? task.owned[i] : report.newcomer_rows[i - task.owned.size()];
  };
  for (uint32_t& row : report.split_rows) row = row_at(row);
  if (old != nullptr) {
    for (size_t i = 0; i < task.owned.size(); ++i) {
      const float cosine = dot(old->centroid(task.owned[i]), row_of(*centroids, i, sample.dims));
      report.shift.push_back(std::max(0.0F, 1.0F - cosine));
    }
  }
  data.centroids = placed(task, old, *centroids, sample.dims, report);
  data.samples = sample.size();
  data.seed = task.seed;
  Result<CohortModel> model = CohortModel::make(std::move(data));
  if (!model) return std::move(model).error();
  report.model = std::make_shared<const CohortModel>(*std::move(model));
  return report;
}

}  // namespace kindred::expert

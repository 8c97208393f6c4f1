#include "expert/refit.h"

#include <gtest/gtest.h>

#include <cmath>
#include <numeric>
#include <set>

#include "expert/testing.h"

namespace kindred::expert {
namespace {

using namespace std::chrono_literals;

const ExpertShape kShape{.layers = {0, 1, 3}, .experts = 16, .top_k = 2};

std::shared_ptr<const ExpertCounts> request_of(uint32_t domain, Rng& rng) {
  return std::make_shared<const ExpertCounts>(made_up_counts(kShape, domain, 40, rng));
}

WindowEntry entry_of(uint32_t domain, Rng& rng, std::string fingerprint = "f") {
  return {{}, std::move(fingerprint), request_of(domain, rng)};
}

std::vector<WindowEntry> window_of(const std::vector<uint32_t>& domains, size_t each, uint64_t seed = 1) {
  Rng rng(seed);
  std::vector<WindowEntry> out;
  for (size_t i = 0; i < each; ++i) {
    for (const uint32_t domain : domains) out.push_back(entry_of(domain, rng));
  }
  return out;
}

// Which row of the model a made-up request of the domain is nearest to, among `rows`.
uint32_t nearest_row(const CohortModel& model, uint32_t domain, const std::vector<uint32_t>& rows) {
  Rng rng(99);
  Signature signature;
  EXPECT_EQ(model.signature(*request_of(domain, rng), signature), SignatureProblem::kNone);
  const std::vector<float> similarities = model.similarities(signature);
  uint32_t best = rows.front();
  for (const uint32_t row : rows) best = similarities[row] > similarities[best] ? row : best;
  return best;
}

// A model whose row r is what requests of domains[r] look like.
std::shared_ptr<const CohortModel> model_of(const std::vector<uint32_t>& domains) {
  CohortData data;
  data.model_fingerprint = "f";
  data.shape = kShape;
  data.idf.assign(kShape.cells(), 1.0F);
  data.layer_mask.assign(kShape.layers.size(), 1);
  Rng rng(5);
  Signature signature;
  for (const uint32_t domain : domains) {
    EXPECT_TRUE(build_signature(request_of(domain, rng)->data, data.idf, data.layer_mask, signature));
    data.centroids.insert(data.centroids.end(), signature.begin(), signature.end());
  }
  return std::make_shared<const CohortModel>(*CohortModel::make(std::move(data)));
}

std::vector<uint32_t> first_rows(uint32_t count) {
  std::vector<uint32_t> out(count);
  std::iota(out.begin(), out.end(), 0U);
  return out;
}

RefitTask task_of(std::shared_ptr<const CohortModel> previous, std::vector<WindowEntry> window) {
  RefitTask task;
  task.fingerprint = "f";
  if (previous) task.owned = first_rows(static_cast<uint32_t>(previous->cohorts()));
  task.previous = std::move(previous);
  task.window = std::move(window);
  return task;
}

TEST(CountsWindow, DropsWhatIsOldAndWhatIsTooMuch) {
  CountsWindow window({.span_ms = 5s, .entries = 3});
  Rng rng(1);
  ManualClock clock;
  window.add(clock.now(), "f", request_of(0, rng));
  clock.advance(4s);
  window.add(clock.now(), "f", request_of(1, rng));
  EXPECT_EQ(window.size(), 2U);
  clock.advance(1s);
  window.drop_older_than_span(clock.now());
  EXPECT_EQ(window.size(), 2U);  // exactly 5 s old is still in
  clock.advance(1ms);
  window.drop_older_than_span(clock.now());
  EXPECT_EQ(window.size(), 1U);
  EXPECT_EQ(window.dropped(), 0U);
  for (int i = 0; i < 4; ++i) window.add(clock.now(), "g", request_of(2, rng));
  EXPECT_EQ(window.size(), 3U);
  EXPECT_EQ(window.dropped(), 2U);
  for (const WindowEntry& entry : window.entries()) EXPECT_EQ(entry.fingerprint, "g");
}

TEST(CountsWindow, HoldsNoMoreBytesThanAllowed) {
  const size_t one = sizeof(WindowEntry) + 1 + kShape.cells() * sizeof(uint32_t);
  CountsWindow window({.entries = 100, .bytes = 2 * one + 10});
  Rng rng(1);
  for (int i = 0; i < 5; ++i) window.add({}, "f", request_of(0, rng));
  EXPECT_EQ(window.size(), 2U);
  EXPECT_EQ(window.dropped(), 3U);
}

TEST(MostFrequentFingerprint, CountsAndBreaksTies) {
  Rng rng(1);
  std::vector<WindowEntry> window = {entry_of(0, rng, "b"), entry_of(0, rng, "a")};
  EXPECT_EQ(most_frequent_fingerprint({}), "");
  EXPECT_EQ(most_frequent_fingerprint(window), "a");
  window.push_back(entry_of(0, rng, "b"));
  EXPECT_EQ(most_frequent_fingerprint(window), "b");
}

TEST(Refit, FollowsTheTrafficAndKeepsIdentities) {
  // Domain 1 has gone, domain 3 has come; the others must keep their rows.
  const auto previous = model_of({0, 1, 2});
  const auto got = refit(task_of(previous, window_of({2, 3, 0}, 30)));
  ASSERT_TRUE(got.ok()) << got.error().message;
  EXPECT_EQ(got->model->cohorts(), 3U);
  EXPECT_EQ(nearest_row(*got->model, 0, {0, 1, 2}), 0U);
  EXPECT_EQ(nearest_row(*got->model, 3, {0, 1, 2}), 1U);
  EXPECT_EQ(nearest_row(*got->model, 2, {0, 1, 2}), 2U);
  ASSERT_EQ(got->shift.size(), 3U);
  EXPECT_LT(got->shift[0], 0.1);
  EXPECT_GT(got->shift[1], 0.5);
  EXPECT_LT(got->shift[2], 0.1);
  EXPECT_EQ(got->requests, 90U);
  EXPECT_EQ(got->model->data().idf, previous->data().idf);
  EXPECT_TRUE(got->newcomer_rows.empty());
}

TEST(Refit, SameTaskSameCohorts) {
  RefitTask task = task_of(model_of({0, 1}), window_of({0, 1, 2, 3}, 20));
  task.newcomers = 1;
  const auto a = refit(task), b = refit(task);
  ASSERT_TRUE(a.ok() && b.ok());
  EXPECT_EQ(a->model->data().centroids, b->model->data().centroids);
  EXPECT_EQ(a->newcomer_rows, b->newcomer_rows);
}

TEST(Refit, ANewcomerTakesHalfOfTheLargestCohortAndOthersStay) {
  // Row 1 serves two domains and so twice the requests.
  std::vector<WindowEntry> window = window_of({0, 2, 3}, 20);
  RefitTask task = task_of(model_of({0, 2}), std::move(window));
  // Make domain 3 nearest to row 1: the windows of experts do not overlap, so lean row 1 on both.
  CohortData data = task.previous->data();
  const auto three = model_of({3});
  double norm = 0;
  const size_t dims = task.previous->dims();
  for (size_t j = 0; j < dims; ++j) {
    float& x = data.centroids[dims + j];
    x += three->centroid(0)[j];
    norm += static_cast<double>(x) * static_cast<double>(x);
  }
  for (size_t j = 0; j < dims; ++j) data.centroids[dims + j] /= static_cast<float>(std::sqrt(norm));
  task.previous = std::make_shared<const CohortModel>(*CohortModel::make(std::move(data)));
  task.newcomers = 1;
  task.move_all = false;
  const auto got = refit(task);
  ASSERT_TRUE(got.ok()) << got.error().message;
  EXPECT_EQ(got->newcomer_rows, (std::vector<uint32_t>{2}));
  EXPECT_EQ(got->split_rows, (std::vector<uint32_t>{1}));
  EXPECT_EQ(got->shift[0], 0);  // the other cohort has not moved
  const std::set<uint32_t> halves = {nearest_row(*got->model, 2, {0, 1, 2}), nearest_row(*got->model, 3, {0, 1, 2})};
  EXPECT_EQ(halves, (std::set<uint32_t>{1, 2}));
  EXPECT_EQ(nearest_row(*got->model, 0, {0, 1, 2}), 0U);
}

TEST(Refit, RowsOfTheGoneAreReusedAndOthersKeepTheirs) {
  RefitTask task = task_of(model_of({0, 1, 2}), window_of({0, 2, 3}, 20));
  task.owned = {0, 2};
  auto got = refit(task);
  ASSERT_TRUE(got.ok());
  EXPECT_EQ(got->model->cohorts(), 3U);
  const auto row = task.previous->centroid(1), same = got->model->centroid(1);
  EXPECT_TRUE(std::equal(row.begin(), row.end(), same.begin()));  // nobody's: left as it is
  EXPECT_EQ(nearest_row(*got->model, 0, {0, 2}), 0U);
  EXPECT_EQ(nearest_row(*got->model, 2, {0, 2}), 2U);
  task.newcomers = 2;
  got = refit(task);
  ASSERT_TRUE(got.ok());
  EXPECT_EQ(got->newcomer_rows, (std::vector<uint32_t>{1, 3}));
  EXPECT_EQ(got->model->cohorts(), 4U);
}

TEST(Refit, FirstFitNeedsNoCohortFile) {
  RefitTask task;
  task.fingerprint = "f";
  task.idf_from_window = true;
  task.newcomers = 3;
  task.window = window_of({0, 1, 2}, 20);
  const auto got = refit(task);
  ASSERT_TRUE(got.ok()) << got.error().message;
  EXPECT_EQ(got->newcomer_rows, first_rows(3));
  EXPECT_TRUE(got->shift.empty());
  EXPECT_EQ(got->model->data().model_fingerprint, "f");
  EXPECT_EQ(got->model->data().layer_mask, (std::vector<uint8_t>{1, 1, 1}));
  std::set<uint32_t> rows;
  for (uint32_t domain = 0; domain < 3; ++domain) rows.insert(nearest_row(*got->model, domain, first_rows(3)));
  EXPECT_EQ(rows.size(), 3U);
  // The next one goes on from it, also for another model.
  RefitTask next = task;
  next.previous = got->model;
  next.owned = {0, 2};
  next.newcomers = 0;
  next.fingerprint = "g";
  for (WindowEntry& entry : next.window) entry.fingerprint = "g";
  const auto other = refit(next);
  ASSERT_TRUE(other.ok()) << other.error().message;
  EXPECT_EQ(other->model->data().model_fingerprint, "g");
  EXPECT_EQ(other->model->cohorts(), 3U);
  EXPECT_TRUE(other->shift.empty());
}

TEST(Refit, TooFewRequestsAreNoFit) {
  RefitTask task = task_of(model_of({0, 1, 2}), window_of({0, 1}, 1));
  const auto few = refit(task);
  ASSERT_FALSE(few.ok());
  EXPECT_EQ(few.error().code, ErrorCode::kUnavailable);
  EXPECT_NE(few.error().message.find("2 requests"), std::string::npos) << few.error().message;
  EXPECT_NE(few.error().message.find("3 needed for 3 cohorts"), std::string::npos) << few.error().message;
  task.window = window_of({0, 1, 2}, 3);
  EXPECT_TRUE(refit(task).ok());
  task.min_requests = 10;
  EXPECT_EQ(refit(task).error().code, ErrorCode::kUnavailable);
  task.window.clear();
  EXPECT_EQ(refit(task).error().code, ErrorCode::kUnavailable);
  task.idf_from_window = true;
  task.previous = nullptr;
  task.owned.clear();
  task.newcomers = 2;
  EXPECT_EQ(refit(task).error().code, ErrorCode::kUnavailable);
}

TEST(Refit, LeavesOutOtherModelsOtherShapesAndTheSilent) {
  RefitTask task = task_of(model_of({0, 1}), window_of({0, 1}, 10));
  Rng rng(3);
  task.window.push_back(entry_of(0, rng, "other"));
  task.window.push_back({{}, "f", std::make_shared<const ExpertCounts>(ExpertShape{{0}, 16, 2})});
  ExpertCounts cut(kShape);
  cut.data.pop_back();
  task.window.push_back({{}, "f", std::make_shared<const ExpertCounts>(std::move(cut))});
  task.window.push_back({{}, "f", std::make_shared<const ExpertCounts>(kShape)});  // no tokens
  const auto got = refit(task);
  ASSERT_TRUE(got.ok()) << got.error().message;
  EXPECT_EQ(got->requests, 20U);
  EXPECT_EQ(got->other_model, 1U);
  EXPECT_EQ(got->other_shape, 2U);
  EXPECT_EQ(got->zero_signatures, 1U);
}

TEST(Refit, AllZeroSignaturesAreAnErrorThatSaysSo) {
  RefitTask task = task_of(model_of({0, 1}), {});
  for (int i = 0; i < 8; ++i) task.window.push_back({{}, "f", std::make_shared<const ExpertCounts>(kShape)});
  const auto got = refit(task);
  ASSERT_FALSE(got.ok());
  EXPECT_EQ(got.error().code, ErrorCode::kInvalid);
  EXPECT_NE(got.error().message.find("none of the 8 requests"), std::string::npos) << got.error().message;
}

TEST(Refit, RefusesTasksThatContradictThemselves) {
  RefitTask task = task_of(model_of({0, 1}), window_of({0, 1}, 10));
  task.owned = {0, 2};
  EXPECT_FALSE(refit(task).ok());
  task.owned = {1, 0};
  EXPECT_FALSE(refit(task).ok());
  task.owned = {1, 1};
  EXPECT_FALSE(refit(task).ok());
  task.owned.clear();
  EXPECT_FALSE(refit(task).ok());  // for nobody
  task.owned = {0, 1};
  task.previous = nullptr;
  EXPECT_FALSE(refit(task).ok());
}

TEST(SplitLargest, NeedsTwoRequests) {
  const std::vector<float> centroids = {1, 0, 0, 1};
  const std::vector<float> one_each = {1, 0, 0, 1};
  EXPECT_EQ(split_largest(one_each, centroids, 2, 1).error().code, ErrorCode::kUnavailable);
  EXPECT_FALSE(split_largest({}, centroids, 2, 1).ok());
  const std::vector<float> alike = {0, 1, 0, 1, 1, 0};
  const auto split = split_largest(alike, centroids, 2, 1);
  ASSERT_TRUE(split.ok());
  EXPECT_EQ(split->row, 1U);
  EXPECT_EQ(split->kept, (std::vector<float>{0, 1}));
  EXPECT_EQ(split->given, (std::vector<float>{0, 1}));
}

TEST(Aligned, MinimisesTheMoveOfAllTogether) {
  // Row 0 is nearest to (1, 0), but giving that to row 1 is better for both together.
  const std::vector<float> old = {1, 0, 0.8F, -0.6F};
  const std::vector<float> fresh = {1, 0, 0.96F, 0.28F};
  EXPECT_EQ(aligned(old, fresh, 2), (std::vector<float>{0.96F, 0.28F, 1, 0}));
}

}  // namespace
}  // namespace kindred::expert

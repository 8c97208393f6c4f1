#include "expert/cohorts.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>

#include "base/rng.h"
#include "expert/kmeans.h"

namespace kindred::expert {
namespace {

CohortData sample() {
  CohortData data;
  data.model = "m";
  data.model_fingerprint = "f";
  data.shape = {.layers = {0, 1, 4}, .experts = 2, .top_k = 1};
  data.layer_mask = {1, 0, 1};
  data.idf = {1, 0.5F, 0, 0, 2, 1};
  data.centroids = {1, 0, 0, 0, /**/ 0, 0.6F, 0.8F, 0};
  data.greedy_layers = {4, 0};
  data.rho = {0.5, 0.625};
  data.seed = 7;
  data.samples = 99;
  return data;
}

TEST(CohortModel, RoundTrips) {
  const auto model = CohortModel::make(sample());
  ASSERT_TRUE(model.ok()) << model.error().message;
  const auto back = CohortModel::from_bytes(model->to_bytes());
  ASSERT_TRUE(back.ok()) << back.error().message;
  const CohortData expected = sample();
  EXPECT_EQ(back->cohorts(), 2U);
  EXPECT_EQ(back->dims(), 4U);
  EXPECT_EQ(back->data().centroids, expected.centroids);
  EXPECT_EQ(back->data().idf, expected.idf);
  EXPECT_EQ(back->data().layer_mask, expected.layer_mask);
  EXPECT_EQ(back->data().shape, expected.shape);
  EXPECT_EQ(back->data().model_fingerprint, "f");
  EXPECT_EQ(back->data().greedy_layers, expected.greedy_layers);
  EXPECT_EQ(back->data().rho, expected.rho);
  EXPECT_EQ(back->data().seed, 7U);
  EXPECT_EQ(back->data().samples, 99U);
}

TEST(CohortModel, SignatureAndSimilarities) {
  const auto model = CohortModel::make(sample());
  ASSERT_TRUE(model.ok());
  ExpertCounts counts(sample().shape);
  counts.tokens = 4;
  counts.data = {4, 0, 1, 3, 2, 2};
  Signature signature;
  ASSERT_EQ(model->signature(counts, signature), SignatureProblem::kNone);
  const double norm = std::sqrt(16 + 16 + 4);
  const std::vector<float> similarities = model->similarities(signature);
  ASSERT_EQ(similarities.size(), 2U);
  EXPECT_NEAR(similarities[0], 4 / norm, 1e-6);
  EXPECT_NEAR(similarities[1], 0.8 * 4 / norm, 1e-6);
}

TEST(CohortModel, SaysWhyThereIsNoSignature) {
  const auto model = CohortModel::make(sample());
  ASSERT_TRUE(model.ok());
  Signature signature;
  EXPECT_EQ(model->signature(ExpertCounts(sample().shape), signature), SignatureProblem::kZeroVector);
  ExpertShape other = sample().shape;
  other.layers = {0, 1, 3};
  EXPECT_EQ(model->signature(ExpertCounts(other), signature), SignatureProblem::kShapeMismatch);
  EXPECT_EQ(model->signature(ExpertCounts(), signature), SignatureProblem::kShapeMismatch);
  ExpertCounts cut(sample().shape);
  cut.data.pop_back();
  EXPECT_EQ(model->signature(cut, signature), SignatureProblem::kShapeMismatch);
}

TEST(CohortModel, GateTransformsNeedGates) {
  CohortData data = sample();
  data.transform = Transform::kGateIdf;
  const auto model = CohortModel::make(data);
  ASSERT_TRUE(model.ok());
  ExpertCounts counts(sample().shape);
  counts.tokens = 4;
  counts.data = {4, 0, 1, 3, 2, 2};
  Signature signature;
  EXPECT_EQ(model->signature(counts, signature), SignatureProblem::kNoGates);
  const std::vector<float> gate = {3, 1, 2, 2, 1, 3};
  EXPECT_EQ(model->signature(counts, signature, std::span(gate).first(4)), SignatureProblem::kShapeMismatch);
  ASSERT_EQ(model->signature(counts, signature, gate), SignatureProblem::kNone);
  const double norm = std::sqrt(9 + 0.25 + 4 + 9);  // gate * idf = 3, 0.5, -, -, 2, 3
  EXPECT_NEAR(signature[1], 0.5 / norm, 1e-6);
  EXPECT_NEAR(signature[3], 3 / norm, 1e-6);
}

TEST(CohortModel, EveryTransformGoesThroughTheFile) {
  for (const Transform transform : kTransforms) {
    CohortData data = sample();
    data.transform = transform;
    const std::string bytes = CohortModel::make(data)->to_bytes();
    EXPECT_NE(bytes.find('"' + file_spelling(transform) + '"'), std::string::npos);
    const auto back = CohortModel::from_bytes(bytes);
    ASSERT_TRUE(back.ok()) << back.error().message;
    EXPECT_EQ(back->data().transform, transform);
  }
  std::string bytes = CohortModel::make(sample())->to_bytes();
  bytes.replace(bytes.find("count_idf"), 9, "count_xyz");
  const auto refused = CohortModel::from_bytes(bytes);
  ASSERT_FALSE(refused.ok());
  EXPECT_NE(refused.error().message.find("count_xyz"), std::string::npos);
}

TEST(CohortModel, RefusesWhatDoesNotFitTogether) {
  const std::vector<std::pair<const char*, std::function<void(CohortData&)>>> changes = {
      {"no layers", [](CohortData& d) { d.shape.layers.clear(); }},
      {"descending", [](CohortData& d) { d.shape.layers = {1, 0, 4}; }},
      {"experts", [](CohortData& d) { d.shape.experts = 3; }},
      {"top_k", [](CohortData& d) { d.shape.top_k = 3; }},
      {"mask length", [](CohortData& d) { d.layer_mask.pop_back(); }},
      {"mask value", [](CohortData& d) { d.layer_mask[0] = 2; }},
      {"mask empty", [](CohortData& d) { d.layer_mask = {0, 0, 0}; }},
      {"idf length", [](CohortData& d) { d.idf.pop_back(); }},
      {"idf negative", [](CohortData& d) { d.idf[0] = -1; }},
      {"idf NaN", [](CohortData& d) { d.idf[0] = std::numeric_limits<float>::quiet_NaN(); }},
      {"no centroids", [](CohortData& d) { d.centroids.clear(); }},
      {"centroid row", [](CohortData& d) { d.centroids.pop_back(); }},
      {"centroid length", [](CohortData& d) { d.centroids[0] = 2; }},
      {"centroid NaN", [](CohortData& d) { d.centroids[0] = std::numeric_limits<float>::quiet_NaN(); }},
      {"kept layers", [](CohortData& d) { d.greedy_layers = {0}; }},
      {"rho", [](CohortData& d) { d.rho = {0.5}; }},
  };
  for (const auto& [what, change] : changes) {
    CohortData data = sample();
    change(data);
    EXPECT_FALSE(CohortModel::make(std::move(data)).ok()) << what;
  }
}

TEST(CohortModel, BentFilesAreErrors) {
  const std::string bytes = CohortModel::make(sample())->to_bytes();
  for (size_t size = 0; size < bytes.size(); ++size) EXPECT_FALSE(CohortModel::from_bytes(bytes.substr(0, size)).ok());
  Rng rng(5);
  for (int i = 0; i < 3000; ++i) {
    std::string bent = bytes;
    bent[rng.below(bent.size())] = static_cast<char>(rng.next());
    (void)CohortModel::from_bytes(std::move(bent));
  }
  const auto missing = CohortModel::load("/nonexistent/cohorts");
  ASSERT_FALSE(missing.ok());
  EXPECT_NE(missing.error().message.find("/nonexistent/cohorts"), std::string::npos);
}

// -------------------------------------------------------------------------------------------- k-means

std::vector<float> blobs(size_t clusters, size_t each, size_t dims, Rng& rng) {
  std::vector<float> out;
  for (size_t i = 0; i < clusters * each; ++i) {
    std::vector<double> row(dims);
    double norm = 0;
    for (size_t j = 0; j < dims; ++j) {
      row[j] = 0.1 * rng.uniform() + (j == i % clusters ? 1.0 : 0.0);
      norm += row[j] * row[j];
    }
    for (const double x : row) out.push_back(static_cast<float>(x / std::sqrt(norm)));
  }
  return out;
}

TEST(Kmeans, FindsSeparateClustersOfEqualSize) {
  Rng rng(1);
  const std::vector<float> data = blobs(5, 12, 8, rng);
  const auto got = balanced_spherical_kmeans({data, 8}, {.clusters = 5, .seed = 3});
  ASSERT_TRUE(got.ok());
  EXPECT_TRUE(got->converged);
  for (size_t i = 0; i < 60; ++i) EXPECT_EQ(got->assignment[i], got->assignment[i % 5]);
}

TEST(Kmeans, SameSeedSameResult) {
  Rng rng(1);
  const std::vector<float> data = blobs(3, 9, 6, rng);
  const auto a = balanced_spherical_kmeans({data, 6}, {.clusters = 4, .seed = 9});
  const auto b = balanced_spherical_kmeans({data, 6}, {.clusters = 4, .seed = 9});
  ASSERT_TRUE(a.ok() && b.ok());
  EXPECT_EQ(a->centroids, b->centroids);
  EXPECT_EQ(a->assignment, b->assignment);
}

TEST(Kmeans, TellsOfItsProgress) {
  const std::vector<float> data = {1, 0, 0, 1, 1, 0};
  std::vector<size_t> heard;
  ASSERT_TRUE(balanced_spherical_kmeans(
                  {data, 2}, {.clusters = 2, .restarts = 3, .on_restart = [&](size_t done) { heard.push_back(done); }})
                  .ok());
  EXPECT_EQ(heard, (std::vector<size_t>{1, 2, 3}));
}

TEST(Kmeans, IdenticalPointsAndTinySets) {
  const std::vector<float> same = {1, 0, 1, 0, 1, 0, 1, 0};
  const auto got = balanced_spherical_kmeans({same, 2}, {.clusters = 4});
  ASSERT_TRUE(got.ok());
  std::vector<uint32_t> sorted = got->assignment;
  std::sort(sorted.begin(), sorted.end());
  EXPECT_EQ(sorted, (std::vector<uint32_t>{0, 1, 2, 3}));
  EXPECT_NEAR(got->cost, 0, 1e-6);
  const std::vector<float> one = {0, 1};
  EXPECT_TRUE(balanced_spherical_kmeans({one, 2}, {.clusters = 1}).ok());
}

TEST(Kmeans, WithoutBalanceEachPointIsInItsNearestCluster) {
  // Ten points on one axis, two on another: balance would split the ten.
  std::vector<float> data;
  for (int i = 0; i < 12; ++i) data.insert(data.end(), {i < 10 ? 1.0F : 0.0F, i < 10 ? 0.0F : 1.0F});
  const auto vanilla = balanced_spherical_kmeans({data, 2}, {.clusters = 2, .capacity = {.balance = Balance::kNone}});
  ASSERT_TRUE(vanilla.ok());
  EXPECT_NEAR(vanilla->cost, 0, 1e-6);
  EXPECT_EQ(std::count(vanilla->assignment.begin(), vanilla->assignment.end(), vanilla->assignment[0]), 10);
  const auto balanced = balanced_spherical_kmeans({data, 2}, {.clusters = 2});
  EXPECT_EQ(std::count(balanced->assignment.begin(), balanced->assignment.end(), 0U), 6);
  EXPECT_GT(balanced->cost, 0.1);
}

TEST(Kmeans, BalancesWork) {
  // Two blobs of 30; the points of the first weigh five times as much.
  Rng rng(2);
  const std::vector<float> data = blobs(2, 30, 4, rng);
  std::vector<uint32_t> weights(60);
  for (size_t i = 0; i < 60; ++i) weights[i] = i % 2 == 0 ? 50 : 10;
  const auto got = balanced_spherical_kmeans(
      {data, 4}, {.clusters = 4, .capacity = {.balance = Balance::kWork, .weights = weights, .tolerance = 0.1}});
  ASSERT_TRUE(got.ok()) << got.error().message;
  std::vector<uint32_t> work(4, 0);
  for (size_t i = 0; i < 60; ++i) work[got->assignment[i]] += weights[i];
  for (const uint32_t w : work) EXPECT_LE(w, 1800 / 4 * 1.1);
}

TEST(Kmeans, RefusesWeightsThatDoNotFit) {
  const std::vector<float> data = {1, 0, 0, 1};
  const std::vector<uint32_t> zero = {1, 0}, one = {1}, good = {1, 1};
  const auto fits = [&](const std::vector<uint32_t>& weights, double tolerance) {
    return kmeans_from({data, 2}, {1, 0}, 5, {Balance::kWork, weights, tolerance}).ok();
  };
  EXPECT_TRUE(fits(good, 0));
  EXPECT_FALSE(fits(zero, 0));
  EXPECT_FALSE(fits(one, 0));
  EXPECT_FALSE(fits(good, -0.1));
  EXPECT_FALSE(fits(good, std::numeric_limits<double>::quiet_NaN()));
}

TEST(Kmeans, RefusesWhatCannotBe) {
  const std::vector<float> data = {1, 0, 0, 1};
  EXPECT_FALSE(balanced_spherical_kmeans({data, 2}, {.clusters = 3}).ok());
  EXPECT_FALSE(balanced_spherical_kmeans({data, 2}, {.clusters = 0}).ok());
  EXPECT_FALSE(balanced_spherical_kmeans({data, 3}, {.clusters = 1}).ok());
  EXPECT_FALSE(balanced_spherical_kmeans({data, 0}, {.clusters = 1}).ok());
  EXPECT_FALSE(kmeans_from({data, 2}, {1, 0, 0}).ok());
  EXPECT_FALSE(kmeans_from({data, 2}, {std::numeric_limits<float>::quiet_NaN(), 0}).ok());
}

}  // namespace
}  // namespace kindred::expert

// The published references' behaviour, from tests/data/golden. Tolerances are those of its README.
#include <gtest/gtest.h>

#include <cmath>

#include "base/json.h"
#include "expert/assign.h"
#include "base/golden_files.h"
#include "expert/kmeans.h"
#include "expert/signature.h"

namespace kindred::expert {
namespace {

using json = Json;

// ------------------------------------------------------------------------------------------ signature

void check_idf(const json& golden, std::vector<float>& idf) {
  const size_t requests = golden["N"];
  const size_t cells = golden["L"].get<size_t>() * golden["E"].get<size_t>();
  const std::vector<uint32_t> df = document_frequency(flat<uint32_t>(golden["prefill_counts"]), cells);
  EXPECT_EQ(df, flat<uint32_t>(golden["document_frequency"]));
  idf = inverse_document_frequency(df, requests);
  const auto expected = flat<double>(golden["idf"]);
  for (size_t c = 0; c < cells; ++c) ASSERT_NEAR(idf[c], expected[c], 1e-7 * std::max(1.0, expected[c])) << c;
}

void check_mask(const json& golden, std::span<const float> idf, LayerMask& mask) {
  const auto prefill = flat<uint32_t>(golden["prefill_counts"]);
  const auto decode = flat<uint32_t>(golden["decode_counts"]);
  const auto ends = golden["pairs"].get<std::vector<uint32_t>>();
  std::vector<RequestPair> pairs;
  for (size_t p = 0; p + 1 < ends.size(); p += 2) pairs.emplace_back(ends[p], ends[p + 1]);
  const size_t layers = golden["L"];
  mask = fit_layer_mask(
      {.prefill_counts = prefill, .decode_counts = decode, .idf = idf, .layers = layers, .experts = golden["E"]},
      pairs);

  EXPECT_EQ(mask.order, golden["greedy_order"].get<std::vector<uint32_t>>());
  for (size_t s = 0; s < layers; ++s) {
    EXPECT_NEAR(mask.rho[s], golden["rho_at_prefix"][s].get<double>(), 1e-4) << s;
    EXPECT_NEAR(mask.rho[s], golden["rho_at_prefix_f64"][s].get<double>(), 1e-4) << s;
    for (size_t l = 0; l < layers; ++l) {
      const json& expected = golden["rho_candidates"][s][l];
      const double got = mask.candidates[s * layers + l];
      ASSERT_EQ(expected.is_null(), std::isnan(got)) << s << " " << l;
      if (!expected.is_null()) {
        EXPECT_NEAR(got, expected.get<double>(), 1e-4) << s << " " << l;
      }
    }
  }
  EXPECT_EQ(mask.kept, golden["peak_length"].get<size_t>());
  EXPECT_NEAR(mask.peak_rho(), golden["peak_rho"].get<double>(), 1e-4);
  std::vector<uint32_t> kept;
  for (uint32_t l = 0; l < layers; ++l) {
    if (mask.mask[l] != 0) kept.push_back(l);
  }
  EXPECT_EQ(kept, golden["layer_mask"].get<std::vector<uint32_t>>());
}

void check_vector(const Signature& got, const json& expected) {
  ASSERT_EQ(got.size(), expected.size());
  for (size_t i = 0; i < got.size(); ++i) ASSERT_NEAR(got[i], expected[i].get<double>(), 1e-6) << i;
}

TEST(golden, eldr_signature) {
  for_each_golden("eldr_signature_", [](const json& golden) {
    std::vector<float> idf;
    check_idf(golden, idf);
    LayerMask mask;
    check_mask(golden, idf, mask);
    const size_t cells = idf.size();
    const auto prefill = flat<uint32_t>(golden["prefill_counts"]);
    const auto signature_of = [&](std::span<const uint32_t> counts) {
      Signature signature;
      build_signature(counts, idf, mask.mask, signature);
      return signature;
    };
    const auto of_request = [&](size_t i) {
      return signature_of(std::span<const uint32_t>(prefill).subspan(i * cells, cells));
    };
    for (size_t r = 0; r < golden["signature_requests"].size(); ++r) {
      check_vector(of_request(golden["signature_requests"][r]), golden["signatures"][r]);
    }
    for (size_t r = 0; r < golden["pair_cosine_requests"].size(); ++r) {
      const json& pair = golden["pair_cosine_requests"][r];
      EXPECT_NEAR(dot(of_request(pair[0]), of_request(pair[1])), golden["pair_cosine"][r].get<double>(), 1e-6);
    }
    for (size_t q = 0; q < golden["query_counts"].size(); ++q) {
      check_vector(signature_of(flat<uint32_t>(golden["query_counts"][q])), golden["query_signatures"][q]);
    }
  });
}

// --------------------------------------------------------------------------------------------- k-means

// How many points of each type each cluster has: equal points may be swapped freely.
std::vector<std::vector<int>> type_counts(const json& golden, const std::vector<uint32_t>& assignment) {
  const auto types = golden["point_type"].get<std::vector<size_t>>();
  const size_t most = *std::max_element(types.begin(), types.end());
  std::vector<std::vector<int>> counts(golden["k"].get<size_t>(), std::vector<int>(most + 1, 0));
  for (size_t i = 0; i < assignment.size(); ++i) ++counts[assignment[i]][types[i]];
  return counts;
}

void check_assignment(const json& golden, const std::vector<uint32_t>& got, const json& expected, const json& margin) {
  if (margin.is_number() && margin.get<double>() <= 1e-5) return;  // not a clear decision
  EXPECT_EQ(type_counts(golden, got), type_counts(golden, expected.get<std::vector<uint32_t>>()));
}

std::vector<float> unit_rows(std::vector<float> rows, size_t dims) {
  for (size_t begin = 0; begin < rows.size(); begin += dims) {
    double norm = 0;
    for (size_t j = begin; j < begin + dims; ++j) norm += static_cast<double>(rows[j]) * static_cast<double>(rows[j]);
    for (size_t j = begin; j < begin + dims; ++j) rows[j] = static_cast<float>(rows[j] / std::sqrt(norm));
  }
  return rows;
}

void check_steps(const json& golden, const Points& points, const std::vector<float>& starts) {
  std::vector<float> centroids = unit_rows(starts, points.dims);
  std::vector<uint32_t> assignment;
  for (size_t step = 0; step < golden["iterations"].get<size_t>(); ++step) {
    SCOPED_TRACE(step);
    const double cost = kmeans_step(points, centroids, assignment);
    EXPECT_NEAR(cost, golden["cost_at_iteration"][step].get<double>(), 1e-5);
    check_assignment(golden, assignment, golden["assignment_at_iteration"][step], golden["margin_at_iteration"][step]);
    if (step == 0) {
      EXPECT_NEAR(cost, golden["one_step_cost"].get<double>(), 1e-5);
      EXPECT_GE(cost, golden["one_step_cost_without_capacity"].get<double>() - 1e-5);
      check_assignment(golden, assignment, golden["one_step_assignment"], golden["one_step_margin"]);
    }
  }
}

void check_alignment(const json& golden, std::span<const float> starts, std::span<const float> centroids, size_t dims) {
  const size_t k = golden["k"];
  std::vector<double> similarity(k * k);
  for (size_t a = 0; a < k; ++a) {
    for (size_t b = 0; b < k; ++b) {
      similarity[a * k + b] =
          static_cast<double>(dot(starts.subspan(a * dims, dims), centroids.subspan(b * dims, dims)));
    }
  }
  const auto permutation = best_permutation(similarity, k);
  ASSERT_TRUE(permutation.ok());
  double total = 0, expected_total = 0;
  for (size_t r = 0; r < k; ++r) {
    total += similarity[r * k + (*permutation)[r]];
    expected_total += similarity[r * k + golden["align_to_C0"][r].get<size_t>()];
  }
  EXPECT_NEAR(total, expected_total, 1e-5);
}

TEST(golden, eldr_kmeans) {
  for_each_golden("eldr_kmeans_", [](const json& golden) {
    const auto data = flat<float>(golden["X"]);
    const auto starts = flat<float>(golden["C0"]);
    const Points points{data, golden["d"].get<size_t>()};
    check_steps(golden, points, starts);

    const Result<Clustering> got = kmeans_from(points, starts, golden["max_iterations"].get<uint32_t>());
    ASSERT_TRUE(got.ok());
    EXPECT_EQ(got->iterations, golden["iterations"].get<uint32_t>());
    EXPECT_EQ(got->converged, golden["converged"].get<bool>());
    EXPECT_NEAR(got->cost, golden["total_cosine_cost"].get<double>(), 1e-5);
    check_assignment(golden, got->assignment, golden["assignment"], golden["margin_at_iteration"].back());
    std::vector<uint32_t> sizes(golden["k"].get<size_t>(), 0);
    for (const uint32_t cluster : got->assignment) ++sizes[cluster];
    EXPECT_EQ(sizes, golden["cluster_sizes"].get<std::vector<uint32_t>>());
    const auto centroids = flat<double>(golden["centroids"]);
    ASSERT_EQ(got->centroids.size(), centroids.size());
    for (size_t c = 0; c < centroids.size(); ++c) ASSERT_NEAR(got->centroids[c], centroids[c], 1e-5) << c;
    check_alignment(golden, starts, got->centroids, points.dims);
  });
}

// ------------------------------------------------------------------------------------------ assignment

TEST(golden, assign) {
  for_each_golden("assign_", [](const json& golden) {
    const auto cost = flat<double>(golden["cost"]);
    const auto capacity = golden["capacity"].get<std::vector<uint32_t>>();
    const Result<Assignment> got = assign_rows(cost, capacity);
    ASSERT_TRUE(got.ok()) << got.error().message;
    ASSERT_EQ(got->column.size(), golden["n"].get<size_t>());
    const double optimum = golden["optimal_total"];
    EXPECT_NEAR(got->total, optimum, 1e-7 * std::max(1.0, std::abs(optimum)));
    std::vector<uint32_t> sizes(capacity.size(), 0);
    for (const uint32_t column : got->column) ++sizes[column];
    for (size_t c = 0; c < capacity.size(); ++c) EXPECT_LE(sizes[c], capacity[c]) << c;
    const json& margin = golden["unique_margin"];
    if (margin.is_null() || margin.get<double>() > 1e-6) {
      EXPECT_EQ(got->column, golden["an_optimal_assignment"].get<std::vector<uint32_t>>());
    }
  });
}

}  // namespace
}  // namespace kindred::expert

// Cohorts: clusters of signatures, one per decode worker, and the file that carries them from `fit` to
// the router.
//
// File (safetensors): centroids f32 [K, D], idf f32 [L, E], layer_mask u8 [L], D = kept layers * E.
// Metadata (strings): format "kindred.cohorts.v1", model, model_fingerprint, layers (JSON list of model
// layer indices), experts, top_k, transform (transform.h, with underscores: "count_idf"), kept_layers
// (JSON list, in the order the greedy choice took them), rho (JSON list beside it), seed, samples.
//
// Thread-safety: immutable after construction; share it freely.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "expert/counts.h"
#include "expert/signature.h"

namespace kindred::expert {

enum class SignatureProblem {
  kNone,
  kShapeMismatch,  // layers, experts or top_k differ from the cohorts'
  kZeroVector,     // every expert the request used in the kept layers has weight 0
  kNoGates,        // the cohorts were fitted on gate sums, and there are none
};

// The contents of a cohort file.
struct CohortData {
  std::string model;              // for people
  std::string model_fingerprint;  // cohorts hold for this model only; may be empty: unknown
  ExpertShape shape;
  std::vector<float> centroids;         // [K, D], rows of unit length
  std::vector<float> idf;               // [L, E], >= 0; read only by the transforms with idf
  std::vector<uint8_t> layer_mask;      // [L], 0 or 1
  std::vector<uint32_t> greedy_layers;  // model layer index of each kept layer, in the order chosen
  std::vector<double> rho;              // after each of them; empty if the mask was not fitted
  uint64_t seed = 0;
  uint64_t samples = 0;  // requests fitted on
  Transform transform = Transform::kCountIdf;
};

class CohortModel {
 public:
  // Checks shapes and values against each other. Error: kInvalid.
  static Result<CohortModel> make(CohortData data);
  // Error: kIo, kCorrupt (not safetensors), kInvalid (not a cohort file, or inconsistent).
  static Result<CohortModel> load(const std::string& path);
  static Result<CohortModel> from_bytes(std::string bytes);

  std::string to_bytes() const;
  Status save(const std::string& path) const;

  size_t cohorts() const { return data_.centroids.size() / dims_; }
  size_t dims() const { return dims_; }
  const CohortData& data() const { return data_; }
  std::span<const float> centroid(size_t k) const { return {data_.centroids.data() + k * dims_, dims_}; }

  // Writes the request's signature to `out`, which is only meaningful for kNone. `gate`: [L * E], or empty:
  // not known, which only matters to the transforms with gates.
  SignatureProblem signature(const ExpertCounts& counts, Signature& out, std::span<const float> gate = {}) const;

  // Cosine to each centroid, [K]. `signature`: dims() floats of unit length.
  std::vector<float> similarities(std::span<const float> signature) const;

 private:
  explicit CohortModel(CohortData data, size_t dims) : data_(std::move(data)), dims_(dims) {}

  CohortData data_;
  size_t dims_ = 0;
};

}  // namespace kindred::expert

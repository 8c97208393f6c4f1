#include "expert/cohorts.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/config.h"
#include "base/safetensors.h"
#include "expert/metadata.h"

namespace kindred::expert {
namespace {

constexpr std::string_view kCohortsFormat = "kindred.cohorts.v1";
constexpr double kUnitTolerance = 1e-3;  // of a centroid's norm; files may be written by other tools

Status check_centroids(const CohortData& data, size_t dims) {
  if (data.centroids.empty() || data.centroids.size() % dims != 0) {
    return invalid(
        fmt::format("{} centroid values are no rows of {} (kept layers x experts)", data.centroids.size(), dims),
        "centroids");
  }
  for (size_t begin = 0; begin < data.centroids.size(); begin += dims) {
    const std::span<const float> row(data.centroids.data() + begin, dims);
    const double norm = std::sqrt(static_cast<double>(dot(row, row)));
    if (!(std::abs(norm - 1.0) <= kUnitTolerance)) {  // also catches NaN
      return invalid(fmt::format("centroid {} has length {}, not 1", begin / dims, norm), "centroids");
    }
  }
  return {};
}

Status check_greedy_layers(const CohortData& data, size_t kept) {
  if (!data.greedy_layers.empty() && data.greedy_layers.size() != kept) {
    return invalid(fmt::format("kept_layers lists {} layers, layer_mask keeps {}", data.greedy_layers.size(), kept),
                   "kept_layers");
  }
  if (!data.rho.empty() && data.rho.size() != data.greedy_layers.size()) {
    return invalid("rho and kept_layers differ in length", "rho");
  }
  return {};
}

Result<CohortData> read_data(const Safetensors& file) {
  CohortData data;
  const Result<std::string> transform = file.metadata("transform");
  if (!transform) return transform.error();
  const Result<Transform> parsed = parse_transform(*transform);
  if (!parsed) return parsed.error();
  data.transform = *parsed;
  if (Result<std::string> model = file.metadata("model"); model.ok()) data.model = *std::move(model);
  if (Result<std::string> print = file.metadata("model_fingerprint"); print.ok()) {
    data.model_fingerprint = *std::move(print);
  }
  Result<std::vector<uint32_t>> layers = metadata_indices(file, "layers");
  if (!layers) return std::move(layers).error();
  const Result<uint64_t> experts = file.metadata_number("experts");
  if (!experts) return experts.error();
  const Result<uint64_t> top_k = file.metadata_number("top_k");
  if (!top_k) return top_k.error();
  constexpr uint64_t kMost = std::numeric_limits<uint32_t>::max();
  if (*experts > kMost || *top_k > kMost) return invalid("experts or top_k out of range", "experts");
  data.shape.layers = *std::move(layers);
  data.shape.experts = static_cast<uint32_t>(*experts);
  data.shape.top_k = static_cast<uint32_t>(*top_k);

  Result<std::vector<uint32_t>> greedy = metadata_indices(file, "kept_layers");
  if (!greedy) return std::move(greedy).error();
  Result<std::vector<double>> rho = metadata_reals(file, "rho");
  if (!rho) return std::move(rho).error();
  data.greedy_layers = *std::move(greedy);
  data.rho = *std::move(rho);
  if (const Result<uint64_t> seed = file.metadata_number("seed"); seed.ok()) data.seed = *seed;
  if (const Result<uint64_t> samples = file.metadata_number("samples"); samples.ok()) data.samples = *samples;
  return data;
}

Result<CohortModel> read_cohorts(const Safetensors& file) {
  if (const Result<std::string> format = file.metadata("format"); !format.ok() || *format != kCohortsFormat) {
    return invalid(fmt::format("not a cohort file: metadata 'format' is not {}", kCohortsFormat), "format");
  }
  Result<CohortData> data = read_data(file);
  if (!data) return std::move(data).error();
  Result<std::vector<float>> centroids = file.read<float>("centroids", 2);
  if (!centroids) return std::move(centroids).error();
  Result<std::vector<float>> idf = file.read<float>("idf", 2);
  if (!idf) return std::move(idf).error();
  Result<std::vector<uint8_t>> mask = file.read<uint8_t>("layer_mask", 1);
  if (!mask) return std::move(mask).error();
  const auto kept = static_cast<uint64_t>(std::count(mask->begin(), mask->end(), 1));
  if (file.find("centroids")->shape[1] != kept * data->shape.experts) {
    return invalid(fmt::format("centroids have {} columns, layer_mask and experts ask for {}",
                               file.find("centroids")->shape[1], kept * data->shape.experts),
                   "centroids");
  }
  if (file.find("idf")->shape[1] != data->shape.experts) return invalid("idf is not [layers, experts]", "idf");
  data->centroids = *std::move(centroids);
  data->idf = *std::move(idf);
  data->layer_mask = *std::move(mask);
  return CohortModel::make(*std::move(data));
}

}  // namespace

Result<CohortModel> CohortModel::make(CohortData data) {
  const Result<ExpertShape> sane = checked_shape(data.shape);
  if (!sane) return sane.error();
  const size_t layers = data.shape.layers.size();
  if (data.layer_mask.size() != layers ||
      !std::all_of(data.layer_mask.begin(), data.layer_mask.end(), [](uint8_t kept) { return kept <= 1; })) {
    return invalid(fmt::format("layer_mask is not {} values of 0 or 1", layers), "layer_mask");
  }
  const auto kept = static_cast<size_t>(std::count(data.layer_mask.begin(), data.layer_mask.end(), 1));
  if (kept == 0) return invalid("layer_mask keeps no layer", "layer_mask");
  if (data.idf.size() != data.shape.cells() ||
      !std::all_of(data.idf.begin(), data.idf.end(), [](float w) { return w >= 0 && std::isfinite(w); })) {
    return invalid("idf is not [layers, experts] of finite values >= 0", "idf");
  }
  const size_t dims = kept * data.shape.experts;
  if (Status good = check_centroids(data, dims); !good) return std::move(good).error();
  if (Status good = check_greedy_layers(data, kept); !good) return std::move(good).error();
  return CohortModel(std::move(data), dims);
}

Result<CohortModel> CohortModel::from_bytes(std::string bytes) {
  const Result<Safetensors> file = Safetensors::parse(std::move(bytes));
  if (!file) return file.error();
  return read_cohorts(*file);
}

Result<CohortModel> CohortModel::load(const std::string& path) {
  const Result<Safetensors> file = Safetensors::load(path);
  if (!file) return file.error();
  Result<CohortModel> model = read_cohorts(*file);
  if (!model) {
    Error error = std::move(model).error();
    error.message = path + ": " + error.message;
    return error;
  }
  return model;
}

std::string CohortModel::to_bytes() const {
  const uint64_t layers = data_.shape.layers.size();
  SafetensorsWriter writer;
  writer.metadata("format", std::string(kCohortsFormat));
  writer.metadata("transform", file_spelling(data_.transform));
  writer.metadata("model", data_.model);
  writer.metadata("model_fingerprint", data_.model_fingerprint);
  writer.metadata("layers", to_json(std::span<const uint32_t>(data_.shape.layers)));
  writer.metadata("experts", fmt::to_string(data_.shape.experts));
  writer.metadata("top_k", fmt::to_string(data_.shape.top_k));
  writer.metadata("kept_layers", to_json(std::span<const uint32_t>(data_.greedy_layers)));
  writer.metadata("rho", to_json(std::span<const double>(data_.rho)));
  writer.metadata("seed", fmt::to_string(data_.seed));
  writer.metadata("samples", fmt::to_string(data_.samples));
  writer.tensor<float>("centroids", {cohorts(), dims_}, data_.centroids);
  writer.tensor<float>("idf", {layers, data_.shape.experts}, data_.idf);
  writer.tensor<uint8_t>("layer_mask", {layers}, data_.layer_mask);
  return writer.finish();
}

Status CohortModel::save(const std::string& path) const { return write_file(path, to_bytes()); }

SignatureProblem CohortModel::signature(const ExpertCounts& counts, Signature& out, std::span<const float> gate) const {
  if (counts.shape != data_.shape || counts.data.size() != data_.shape.cells()) return SignatureProblem::kShapeMismatch;
  if (uses_gates(data_.transform)) {
    if (gate.empty()) return SignatureProblem::kNoGates;
    if (gate.size() != data_.shape.cells()) return SignatureProblem::kShapeMismatch;
  }
  const PromptProfile profile{.counts = counts.data, .gate = gate};
  return build_signature(data_.transform, profile, data_.idf, data_.layer_mask, out) ? SignatureProblem::kNone
                                                                                     : SignatureProblem::kZeroVector;
}

std::vector<float> CohortModel::similarities(std::span<const float> signature) const {
  KINDRED_CHECK(signature.size() == dims_);
  std::vector<float> out(cohorts());
  dots(signature, data_.centroids, out);
  return out;
}

}  // namespace kindred::expert

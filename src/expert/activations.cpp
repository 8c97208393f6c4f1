#include "expert/activations.h"

#include <fmt/format.h>

#include <cmath>
#include <limits>

#include "base/config.h"
#include "base/safetensors.h"
#include "expert/metadata.h"

namespace kindred::expert {
namespace {

constexpr std::string_view kActivationsFormat = "kindred.activations.v1";
constexpr double kGateSlack = 1e-3;  // f32 sums over long prompts

// Rows of one request: every count at most `tokens`, every sum tokens * top_k.
Status check_rows(const ExpertShape& shape, std::span<const uint32_t> cells, uint64_t tokens, std::string_view what,
                  size_t request) {
  for (size_t l = 0; l < shape.layers.size(); ++l) {
    uint64_t sum = 0;
    for (const uint32_t count : cells.subspan(l * shape.experts, shape.experts)) {
      sum += count;
      if (count > tokens) {
        return invalid(fmt::format("{} of request {}, layer {}: a count of {} for {} tokens", what, request,
                                   shape.layers[l], count, tokens),
                       std::string(what));
      }
    }
    if (sum != tokens * shape.top_k) {
      return invalid(fmt::format("{} of request {}, layer {}: the counts sum to {}, not to {} tokens x top_k {}", what,
                                 request, shape.layers[l], sum, tokens, shape.top_k),
                     std::string(what));
    }
  }
  return {};
}

// Gate sums of one request: T probabilities add up to no more than T, but for rounding.
Status check_gates(const ExpertShape& shape, std::span<const float> gate, uint64_t tokens, size_t request) {
  const double most = static_cast<double>(tokens) * (1 + kGateSlack);
  for (size_t c = 0; c < gate.size(); ++c) {
    const auto value = static_cast<double>(gate[c]);
    if (value >= 0 && value <= most) continue;  // false for NaN
    return invalid(fmt::format("prefill_gate of request {}, layer {}: a gate sum of {}; accepted: 0 to {} (its prompt "
                               "tokens)",
                               request, shape.layers[c / shape.experts], value, tokens),
                   "prefill_gate");
  }
  return {};
}

// [N, L, E] with the N and, once known, the shape of what was read before.
template <class T>
Result<std::vector<T>> read_cells(const Safetensors& file, std::string_view name, size_t requests,
                                  const ExpertShape& shape) {
  Result<std::vector<T>> counts = file.read<T>(name, 3);
  if (!counts) return counts;
  const std::vector<uint64_t>& dims = file.find(name)->shape;
  const std::vector<uint64_t> wanted = {requests, shape.layers.size(), shape.experts};
  if (dims != wanted) {
    return invalid(fmt::format("tensor '{}' has shape [{}]; prompt_tokens and metadata ask for [{}]", name,
                               fmt::join(dims, ", "), fmt::join(wanted, ", ")),
                   std::string(name));
  }
  return counts;
}

Result<ExpertShape> read_shape(const Safetensors& file) {
  ExpertShape shape;
  Result<std::vector<uint32_t>> layers = metadata_indices(file, "layers");
  if (!layers) return std::move(layers).error();
  const Result<uint64_t> top_k = file.metadata_number("top_k");
  if (!top_k) return top_k.error();
  const Safetensors::Tensor* prefill = file.find("prefill_counts");
  if (prefill == nullptr || prefill->shape.size() != 3) {
    return invalid("tensor 'prefill_counts' is missing or not of three dimensions", "prefill_counts");
  }
  constexpr uint64_t kMost = std::numeric_limits<uint32_t>::max();
  if (prefill->shape[2] > kMost || *top_k > kMost) return invalid("experts or top_k out of range", "experts");
  shape.layers = *std::move(layers);
  shape.experts = static_cast<uint32_t>(prefill->shape[2]);
  shape.top_k = static_cast<uint32_t>(*top_k);
  return checked_shape(std::move(shape));
}

Result<Activations> read_activations(const Safetensors& file) {
  if (const Result<std::string> format = file.metadata("format"); !format.ok() || *format != kActivationsFormat) {
    return invalid(fmt::format("not an activations file: metadata 'format' is not {}", kActivationsFormat), "format");
  }
  Activations out;
  if (Result<std::string> model = file.metadata("model"); model.ok()) out.model = *std::move(model);
  if (Result<std::string> print = file.metadata("model_fingerprint"); print.ok()) {
    out.model_fingerprint = *std::move(print);
  }
  Result<ExpertShape> shape = read_shape(file);
  if (!shape) return std::move(shape).error();
  out.shape = *std::move(shape);

  Result<std::vector<uint32_t>> prompt = file.read<uint32_t>("prompt_tokens", 1);
  if (!prompt) return std::move(prompt).error();
  Result<std::vector<uint32_t>> decode = file.read<uint32_t>("decode_tokens", 1);
  if (!decode) return std::move(decode).error();
  out.prompt_tokens = *std::move(prompt);
  out.decode_tokens = *std::move(decode);
  Result<std::vector<uint32_t>> prefill = read_cells<uint32_t>(file, "prefill_counts", out.requests(), out.shape);
  if (!prefill) return std::move(prefill).error();
  out.prefill_counts = *std::move(prefill);
  if (file.has("decode_counts")) {
    Result<std::vector<uint32_t>> counts = read_cells<uint32_t>(file, "decode_counts", out.requests(), out.shape);
    if (!counts) return std::move(counts).error();
    out.decode_counts = *std::move(counts);
  }
  if (file.has("prefill_gate")) {
    Result<std::vector<float>> gate = read_cells<float>(file, "prefill_gate", out.requests(), out.shape);
    if (!gate) return std::move(gate).error();
    out.prefill_gate = *std::move(gate);
  }
  Result<std::vector<std::string>> domains = metadata_strings(file, "domains");
  if (!domains) return std::move(domains).error();
  out.domains = *std::move(domains);
  if (Status good = out.check(); !good) return std::move(good).error();
  return out;
}

Error in_file(const std::string& path, Error error) {
  error.message = path + ": " + error.message;
  return error;
}

}  // namespace

Status Activations::append(const ExpertCounts& prefill_of, const ExpertCounts* decode_of, std::string_view domain,
                           std::span<const float> gate_of) {
  constexpr uint64_t kMostTokens = std::numeric_limits<uint32_t>::max();
  const bool first = requests() == 0;
  const ExpertShape& wanted = first ? prefill_of.shape : shape;
  const Result<ExpertShape> sane = checked_shape(wanted);
  if (!sane) return sane.error();
  if (prefill_of.shape != wanted || (decode_of != nullptr && decode_of->shape != wanted)) {
    return invalid("counts of another shape than those recorded before", "shape");
  }
  if (!first && (decode_of != nullptr) != has_decode()) {
    return invalid("decode counts must be there for all requests or for none", "decode_counts");
  }
  if (!first && domain.empty() == has_domains()) {
    return invalid("domain labels must be there for all requests or for none", "domains");
  }
  if (!first && gate_of.empty() == has_gates()) {
    return invalid("gate sums must be there for all requests or for none", "prefill_gate");
  }
  if (!gate_of.empty() && gate_of.size() != wanted.cells()) {
    return invalid(fmt::format("{} gate sums for {} cells", gate_of.size(), wanted.cells()), "prefill_gate");
  }
  const uint64_t decoded = decode_of == nullptr ? 0 : decode_of->tokens;
  if (prefill_of.tokens == 0 || prefill_of.tokens > kMostTokens || decoded > kMostTokens) {
    return invalid(fmt::format("{} prompt tokens and {} decode tokens", prefill_of.tokens, decoded), "tokens");
  }
  if (prefill_of.data.size() != wanted.cells() || (decode_of != nullptr && decode_of->data.size() != wanted.cells())) {
    return invalid("counts do not fill their shape", "shape");
  }
  Status good = check_rows(wanted, prefill_of.data, prefill_of.tokens, "prefill_counts", requests());
  if (good.ok() && decode_of != nullptr) {
    good = check_rows(wanted, decode_of->data, decoded, "decode_counts", requests());
  }
  if (good.ok()) good = check_gates(wanted, gate_of, prefill_of.tokens, requests());
  if (!good) return good;

  if (first) shape = prefill_of.shape;
  prompt_tokens.push_back(static_cast<uint32_t>(prefill_of.tokens));
  decode_tokens.push_back(static_cast<uint32_t>(decoded));
  prefill_counts.insert(prefill_counts.end(), prefill_of.data.begin(), prefill_of.data.end());
  if (decode_of != nullptr) decode_counts.insert(decode_counts.end(), decode_of->data.begin(), decode_of->data.end());
  prefill_gate.insert(prefill_gate.end(), gate_of.begin(), gate_of.end());
  if (!domain.empty()) domains.emplace_back(domain);
  return {};
}

Status Activations::check() const {
  if (requests() == 0) return invalid("no requests", "prompt_tokens");
  const Result<ExpertShape> sane = checked_shape(shape);
  if (!sane) return sane.error();
  if (decode_tokens.size() != requests()) {
    return invalid(fmt::format("{} prompt_tokens, but {} decode_tokens", requests(), decode_tokens.size()),
                   "decode_tokens");
  }
  const size_t cells = requests() * shape.cells();
  if (prefill_counts.size() != cells || (has_decode() && decode_counts.size() != cells)) {
    return invalid("counts do not fill [requests, layers, experts]", "prefill_counts");
  }
  if (has_gates() && prefill_gate.size() != cells) {
    return invalid("gate sums do not fill [requests, layers, experts]", "prefill_gate");
  }
  if (has_domains() && domains.size() != requests()) {
    return invalid(fmt::format("{} domain labels for {} requests", domains.size(), requests()), "domains");
  }
  for (size_t i = 0; i < requests(); ++i) {
    if (prompt_tokens[i] == 0) return invalid(fmt::format("request {} has no prompt tokens", i), "prompt_tokens");
    Status good = check_rows(shape, prefill(i), prompt_tokens[i], "prefill_counts", i);
    if (good.ok() && has_decode()) good = check_rows(shape, decode(i), decode_tokens[i], "decode_counts", i);
    if (good.ok() && has_gates()) good = check_gates(shape, gate(i), prompt_tokens[i], i);
    if (!good) return good;
  }
  return {};
}

Result<Activations> activations_from_bytes(std::string bytes) {
  const Result<Safetensors> file = Safetensors::parse(std::move(bytes));
  if (!file) return file.error();
  return read_activations(*file);
}

Result<Activations> load_activations(const std::string& path) {
  const Result<Safetensors> file = Safetensors::load(path);
  if (!file) return file.error();
  Result<Activations> activations = read_activations(*file);
  if (!activations) return in_file(path, std::move(activations).error());
  return activations;
}

Status save_activations(const Activations& activations, const std::string& path) {
  if (const Status good = activations.check(); !good) return in_file(path, good.error());
  const ExpertShape& shape = activations.shape;
  const uint64_t requests = activations.requests();
  const std::vector<uint64_t> dims = {requests, shape.layers.size(), shape.experts};
  SafetensorsWriter writer;
  writer.metadata("format", std::string(kActivationsFormat));
  writer.metadata("model", activations.model);
  writer.metadata("model_fingerprint", activations.model_fingerprint);
  writer.metadata("layers", to_json(std::span<const uint32_t>(shape.layers)));
  writer.metadata("top_k", fmt::to_string(shape.top_k));
  if (activations.has_domains()) {
    writer.metadata("domains", to_json(std::span<const std::string>(activations.domains)));
  }
  writer.tensor<uint32_t>("prefill_counts", dims, activations.prefill_counts);
  if (activations.has_decode()) writer.tensor<uint32_t>("decode_counts", dims, activations.decode_counts);
  if (activations.has_gates()) writer.tensor<float>("prefill_gate", dims, activations.prefill_gate);
  writer.tensor<uint32_t>("prompt_tokens", {requests}, activations.prompt_tokens);
  writer.tensor<uint32_t>("decode_tokens", {requests}, activations.decode_tokens);
  return write_file(path, writer.finish());
}

}  // namespace kindred::expert

// Processes that replay recorded requests.
#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <numeric>

#include "base/json.h"
#include "base/rng.h"
#include "sim/expert_process.h"
#include "sim/text_file.h"

namespace kindred::sim {
namespace {

constexpr uint32_t kMostRecordedTape = 512;  // tokens; a longer decode is represented by as many
constexpr size_t kMostRequests = 1'000'000;

struct Recorded {
  std::shared_ptr<const expert::ExpertCounts> prompt;
  std::shared_ptr<const ExpertTape> decode;
  uint32_t domain = 0;
};

class Replay final : public ExpertProcess {
 public:
  Replay(expert::ExpertShape shape, std::vector<std::string> domains, std::vector<Recorded> requests, uint64_t seed)
      : shape_(std::move(shape)), domains_(std::move(domains)), requests_(std::move(requests)), seed_(seed) {
    of_domain_.resize(domains_.size());
    for (uint32_t i = 0; i < requests_.size(); ++i) of_domain_[requests_[i].domain].push_back(i);
  }

  const expert::ExpertShape& shape() const override { return shape_; }
  const std::vector<std::string>& domains() const override { return domains_; }
  uint32_t recorded() const override { return static_cast<uint32_t>(requests_.size()); }

  RequestExperts experts(const TraceRequest& request, uint64_t number) override {
    const double draw = uniform_at(seed_, number);
    size_t row = 0;
    if (request.expert_profile >= 0) {
      row = static_cast<size_t>(request.expert_profile) % requests_.size();
    } else if (request.domain >= 0) {
      const std::vector<uint32_t>& rows = of_domain_[static_cast<size_t>(request.domain) % of_domain_.size()];
      row = rows[static_cast<size_t>(draw * static_cast<double>(rows.size()))];
    } else {
      row = static_cast<size_t>(draw * static_cast<double>(requests_.size()));
    }
    const Recorded& recorded = requests_[row];
    return {.prompt = recorded.prompt, .decode = recorded.decode, .first = 0, .domain = recorded.domain};
  }

 private:
  expert::ExpertShape shape_;
  std::vector<std::string> domains_;
  std::vector<Recorded> requests_;
  std::vector<std::vector<uint32_t>> of_domain_;  // none is empty
  uint64_t seed_;
};

void shuffle(std::vector<uint32_t>& values, Rng& rng) {
  for (size_t i = values.size(); i > 1; --i) std::swap(values[i - 1], values[rng.below(i)]);
}

// Tokens that use the experts as often as `counts` [L, E] says, in an order of chance. Dealing out an expert's uses
// to consecutive tokens, around the end, never gives a token the same one twice, since none was used by more tokens
// than there are.
std::shared_ptr<const ExpertTape> tape_from_counts(const expert::ExpertShape& shape, std::span<const uint32_t> counts,
                                                   uint32_t tokens, Rng& rng) {
  const uint32_t kept = std::min(tokens, kMostRecordedTape);
  auto tape = std::make_shared<ExpertTape>(shape, kept);
  std::vector<uint32_t> experts(shape.experts), order(tokens);
  std::iota(experts.begin(), experts.end(), 0);
  std::iota(order.begin(), order.end(), 0);
  for (uint32_t l = 0; l < shape.layers.size(); ++l) {
    shuffle(experts, rng);
    shuffle(order, rng);
    uint64_t dealt = 0;
    for (const uint32_t expert : experts) {
      for (uint32_t use = counts[l * shape.experts + expert]; use > 0; --use) {
        const uint32_t token = order[dealt++ % tokens];
        if (token < kept) tape->set(token, l, expert);
      }
    }
  }
  return tape;
}

uint32_t domain_index(std::vector<std::string>& domains, const std::string& name) {
  const auto found = std::find(domains.begin(), domains.end(), name);
  if (found != domains.end()) return static_cast<uint32_t>(found - domains.begin());
  domains.push_back(name);
  return static_cast<uint32_t>(domains.size() - 1);
}

struct IndexLine {
  uint64_t offset = 0;
  uint32_t tokens = 0;
  std::string domain;
};

Result<std::vector<IndexLine>> read_index(const std::string& path) {
  const Result<std::string> text = read_text(path);
  if (!text) return text.error();
  std::vector<IndexLine> lines;
  size_t number = 0;
  for (size_t begin = 0; begin < text->size();) {
    ++number;
    const size_t end = std::min(text->find('\n', begin), text->size());
    const Json line = parse_json(std::string_view(*text).substr(begin, end - begin));
    begin = end + 1;
    const auto wrong = [&](const char* field, const char* accepted) {
      return invalid(fmt::format("{}: line {}: {} is missing or wrong; accepted: {}", path, number, field, accepted),
                     field);
    };
    if (!line.is_object()) return wrong("line", "one JSON object");
    if (lines.size() == kMostRequests) return wrong("line", "at most a million lines");
    const auto whole = [&line](const char* field) { return line.contains(field) && line[field].is_number_unsigned(); };
    if (!whole("token_offset")) return wrong("token_offset", "a whole number");
    if (!whole("decode_tokens") || line["decode_tokens"].get<uint64_t>() > UINT32_MAX) {
      return wrong("decode_tokens", "a whole number");
    }
    if (!line.contains("domain") || !line["domain"].is_string()) return wrong("domain", "a text");
    lines.push_back({line["token_offset"].get<uint64_t>(), line["decode_tokens"].get<uint32_t>(),
                     line["domain"].get<std::string>()});
  }
  return lines;
}

}  // namespace

Result<std::unique_ptr<ExpertProcess>> make_recorded(const expert::Activations& activations, uint64_t seed) {
  if (!activations.has_decode()) {
    return invalid("activations: no decode counts were recorded, so nothing is known of generated tokens",
                   "activations");
  }
  std::vector<std::string> domains;
  std::vector<Recorded> requests;
  Rng rng(seed);
  for (size_t i = 0; i < activations.requests(); ++i) {
    // A request that generated nothing has no tape.
    if (activations.decode_tokens[i] == 0) continue;
    Recorded recorded;
    auto prompt = std::make_shared<expert::ExpertCounts>(activations.shape);
    prompt->tokens = activations.prompt_tokens[i];
    const auto cells = activations.prefill(i);
    prompt->data.assign(cells.begin(), cells.end());
    recorded.prompt = std::move(prompt);
    recorded.decode = tape_from_counts(activations.shape, activations.decode(i), activations.decode_tokens[i], rng);
    recorded.domain = domain_index(domains, activations.has_domains() ? activations.domains[i] : "all");
    requests.push_back(std::move(recorded));
  }
  if (requests.empty()) return invalid("activations: no request generated a token", "activations");
  return std::unique_ptr<ExpertProcess>(
      std::make_unique<Replay>(activations.shape, std::move(domains), std::move(requests), seed));
}

Result<std::unique_ptr<ExpertProcess>> load_token_decisions(const std::string& folder, const TokenFileShape& of,
                                                            uint64_t seed) {
  const std::filesystem::path base(folder);
  std::error_code ignored;
  const bool plain = std::filesystem::exists(base / "experts.u8", ignored);
  const std::string path = (base / (plain ? "experts.u8" : "experts.u8.xz")).string();
  const std::string index_path = (base / "index.jsonl").string();
  const Result<std::string> bytes = read_text(path);
  if (!bytes) return bytes.error();
  const Result<std::vector<IndexLine>> index = read_index(index_path);
  if (!index) return index.error();

  expert::ExpertShape shape{.layers = std::vector<uint32_t>(of.layers), .experts = of.experts, .top_k = of.top_k};
  std::iota(shape.layers.begin(), shape.layers.end(), 0);
  const size_t row = size_t{of.layers} * of.top_k;
  std::vector<std::string> domains;
  std::vector<Recorded> requests;
  for (size_t i = 0; i < index->size(); ++i) {
    const IndexLine& line = (*index)[i];
    if (line.tokens < 2) continue;  // one to stand for the prompt, one to generate
    if (line.offset > bytes->size() / row || line.tokens > bytes->size() / row - line.offset) {
      return invalid(
          fmt::format(
              "{}: line {}: token_offset and decode_tokens reach beyond the {} tokens of {}, if the model has {} MoE "
              "layers and top {}",
              index_path, i + 1, bytes->size() / row, path, of.layers, of.top_k),
          "token_offset");
    }
    const uint32_t prompt_tokens = std::min(of.prompt_tokens, line.tokens / 2);
    auto prompt = std::make_shared<expert::ExpertCounts>(shape);
    prompt->tokens = prompt_tokens;
    auto tape = std::make_shared<ExpertTape>(shape, line.tokens - prompt_tokens);
    for (uint32_t t = 0; t < line.tokens; ++t) {
      for (size_t at = 0; at < row; ++at) {
        const auto expert = static_cast<uint8_t>((*bytes)[(line.offset + t) * row + at]);
        const auto layer = static_cast<uint32_t>(at / of.top_k);
        if (expert >= of.experts) {
          return Error{ErrorCode::kCorrupt, fmt::format("{}: token {}, layer {}: expert {}; the model has {}", path,
                                                        line.offset + t, layer, expert, of.experts)};
        }
        if (t < prompt_tokens) ++prompt->data[layer * of.experts + expert];
        else tape->set(t - prompt_tokens, layer, expert);
      }
    }
    requests.push_back({std::move(prompt), std::move(tape), domain_index(domains, line.domain)});
  }
  if (requests.empty()) return invalid(fmt::format("{}: no request of at least two tokens", index_path));
  return std::unique_ptr<ExpertProcess>(
      std::make_unique<Replay>(std::move(shape), std::move(domains), std::move(requests), seed));
}

}  // namespace kindred::sim

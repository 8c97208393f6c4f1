// The reader of SGLang's routed_experts: what is accepted is conserved, wherever the answer was cut.
#include <numeric>
#include <string_view>

#include "fuzz.h"
#include "router/routed_experts.h"

using namespace kindred;
using router::RoutedExpertsReader;

namespace {

constexpr router::RoutedShape kShape = {.layers = 2, .experts = 8, .top_k = 2};

Result<router::RoutedExperts> read(std::string_view answer, size_t piece) {
  RoutedExpertsReader reader(kShape);
  for (size_t at = 0; at < answer.size(); at += piece) reader.feed(answer.substr(at, piece));
  Result<router::RoutedExperts> out = reader.take();
  KINDRED_CHECK(out.ok() == (reader.fault() == RoutedExpertsReader::Fault::kNone));
  return out;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const size_t piece = 1 + data[0] % 16;
  const std::string_view answer(reinterpret_cast<const char*>(data) + 1, size - 1);
  const auto whole = read(answer, answer.size() + 1), cut = read(answer, piece);
  KINDRED_CHECK(whole.ok() == cut.ok());
  if (!whole) return 0;
  KINDRED_CHECK(whole->tokens == cut->tokens && whole->prefixes.size() == cut->prefixes.size());
  for (size_t i = 0; i < whole->prefixes.size(); ++i) {
    const router::PrefixCounts& prefix = whole->prefixes[i];
    KINDRED_CHECK(prefix.cells == cut->prefixes[i].cells && prefix.cells.size() == whole->shape.cells());
    const auto sum = std::accumulate(prefix.cells.begin(), prefix.cells.end(), uint64_t{0});
    KINDRED_CHECK(sum == prefix.tokens * whole->shape.layers.size() * kShape.top_k);
  }
  return 0;
}

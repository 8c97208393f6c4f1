#include "expert/inclusion.h"

#include <gtest/gtest.h>

#include <cmath>
#include <numeric>
#include <vector>

#include "base/rng.h"

namespace kindred::expert {
namespace {

ExpertCounts counts_of(std::vector<uint32_t> row, uint64_t tokens, uint32_t top_k) {
  ExpertCounts out(ExpertShape{.layers = {0}, .experts = static_cast<uint32_t>(row.size()), .top_k = top_k});
  out.tokens = tokens;
  out.data = std::move(row);
  return out;
}

std::vector<float> probabilities(const Inclusion& inclusion) {
  std::vector<float> out(inclusion.codes.size());
  unpack_inclusion(inclusion.codes, out);
  return out;
}

TEST(Inclusion, IsTheShareOfTokens) {
  constexpr uint32_t kTokens = 1000;
  std::vector<uint32_t> row(kTokens + 1);
  std::iota(row.begin(), row.end(), 0U);
  const std::vector<float> p = probabilities(pack_inclusion(counts_of(row, kTokens, 1)));
  EXPECT_EQ(p[0], 0.0F);
  for (uint32_t c = 0; c <= kTokens; ++c) {
    const double wanted = static_cast<double>(c) / kTokens;
    EXPECT_NEAR(p[c], std::min(wanted, 0.982), wanted >= 0.01 && wanted <= 0.9 ? 0.04 * wanted : 0.02) << c;
    if (c > 0) {
      EXPECT_GE(p[c], p[c - 1]) << c;
    }
  }
}

TEST(Inclusion, SharpenedKeepsTheSumOfALayer) {
  const ExpertCounts counts = counts_of({50, 30, 10, 6, 4, 0, 0, 0}, 50, 2);
  const std::vector<float> plain = probabilities(pack_inclusion(counts));
  const std::vector<float> sharp = probabilities(pack_inclusion(counts, 1.5));
  EXPECT_LT(sharp[3], plain[3]);
  EXPECT_GT(sharp[1] / sharp[3], plain[1] / plain[3]);
  EXPECT_EQ(sharp[5], 0.0F);
}

TEST(Inclusion, LeavingTakesAwayWhatJoiningAdded) {
  Rng rng(3);
  std::vector<std::vector<uint8_t>> requests(200, std::vector<uint8_t>(64));
  for (auto& codes : requests) {
    for (uint8_t& code : codes) code = static_cast<uint8_t>(rng.below(256));
  }
  std::vector<uint32_t> sums(64, 0);
  for (size_t i = 0; i < requests.size(); ++i) add_inclusion(requests[i], static_cast<int32_t>(1 + i % 3), sums);
  for (size_t i = requests.size(); i-- > 0;) add_inclusion(requests[i], -static_cast<int32_t>(1 + i % 3), sums);
  EXPECT_EQ(sums, std::vector<uint32_t>(64, 0));
  std::vector<float> unused(64);
  EXPECT_EQ(unused_shares(sums, unused), 0.0);
  EXPECT_EQ(unused, std::vector<float>(64, 1.0F));
}

TEST(Inclusion, UnusedIsTheProduct) {
  const Inclusion one = pack_inclusion(counts_of({0, 2, 10, 25, 63, 100}, 100, 2));
  const Inclusion two = pack_inclusion(counts_of({1, 40, 10, 50, 99, 0}, 100, 2));
  const std::vector<float> p = probabilities(one), r = probabilities(two);
  std::vector<uint32_t> sums(p.size(), 0);
  add_inclusion(one.codes, 1, sums);
  add_inclusion(two.codes, 2, sums);
  std::vector<float> unused(p.size());
  const double used = unused_shares(sums, unused);
  double expected = 0;
  for (size_t i = 0; i < p.size(); ++i) {
    const double q = (1.0 - p[i]) * (1.0 - r[i]) * (1.0 - r[i]);
    EXPECT_NEAR(unused[i], q, 1e-6) << i;
    expected += 1 - q;
  }
  EXPECT_NEAR(used, expected, 1e-5);
}

TEST(Inclusion, ManyLeaveNothingUnused) {
  std::vector<uint32_t> sums = {0, 1U << 30};
  std::vector<float> unused(2);
  EXPECT_EQ(unused_shares(sums, unused), 1.0);
  EXPECT_EQ(unused[1], 0.0F);
}

}  // namespace
}  // namespace kindred::expert

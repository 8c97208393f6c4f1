#include "policy/shuffled.h"

#include <gtest/gtest.h>

#include <map>

namespace kindred::policy {
namespace {

// Remembers the counts it was asked with.
class Spy final : public DecodePolicy {
 public:
  explicit Spy(std::vector<int64_t>* seen) : seen_(seen) {}
  std::optional<Decision> choose(const DecodeSnapshot&, const DecodeRequest& request) override {
    seen_->push_back(request.counts == nullptr ? -1 : static_cast<int64_t>(request.counts->tokens));
    return Decision{};
  }
  std::string_view name() const override { return "spy"; }
  bool wants_counts() const override { return true; }

 private:
  std::vector<int64_t>* seen_;
};

TEST(ShuffledSignatures, NeverUseTheRequestsOwnAndLoseNone) {
  std::vector<int64_t> seen;
  ShuffledSignatures policy(std::make_unique<Spy>(&seen), 1);
  constexpr int64_t kRequests = 400;
  for (int64_t i = 0; i < kRequests; ++i) {
    expert::ExpertCounts counts(expert::ExpertShape{{0}, 2, 1});
    counts.tokens = static_cast<uint64_t>(i);
    DecodeRequest request;
    request.counts = &counts;
    ASSERT_TRUE(policy.choose({}, request).has_value());
    EXPECT_NE(seen.back(), i);
  }
  std::map<int64_t, int> times;
  for (const int64_t tokens : seen) ++times[tokens];
  EXPECT_EQ(times[-1], static_cast<int>(ShuffledSignatures::kKept));
  for (const auto& [tokens, n] : times) EXPECT_TRUE(tokens == -1 || n == 1) << tokens;
  EXPECT_EQ(seen.size(), static_cast<size_t>(kRequests));
}

TEST(ShuffledSignatures, LeaveRequestsWithoutCountsAlone) {
  std::vector<int64_t> seen;
  ShuffledSignatures policy(std::make_unique<Spy>(&seen), 1);
  for (int i = 0; i < 3; ++i) policy.choose({}, {});
  EXPECT_EQ(seen, (std::vector<int64_t>{-1, -1, -1}));
}

TEST(ShuffledSignatures, AreMadeByTheFactory) {
  DecodePolicyOptions options;
  options.shuffle_signatures = true;
  const auto policy = make_decode_policy(options);
  ASSERT_TRUE(policy.ok());
  EXPECT_EQ((*policy)->name(), "locality-band");
  EXPECT_NE(dynamic_cast<ShuffledSignatures*>(policy->get()), nullptr);
}

}  // namespace
}  // namespace kindred::policy

#include "router/keys.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>

#include "base/config.h"
#include "router/rate_limit.h"

namespace kindred::router {
namespace {

using namespace std::chrono_literals;

std::string hex(const KeyDigest& digest) {
  std::string out;
  for (const unsigned char byte : digest) {
    out += "0123456789abcdef"[byte >> 4];
    out += "0123456789abcdef"[byte & 15];
  }
  return out;
}

TEST(KeyRing, FindsKeysInClearAndByDigest) {
  // FIPS 180-2's example.
  EXPECT_EQ(hex(digest_of("abc")), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  const auto ring =
      KeyRing::parse("# keys\n\nalice:secret-of-alice rpm=60\r\n  bob:sha256:" + hex(digest_of("secret-of-bob")) +
                         "\ttpm=1000 rpm=5\n",
                     "keys");
  ASSERT_TRUE(ring.ok()) << ring.error().message;
  const KeyRing::Key* alice = ring->find("secret-of-alice");
  ASSERT_NE(alice, nullptr);
  EXPECT_EQ(alice->name, "alice");
  EXPECT_EQ(alice->limits, (KeyLimits{60, 0}));
  const KeyRing::Key* bob = ring->find("secret-of-bob");
  ASSERT_NE(bob, nullptr);
  EXPECT_EQ(bob->limits, (KeyLimits{5, 1000}));
  for (const std::string& wrong : {std::string(), std::string("secret-of-alic"), std::string("secret-of-alice "),
                                   "sha256:" + hex(digest_of("secret-of-bob")), std::string("alice")}) {
    EXPECT_EQ(ring->find(wrong), nullptr) << wrong;
  }
}

TEST(KeyRing, RefusesBadLinesWithoutQuotingKeys) {
  for (const char* text :
       {"canary-alone", ":canary-key", "a b:canary-key", "a:canary", "a:canary-key x", "a:canary-key rpm=0",
        "a:canary-key rpm=-1", "a:canary-key rpm=1x", "a:canary-key rpm", "a:canary-key rpm=99999999999999",
        "a:sha256:canary", "a:canary-key\na:canary-other", "a:canary-key\nb:canary-key", "a:canary-k\x01y"}) {
    const auto ring = KeyRing::parse(text, "keys.txt");
    ASSERT_FALSE(ring.ok()) << text;
    EXPECT_TRUE(ring.error().message.starts_with("keys.txt:")) << ring.error().message;
    EXPECT_EQ(ring.error().message.find("canary"), std::string::npos) << ring.error().message;
  }
  EXPECT_FALSE(KeyRing::parse("a:" + std::string(KeyRing::kMostKeyBytes + 1, 'x'), "k").ok());
}

TEST(KeyStore, ReadsItsFileAgainAndKeepsTheKeysAfterAnError) {
  const std::string path = ::testing::TempDir() + "kindred_keys_test_" + std::to_string(getpid());
  ASSERT_TRUE(write_file(path, "a:first-key-of-a").ok());
  auto store = KeyStore::load(path, "env:key-from-outside");
  ASSERT_TRUE(store.ok()) << store.error().message;
  EXPECT_NE((*store)->current()->find("first-key-of-a"), nullptr);
  EXPECT_NE((*store)->current()->find("key-from-outside"), nullptr);
  ASSERT_TRUE(write_file(path, "a:second-key-of-a").ok());
  EXPECT_TRUE((*store)->reload().ok());
  EXPECT_EQ((*store)->current()->find("first-key-of-a"), nullptr);
  EXPECT_NE((*store)->current()->find("second-key-of-a"), nullptr);
  ASSERT_TRUE(write_file(path, "nonsense").ok());
  EXPECT_FALSE((*store)->reload().ok());
  EXPECT_NE((*store)->current()->find("second-key-of-a"), nullptr);
  EXPECT_FALSE(KeyStore::load("/nonexistent", "").ok());
  ASSERT_TRUE(write_file(path, "# nobody\n").ok());
  EXPECT_FALSE(KeyStore::load(path, "").ok());  // would let everybody in
  std::remove(path.c_str());
}

TEST(PresentedKey, IsTheBearerTokenOrXApiKey) {
  const auto presented = [](const char* name, const char* value) {
    net::Headers headers;
    headers.add(name, value);
    return std::string(presented_key(headers));
  };
  EXPECT_EQ(presented("authorization", "Bearer abc"), "abc");
  EXPECT_EQ(presented("Authorization", "bearer  abc"), "abc");
  EXPECT_EQ(presented("X-Api-Key", "abc"), "abc");
  EXPECT_EQ(presented("Authorization", "Basic abc"), "");
  EXPECT_EQ(presented("Authorization", "Bearer "), "");
  EXPECT_EQ(presented("Other", "abc"), "");
}

TEST(Secret, ComesFromAFileOrTheEnvironment) {
  const std::string path = ::testing::TempDir() + "kindred_secret_test_" + std::to_string(getpid());
  ASSERT_TRUE(write_file(path, "the-secret-itself\nand a remark\n").ok());
  EXPECT_EQ(*read_secret(path, "KINDRED_TEST_SECRET", "f"), "the-secret-itself");
  ASSERT_EQ(::setenv("KINDRED_TEST_SECRET", "from-the-environment", 1), 0);
  EXPECT_EQ(*read_secret("", "KINDRED_TEST_SECRET", "f"), "from-the-environment");
  ASSERT_EQ(::setenv("KINDRED_TEST_SECRET", "canary", 1), 0);
  const auto bad = read_secret("", "KINDRED_TEST_SECRET", "f");  // too short
  ASSERT_FALSE(bad.ok());
  EXPECT_EQ(bad.error().message.find("canary"), std::string::npos);
  ::unsetenv("KINDRED_TEST_SECRET");
  EXPECT_EQ(*read_secret("", "KINDRED_TEST_SECRET", "f"), "");
  EXPECT_FALSE(read_secret("/nonexistent", "KINDRED_TEST_SECRET", "f").ok());
  EXPECT_TRUE(same_secret("abc", "abc"));
  EXPECT_FALSE(same_secret("abc", "abd"));
  EXPECT_FALSE(same_secret("abc", "ab"));
  std::remove(path.c_str());
}

class LimiterTest : public ::testing::Test {
 protected:
  ManualClock clock_;
  RateLimiter limiter_{clock_};
};

TEST_F(LimiterTest, RequestsAreABucketOfAMinute) {
  const KeyLimits limits{3, 0};
  for (uint64_t i = 0; i < 3; ++i) {
    const auto verdict = limiter_.admit("a", limits, 0);
    EXPECT_TRUE(verdict.admitted);
    EXPECT_EQ(verdict.requests->remaining, 2 - i);
    EXPECT_EQ(verdict.requests->limit, 3U);
  }
  const auto refused = limiter_.admit("a", limits, 0);
  EXPECT_FALSE(refused.admitted);
  EXPECT_EQ(refused.short_of, "requests");
  EXPECT_NEAR(refused.retry_after_s, 20, 1e-6);
  EXPECT_TRUE(limiter_.admit("b", limits, 0).admitted);  // another's is its own
  clock_.advance(20s);
  EXPECT_TRUE(limiter_.admit("a", limits, 0).admitted);
  EXPECT_FALSE(limiter_.admit("a", limits, 0).admitted);
  clock_.advance(10min);
  EXPECT_EQ(limiter_.admit("a", limits, 0).requests->remaining, 2U);  // no more than a minute is saved up
}

TEST_F(LimiterTest, TokensAreCorrectedAfterwards) {
  const KeyLimits limits{0, 600};
  EXPECT_TRUE(limiter_.admit("a", limits, 100).admitted);
  limiter_.settle("a", 100, 700);  // a hundred more than there were
  const auto refused = limiter_.admit("a", limits, 1);
  EXPECT_FALSE(refused.admitted);
  EXPECT_EQ(refused.short_of, "tokens");
  EXPECT_EQ(refused.tokens->remaining, 0U);
  EXPECT_NEAR(refused.retry_after_s, 10.1, 1e-6);
  clock_.advance(11s);
  EXPECT_TRUE(limiter_.admit("a", limits, 10).admitted);
  limiter_.settle("a", 10, 0);  // nobody served it
  EXPECT_TRUE(limiter_.admit("a", limits, 10).admitted);
}

TEST_F(LimiterTest, APromptLargerThanTheBucketNeedsAFullOne) {
  const KeyLimits limits{0, 600};
  EXPECT_TRUE(limiter_.admit("a", limits, 5'000).admitted);
  EXPECT_NEAR(limiter_.admit("a", limits, 5'000).retry_after_s, 500, 1e-6);
  clock_.advance(501s);
  EXPECT_TRUE(limiter_.admit("a", limits, 5'000).admitted);
}

TEST_F(LimiterTest, ARefusedRequestCostsNothing) {
  const KeyLimits limits{10, 100};
  EXPECT_TRUE(limiter_.admit("a", limits, 100).admitted);
  for (int i = 0; i < 50; ++i) EXPECT_FALSE(limiter_.admit("a", limits, 10).admitted);
  clock_.advance(6s);
  EXPECT_EQ(limiter_.admit("a", limits, 10).requests->remaining, 9U);
}

TEST_F(LimiterTest, ForgetsKeysThatAreGoneAndStartsAnewWithNewLimits) {
  EXPECT_TRUE(limiter_.admit("a", {1, 0}, 0).admitted);
  EXPECT_FALSE(limiter_.admit("a", {1, 0}, 0).admitted);
  EXPECT_TRUE(limiter_.admit("a", {2, 0}, 0).admitted);
  limiter_.keep_only(*KeyRing::parse("b:some-other-key", "k"));
  EXPECT_EQ(limiter_.admit("a", {2, 0}, 0).requests->remaining, 1U);
}

TEST_F(LimiterTest, HeadersSayLimitRemainderAndReset) {
  net::Headers headers;
  add_rate_headers(headers, limiter_.admit("a", {60, 600}, 60));
  EXPECT_EQ(*headers.find("x-ratelimit-limit-requests"), "60");
  EXPECT_EQ(*headers.find("x-ratelimit-remaining-requests"), "59");
  EXPECT_EQ(*headers.find("x-ratelimit-reset-requests"), "1000ms");
  EXPECT_EQ(*headers.find("x-ratelimit-limit-tokens"), "600");
  EXPECT_EQ(*headers.find("x-ratelimit-remaining-tokens"), "540");
  EXPECT_EQ(*headers.find("x-ratelimit-reset-tokens"), "6000ms");
}

}  // namespace
}  // namespace kindred::router

#include <gtest/gtest.h>

#include <string>

#include "base/bytes.h"
#include "base/metrics.h"
#include "base/rng.h"

namespace kindred {
namespace {

TEST(Base64, RoundTripsEveryLength) {
  Rng rng(1);
  for (size_t size = 0; size < 200; ++size) {
    std::vector<uint8_t> bytes(size);
    for (uint8_t& b : bytes) b = static_cast<uint8_t>(rng.next());
    const auto back = base64_decode(base64_encode(bytes));
    ASSERT_TRUE(back.ok());
    EXPECT_EQ(*back, bytes);
  }
  EXPECT_EQ(base64_encode(std::string_view("foobar")), "Zm9vYmFy");  // RFC 4648 §10
  EXPECT_EQ(base64_encode(std::string_view("foob")), "Zm9vYg==");
}

TEST(Base64, RefusesWhatIsNot) {
  for (const char* text : {"Zg", "Zg=", "Z===", "====", "Zm9vY!==", "Zm9v\n", "Zg==Zg==", "Zh==", "Zm9vYmF="}) {
    EXPECT_FALSE(base64_decode(text).ok()) << text;
  }
}

TEST(Base64, KnowsEachCharacterAtEachPlace) {
  const std::string text = base64_encode(std::string(120, 'x'));
  for (size_t at = 0; at < text.size(); ++at) {
    std::string changed = text;
    for (int c = 0; c < 256; ++c) {
      changed[at] = static_cast<char>(c);
      const bool known = std::isalnum(c) != 0 || c == '+' || c == '/';
      const auto back = base64_decode(changed);
      ASSERT_EQ(back.ok(), known) << "character " << c << " at " << at;
      if (known) {
        ASSERT_EQ(base64_encode(*back), changed);
      }
    }
  }
}

TEST(Hex, HasSixteenLowerCaseDigits) {
  EXPECT_EQ(hex64(0), "0000000000000000");
  EXPECT_EQ(hex64(0x0123456789abcdef), "0123456789abcdef");
  EXPECT_EQ(hex64(0xfedcba9876543210), "fedcba9876543210");
  EXPECT_EQ(hex64(~uint64_t{0}), "ffffffffffffffff");
  EXPECT_EQ(hex64(0x9a), "000000000000009a");
}

TEST(Hex, ReadsSixteenDigitsOfEitherCaseAndNothingElse) {
  EXPECT_EQ(parse_hex64("0123456789abcdef"), 0x0123456789abcdefU);
  EXPECT_EQ(parse_hex64("FEDCBA9876543210"), 0xfedcba9876543210U);
  for (const char* text : {"", "0", "0123456789abcde", "0123456789abcdef0", "0123456789abcdeg", "-123456789abcdef",
                           "0x23456789abcdef", " 123456789abcdef"}) {
    EXPECT_FALSE(parse_hex64(text)) << text;
  }
}

TEST(BigEndian, RoundTripsInEightBytes) {
  EXPECT_EQ(big_endian64(0x0102030405060708), "\1\2\3\4\5\6\7\10");
  for (const uint64_t value : {uint64_t{0}, uint64_t{0xff}, UINT64_MAX, uint64_t{0x8000000000000001}}) {
    EXPECT_EQ(parse_big_endian64(big_endian64(value)), value);
  }
  EXPECT_FALSE(parse_big_endian64("1234567"));
  EXPECT_FALSE(parse_big_endian64("123456789"));
}

TEST(JsonString, EscapesAndRepairs) {
  EXPECT_EQ(json_string("a\"b\\c\n\t\x01"), R"("a\"b\\c\n\t\u0001")");
  EXPECT_EQ(json_string("\x0b\x0c\r"), R"("\u000b\f\r")");
  EXPECT_EQ(json_string("é漢😀"), "\"é漢😀\"");
  EXPECT_EQ(json_string("\xff\xc3"), "\"\xef\xbf\xbd\xef\xbf\xbd\"");
  EXPECT_EQ(json_string("\xed\xa0\x80"), "\"\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd\"");  // a surrogate
}

TEST(Utf8, HoldsBackOnlyWhatCanStillBecomeValid) {
  const std::string text = "a😀";  // 1 + 4 bytes
  EXPECT_EQ(utf8_complete_prefix(text), 5U);
  for (size_t cut = 2; cut < 5; ++cut) EXPECT_EQ(utf8_complete_prefix(text.substr(0, cut)), 1U) << cut;
  EXPECT_EQ(utf8_complete_prefix("a\xff"), 2U);          // never valid
  EXPECT_EQ(utf8_complete_prefix("a\xe0\x80"), 3U);      // overlong
  EXPECT_EQ(utf8_complete_prefix("a\x80\x80\x80"), 4U);  // continuation without a lead
  EXPECT_EQ(utf8_complete_prefix(""), 0U);
}

TEST(Rng, IsTheSameOnEveryMachine) {
  Rng rng(42);
  EXPECT_EQ(rng.next(), mix64(42));
  EXPECT_EQ(mix64(0), 0xe220a8397b1dcdafULL);  // SplitMix64's first output for seed 0
  for (int i = 0; i < 1000; ++i) EXPECT_LT(rng.below(7), 7U);
}

TEST(Rng, UniformAtIsUniformAndOrderFree) {
  double sum = 0;
  for (uint64_t position = 0; position < 20000; ++position) sum += uniform_at(7, position);
  EXPECT_NEAR(sum / 20000, 0.5, 0.01);
  EXPECT_NE(uniform_at(7, 1), uniform_at(1, 7));
  EXPECT_EQ(uniform_at(7, 12345), uniform_at(7, 12345));
}

TEST(Metrics, RendersPrometheusText) {
  Registry registry;
  registry.counter("requests_total", "Requests.", {{"worker", "a\"b"}}).add(2);
  registry.gauge("load", "Load.").set(1.5);
  const std::array<double, 2> bounds = {0.1, 1};
  Histogram& latency = registry.histogram("latency_seconds", "Latency.", bounds);
  latency.observe(0.1);
  latency.observe(0.5);
  latency.observe(9);
  const std::string text = registry.render();
  EXPECT_NE(text.find("# TYPE requests_total counter\nrequests_total{worker=\"a\\\"b\"} 2\n"), std::string::npos);
  EXPECT_NE(text.find("load 1.5\n"), std::string::npos);
  EXPECT_NE(text.find("latency_seconds_bucket{le=\"0.1\"} 1\n"), std::string::npos);
  EXPECT_NE(text.find("latency_seconds_bucket{le=\"1\"} 2\n"), std::string::npos);
  EXPECT_NE(text.find("latency_seconds_bucket{le=\"+Inf\"} 3\n"), std::string::npos);
  EXPECT_NE(text.find("latency_seconds_sum 9.6\n"), std::string::npos);
  EXPECT_EQ(&registry.gauge("load", "Load."), &registry.gauge("load", "Load."));
}

}  // namespace
}  // namespace kindred

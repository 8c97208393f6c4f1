#include "net/chunked.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace kindred::net {
namespace {

const std::string kBody =
    "5\r\nhello\r\n"
    "1;name=value;other=\"x\"\r\n \r\n"
    "00b\r\nworld\r\n0\r\n\r\r\n"
    "0;last\r\nTrailer: a\r\nOther:\r\n\r\n";
const std::string kPayload = "hello world\r\n0\r\n\r";

struct Outcome {
  std::string payload;
  size_t consumed = 0;
  bool done = false;
  bool failed = false;
};

// Feeds `pieces` one after the other, decoding in place.
Outcome decode(const std::vector<std::string>& pieces, ChunkLimits limits = {}) {
  ChunkTracker tracker(limits);
  Outcome outcome;
  for (std::string piece : pieces) {
    const auto decoded = tracker.decode_in_place(piece);
    outcome.payload.append(piece, 0, decoded.payload_bytes);
    outcome.consumed += decoded.consumed;
  }
  outcome.done = tracker.done();
  outcome.failed = tracker.failed();
  return outcome;
}

TEST(ChunkTracker, DecodesAtEverySplit) {
  for (size_t a = 0; a <= kBody.size(); ++a) {
    for (size_t b = a; b <= kBody.size(); ++b) {
      const Outcome outcome = decode({kBody.substr(0, a), kBody.substr(a, b - a), kBody.substr(b)});
      ASSERT_EQ(outcome.payload, kPayload) << a << ", " << b;
      ASSERT_TRUE(outcome.done) << a << ", " << b;
      ASSERT_EQ(outcome.consumed, kBody.size());
    }
  }
}

TEST(ChunkTracker, TracksAtEverySplitAndLeavesWhatFollows) {
  const std::string wire = kBody + "GET / HTTP/1.1\r\n";
  for (size_t cut = 0; cut <= wire.size(); ++cut) {
    ChunkTracker tracker;
    const std::string_view bytes = wire;
    size_t consumed = tracker.track(bytes.substr(0, cut));
    EXPECT_EQ(consumed, std::min(cut, kBody.size()));
    consumed += tracker.track(bytes.substr(consumed));
    EXPECT_EQ(consumed, kBody.size());
    EXPECT_TRUE(tracker.done());
    EXPECT_FALSE(tracker.at_border());
  }
}

TEST(ChunkTracker, KnowsTheBorders) {
  ChunkTracker tracker;
  const std::string wire = "2\r\nab\r\n1\r\nc\r\n";
  std::string borders;
  for (const char byte : wire) {
    borders += tracker.at_border() ? '|' : '.';
    EXPECT_EQ(tracker.track(std::string_view(&byte, 1)), 1U);
  }
  EXPECT_EQ(borders, "|......|.....");
  EXPECT_TRUE(tracker.at_border());
  EXPECT_FALSE(tracker.done());
}

TEST(ChunkTracker, RefusesBadFraming) {
  for (const std::string& wire : std::vector<std::string>{"\r\n",
                                                          "g\r\n",
                                                          " 1\r\na\r\n",
                                                          "1 \r\na\r\n",
                                                          "+1\r\na\r\n",
                                                          "-1\r\n",
                                                          "0x1\r\na\r\n",
                                                          "1\na\r\n",
                                                          "1\r\nab\r\n",
                                                          "1\r\na\n",
                                                          "1\r\na\rb",
                                                          "1\r\r\n",
                                                          ";x\r\n",
                                                          "1;\nx\r\n",
                                                          "1;a\x01\r\n",
                                                          "1;a\x7f\r\n",
                                                          "fffffffffffffffff\r\n",
                                                          "10000000000000000\r\n",
                                                          "0\r\n\n",
                                                          "0\r\n\rx",
                                                          "0\r\n folded\r\n\r\n",
                                                          "0\r\nname\r\n\r\n",
                                                          "0\r\nname : x\r\n\r\n",
                                                          "0\r\n: x\r\n\r\n",
                                                          "0\r\na: x\n\r\n",
                                                          "0\r\na: \x01\r\n\r\n",
                                                          std::string("1\0\r\na\r\n", 8)}) {
    EXPECT_TRUE(decode({wire}).failed) << wire;
    std::vector<std::string> bytes;
    for (const char byte : wire) bytes.emplace_back(1, byte);
    EXPECT_TRUE(decode(bytes).failed) << wire;
  }
}

TEST(ChunkTracker, BoundsExtensionsAndTrailers) {
  const ChunkLimits limits{8, 16};
  EXPECT_TRUE(decode({"1;1234567\r\na\r\n0\r\n\r\n"}, limits).done);
  EXPECT_TRUE(decode({"1;123456789\r\na\r\n0\r\n\r\n"}, limits).failed);
  EXPECT_TRUE(decode({"0\r\na: 1\r\nb: 2\r\n\r\n"}, limits).done);
  EXPECT_TRUE(decode({"0\r\na: 1\r\nb: 2\r\nc: 345678901\r\n\r\n"}, limits).failed);
  EXPECT_TRUE(decode({"00000000000000000000000000000000000001\r\na\r\n0\r\n\r\n"}, limits).failed);
}

}  // namespace
}  // namespace kindred::net

#include "net/sse.h"

#include <gtest/gtest.h>

#include <vector>

namespace kindred::net {
namespace {

struct StreamCase {
  std::string bytes;
  std::vector<std::string> data;  // of the events that are dispatched
};

const std::vector<StreamCase> kStreams = {
    {"", {}},
    {"data: a\n\n", {"a"}},
    {"data: a\r\n\r\ndata:b\r\rdata:  c\n\n", {"a", "b", " c"}},
    {"data: a\ndata: b\ndata\ndata:\n\n", {"a\nb\n\n"}},
    {": ping\n\n: ping\r\n\r\ndata: x\n\n\n\n", {"x"}},
    {": note\nevent: end\nid: 7\ndata: {\"t\":\"data: [DONE]\"}\n\ndata: [DONE]\n\n",
     {"{\"t\":\"data: [DONE]\"}", "[DONE]"}},
    {"data: a\n\ndata: b\n", {"a"}},
    {"data: a\n\nda", {"a"}},
    {"data: a\n\n: comment\n", {"a"}},
    {"database: x\ndata: y\n\n", {"y"}},
    {"event: only\n\ndata: \xc3\xa9\n\n", {"\xc3\xa9"}},
};

TEST(SseSplitter, SplitsAtEverySplit) {
  for (const StreamCase& stream : kStreams) {
    for (size_t a = 0; a <= stream.bytes.size(); ++a) {
      for (size_t b = a; b <= stream.bytes.size(); ++b) {
        SseSplitter splitter;
        const std::string_view bytes = stream.bytes;
        std::vector<std::string> data;
        for (const auto piece : {bytes.substr(0, a), bytes.substr(a, b - a), bytes.substr(b)}) {
          ASSERT_TRUE(splitter.feed(piece));
          while (auto event = splitter.next()) data.push_back(*event);
        }
        ASSERT_EQ(data, stream.data) << bytes << " at " << a << ", " << b;
      }
    }
  }
}

TEST(SseSplitter, StopsAtItsLimit) {
  SseSplitter splitter(16);
  EXPECT_TRUE(splitter.feed("data: 0123456\n\n"));
  EXPECT_TRUE(splitter.feed("data: 0123456\n\n"));  // the limit is per event
  EXPECT_FALSE(splitter.feed("data: 0123456789abcdef\n\n"));
  EXPECT_FALSE(splitter.feed("data: a\n\n"));
  SseSplitter lines(16);
  EXPECT_FALSE(lines.feed("data: 01234\ndata: 01234\ndata: 01234\n\n"));
}

}  // namespace
}  // namespace kindred::net

#include "router/stream_watch.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace kindred::router {
namespace {

struct StreamCase {
  std::string bytes;
  uint64_t events = 0, tokens = 0;
  bool inside = false, may_end = true, done = false;  // at the end
  ApiForm form = ApiForm::kOpenAi;
};

const std::vector<StreamCase> kStreams = {
    {"", 0, 0},
    {"data: a\n\n", 1, 0},
    {"data: a\r\n\r\ndata:b\r\rdata:  c\n\n", 3, 0},
    {"data: a\ndata: b\ndata\ndata:\n\n", 1, 0},
    {": ping\n\n: ping\r\n\r\ndata: x\n\n\n\n", 1, 0},
    {": note\nevent: end\nid: 7\ndata: {\"t\":\"data: [DONE]\"}\n\ndata: [DONE]\n\n", 2, 0, false, true, true},
    {"data: a\n\ndata: b\n", 1, 0, true, false},
    {"data: a\n\nda", 1, 0, true, true},
    {"data: a\n\n: comment\n", 1, 0},
    {"data: a\n\n: comm", 1, 0, true, true},
    {"database: x\ndata: y\n\n", 1, 0},
    {"event: only\n\ndata: \xc3\xa9\n\n", 2, 0},
    // What may be ended and what may not.
    {"data: {\"x\":1", 0, 0, true, true},
    {"data: {\"x\":1}", 0, 0, true, true},
    {"data:{\"x\":1}\n", 0, 0, true, true},
    {"data: [DONE]", 0, 0, true, false},
    {"data: [DON", 0, 0, true, false},
    {"data:[DONE]\n", 0, 0, true, false},
    {"data: \ndata: [DONE]", 0, 0, true, false},
    {"data: 12", 0, 0, true, false},
    {"data: ", 0, 0, true, true},
    {"event: error\nid: 3", 0, 0, true, true},
    {"event: error\ndata: {\"a\":\ndata: 1", 0, 0, true, true},
    // Tokens: chat, completion, reasoning, tool call, Anthropic, responses; in either spelling.
    {"data: {\"choices\":[{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":\"\"}}]}\n\n", 1, 0},
    {"data: {\"choices\":[{\"delta\":{\"content\":\"a\"}}]}\n\ndata: "
     "{\"choices\":[{\"delta\":{\"content\":\"b\"}}]}\n\n"
     "data: {\"choices\":[{\"delta\":{},\"finish_reason\":\"stop\"}]}\n\n"
     "data: {\"choices\":[],\"usage\":{\"completion_tokens\":2}}\n\ndata: [DONE]\n\n",
     5, 2, false, true, true},
    {"data: {\"choices\": [{\"text\": \"a\"}]}\n\ndata: {\"choices\": [{\"text\": \"\"}]}\n\n", 2, 1},
    {"data: {\"choices\":[{\"delta\":{\"content\":null,\"reasoning_content\":\"hm\"}}]}\n\n", 1, 1},
    {"data: {\"choices\":[{\"delta\":{\"tool_calls\":[{\"index\":0}]}}]}\n\n", 1, 1},
    {"data: {\"choices\":[{\"delta\":{\"content\":\"\",\"tool_calls\":[]}}]}\n\n", 1, 0},
    {"event: content_block_delta\ndata: {\"type\":\"content_block_delta\",\"delta\":{\"type\":\"text_delta\","
     "\"text\":\"Hi\"}}\n\n",
     1, 1},
    {"data: {\"type\":\"response.output_text.delta\",\"delta\":\"Hi\"}\n\n", 1, 1},
    {"data: {\"choices\":[{\"delta\":{\"content\":\"\",\"note\":\"\\\"text\\\":\\\"x\"}}]}\n\n", 1, 0},
    // Named events: only deltas carry tokens, and the last one has a name, which may stand in its data alone.
    {"event: message_start\ndata: {\"message\":{\"content\":[{\"text\":\"no\"}]}}\n\n", 1, 0, false, true, false,
     ApiForm::kMessages},
    {"event: content_block_delta\ndata: {\"delta\":{\"type\":\"thinking_delta\",\"thinking\":\"x\"}}\n\n", 1, 1, false,
     true, false, ApiForm::kMessages},
    {"event: content_block_delta\ndata: {\"delta\":{\"type\":\"signature_delta\",\"signature\":\"x\"}}\n\n", 1, 0,
     false, true, false, ApiForm::kMessages},
    {"event:message_stop\r\ndata: {}\r\n\r\n", 1, 0, false, true, true, ApiForm::kMessages},
    {"data: {\"type\": \"message_stop\"}\n\n", 1, 0, false, true, true, ApiForm::kMessages},
    {"event: message_stop\ndata: {}\n", 0, 0, true, true, false, ApiForm::kMessages},
    {"event: error\ndata: {\"type\":\"error\"}\n\n", 1, 0, false, true, true, ApiForm::kMessages},
    {"event: response.output_text.delta\ndata: {\"delta\":\"Hi\"}\n\nevent: response.output_text.done\ndata: "
     "{\"text\":\"Hi\"}\n\n",
     2, 1, false, true, false, ApiForm::kResponses},
    {"event: response.completed\ndata: {\"response\":{\"text\":\"Hi\"}}\n\n", 1, 0, false, true, true,
     ApiForm::kResponses},
    {"event: response.incomplete\ndata: {}\n\ndata: [DONE]\n\n", 2, 0, false, true, true, ApiForm::kResponses},
};

TEST(StreamWatch, SeesTheSameAtEverySplit) {
  for (const StreamCase& stream : kStreams) {
    for (size_t a = 0; a <= stream.bytes.size(); ++a) {
      for (size_t b = a; b <= stream.bytes.size(); b += 3) {
        StreamWatch watch(stream.form);
        const std::string_view bytes = stream.bytes;
        for (const auto piece : {bytes.substr(0, a), bytes.substr(a, b - a), bytes.substr(b)}) watch.feed(piece);
        const std::string where = stream.bytes + " at " + std::to_string(a) + ", " + std::to_string(b);
        ASSERT_EQ(watch.events(), stream.events) << where;
        ASSERT_EQ(watch.tokens(), stream.tokens) << where;
        ASSERT_EQ(watch.inside_event(), stream.inside) << where;
        ASSERT_EQ(watch.may_end_event(), stream.may_end) << where;
        ASSERT_EQ(watch.done(), stream.done) << where;
      }
    }
  }
}

TEST(StreamWatch, IsBoundedByTheHeadOfAnEvent) {
  StreamWatch watch;
  const std::string pad(10'000, 'x');
  watch.feed("data: {\"choices\":[{\"delta\":{\"content\":\"" + pad + "\"}}]}\n\n");
  EXPECT_EQ(watch.tokens(), 1U);
  watch.feed("data: {\"pad\":\"" + pad + "\",\"content\":\"late\"}\n\n");
  EXPECT_EQ(watch.events(), 2U);
  EXPECT_EQ(watch.tokens(), 1U);
  watch.feed("id: " + pad);  // whether data follows behind the head is not known
  EXPECT_FALSE(watch.may_end_event());
}

}  // namespace
}  // namespace kindred::router

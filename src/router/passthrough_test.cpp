// What clients and workers say to each other passes byte for byte, known to the router or not.

#include "base/json.h"
#include "router/expert_fields.h"
#include "router/testing.h"

namespace kindred::router::testing {
namespace {

// Key order, spelling of numbers, escapes, unknown fields given twice, white space.
const std::string kOdd =
    "{ \"zz\" : 1.0e0,\t\"model\":\"m\", \"a\":-0, \"n\":1 ,\"dup\":1,\"dup\":{\"x\":[ "
    "]},\"big\":12345678901234567890123,\n"
    " \"text\":\"\\u00e9\\/\\ud83d\\ude00 \xc3\xa9\", \"return_routed_experts\":true,"
    "\"chat_template_kwargs\":{\"enable_thinking\":false},\"f\":1E+2,"
    "\"messages\":[{\"role\":\"user\",\"content\":\"canary-prompt\",\"name\":null}],\"stream\":";

TEST_F(PdFlowTest, PassthroughBothLegsGetTheBodyByteForByte) {
  FakeWorker& p = prefill();
  FakeWorker& d = decode();
  start();
  for (const char* end : {"false}", "true}", "true  }\r\n"}) {
    const std::string body = kOdd + end;
    const Answer answer = call("POST", "/v1/chat/completions?trace=1&x=%20", body);
    EXPECT_EQ(answer.status, 200) << answer.body;
    EXPECT_EQ(p.legs().back().body, body);
    EXPECT_EQ(d.legs().back().body, body);
  }
}

TEST_F(PdFlowTest, PassthroughOfAPromptOfAHundredThousandTokens) {
  FakeWorker& p = prefill();
  FakeWorker& d = decode();
  start();
  std::string prompt;
  for (int i = 0; prompt.size() < 600'000; ++i) prompt += "word\\u00e9 " + std::to_string(i) + " ";
  const std::string body = R"({"model":"m","messages":[{"role":"user","content":")" + prompt + R"("}],"x":1.50})";
  EXPECT_EQ(call("POST", "/v1/chat/completions", body).status, 200);
  EXPECT_TRUE(p.legs().back().body == body);
  EXPECT_TRUE(d.legs().back().body == body);
}

// Answers as a worker gives them; `cut` is what the client gets if it did not ask for counts.
struct AnswerCase {
  std::string whole, cut;
};

const std::vector<AnswerCase> kAnswers = {
    {"{\"b\":1.0e0,\"a\":\"\\u00e9\",\"b\":[ 1 ],\"vendor\":{\"routed_experts\":[[1,2]]} }\n", ""},
    {R"({"expert_counts":{"v":1,"data":"AAAA"},"x":1})", R"({"x":1})"},
    {R"({"x":1.0, "expert_counts" : {"v":1} })", R"({"x":1.0 })"},
    {R"({"x":1,"expert_counts":{"v":[1,{}]},"decode_expert_counts":{"v":2},"y":{"expert_counts":3}})",
     R"({"x":1,"y":{"expert_counts":3}})"},
    {R"({"expert_gates":null})", R"({})"},
    {R"({"expert_counts":[1,2] ,"expert_\u0063ounts":4})", R"({})"},
    {R"({"text":"\"expert_counts\":{}"})", ""},
    {R"([{"expert_counts":1}])", ""},
    {R"({"expert_counts":{"v":1)", ""},
};

TEST(ExpertFields, AreCutOutAndNothingElse) {
  for (const AnswerCase& c : kAnswers) {
    std::string answer = c.whole;
    remove_expert_counts(answer);
    EXPECT_EQ(answer, c.cut.empty() ? c.whole : c.cut);
  }
}

TEST_F(PdFlowTest, PassthroughOfAnswersButForCountsThatNobodyAskedFor) {
  prefill();
  FakeWorker& d = decode();
  start();
  for (const AnswerCase& c : kAnswers) {
    d.play([&](const SeenLeg&, net::Request&, net::ResponseWriter& writer) -> net::Task<void> {
      net::Headers headers = json_type();
      headers.add("X-Vendor", "kept");
      headers.add("X-Kindred-Secret", "dropped");
      co_await writer.send(200, std::move(headers), c.whole);
    });
    const Answer unasked = chat(false, R"(,"return_expert_counts":false)");
    EXPECT_EQ(unasked.body, c.cut.empty() ? c.whole : c.cut);
    EXPECT_EQ(*unasked.headers.find("X-Vendor"), "kept");
    EXPECT_EQ(unasked.headers.find("X-Kindred-Secret"), nullptr);
    EXPECT_EQ(chat(false, R"(,"return_expert_counts":true)").body, c.whole);
    EXPECT_NE(d.legs().back().body.find(R"("return_expert_counts":true)"), std::string::npos);
  }
}

TEST_F(PdFlowTest, PassthroughOfCountsInAStreamThatAskedForThem) {
  prefill();
  FakeWorker& d = decode();
  const std::string last = "data: {\"choices\":[],\"expert_counts\":{\"v\":1.0e0}}\n\ndata: [DONE]\n\n";
  d.play([&](const SeenLeg&, net::Request&, net::ResponseWriter& writer) -> net::Task<void> {
    co_await writer.start(200, events_type());
    co_await writer.write(last);
    co_await writer.finish();
  });
  start();
  EXPECT_TRUE(chat(true, R"(,"return_expert_counts":true)").body.ends_with(last));
}

}  // namespace
}  // namespace kindred::router::testing

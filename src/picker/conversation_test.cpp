#include "picker/conversation.h"

#include <gtest/gtest.h>

namespace kindred::picker {
namespace {

using Event = Conversation::Event;

FromProxy head(bool end_of_stream = false) {
  FromProxy out = {.part = Part::kRequestHeaders, .end_of_stream = end_of_stream};
  out.headers.add(":method", "POST");
  out.headers.add(":path", "/v1/completions");
  return out;
}

FromProxy body(std::string text, bool ends) {
  return {.part = Part::kRequestBody, .body = std::move(text), .end_of_stream = ends};
}

FromProxy answer(std::string status, bool ends = false) {
  FromProxy out = {.part = Part::kResponseHeaders, .end_of_stream = ends};
  out.headers.add(":status", status);
  return out;
}

Picked to_worker(std::string text) {
  Picked out = {.endpoint = "10.0.0.1:8000", .remove = {"x-kindred-leg"}, .body = std::move(text)};
  out.set.add("x-extra", "1");
  return out;
}

std::string header(const ToProxy& message, std::string_view name) {
  std::string out;
  for (const net::Header& one : message.set) {
    if (one.name == name) out.append(one.value) += ";";
  }
  return out;
}

TEST(Conversation, FullDuplexAnswersTheHeadersOnceTheBodyIsThereAndThenSendsItBack) {
  Conversation talk(1000);
  Conversation::Step step = talk.on(head());
  EXPECT_EQ(step.event, Event::kNone);
  EXPECT_TRUE(step.replies.empty());
  EXPECT_TRUE(talk.on(body("{\"a\":", false)).replies.empty());
  step = talk.on(body("1}", true));
  ASSERT_EQ(step.event, Event::kChoose);
  EXPECT_TRUE(step.replies.empty());
  const auto replies = talk.chosen(to_worker(talk.take_body()));
  ASSERT_EQ(replies.size(), 2U);
  EXPECT_EQ(replies[0].part, Part::kRequestHeaders);
  EXPECT_EQ(replies[0].endpoint, "10.0.0.1:8000");
  EXPECT_EQ(header(replies[0], kEndpointHeader), "10.0.0.1:8000;");
  EXPECT_EQ(header(replies[0], "content-length"), "7;");
  EXPECT_EQ(header(replies[0], "x-extra"), "1;");
  EXPECT_EQ(replies[0].remove, std::vector<std::string>{"x-kindred-leg"});
  EXPECT_EQ(replies[1].part, Part::kRequestBody);
  EXPECT_TRUE(replies[1].streamed);
  EXPECT_EQ(replies[1].body, "{\"a\":1}");
  EXPECT_TRUE(replies[1].end_of_stream);
}

TEST(Conversation, ALongBodyGoesBackInPiecesOfWhichOnlyTheLastEnds) {
  Conversation talk(10 * kPieceBytes);
  const std::string text(2 * kPieceBytes + 5, 'x');
  talk.on(head());
  talk.on(body(text, true));
  const auto replies = talk.chosen(to_worker(talk.take_body()));
  ASSERT_EQ(replies.size(), 4U);
  std::string back;
  for (size_t i = 1; i < replies.size(); ++i) {
    EXPECT_EQ(replies[i].end_of_stream, i == 3);
    EXPECT_LE(replies[i].body.size(), kPieceBytes);
    back += replies[i].body;
  }
  EXPECT_EQ(back, text);
}

TEST(Conversation, AnEmptyBodyEndsToo) {
  Conversation talk(10);
  talk.on(head());
  EXPECT_EQ(talk.on(body("", true)).event, Event::kChoose);
  const auto replies = talk.chosen(to_worker(""));
  ASSERT_EQ(replies.size(), 2U);
  EXPECT_TRUE(replies[1].end_of_stream);
}

TEST(Conversation, TrailersEndARequestAndAreAnsweredLast) {
  Conversation talk(100);
  talk.on(head());
  EXPECT_EQ(talk.on(body("abc", false)).event, Event::kNone);
  EXPECT_EQ(talk.on({.part = Part::kRequestTrailers}).event, Event::kChoose);
  const auto replies = talk.chosen(to_worker(talk.take_body()));
  ASSERT_EQ(replies.size(), 3U);
  EXPECT_FALSE(replies[1].end_of_stream);
  EXPECT_EQ(replies[2].part, Part::kRequestTrailers);
}

TEST(Conversation, ARequestWithoutABodyIsChosenForAtOnce) {
  Conversation talk(100);
  EXPECT_EQ(talk.on(head(true)).event, Event::kChoose);
  const auto replies = talk.chosen(to_worker(""));
  ASSERT_EQ(replies.size(), 1U);
  EXPECT_EQ(replies[0].part, Part::kRequestHeaders);
  EXPECT_EQ(header(replies[0], "content-length"), "");
}

TEST(Conversation, ABufferingProxyGetsTheChoiceWithTheBody) {
  Conversation talk(100);
  FromProxy first = head();
  first.request_mode = BodyMode::kBuffered;
  Conversation::Step step = talk.on(first);
  ASSERT_EQ(step.replies.size(), 1U);
  EXPECT_EQ(step.replies[0].part, Part::kRequestHeaders);
  EXPECT_EQ(step.replies[0].set.size(), 0U);
  EXPECT_EQ(talk.on(body("abc", true)).event, Event::kChoose);
  Picked same = to_worker(talk.take_body());
  auto replies = talk.chosen(same);
  ASSERT_EQ(replies.size(), 1U);
  EXPECT_EQ(replies[0].part, Part::kRequestBody);
  EXPECT_EQ(replies[0].endpoint, "10.0.0.1:8000");
  EXPECT_FALSE(replies[0].streamed || replies[0].replaced);
  same.changed = true;
  replies = talk.chosen(same);
  EXPECT_TRUE(replies[0].replaced);
  EXPECT_EQ(header(replies[0], "content-length"), "3;");
}

TEST(Conversation, OtherModesAreChosenForByTheHeadersAndTheirBodiesPass) {
  for (const BodyMode mode : {BodyMode::kNone, BodyMode::kStreamed, BodyMode::kBufferedPartial, BodyMode::kGrpc}) {
    Conversation talk(100);
    FromProxy first = head();
    first.request_mode = mode;
    EXPECT_EQ(talk.on(first).event, Event::kChoose);
    EXPECT_EQ(talk.chosen(to_worker("")).size(), 1U);
    const Conversation::Step step = talk.on(body("abc", true));
    EXPECT_EQ(step.event, Event::kNone);
    ASSERT_EQ(step.replies.size(), 1U);
    EXPECT_FALSE(step.replies[0].streamed);
  }
}

TEST(Conversation, ABodyThatIsTooLongIsA413AndWhatFollowsIsIgnored) {
  Conversation talk(4);
  talk.on(head());
  EXPECT_TRUE(talk.on(body("1234", false)).replies.empty());
  const Conversation::Step step = talk.on(body("5", false));
  EXPECT_EQ(step.event, Event::kNone);
  ASSERT_EQ(step.replies.size(), 1U);
  EXPECT_EQ(step.replies[0].part, Part::kImmediate);
  EXPECT_EQ(step.replies[0].status, 413);
  EXPECT_TRUE(talk.on(body("6", true)).replies.empty());
}

TEST(Conversation, RefusalsAreOpenAisErrorsAndWhatIsShedIs429) {
  Conversation talk(100);
  talk.on(head(true));
  router::ApiError none = router::no_worker("nobody is up");
  auto replies = talk.refuse(none);
  EXPECT_EQ(replies[0].part, Part::kImmediate);
  EXPECT_EQ(replies[0].status, 503);
  EXPECT_EQ(header(replies[0], "retry-after"), "1;");
  EXPECT_NE(replies[0].body.find("\"no_worker_available\""), std::string::npos);
  EXPECT_EQ(replies[0].details, "kindred_no_worker_available");
  none.shed = true;
  EXPECT_EQ(talk.refuse(none)[0].status, 429);
}

TEST(Conversation, TheResponsePassesAndTellsWhoServedAndWhenItEnded) {
  Conversation talk(100);
  talk.on(head(true));
  talk.chosen(to_worker(""));
  FromProxy first = answer("200");
  first.served = "10.0.0.2:8000";
  Conversation::Step step = talk.on(first);
  EXPECT_EQ(step.event, Event::kAnswered);
  EXPECT_EQ(talk.status(), 200);
  EXPECT_EQ(talk.served(), "10.0.0.2:8000");
  step = talk.on({.part = Part::kResponseBody, .body = "data"});
  EXPECT_EQ(step.event, Event::kProgress);
  ASSERT_EQ(step.replies.size(), 1U);
  EXPECT_TRUE(step.replies[0].streamed);
  EXPECT_EQ(step.replies[0].body, "data");
  step = talk.on({.part = Part::kResponseBody, .body = "end", .end_of_stream = true});
  EXPECT_EQ(step.event, Event::kEnded);
  EXPECT_TRUE(step.replies[0].end_of_stream);
  EXPECT_EQ(talk.on({.part = Part::kResponseBody}).event, Event::kBroken);
}

TEST(Conversation, TrailersEndAResponseOnce) {
  Conversation talk(100);
  talk.on(head(true));
  talk.chosen(to_worker(""));
  talk.on(answer("200"));
  EXPECT_EQ(talk.on({.part = Part::kResponseTrailers}).event, Event::kEnded);
  Conversation other(100);
  other.on(head(true));
  other.chosen(to_worker(""));
  EXPECT_EQ(other.on(answer("204", true)).event, Event::kEnded);
  EXPECT_EQ(other.on({.part = Part::kResponseTrailers}).event, Event::kNone);
}

TEST(Conversation, AProxyMayAnswerBeforeTheRequestIsWhole) {
  Conversation talk(100);
  talk.on(head());
  EXPECT_EQ(talk.on(answer("408", true)).event, Event::kEnded);
  EXPECT_EQ(talk.status(), 408);
}

TEST(Conversation, OtherResponseModesAreNotSentBackAndNoneEndsWithTheStream) {
  Conversation talk(100);
  FromProxy first = head(true);
  first.response_mode = BodyMode::kStreamed;
  talk.on(first);
  talk.chosen(to_worker(""));
  talk.on(answer("200"));
  EXPECT_FALSE(talk.ends_unseen());
  EXPECT_FALSE(talk.on({.part = Part::kResponseBody, .body = "x"}).replies[0].streamed);
  Conversation blind(100);
  first.response_mode = BodyMode::kNone;
  blind.on(first);
  blind.chosen(to_worker(""));
  EXPECT_FALSE(blind.ends_unseen());
  blind.on(answer("200"));
  EXPECT_TRUE(blind.ends_unseen());
}

TEST(Conversation, ImpossibleOrdersAreBroken) {
  EXPECT_EQ(Conversation(10).on(body("x", true)).event, Event::kBroken);
  EXPECT_EQ(Conversation(10).on({.part = Part::kRequestTrailers}).event, Event::kBroken);
  EXPECT_EQ(Conversation(10).on({.part = Part::kImmediate}).event, Event::kBroken);
  Conversation twice(10);
  twice.on(head());
  EXPECT_EQ(twice.on(head()).event, Event::kBroken);
  Conversation answers(10);
  answers.on(head(true));
  answers.chosen(to_worker(""));
  answers.on(answer("200"));
  EXPECT_EQ(answers.on(answer("200")).event, Event::kBroken);
}

TEST(Conversation, AProxyThatOnlyWatchesIsLetGo) {
  FromProxy first = head();
  first.observing = true;
  const Conversation::Step step = Conversation(10).on(first);
  EXPECT_EQ(step.event, Event::kLetGo);
  EXPECT_TRUE(step.replies.empty());
}

}  // namespace
}  // namespace kindred::picker

#include "router/splice.h"

#include <gtest/gtest.h>

#include "base/json.h"
#include "base/rng.h"

namespace kindred::router {
namespace {

std::string spliced(std::string_view object, std::initializer_list<Edit> edits) {
  const Result<std::string> out = splice(object, edits);
  return out ? *out : "error: " + out.error().message;
}

TEST(Splice, ReplacesInPlaceAndKeepsTheRestByteForByte) {
  EXPECT_EQ(spliced(R"( { "a" : 1.0e0 ,"b":"x\u00e9\/" , "c" : [ 1, 2 ] } )", {{"b", R"("y")"}}),
            R"( { "a" : 1.0e0 ,"b":"y" , "c" : [ 1, 2 ] } )");
  EXPECT_EQ(spliced(R"({"n":1,"n":2})", {{"n", "3"}}), R"({"n":3,"n":3})");
  EXPECT_EQ(spliced(R"({"a":{"b":1},"b":2})", {{"b", "3"}}), R"({"a":{"b":1},"b":3})");
  EXPECT_EQ(spliced(R"({"a":1e400,"b":-0})", {}), R"({"a":1e400,"b":-0})");
}

TEST(Splice, AddsAtTheEnd) {
  EXPECT_EQ(spliced("{}", {{"a", "1"}}), R"({"a":1})");
  EXPECT_EQ(spliced("{ }", {{"a", "1"}, {"b", "2"}}), R"({ "a":1,"b":2})");
  EXPECT_EQ(spliced("{\"x\":1}\n", {{"a", "1"}}), "{\"x\":1,\"a\":1}\n");
  EXPECT_EQ(spliced(R"({"x":1})", {{"a", "1", false}}), R"({"x":1})");  // only where it is
}

TEST(Splice, RemovesWithOneComma) {
  EXPECT_EQ(spliced(R"({"a":1, "b":2, "c":3})", {{"a", std::nullopt}}), R"({"b":2, "c":3})");
  EXPECT_EQ(spliced(R"({"a":1, "b":2, "c":3})", {{"b", std::nullopt}}), R"({"a":1, "c":3})");
  EXPECT_EQ(spliced(R"({"a":1, "b":2, "c":3})", {{"c", std::nullopt}}), R"({"a":1, "b":2})");
  EXPECT_EQ(spliced(R"({ "a":1 })", {{"a", std::nullopt}}), R"({  })");
  EXPECT_EQ(spliced(R"({"a":1,"b":2})", {{"a", std::nullopt}, {"b", std::nullopt}, {"c", "3"}}), R"({"c":3})");
  EXPECT_EQ(spliced(R"({"a":1})", {{"b", std::nullopt}}), R"({"a":1})");
}

TEST(Splice, FindsFieldsHoweverTheyAreSpelled) {
  EXPECT_EQ(spliced(R"({"str\u0065am":true})", {{"stream", "false"}}), R"({"str\u0065am":false})");
  EXPECT_EQ(spliced(R"({"str\u00e9am":true})", {{"stream", "false"}}), R"({"str\u00e9am":true,"stream":false})");
  EXPECT_EQ(spliced(R"({"s\u002Fx":1})", {{"s/x", "2"}}), R"({"s\u002Fx":2})");
  EXPECT_EQ(spliced(R"({"s\/x":1})", {{"s/x", "2"}}), R"({"s\/x":2})");
}

TEST(Splice, IsNotFooledByWhatIsInStrings) {
  EXPECT_EQ(spliced(R"({"p":"\"stream\":true}","q":"\\","stream":true})", {{"stream", "false"}}),
            R"({"p":"\"stream\":true}","q":"\\","stream":false})");
  EXPECT_EQ(spliced(R"({"p":["{\"a\":[","\\\""],"a":1})", {{"a", "2"}}), R"({"p":["{\"a\":[","\\\""],"a":2})");
}

TEST(Splice, RefusesWhatIsNoObject) {
  for (const char* text : {"", "[]", "1", "{", "}", "{\"a\"}", "{\"a\":}", "{\"a\":1", "{\"a\":1,}", "{,}",
                           "{\"a\":1 \"b\":2}", "{\"a\":\"x}", "{\"a\":[1}", "{\"a\":1}x", "{a:1}", "{\"a\\\":1}"}) {
    EXPECT_FALSE(splice(text, {{"a", "1"}}).ok()) << text;
    EXPECT_FALSE(raw_field(text, "a").ok()) << text;
  }
}

TEST(Splice, GivesAFieldsRawBytes) {
  const auto get = [](std::string_view object, std::string_view field) {
    const auto out = raw_field(object, field);
    return out && *out ? std::string(**out) : std::string("none");
  };
  EXPECT_EQ(get(R"({"a" : {"x": [1 , 2]} , "b":1.50})", "a"), R"({"x": [1 , 2]})");
  EXPECT_EQ(get(R"({"a":1,"b": 1.50 })", "b"), "1.50");
  EXPECT_EQ(get(R"({"a":1,"a":2})", "a"), "2");
  EXPECT_EQ(get(R"({"a":{"b":1}})", "b"), "none");
}

// Random objects with random spacing, against a parser that builds a tree.
TEST(Splice, AgreesWithATree) {
  Rng rng(7);
  const auto space = [&] { return std::string(rng.below(3), ' '); };
  const std::array<std::string, 7> values = {
      "1", "-2.50e3", "true", "null", R"("a\"b,}")", R"([1,{"a":2},"]"])", R"({"a":{"b":"{"}})"};
  const std::array<std::string, 5> names = {"a", "b", "c", "d", "e"};
  for (int round = 0; round < 3000; ++round) {
    std::vector<std::string> left(names.begin(), names.end());
    std::string text = space() + "{" + space();
    const size_t count = rng.below(5);
    for (size_t i = 0; i < count; ++i) {
      const size_t pick = rng.below(left.size());
      text += (i == 0 ? "" : "," + space()) + "\"" + left[pick] + "\"" + space() + ":" + space() +
              values[rng.below(values.size())] + space();
      left.erase(left.begin() + static_cast<ptrdiff_t>(pick));
    }
    text += "}" + space();
    Json tree = Json::parse(text);
    std::vector<Edit> edits;
    for (const std::string& name : names) {
      switch (rng.below(4)) {
        case 0: edits.push_back({name, std::string_view(values[rng.below(values.size())])}); break;
        case 1: edits.push_back({name, std::nullopt}); break;
        case 2: edits.push_back({name, std::string_view(values[rng.below(values.size())]), false}); break;
        default: break;
      }
    }
    for (const Edit& edit : edits) {
      const std::string name(edit.field);
      if (!edit.value) tree.erase(name);
      else if (edit.add || tree.contains(name)) tree[name] = Json::parse(*edit.value);
    }
    const Result<std::string> got = splice(text, edits);
    ASSERT_TRUE(got.ok()) << text;
    EXPECT_EQ(Json::parse(*got), tree) << text << " -> " << *got;
    EXPECT_EQ(*splice(text, std::span<const Edit>()), text);
  }
}

}  // namespace
}  // namespace kindred::router

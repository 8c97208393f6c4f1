// Several models behind one router: by name, by alias, by LoRA adapter.

#include "router/models.h"

#include "base/json.h"
#include "router/testing.h"

namespace kindred::router::testing {
namespace {

TEST(ModelAliases, AreCheckedWhenTheyAreRead) {
  const auto good = ModelAliases::parse({"gpt-4=m", "fast=org/m=2"});
  ASSERT_TRUE(good.ok());
  EXPECT_EQ(*good->find("fast"), "org/m=2");
  EXPECT_EQ(good->find("m"), nullptr);
  for (const char* bad : {"x", "=m", "x="}) EXPECT_FALSE(ModelAliases::parse({bad}).ok()) << bad;
  EXPECT_NE(ModelAliases::parse({"a=m", "a=n"}).error().message.find("twice"), std::string::npos);
  EXPECT_NE(ModelAliases::parse({"a=b", "b=m"}).error().message.find("alias itself"), std::string::npos);
  EXPECT_EQ(ModelAliases::parse(std::vector<std::string>(kMaxAliases + 1, "a=b")).error().field, "model_alias");
}

class Models : public RouterTest {
 protected:
  FakeWorker& serving(const std::string& model) {
    FakeWorker& worker = add(Role::kBoth, "");
    worker.model = model;
    return worker;
  }
  Answer ask(const std::string& model, const std::string& more = {}) {
    return call("POST", "/v1/chat/completions",
                R"({ "temperature":1.0e0, "model" : ")" + model +
                    R"(" ,"messages":[{"role":"user","content":"\u00e9"}])" + more + "}");
  }
  std::string error_of(const Answer& answer) { return Json::parse(answer.body)["error"]["message"]; }
};

TEST_F(Models, ARequestGoesToAWorkerOfItsModel) {
  FakeWorker& a = serving("a");
  FakeWorker& b = serving("b");
  start();
  for (int i = 0; i < 3; ++i) EXPECT_EQ(ask("b").status, 200);
  EXPECT_EQ(ask("a").status, 200);
  EXPECT_EQ(a.leg_count(), 1U);
  EXPECT_EQ(b.leg_count(), 3U);
  const Answer none = call("POST", "/v1/chat/completions", R"({"messages":[]})");  // which one?
  EXPECT_EQ(none.status, 404);
}

TEST_F(Models, EachCanBeAskedForByItsName) {
  options_.model_aliases = {"gpt-4=org/a"};
  serving("org/a");
  start();
  for (const char* path : {"/v1/models/org/a", "/v1/models/org%2Fa"}) {
    const Answer answer = call("GET", path);
    EXPECT_EQ(answer.status, 200) << path;
    EXPECT_EQ(Json::parse(answer.body)["id"], "org/a");
    EXPECT_EQ(Json::parse(answer.body)["object"], "model");
  }
  EXPECT_EQ(Json::parse(call("GET", "/v1/models/gpt-4").body)["root"], "org/a");
  const Answer none = call("GET", "/v1/models/b");
  EXPECT_EQ(none.status, 404);
  EXPECT_EQ(Json::parse(none.body)["error"]["code"], "model_not_found");
  EXPECT_EQ(call("DELETE", "/v1/models/b").status, 405);
}

TEST_F(Models, AnUnknownOneIsA404ThatListsWhatIsServed) {
  options_.model_aliases = {"gpt-4=a", "gone=z"};
  serving("a");
  serving("b");
  start();
  ASSERT_TRUE(eventually([&] { return ask("b").status == 200; }));
  const Answer answer = ask("c");
  EXPECT_EQ(answer.status, 404);
  EXPECT_EQ(Json::parse(answer.body)["error"]["code"], "model_not_found");
  EXPECT_EQ(error_of(answer), "the model 'c' does not exist; served here: a, b, gpt-4 (alias of a)");
  EXPECT_EQ(ask("gone").status, 404);  // an alias of what is not there
}

TEST_F(Models, AnAliasBecomesItsModelInTheBodyAndNothingElseChanges) {
  options_.model_aliases = {"gpt-4=a"};
  FakeWorker& a = serving("a");
  serving("b");
  start();
  ASSERT_TRUE(eventually([&] { return ask("gpt-4", R"(,"x":[1.50])").status == 200; }));
  EXPECT_EQ(a.legs().back().body,
            R"({ "temperature":1.0e0, "model" : "a" ,"messages":[{"role":"user","content":"\u00e9"}],"x":[1.50]})");
  EXPECT_EQ(call("GET", "/health?model=gpt-4").status, 200);
  const Json list = Json::parse(call("GET", "/v1/models").body)["data"];
  ASSERT_EQ(list.size(), 3U);
  EXPECT_EQ(list[2]["id"], "gpt-4");
  EXPECT_EQ(list[2]["root"], "a");
}

TEST_F(Models, AWorkerThatKnowsTheNameGetsItAsItIs) {
  options_.model_aliases = {"b=a"};
  FakeWorker& a = serving("a");
  FakeWorker& b = serving("b");
  start();
  ASSERT_TRUE(eventually([&] { return ask("b").status == 200; }));
  EXPECT_EQ(a.leg_count(), 0U);
  EXPECT_NE(b.legs().back().body.find(R"("model" : "b")"), std::string::npos);
}

TEST_F(Models, LoraAdaptersAreServedByTheWorkersThatListThem) {
  FakeWorker& plain = serving("base");
  FakeWorker& lora = serving("base");
  lora.set_page("/v1/models", R"({"object":"list","data":[
      {"id":"base","object":"model","owned_by":"vllm","root":"base","parent":null,"max_model_len":4096},
      {"id":"sql-lora","object":"model","owned_by":"vllm","root":"/adapters/sql","parent":"base"}]})");
  start();
  ASSERT_TRUE(eventually([&] { return ask("sql-lora").status == 200; }));
  for (int i = 0; i < 3; ++i) EXPECT_EQ(ask("sql-lora").status, 200);
  EXPECT_EQ(plain.leg_count(), 0U);
  EXPECT_EQ(lora.leg_count(), 4U);
  EXPECT_NE(lora.legs()[0].body.find(R"("model" : "sql-lora")"), std::string::npos);
  for (int i = 0; i < 4; ++i) EXPECT_EQ(ask("base").status, 200);
  EXPECT_EQ(plain.leg_count(), 2U);  // both serve the base model
  const Json list = Json::parse(call("GET", "/v1/models").body)["data"];
  ASSERT_EQ(list.size(), 2U);
  EXPECT_EQ(list[1]["parent"], "base");
  // Adapters do not make the base model ambiguous.
  EXPECT_EQ(call("POST", "/v1/chat/completions", R"({"messages":[]})").status, 200);
  EXPECT_EQ(call("GET", "/ready?model=sql-lora").status, 200);
}

class ModelsPd : public PdFlowTest {};

TEST_F(ModelsPd, AnAliasReachesBothLegs) {
  options_.model_aliases = {"gpt-4=m"};
  FakeWorker& p = prefill();
  FakeWorker& d = decode();
  start();
  const Answer answer = call("POST", "/v1/chat/completions", R"({"model":"gpt-4","messages":[],"stream":true})");
  EXPECT_EQ(answer.body, kWholeStream);
  for (const FakeWorker* worker : {&p, &d}) {
    EXPECT_EQ(worker->legs()[0].body, R"({"model":"m","messages":[],"stream":true})");
  }
}

}  // namespace
}  // namespace kindred::router::testing

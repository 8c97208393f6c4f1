#include "base/config.h"

#include <gtest/gtest.h>
#include <unistd.h>

namespace kindred {
namespace {

struct Options {
  std::string model;
  int64_t token_budget = 512;
  double tau = 0.1;
  bool cache = true;
  std::string role = "both";
  std::vector<std::string> worker;
};

ConfigSchema schema_of(Options& o) {
  ConfigSchema schema("test [OPTIONS]", "A test.");
  schema.text("model", &o.model, "the model");
  schema.integer("token_budget", &o.token_budget, 1, 4096, "tokens a step");
  schema.real("tau", &o.tau, 0, 2, "width of the band");
  schema.flag("cache", &o.cache, "keep prefixes");
  schema.choice("role", &o.role, {"prefill", "decode", "both"}, "the role");
  schema.list("worker", &o.worker, "a worker's URL");
  return schema;
}

Status parse(Options& o, std::vector<const char*> args) { return schema_of(o).parse_flags(args); }

TEST(Config, FlagsSetEveryKind) {
  Options o;
  ASSERT_TRUE(parse(o, {"--model", "m.gguf", "--token-budget=7", "--tau", "0.5", "--cache=false", "--role", "decode",
                        "--worker", "a", "--worker=b"})
                  .ok());
  EXPECT_EQ(o.model, "m.gguf");
  EXPECT_EQ(o.token_budget, 7);
  EXPECT_EQ(o.tau, 0.5);
  EXPECT_FALSE(o.cache);
  EXPECT_EQ(o.role, "decode");
  EXPECT_EQ(o.worker, (std::vector<std::string>{"a", "b"}));
}

TEST(Config, ErrorsNameTheOptionAndWhatIsAccepted) {
  Options o;
  const auto message = [&](std::vector<const char*> args) { return parse(o, std::move(args)).error().message; };
  EXPECT_EQ(message({"--token-budget", "0"}), "--token-budget: got '0', accepted: a whole number from 1 to 4096");
  EXPECT_EQ(message({"--token-budget", "7x"}), "--token-budget: got '7x', accepted: a whole number from 1 to 4096");
  EXPECT_EQ(message({"--tau", "nan"}), "--tau: got 'nan', accepted: a number from 0 to 2");
  EXPECT_EQ(message({"--role", "deocde"}), "--role: got 'deocde', accepted: prefill, decode, both");
  EXPECT_EQ(message({"--modle", "x"}), "unknown option --modle; the nearest valid one is --model");
  EXPECT_EQ(message({"--model"}), "--model needs a value");
  EXPECT_EQ(message({"stray"}), "unexpected argument 'stray'");
}

TEST(Config, YamlHasTheSameKeysAndNamesTheLine) {
  Options o;
  ConfigSchema schema = schema_of(o);
  ASSERT_TRUE(schema.parse_yaml("model: m.gguf\nworker:\n  - a\n  - b\ntoken_budget: 9\n", "fleet.yaml").ok());
  EXPECT_EQ(o.worker, (std::vector<std::string>{"a", "b"}));
  EXPECT_EQ(o.token_budget, 9);
  EXPECT_EQ(schema.parse_yaml("tau: 0.2\ntoken_bugdet: 9\n", "fleet.yaml").error().message,
            "fleet.yaml:2: unknown key 'token_bugdet'; the nearest valid one is 'token_budget'");
  EXPECT_EQ(schema.parse_yaml("role: [a]\n", "f").error().message, "f:1: role: expected a single value");
  EXPECT_FALSE(schema.parse_yaml("a: [", "f").ok());
  EXPECT_FALSE(schema.parse_yaml("- a\n", "f").ok());
  EXPECT_TRUE(schema.parse_yaml("", "f").ok());
}

TEST(Config, FlagsWinOverTheFile) {
  Options o;
  const std::string path = testing::TempDir() + "config_test_" + std::to_string(getpid()) + ".yaml";
  ASSERT_TRUE(write_file(path, "token_budget: 9\ntau: 0.2\nworker: [a, b]\n").ok());
  ConfigSchema schema = schema_of(o);
  schema.accept_config_file();
  const std::vector<const char*> args = {"--token-budget", "8", "--config", path.c_str(), "--worker", "c"};
  ASSERT_TRUE(schema.parse_flags(args).ok());
  EXPECT_EQ(o.token_budget, 8);
  EXPECT_EQ(o.tau, 0.2);
  EXPECT_EQ(o.worker, (std::vector<std::string>{"c"}));
}

TEST(Config, HelpShowsDefaults) {
  Options o;
  const std::string help = schema_of(o).help();
  EXPECT_NE(help.find("usage: kindred test [OPTIONS]"), std::string::npos);
  EXPECT_NE(help.find("--token-budget N"), std::string::npos);
  EXPECT_NE(help.find("tokens a step [512]"), std::string::npos);
}

TEST(EditDistance, CountsSwapsOnce) {
  EXPECT_EQ(edit_distance("modle", "model"), 1U);
  EXPECT_EQ(edit_distance("", "abc"), 3U);
  EXPECT_EQ(edit_distance("same", "same"), 0U);
  EXPECT_EQ(edit_distance("kitten", "sitting"), 3U);
}

TEST(ConfigSchema, SaysAllThatIsWrongAtOnce) {
  int64_t number = 5;
  std::string name = "x";
  std::vector<std::string> list = {"a"};
  ConfigSchema schema("t", "t");
  schema.integer("number", &number, 1, 10, "n");
  schema.text("name", &name, "n");
  schema.list("list", &list, "l");
  const std::vector<Error> problems = schema.check_yaml("number: 11\nnome: y\nlist: {a: b}\nname: good\n[1]: 2\n", "f");
  ASSERT_EQ(problems.size(), 4U);
  EXPECT_EQ(problems[0].field, "number");
  EXPECT_NE(problems[0].message.find("f:1: number: got '11', accepted: a whole number from 1 to 10"), std::string::npos)
      << problems[0].message;
  EXPECT_NE(problems[1].message.find("f:2: unknown key 'nome'; the nearest valid one is 'name'"), std::string::npos);
  EXPECT_EQ(problems[2].field, "list");
  EXPECT_NE(problems[3].message.find("f:5"), std::string::npos);
  EXPECT_EQ(name, "good");
  EXPECT_EQ(schema.check_yaml("a: [", "f").size(), 1U);
  EXPECT_EQ(schema.to_json(), R"({"list":["a"],"name":"good","number":5})");
}

}  // namespace
}  // namespace kindred

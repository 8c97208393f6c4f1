#include "expert/gates.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "base/json.h"

namespace kindred::expert {
namespace {

ExpertGates example() { return {{1, 3}, 3, {0, 0.25F, 7.5F, 1e-30F, 3, std::numeric_limits<float>::max()}}; }

TEST(Gates, SurviveTheWire) {
  const ExpertGates gates = example();
  const std::string json = gates_to_json(gates);
  EXPECT_EQ(json.substr(0, json.find("\"data\"")), R"({"v":1,"dtype":"f32","layers":[1,3],"experts":3,)");
  const auto back = gates_from_json(json);
  ASSERT_TRUE(back.ok()) << back.error().message;
  EXPECT_EQ(*back, gates);
}

TEST(Gates, AreLittleEndian) {
  // 1.0f is 0x3f800000.
  EXPECT_EQ(parse_json(gates_to_json({{0}, 1, {1.0F}}))["data"], "AACAPw==");
}

TEST(Gates, BadOnesAreRefusedByField) {
  const auto refused = [](const std::string& key, const Json& value, ErrorCode code = ErrorCode::kInvalid) {
    Json object = parse_json(gates_to_json(example()));
    if (value.is_null()) {
      object.erase(key);
    } else {
      object[key] = value;
    }
    const auto gates = gates_from_json(dump_json(object), 1000);
    ASSERT_FALSE(gates.ok()) << dump_json(object);
    EXPECT_EQ(gates.error().code, code) << gates.error().message;
    EXPECT_EQ(gates.error().field, key) << gates.error().message;
  };
  for (const char* key : {"v", "dtype", "layers", "experts", "data"}) {
    refused(key, nullptr);
    refused(key, true);
  }
  refused("v", 2);
  refused("dtype", "f64");
  refused("layers", Json::array());
  refused("layers", {3, 1});
  refused("layers", {1, 1});
  refused("layers", {-1, 3});
  refused("layers", {1, 1LL << 33});
  refused("experts", 0);
  refused("experts", -3);
  refused("experts", 2.5);
  refused("experts", 1LL << 40);
  refused("experts", 501, ErrorCode::kTooLarge);
  refused("data", "AAAA");
  refused("data", std::string(32, '!'));
  for (const float bad : {-0.5F, std::numeric_limits<float>::infinity(), std::nanf("")}) {
    ExpertGates gates = example();
    gates.data[4] = bad;
    const auto read = gates_from_json(gates_to_json(gates));
    ASSERT_FALSE(read.ok());
    EXPECT_EQ(read.error().field, "data");
  }
  ExpertGates shorter = example();
  shorter.data.pop_back();
  EXPECT_EQ(gates_from_json(gates_to_json(shorter)).error().field, "data");
  for (const char* text : {"", "[]", "7", "{"}) EXPECT_FALSE(gates_from_json(text).ok());
}

}  // namespace
}  // namespace kindred::expert

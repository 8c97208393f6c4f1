#include <gtest/gtest.h>

#include "base/json.h"
#include "place/generate.h"
#include "place/placement_file.h"
#include "place/solve.h"
#include "place/traffic_file.h"

namespace kindred::place {
namespace {

std::string field_of(const auto& result) { return result ? "" : result.error().field; }

TEST(traffic_file, json) {
  const Result<TrafficFile> file = traffic_from_json(
      R"({"A": [[[1,2],[3,4.5]]], "ranks": 2, "source_names": ["code","chat"], "placement": [[1,0]],
          "distance": [[0,1],[2,0]], "a field of others": 1})");
  ASSERT_TRUE(file.ok()) << file.error().message;
  EXPECT_EQ(file->traffic.layers, 1U);
  EXPECT_EQ(file->traffic.sources, 2U);
  EXPECT_EQ(file->traffic.tokens, (std::vector<double>{1, 2, 3, 4.5}));
  EXPECT_EQ(file->old.rank, (std::vector<uint32_t>{1, 0}));
  EXPECT_EQ(file->distance, (std::vector<double>{0, 1, 2, 0}));
  EXPECT_EQ(file->source_names[1], "chat");
}

TEST(traffic_file, bad_json) {
  EXPECT_EQ(field_of(traffic_from_json("nonsense")), "json");
  EXPECT_EQ(field_of(traffic_from_json("{}")), "json");
  EXPECT_EQ(field_of(traffic_from_json(R"({"A": 3})")), "A");
  EXPECT_EQ(field_of(traffic_from_json(R"({"A": [[[1,2],[3]]]})")), "A");
  EXPECT_EQ(field_of(traffic_from_json(R"({"A": [[[1,"2"]]]})")), "A");
  EXPECT_EQ(field_of(traffic_from_json(R"({"A": [[[1,-2]]]})")), "A");
  EXPECT_EQ(field_of(traffic_from_json(R"({"A": [[[0,0]]]})")), "A");
  EXPECT_EQ(field_of(traffic_from_json(R"({"A": [[[1e300,1e300]]]})")), "A");
  EXPECT_EQ(field_of(traffic_from_json(R"({"A": [[]]})")), "A");
  EXPECT_EQ(field_of(traffic_from_json(R"({"A": [[[1,2]]], "ranks": -1})")), "ranks");
  EXPECT_EQ(field_of(traffic_from_json(R"({"A": [[[1,2]]], "placement": [[0]]})")), "placement");
  EXPECT_EQ(field_of(traffic_from_json(R"({"A": [[[1,2]]], "placement": [[0,-1]]})")), "placement");
  EXPECT_EQ(field_of(traffic_from_json(R"({"A": [[[1,2]]], "source_names": ["a","b"]})")), "source_names");
  EXPECT_EQ(field_of(traffic_from_json(R"({"A": [[[1,2]]], "distance": [[0,1],[1,0]]})")), "distance");
}

TEST(traffic_file, csv) {
  const Result<TrafficFile> file = traffic_from_csv("layer,source,expert,tokens\r\n0,0,1,5\n1, 1, 0, 2.5\n\n0,0,1,1\n");
  ASSERT_TRUE(file.ok()) << file.error().message;
  EXPECT_EQ(file->traffic.layers, 2U);
  EXPECT_EQ(file->traffic.tokens, (std::vector<double>{0, 6, 0, 0, 0, 0, 2.5, 0}));
  EXPECT_EQ(field_of(traffic_from_csv("0,0,1,5\n")), "csv");
  EXPECT_EQ(field_of(traffic_from_csv("layer,source,expert,tokens\n0,0,-1,5\n")), "csv");
  EXPECT_EQ(field_of(traffic_from_csv("layer,source,expert,tokens\n0,0,1\n")), "csv");
  EXPECT_EQ(field_of(traffic_from_csv("layer,source,expert,tokens\n0,0,1,5,6\n")), "csv");
  EXPECT_EQ(field_of(traffic_from_csv("layer,source,expert,tokens\n4000000000,0,1,5\n")), "csv");
  EXPECT_EQ(field_of(traffic_from_csv("layer,source,expert,tokens\n0,0,1,nan\n")), "A");
  EXPECT_EQ(field_of(traffic_from_csv("layer,source,expert,tokens\n")), "layers");
}

TEST(traffic_file, vllm_load) {
  // Expert 1 has two slots; two windows.
  const Result<TrafficFile> file =
      traffic_from_json(R"({"physical_to_logical_map": [[0,1,2,1]], "expert_load": [[[1,2,3,4]],[[10,20,30,40]]]})");
  ASSERT_TRUE(file.ok()) << file.error().message;
  EXPECT_EQ(file->traffic.tokens, (std::vector<double>{11, 66, 33}));
  const Result<Placement> placement = placement_from_slots(file->slots, 3, 2);
  ASSERT_TRUE(placement.ok());
  EXPECT_EQ(placement->rank, (std::vector<uint32_t>{0, 0, 1}));
  EXPECT_EQ(placement->copies, (std::vector<Copy>{{.layer = 0, .expert = 1, .rank = 1}}));
  EXPECT_EQ(field_of(traffic_from_json(R"({"physical_to_logical_map": [[0,1]]})")), "expert_load");
  EXPECT_EQ(field_of(traffic_from_json(R"({"physical_to_logical_map": [[0,1]], "expert_load": [[1,2,3]]})")),
            "expert_load");
  EXPECT_EQ(field_of(traffic_from_json(R"({"physical_to_logical_map": [[0,-1]], "expert_load": [[1,2]]})")),
            "physical_to_logical_map");
  EXPECT_EQ(field_of(placement_from_slots({{0, 0, 2, 2}}, 3, 2)), "physical_to_logical_map");  // 1 is missing
  EXPECT_EQ(field_of(placement_from_slots({{0, 1, 2}}, 3, 2)), "physical_to_logical_map");
}

TEST(traffic_file, activations_by_domain) {
  expert::Activations activations;
  const auto request = [&](std::vector<uint32_t> counts, const char* domain) {
    expert::ExpertCounts prefill(expert::ExpertShape{.layers = {0, 1}, .experts = 3, .top_k = 1});
    prefill.tokens = 4;
    prefill.data = std::move(counts);
    ASSERT_TRUE(activations.append(prefill, nullptr, domain).ok());
  };
  request({4, 0, 0, 0, 4, 0}, "b");
  request({0, 2, 2, 1, 0, 3}, "a");
  request({4, 0, 0, 0, 4, 0}, "b");
  const Result<TrafficFile> file = traffic_from_activations(activations, 0);
  ASSERT_TRUE(file.ok()) << file.error().message;
  EXPECT_EQ(file->source_names, (std::vector<std::string>{"a", "b"}));
  EXPECT_EQ(file->traffic.tokens, (std::vector<double>{0, 2, 2, 8, 0, 0, 1, 0, 3, 0, 8, 0}));
  // Of "b", 8 tokens go from expert 0 to 1; of "a", half of 2 and 2 each way.
  EXPECT_EQ(file->transitions, (std::vector<float>{0, 8, 0, 0.5F, 0, 1.5F, 0.5F, 0, 1.5F}));
  const Result<TrafficFile> merged = traffic_from_activations(activations, 1);
  ASSERT_TRUE(merged.ok());
  EXPECT_EQ(merged->source_names[0], "a + b");
  EXPECT_EQ(merged->traffic.tokens, (std::vector<double>{8, 2, 2, 1, 8, 3}));
}

TEST(placement_file, there_and_back) {
  Problem problem = generate_problem(TrafficKind::kZipf, {.layers = 3, .experts = 16}, 4, 1);
  problem.redundant = 8;
  problem.old = {};
  for (const Solver solver : {Solver::kFlow, Solver::kEplb}) {
    const Placement placement = solve(problem, solver)->placement;
    const Result<Placement> read = placement_from_text(placement_to_text(placement));
    ASSERT_TRUE(read.ok()) << read.error().message;
    EXPECT_EQ(*read, placement);
    const auto slots = slots_of(placement);
    const Result<Placement> from_slots = placement_from_slots(slots, 16, 4);
    ASSERT_TRUE(from_slots.ok());
    EXPECT_TRUE(from_slots->check(problem.slots()).ok());
    for (size_t l = 0; l < 3; ++l) EXPECT_EQ(from_slots->holders(l), placement.holders(l));
  }
}

TEST(placement_file, who_stays_keeps_the_slot) {
  const Placement placement{.layers = 1, .experts = 4, .ranks = 2, .rank = {0, 1, 1, 0}};
  EXPECT_EQ(slots_of(placement), (std::vector<std::vector<uint32_t>>{{0, 3, 1, 2}}));
  EXPECT_EQ(slots_of(placement, {{1, 0, 3, 2}}), (std::vector<std::vector<uint32_t>>{{3, 0, 1, 2}}));
}

TEST(placement_file, bad_ones) {
  EXPECT_FALSE(placement_from_text("[]").ok());
  EXPECT_FALSE(placement_from_text(R"({"layers":1,"experts":2,"ranks":2,"placement":[[0]]})").ok());
  EXPECT_FALSE(placement_from_text(R"({"layers":1,"experts":2,"ranks":2,"placement":[[0,2]]})").ok());
  EXPECT_FALSE(placement_from_text(R"({"layers":1,"experts":2,"ranks":2,"placement":[[0,[]]]})").ok());
  EXPECT_FALSE(placement_from_text(R"({"layers":2,"experts":2,"ranks":2,"placement":[[0,1]]})").ok());
  EXPECT_FALSE(placement_from_text(R"({"layers":1,"experts":2,"ranks":2,"placement":7})").ok());
}

TEST(placement_file, exports) {
  const std::vector<std::vector<uint32_t>> slots = {{0, 3, 1, 2}, {2, 1, 0, 3}};
  EXPECT_EQ(parse_json(vllm_map(slots)), Json(slots));
  const Json sglang = parse_json(sglang_location(slots));
  EXPECT_EQ(sglang.size(), 1U);  // SGLang passes the fields on as arguments: no other may be there
  EXPECT_EQ(sglang["physical_to_logical_map"], Json(slots));
}

}  // namespace
}  // namespace kindred::place

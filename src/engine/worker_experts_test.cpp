// A worker with expert ranks over HTTP: what it says of them, and placements that it applies or refuses.
#include <gtest/gtest.h>

#include "engine/expert_ranks.h"
#include "engine/worker_testing.h"

namespace kindred::engine {
namespace {

using namespace testing;

class WorkerExpertsTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    auto model = Model::load(KINDRED_SOURCE_DIR "/models/kindred-tiny-moe-q8_0.gguf", {}, {.ranks = 2, .threads = 2});
    ASSERT_TRUE(model.ok()) << model.error().message;
    model_ = std::move(*model);
    loop_ = std::make_unique<Loop>();
    node_ = std::make_unique<Node>(*loop_, role(Role::kBoth), Node::small(), 1, *model_);
  }
  static void TearDownTestSuite() {
    node_.reset();
    loop_.reset();
    model_.reset();
  }
  static std::string complete() {
    const Reply reply = node_->post("/v1/completions", {{"model", "tiny"},
                                                        {"prompt", "def main():"},
                                                        {"max_tokens", 24},
                                                        {"temperature", 0},
                                                        {"ignore_eos", true},
                                                        {"cache_prompt", false}});
    EXPECT_EQ(reply.status, 200) << reply.body;
    return reply.parsed()["choices"][0]["text"];
  }
  static json experts() {
    const Reply reply = node_->get("/v1/experts");
    EXPECT_EQ(reply.status, 200) << reply.body;
    return reply.parsed();
  }
  static json file_of(const json& page) {
    return {{"layers", page["layers"]},
            {"experts", page["experts"]},
            {"ranks", page["ranks"]},
            {"placement", page["placement"]}};
  }

  static inline std::unique_ptr<Model> model_;
  static inline std::unique_ptr<Loop> loop_;
  static inline std::unique_ptr<Node> node_;
};

TEST_F(WorkerExpertsTest, ShowsTrafficAndAppliesAPlacement) {
  const std::string text = complete();
  json page = experts();
  EXPECT_EQ(page["ranks"], 2);
  EXPECT_EQ(page["sources"], 1);
  ASSERT_EQ(page["A"].size(), page["layers"].get<size_t>());
  ASSERT_EQ(page["A"][0].size(), 1U);
  EXPECT_EQ(page["A"][0][0], page["B"][0]);  // one source
  uint64_t of_ranks = 0, of_experts = 0;
  for (const json& tokens : page["rank_tokens"]) of_ranks += tokens.get<uint64_t>();
  for (const json& layer : page["B"]) {
    for (const json& tokens : layer) of_experts += tokens.get<uint64_t>();
  }
  EXPECT_GT(of_ranks, 0U);
  EXPECT_EQ(of_ranks, of_experts);
  EXPECT_GE(page["imbalance"].get<double>(), 1.0);
  EXPECT_EQ(page["remote_share"], 0.0);  // one engine owns all ranks
  EXPECT_GE(page["active_experts"][0].get<double>(), page["top_k"].get<double>());

  json target = file_of(page);
  uint64_t moves = 0;
  for (json& layer : target["placement"]) {
    for (json& rank : layer) {
      rank = 1 - rank.get<int>();
      ++moves;
    }
  }
  const Reply applied = node_->post("/v1/experts/placement", target);
  EXPECT_EQ(applied.status, 202) << applied.body;
  EXPECT_EQ(complete(), text);
  model_->ranks()->wait_for_migration();
  EXPECT_EQ(complete(), text);
  page = experts();
  EXPECT_EQ(page["placement"], target["placement"]);
  EXPECT_EQ(page["migration"]["active"], false);
  EXPECT_EQ(page["migration"]["remaining"], 0);
  EXPECT_EQ(page["migration"]["total_moves"], moves);
  EXPECT_EQ(node_->metric("kindred_expert_moves_total"), static_cast<double>(moves));
  EXPECT_GE(node_->metric("kindred_expert_rank_imbalance"), 1);
}

TEST_F(WorkerExpertsTest, RefusesBadPlacementsAndSaysWhy) {
  const json before = experts();
  const auto refused = [&](const json& file, const std::string& param) {
    const Reply reply = node_->post("/v1/experts/placement", file);
    EXPECT_EQ(reply.status, 400) << reply.body;
    EXPECT_EQ(reply.parsed()["error"]["param"], param) << reply.body;
  };
  json file = file_of(before);
  file["placement"][1][2] = 2;
  refused(file, "placement[1][2]");
  file = file_of(before);
  file["placement"][0].erase(0);
  refused(file, "placement[0]");
  file = file_of(before);
  file["ranks"] = 3;
  refused(file, "ranks");
  EXPECT_EQ(node_->request("POST", "/v1/experts/placement", "{").status, 400);
  EXPECT_EQ(node_->get("/v1/experts/placement").status, 405);
  EXPECT_EQ(experts()["placement"], before["placement"]);

  const Reply cancelled = node_->request("DELETE", "/v1/experts/placement");
  EXPECT_EQ(cancelled.status, 200);
  EXPECT_EQ(cancelled.parsed()["active"], false);
}

TEST(WorkerWithoutExpertRanks, SaysSo) {
  Loop loop;
  Node node(loop, role(Role::kBoth));
  EXPECT_EQ(node.get("/v1/experts").status, 404);
  EXPECT_EQ(node.post("/v1/experts/placement", json::object()).code(), "no_expert_ranks");
}

}  // namespace
}  // namespace kindred::engine

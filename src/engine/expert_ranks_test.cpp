#include "engine/expert_ranks.h"

#include <algorithm>
#include <chrono>
#include <fstream>
#include <thread>

#include "engine/expert_controller.h"
#include "engine/expert_ranks_testing.h"

namespace kindred::engine::test {
namespace {

struct RankCase {
  const char* type;
  uint32_t ranks, threads;
};

std::string path_of(const char* type) { return std::string(type) == "f16" ? f16_model_path() : model_path(); }

std::vector<float> logits_without_ranks(const std::string& path, uint32_t steps, uint64_t seed = 5) {
  auto model = Model::load(path);
  EXPECT_TRUE(model.ok()) << model.error().message;
  return run_schedule(*rank_session(**model), steps, {}, seed);
}

// Every expert at another rank than in `from`.
ExpertPlacement all_moved(ExpertPlacement from) {
  for (uint16_t& rank : from.rank_of) rank = static_cast<uint16_t>((rank + 1U) % from.ranks);
  return from;
}

class ExpertRanksExact : public testing::TestWithParam<RankCase> {};

// Ranks on against off: not one bit of any logit differs.
TEST_P(ExpertRanksExact, SameLogitsAsWithoutRanks) {
  const RankCase& c = GetParam();
  const std::vector<float> off = logits_without_ranks(path_of(c.type), 6);
  const auto model = load_with_ranks(path_of(c.type), c.ranks, c.threads);
  ASSERT_NE(model, nullptr);
  const std::vector<float> on = run_schedule(*rank_session(*model), 6);
  ASSERT_FALSE(off.empty());
  EXPECT_TRUE(same_bits(off, on));
  // And the ranks did the work.
  const std::vector<uint64_t> loads = rank_loads(model->ranks()->traffic(), model->ranks()->shape());
  for (const uint64_t load : loads) EXPECT_GT(load, 0U);
}

INSTANTIATE_TEST_SUITE_P(Types, ExpertRanksExact,
                         testing::Values(RankCase{"q8_0", 1, 1}, RankCase{"q8_0", 2, 1}, RankCase{"q8_0", 3, 2},
                                         RankCase{"f16", 1, 1}, RankCase{"f16", 2, 1}, RankCase{"f16", 4, 1}));

TEST(ExpertRanks, CountsEqualWhatTheCallbackSees) {
  for (const uint32_t ranks : {1U, 2U}) {
    const auto model = load_with_ranks(model_path(), ranks);
    ASSERT_NE(model, nullptr);
    ExpertRanks& r = *model->ranks();
    const auto session = rank_session(*model, /*capture=*/true);
    const expert::ExpertShape& shape = model->info().experts;
    std::vector<uint64_t> seen(shape.layers.size() * shape.experts);
    uint64_t tokens = 0;
    const auto add = [&] {
      const ExpertCapture* experts = session->experts();
      ASSERT_NE(experts, nullptr);
      for (size_t l = 0; l < shape.layers.size(); ++l) {
        for (uint32_t t = 0; t < session->batch_size(); ++t) {
          for (const uint16_t e : experts->selected(l, t)) ++seen[l * shape.experts + e];
        }
      }
      tokens += session->batch_size();
    };
    r.reset_window();
    run_schedule(*session, 4, {}, 5, add);
    const RankTraffic window = r.window();
    ASSERT_EQ(window.sources, 1U);
    const std::vector<uint64_t> counted = expert_tokens(window, r.shape());
    for (size_t l = 0; l < shape.layers.size(); ++l) {
      const auto row = std::ranges::find(r.layers(), shape.layers[l]) - r.layers().begin();
      for (uint32_t e = 0; e < shape.experts; ++e) {
        EXPECT_EQ(counted[static_cast<size_t>(row) * shape.experts + e], seen[l * shape.experts + e]);
      }
    }
    EXPECT_GT(tokens, 100U);
  }
}

class ExpertRanksMigration : public testing::TestWithParam<const char*> {};

TEST_P(ExpertRanksMigration, BitIdenticalBeforeDuringAndAfter) {
  const std::string path = path_of(GetParam());
  constexpr uint32_t kSteps = 40;
  const std::vector<float> expected = logits_without_ranks(path, kSteps);
  const auto model = load_with_ranks(path, 2);
  ASSERT_NE(model, nullptr);
  ExpertRanks& ranks = *model->ranks();
  const ExpertPlacement target = all_moved(ranks.placement());
  const auto session = rank_session(*model);
  uint64_t during = 0;
  const std::vector<float> logits = run_schedule(*session, kSteps, [&](uint32_t batch) {
    if (batch == 4) {
      EXPECT_TRUE(ranks.apply(target).ok());
    }
    if (ranks.progress().active) ++during;
  });
  ranks.wait_for_migration();
  EXPECT_GT(during, 2U);
  EXPECT_EQ(ranks.placement(), target);
  EXPECT_EQ(ranks.progress().total_moves, target.rank_of.size());
  EXPECT_TRUE(same_bits(expected, logits));
  EXPECT_TRUE(same_bits(expected, run_schedule(*session, kSteps)));
  EXPECT_GT(ranks.step_latency(true).steps, 0U);

  // Nobody reads the old copies any more, and the new ones are what is read.
  for (uint32_t l = 0; l < target.layers; ++l) {
    for (uint32_t e = 0; e < target.experts; ++e) ranks.poison(l, e, 1U - target.at(l, e));
  }
  EXPECT_TRUE(same_bits(expected, run_schedule(*session, kSteps)));
  for (uint32_t e = 0; e < target.experts; ++e) ranks.poison(0, e, target.at(0, e));
  EXPECT_FALSE(same_bits(expected, run_schedule(*session, kSteps)));
}

// Two engines' contexts over one model, each on its thread, while experts go to and fro.
TEST_P(ExpertRanksMigration, TwoContextsInTwoThreads) {
  const std::string path = path_of(GetParam());
  constexpr uint32_t kSteps = 30;
  const std::vector<std::vector<float>> expected = {logits_without_ranks(path, kSteps, 5),
                                                    logits_without_ranks(path, kSteps, 6)};
  const auto model = load_with_ranks(path, 2);
  ASSERT_NE(model, nullptr);
  ExpertRanks& ranks = *model->ranks();
  std::vector<std::unique_ptr<LlamaSession>> sessions;
  for (int i = 0; i < 2; ++i) sessions.push_back(rank_session(*model));
  std::atomic<bool> stop{false};
  std::thread mover([&] {
    while (!stop.load()) {
      EXPECT_TRUE(ranks.apply(all_moved(ranks.placement())).ok());
      std::this_thread::sleep_for(std::chrono::milliseconds(30));
    }
  });
  std::vector<std::vector<float>> logits(2);
  std::vector<std::thread> threads;
  for (size_t i = 0; i < 2; ++i) {
    threads.emplace_back([&, i] { logits[i] = run_schedule(*sessions[i], kSteps, {}, 5 + i); });
  }
  for (std::thread& thread : threads) thread.join();
  stop = true;
  mover.join();
  for (size_t i = 0; i < 2; ++i) EXPECT_TRUE(same_bits(expected[i], logits[i])) << i;
  EXPECT_GT(ranks.progress().total_moves, 0U);
  EXPECT_EQ(ranks.window().sources, 2U);
  EXPECT_EQ(ranks.expert_pressure().size(), 2U);
}

INSTANTIATE_TEST_SUITE_P(Types, ExpertRanksMigration, testing::Values("q8_0", "f16"));

TEST(ExpertRanks, CancelledHalfWayTheOutputIsTheSame) {
  const std::vector<float> expected = logits_without_ranks(model_path(), 10);
  const auto model = load_with_ranks(model_path(), 2);
  ASSERT_NE(model, nullptr);
  ExpertRanks& ranks = *model->ranks();
  const auto session = rank_session(*model);
  ASSERT_TRUE(ranks.apply(all_moved(ranks.placement())).ok());
  const std::vector<float> logits = run_schedule(*session, 10, [&](uint32_t batch) {
    if (batch == 3) ranks.cancel();
  });
  EXPECT_TRUE(same_bits(expected, logits));
  EXPECT_FALSE(ranks.progress().active);
}

TEST(ExpertRanks, MemoryStaysFlat) {
  const auto model = load_with_ranks(f16_model_path(), 2);
  ASSERT_NE(model, nullptr);
  ExpertRanks& ranks = *model->ranks();
  const auto before = static_cast<double>(ranks.resident_bytes());
  for (int i = 0; i < 4; ++i) {
    ASSERT_TRUE(ranks.apply(all_moved(ranks.placement())).ok());
    ranks.wait_for_migration();
  }
  EXPECT_GT(before, 0);
  EXPECT_LE(static_cast<double>(ranks.resident_bytes()), before * 1.1);
}

TEST(ExpertRanks, RefusesWhatItCannotServe) {
  const auto refused = [](const std::string& path, const ExpertRanksOptions& options) {
    const auto model = Model::load(path, {}, options);
    EXPECT_FALSE(model.ok());
    return model.ok() ? Error{} : model.error();
  };
  const uint32_t experts = bundled_model().info().experts.experts;
  Error error = refused(model_path(), {.ranks = experts + 1});
  EXPECT_EQ(error.code, ErrorCode::kInvalid);
  EXPECT_NE(error.message.find("accepted: 1.." + std::to_string(experts)), std::string::npos) << error.message;
  error = refused(model_path(), {.ranks = 2, .memory_bytes = 1000});
  EXPECT_EQ(error.code, ErrorCode::kExhausted);
  EXPECT_EQ(refused(model_path(), {.ranks = 2, .moves_per_step = 0}).field, "expert_moves_per_step");
  EXPECT_EQ(refused(model_path(), {.ranks = 2, .placement = "/nowhere"}).code, ErrorCode::kNotFound);

  const std::string dense = write_dense_model(rank_temp_path("kindred-ranks-dense.gguf"));
  error = refused(dense, {.ranks = 2});
  EXPECT_NE(error.message.find("no experts"), std::string::npos) << error.message;
  std::filesystem::remove(dense);

  const auto model = load_with_ranks(model_path(), 2);
  ASSERT_NE(model, nullptr);
  ExpertPlacement wrong = model->ranks()->placement();
  wrong.rank_of[3] = 2;
  EXPECT_FALSE(model->ranks()->apply(wrong).ok());
  wrong.layers = 1;
  EXPECT_FALSE(model->ranks()->apply(wrong).ok());
  EXPECT_FALSE(model->ranks()->progress().active);
}

TEST(ExpertRanks, BeginsWithAPlacementFile) {
  ExpertPlacement wanted;
  {
    const auto model = load_with_ranks(model_path(), 2);
    ASSERT_NE(model, nullptr);
    wanted = all_moved(model->ranks()->placement());
  }
  wanted.rank_of[0] = wanted.rank_of[1] = 0;  // need not be even
  const std::string file = rank_temp_path("kindred-placement.json");
  {
    std::ofstream out(file);
    out << R"({"layers":)" << wanted.layers << R"(,"experts":)" << wanted.experts << R"(,"ranks":2,"placement":[)";
    for (uint32_t l = 0; l < wanted.layers; ++l) {
      out << (l == 0 ? "[" : ",[");
      for (uint32_t e = 0; e < wanted.experts; ++e) out << (e == 0 ? "" : ",") << wanted.at(l, e);
      out << "]";
    }
    out << "]}";
  }
  auto model = Model::load(model_path(), {}, {.ranks = 2, .threads = 2, .placement = file});
  std::filesystem::remove(file);
  ASSERT_TRUE(model.ok()) << model.error().message;
  EXPECT_EQ((*model)->ranks()->placement(), wanted);
  EXPECT_TRUE(same_bits(logits_without_ranks(model_path(), 4), run_schedule(*rank_session(**model), 4)));
}

// Two engines whose tokens differ, and moves that cost nothing: the controller finds something to gain, and the
// outputs stay what they are.
TEST(ExpertRanks, ControllerFollowsTheTraffic) {
  const std::vector<float> expected = logits_without_ranks(model_path(), 4, 6);
  const auto model = load_with_ranks(model_path(), 2);
  ASSERT_NE(model, nullptr);
  ExpertRanks& ranks = *model->ranks();
  const auto first = rank_session(*model), second = rank_session(*model);
  ExpertControllerOptions options;
  options.window = std::chrono::milliseconds(100);
  options.rebalance.windows = 1;
  options.rebalance.least_share = 0;
  // A token's way is dear and balance is worth nothing, so whatever saves way pays.
  options.rebalance.migration.token_bytes = 1e9;
  options.rebalance.migration.busy_token_s = 0;
  ASSERT_TRUE(ranks.start_controller(options).ok());
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (ranks.controller()->report().applied == 0 && std::chrono::steady_clock::now() < deadline) {
    run_schedule(*first, 4, {}, 5);
    EXPECT_TRUE(same_bits(expected, run_schedule(*second, 4, {}, 6)));
  }
  const ExpertControllerReport report = ranks.controller()->report();
  EXPECT_GT(report.applied, 0U) << report.reason;
  EXPECT_EQ(report.failed, 0U) << report.reason;
  ranks.wait_for_migration();
  EXPECT_GT(ranks.progress().total_moves, 0U);
  EXPECT_TRUE(same_bits(expected, run_schedule(*second, 4, {}, 6)));
}

TEST(ExpertRanks, ControllerNeedsEvenRanks) {
  const auto model = load_with_ranks(model_path(), 3);
  ASSERT_NE(model, nullptr);
  ASSERT_NE(model->ranks()->shape().experts % 3, 0U);
  EXPECT_FALSE(model->ranks()->start_controller({}).ok());
}

}  // namespace
}  // namespace kindred::engine::test

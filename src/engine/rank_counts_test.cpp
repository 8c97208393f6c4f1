#include "engine/rank_counts.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "engine/expert_placement.h"
#include "engine/rank_topology.h"

namespace kindred::engine {
namespace {

MonotonicTime at_s(double s) {
  return MonotonicTime{} + std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::duration<double>(s));
}

TEST(RankCounts, WindowsAreDifferences) {
  const RankShape shape{2, 4, 2};
  RankCounts counts(shape);
  RankCounts::Source* first = counts.open();
  first->add_token(0, 1);
  counts.reset_window(at_s(1));
  RankCounts::Source* second = counts.open();  // unknown when the window began
  first->add_token(1, 3);
  second->add_token(0, 1);
  second->add_token(0, 1);
  second->add_rank_tokens(0, 1, 2);
  second->add_dispatch(0, 1);
  second->add_rank_active(1, 1);
  second->add_busiest(2);
  RankTraffic window = counts.window(at_s(3));
  EXPECT_EQ(window.sources, 2U);
  EXPECT_DOUBLE_EQ(window.seconds, 2);
  EXPECT_EQ(window.tokens, (std::vector<uint64_t>{0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0}));
  EXPECT_EQ(expert_tokens(window, shape), (std::vector<uint64_t>{0, 2, 0, 0, 0, 0, 0, 1}));
  EXPECT_EQ(rank_loads(window, shape), (std::vector<uint64_t>{0, 2}));
  EXPECT_EQ(window.rank_tokens, (std::vector<uint64_t>{0, 0, 0, 2, 0, 0, 0, 0}));
  EXPECT_EQ(window.rank_active, (std::vector<uint64_t>{0, 1}));
  EXPECT_EQ(window.busiest_tokens, 2U);
  EXPECT_EQ(window.dispatches, (std::vector<uint64_t>{1, 0}));
  EXPECT_EQ(counts.total().tokens[1], 1U);

  using std::chrono::milliseconds;
  counts.rotate(at_s(4), milliseconds(10'000));  // too early
  EXPECT_DOUBLE_EQ(counts.window(at_s(4)).seconds, 3);
  counts.rotate(at_s(11), milliseconds(10'000));  // begins at the old middle, which was the same
  counts.rotate(at_s(21), milliseconds(10'000));
  window = counts.window(at_s(21));
  EXPECT_DOUBLE_EQ(window.seconds, 10);
  EXPECT_EQ(expert_tokens(window, shape), std::vector<uint64_t>(8, 0));
}

TEST(RankCounts, SourcesAreBoundedAndUsedAgain) {
  RankCounts counts({1, 1, 1});
  std::vector<RankCounts::Source*> open;
  for (uint32_t i = 0; i < RankCounts::kMostSources; ++i) open.push_back(counts.open());
  EXPECT_EQ(counts.open(), nullptr);
  counts.close(open[3]);
  EXPECT_EQ(counts.open(), open[3]);
  EXPECT_EQ(counts.total().sources, RankCounts::kMostSources);
}

TEST(RankCounts, RemoteShareAndPressure) {
  const RankShape shape{1, 2, 2};
  RankTraffic traffic;
  traffic.sources = 2;
  traffic.tokens = {30, 10, 20, 40};
  traffic.rank_tokens = {30, 10, 20, 40};  // source 0 owns rank 0, source 1 rank 1
  EXPECT_DOUBLE_EQ(remote_share(traffic, shape), 0.3);
  EXPECT_DOUBLE_EQ(rank_imbalance(traffic, shape), 1.0);
  EXPECT_EQ(source_pressure(traffic, shape, 2), (std::vector<double>{25, 25}));

  // Two layers whose ranks are uneven the other way round: even in the sum, and yet all wait for the busier one.
  RankTraffic crossed;
  crossed.sources = 1;
  crossed.rank_tokens = {3, 1, 1, 3};
  crossed.busiest_tokens = 7;
  EXPECT_DOUBLE_EQ(rank_imbalance(crossed, {2, 2, 2}), 1.5);
  EXPECT_DOUBLE_EQ(dispatch_imbalance(crossed, {2, 2, 2}), 1.75);
  crossed.rank_tokens.assign(4, 0);
  EXPECT_DOUBLE_EQ(rank_imbalance(crossed, {2, 2, 2}), 1);

  traffic.sources = 1;
  traffic.rank_tokens = {60, 40};
  EXPECT_DOUBLE_EQ(remote_share(traffic, shape), 0);  // one engine owns all ranks
}

TEST(RankCounts, EveryRankHasAnOwner) {
  for (const uint32_t sources : {1U, 2U, 3U, 5U}) {
    for (const uint32_t ranks : {1U, 2U, 4U}) {
      for (uint32_t s = 0; s < sources; ++s) {
        uint32_t own = 0;
        for (uint32_t r = 0; r < ranks; ++r) own += owns_rank(s, sources, r, ranks) ? 1 : 0;
        EXPECT_GE(own, 1U) << sources << " " << ranks;
      }
      for (uint32_t r = 0; r < ranks; ++r) {
        uint32_t owners = 0;
        for (uint32_t s = 0; s < sources; ++s) owners += owns_rank(s, sources, r, ranks) ? 1 : 0;
        EXPECT_GE(owners, 1U) << sources << " " << ranks;
      }
    }
  }
}

TEST(ExpertPlacement, LinearIsAsEvenAsCanBe) {
  EXPECT_EQ(linear_placement(1, 5, 2).rank_of, (std::vector<uint16_t>{0, 0, 0, 1, 1}));
  EXPECT_EQ(linear_placement(2, 2, 2).rank_of, (std::vector<uint16_t>{0, 1, 0, 1}));
}

TEST(ExpertPlacement, SaysWhatIsWrong) {
  const auto error = [](const std::string& text) {
    const auto parsed = parse_expert_placement(text, 2, 3, 2);
    return parsed ? std::string("accepted") : parsed.error().field + ": " + parsed.error().message;
  };
  const std::string head = R"({"layers":2,"experts":3,"ranks":2,"placement":)";
  EXPECT_EQ(error(head + "[[0,1,0],[1,1,0]]}"), "accepted");
  EXPECT_NE(error("[]").find("not a JSON object"), std::string::npos);
  EXPECT_TRUE(error(R"({"layers":3,"experts":3,"ranks":2,"placement":[]})").starts_with("layers: "));
  EXPECT_TRUE(error(R"({"layers":2,"ranks":2,"placement":[]})").starts_with("experts: "));
  EXPECT_TRUE(error(R"({"layers":2,"experts":3,"ranks":-2,"placement":[]})").starts_with("ranks: "));
  EXPECT_TRUE(error(head + "[[0,1,0]]}").starts_with("placement: "));
  EXPECT_TRUE(error(head + "[[0,1],[1,1,0]]}").starts_with("placement[0]: "));      // an expert is missing
  EXPECT_TRUE(error(head + "[[0,1,0],[1,1,0,0]]}").starts_with("placement[1]: "));  // one too many
  EXPECT_TRUE(error(head + "[[0,1,0],[1,null,0]]}").starts_with("placement[1][1]: "));
  EXPECT_TRUE(error(head + "[[0,1,0],[1,2,0]]}").starts_with("placement[1][1]: "));
  EXPECT_TRUE(error(head + "[[0,1,0],[1,0.5,0]]}").starts_with("placement[1][1]: "));
}

TEST(RankTopology, ReadsNodes) {
  const auto folder = std::filesystem::temp_directory_path() / ("kindred-nodes-" + std::to_string(getpid()));
  for (const auto& [name, cpus] : {std::pair{"node0", "0-3,8"}, {"node1", "4-7"}, {"node2", "100"}, {"possible", ""}}) {
    std::filesystem::create_directories(folder / name);
    std::ofstream(folder / name / "cpulist") << cpus << "\n";
  }
  const auto nodes = read_numa_nodes({0, 1, 2, 3, 4, 5, 6, 7, 8}, folder.string());
  std::filesystem::remove_all(folder);
  ASSERT_EQ(nodes.size(), 2U);  // no processor of node 2 is ours
  EXPECT_EQ(nodes[0].cpus, (std::vector<uint32_t>{0, 1, 2, 3, 8}));
  EXPECT_EQ(read_numa_nodes({5}, "/nowhere").at(0).cpus, (std::vector<uint32_t>{5}));
}

TEST(RankTopology, OneRankPerNode) {
  const std::vector<NumaNode> one = {{0, {0, 1}}}, three = {{0, {0}}, {1, {1}}, {3, {2}}};
  EXPECT_EQ(parse_rank_count("auto", one).value(), 0U);
  EXPECT_EQ(parse_rank_count("auto", three).value(), 3U);
  EXPECT_EQ(parse_rank_count("2", three).value(), 2U);
  EXPECT_EQ(parse_rank_count("1024", one).value(), 1024U);
  for (const char* text : {"", "-1", "1025", "two", "2x", "99999999999"}) {
    const auto refused = parse_rank_count(text, one);
    ASSERT_FALSE(refused.ok()) << text;
    EXPECT_EQ(refused.error().field, "expert_ranks");
    EXPECT_NE(refused.error().message.find("accepted: auto, or 0 to 1024"), std::string::npos);
  }
}

TEST(RankTopology, SharesProcessors) {
  const std::vector<NumaNode> two = {{0, {0, 1, 2, 3}}, {1, {4, 5, 6, 7}}};
  using Cpus = std::vector<std::vector<uint32_t>>;
  EXPECT_EQ(rank_cpus(two, 1), (Cpus{{0, 1, 2, 3, 4, 5, 6, 7}}));
  EXPECT_EQ(rank_cpus(two, 2), (Cpus{{0, 1, 2, 3}, {4, 5, 6, 7}}));
  EXPECT_EQ(rank_cpus(two, 4), (Cpus{{0, 1}, {2, 3}, {4, 5}, {6, 7}}));
  EXPECT_EQ(rank_cpus(two, 3), (Cpus{{0, 1}, {2, 3}, {4, 5, 6, 7}}));
  EXPECT_EQ(rank_cpus({{0, {0, 1}}}, 3), (Cpus{{}, {}, {}}));
}

}  // namespace
}  // namespace kindred::engine

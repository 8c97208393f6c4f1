// The published reference's behaviour, from tests/data/golden.
#include <gtest/gtest.h>

#include "base/bytes.h"
#include "base/json.h"
#include "base/golden_files.h"
#include "policy/band.h"
#include "policy/chooser.h"
#include "policy/hash_ring.h"
#include "policy/prefill_policy.h"

namespace kindred::policy {
namespace {

using json = Json;

std::string from_hex(const std::string& hex) {
  std::string out;
  for (size_t i = 0; i + 1 < hex.size(); i += 2) out += static_cast<char>(std::stoi(hex.substr(i, 2), nullptr, 16));
  return out;
}

std::vector<WorkerView> workers_of(const json& loads) {
  std::vector<WorkerView> workers;
  for (const json& load : loads) workers.push_back({.load = load.get<double>()});
  return workers;
}

TEST(golden, eldr_band) {
  for_each_golden("eldr_band_", [](const json& golden) {
    for (const json& c : golden["cases"]) {
      SCOPED_TRACE(c["id"].dump() + " " + c["kind"].dump());
      const auto scores = c["scores"].get<std::vector<float>>();
      const std::vector<WorkerView> workers = workers_of(c["loads"]);
      const auto band = locality_band(scores, available_workers(workers), c["tau"].get<float>());
      EXPECT_EQ(band, c["candidates"].get<std::vector<uint32_t>>());
      Chooser chooser(TieBreak::kLowestIndex, 1);
      EXPECT_EQ(chooser.least_loaded(workers, band), c["chosen"].get<uint32_t>());
    }
  });
}

void check_ring(const json& golden) {
  const auto urls = golden["urls"].get<std::vector<std::string>>();
  const HashRing ring(std::vector<std::string_view>(urls.begin(), urls.end()),
                      golden["vnodes_per_worker"].get<uint32_t>());
  const auto points = ring.points();
  ASSERT_EQ(points.size(), golden["entries"].get<size_t>());
  std::vector<size_t> per_worker(urls.size(), 0);
  for (const HashRing::Point& point : points) ++per_worker[point.worker];
  EXPECT_EQ(per_worker, golden["entries_per_worker"].get<std::vector<size_t>>());
  const json& ends = golden["ring_head_tail"];
  for (size_t i = 0; i < ends.size(); ++i) {
    // All entries, or the first and the last half of those listed.
    const size_t at = ends.size() == points.size() || i < ends.size() / 2 ? i : points.size() - ends.size() + i;
    EXPECT_EQ(hex64(points[at].hash), ends[i][0].get<std::string>());
    EXPECT_EQ(points[at].worker, ends[i][1].get<uint32_t>());
  }
}

void check_case(const json& ring_of, const json& c) {
  const auto urls = ring_of["urls"].get<std::vector<std::string>>();
  const auto prefix_bytes = ring_of["prefix_byte_count"].get<uint32_t>();
  const auto vnodes = ring_of["vnodes_per_worker"].get<uint32_t>();
  std::vector<WorkerView> workers = workers_of(c["loads"]);
  for (size_t w = 0; w < workers.size(); ++w) workers[w].url = urls[w];
  const std::string key = from_hex(c["key_hex"]);
  if (!key.empty()) {
    const uint64_t hash = blake2b_64(std::string_view(key).substr(0, prefix_bytes));
    EXPECT_EQ(hex64(hash), c["hash_hex"].get<std::string>());
    const HashRing ring(std::vector<std::string_view>(urls.begin(), urls.end()), vnodes);
    const HashRing::Point& point = ring.points()[ring.locate(hash)];
    EXPECT_EQ(point.worker, c["ring_worker"].get<uint32_t>());
    EXPECT_EQ(point.hash < hash, c["wrapped"].get<bool>());
  }
  const auto policy = make_prefill_policy({.prefix_bytes = prefix_bytes,
                                           .load_factor = ring_of["load_factor"].get<double>(),
                                           .vnodes = vnodes,
                                           .tie_break = "lowest-index"});
  ASSERT_TRUE(policy.ok()) << policy.error().message;
  const auto decision = (*policy)->choose({workers}, {.key = key});
  ASSERT_TRUE(decision.has_value());
  EXPECT_EQ(decision->worker, c["chosen"].get<size_t>());
  EXPECT_EQ(to_string(decision->reason), c["reason"].get<std::string>());
}

TEST(golden, eldr_prefixhash) {
  for_each_golden("eldr_prefixhash_", [](const json& golden) {
    for (const json& vector : golden["hash_vectors"]) {
      EXPECT_EQ(hex64(blake2b_64(from_hex(vector["bytes_hex"]))), vector["hash_hex"].get<std::string>());
    }
    for (const json& ring : golden["rings"]) check_ring(ring);
    for (const json& c : golden["cases"]) {
      SCOPED_TRACE(c["id"].dump() + " " + c["kind"].dump());
      check_case(golden["rings"][c["ring"].get<size_t>()], c);
    }
  });
}

}  // namespace
}  // namespace kindred::policy

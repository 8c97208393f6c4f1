#include "fleet/prefix_index.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>
#include <vector>

#include "base/rng.h"

namespace kindred::fleet {
namespace {

using Path = std::vector<uint32_t>;  // the tokens of a block and of all before it
using Held = PrefixIndex::Held;

constexpr uint32_t kTokens = 2;  // per block
constexpr BlockHash kRoot = 7;

// What a worker calls a block.
uint64_t name_of(uint32_t worker, const Path& path) {
  uint64_t hash = mix64(worker);
  for (const uint32_t token : path) hash = mix64(hash ^ token);
  return hash;
}

// The same as the index, with whole paths in place of hashes and no bounds.
class Model {
 public:
  void store(uint32_t worker, uint64_t name, const Path& path) { held_[worker][name] = path; }
  void remove(uint32_t worker, uint64_t name) { held_[worker].erase(name); }
  void clear(uint32_t worker) { held_.erase(worker); }
  bool holds(uint32_t worker, uint64_t name) { return held_[worker].contains(name); }
  std::vector<uint64_t> names(uint32_t worker) {
    std::vector<uint64_t> out;
    for (const auto& [name, path] : held_[worker]) out.push_back(name);
    return out;
  }
  const Path& path(uint32_t worker, uint64_t name) { return held_[worker].at(name); }

  std::vector<Held> match(const Path& prompt) const {
    std::vector<Held> out;
    for (const auto& [worker, blocks] : held_) {
      uint32_t depth = 0;
      while ((depth + 1) * kTokens <= prompt.size() &&
             blocks.contains(name_of(worker, Path(prompt.begin(), prompt.begin() + (depth + 1) * kTokens)))) {
        ++depth;
      }
      if (depth > 0) out.push_back({worker, depth});
    }
    return out;
  }
  const std::map<uint32_t, std::map<uint64_t, Path>>& all() const { return held_; }

 private:
  std::map<uint32_t, std::map<uint64_t, Path>> held_;  // worker -> engine hash -> path
};

// Few different blocks, so that paths meet.
Path random_blocks(Rng& rng, size_t blocks) {
  Path out;
  for (size_t i = 0; i < blocks * kTokens; ++i) out.push_back(static_cast<uint32_t>(rng.below(2)));
  return out;
}

std::vector<Held> match(PrefixIndex& index, const Path& prompt) {
  std::vector<BlockHash> chain;
  chain_blocks(kRoot, prompt, kTokens, chain);
  std::vector<Held> out;
  index.match(chain, out);
  std::ranges::sort(out);
  return out;
}

// Stores `more` behind `before`, which the worker holds or which is empty.
void store(PrefixIndex& index, Model& model, uint32_t worker, const Path& before, const Path& more) {
  std::vector<uint64_t> names;
  Path path = before;
  for (size_t at = 0; at < more.size(); at += kTokens) {
    path.insert(path.end(), more.begin() + static_cast<ptrdiff_t>(at),
                more.begin() + static_cast<ptrdiff_t>(at + kTokens));
    names.push_back(name_of(worker, path));
    model.store(worker, names.back(), path);
  }
  StoredBlocks blocks = {.engine_hashes = names, .parent = {}, .root = kRoot, .tokens = more, .block_tokens = kTokens};
  if (!before.empty()) blocks.parent = name_of(worker, before);
  index.store(worker, blocks);
}

void step(PrefixIndex& index, Model& model, Rng& rng, uint32_t workers, bool removes) {
  const auto worker = static_cast<uint32_t>(rng.below(workers)) * 1000;
  const uint64_t kind = rng.below(100);
  const std::vector<uint64_t> names = model.names(worker);
  if (kind < 60 || names.empty() || !removes) {
    Path before;
    if (!names.empty() && rng.below(2) == 0) before = model.path(worker, names[rng.below(names.size())]);
    if (before.size() >= 12 * kTokens) before.clear();
    store(index, model, worker, before, random_blocks(rng, 1 + rng.below(6)));
  } else if (kind < 98) {
    std::vector<uint64_t> gone;
    for (uint64_t i = 0; i < 1 + rng.below(4); ++i) {
      gone.push_back(names[rng.below(names.size())]);
      model.remove(worker, gone.back());
    }
    gone.push_back(rng.next());  // one that nobody knows
    index.remove(worker, gone);
  } else {
    model.clear(worker);
    index.clear(worker);
  }
}

TEST(PrefixIndex, AgreesWithANaiveModel) {
  for (const uint32_t workers : {1U, 3U, 40U, 200U}) {
    Rng rng(workers);
    PrefixIndex index({.budget_bytes = 64 << 20, .workers = workers});
    Model model;
    for (int i = 0; i < 2000; ++i) {
      step(index, model, rng, workers, /*removes=*/true);
      const Path prompt = random_blocks(rng, rng.below(10));
      ASSERT_EQ(match(index, prompt), model.match(prompt)) << "step " << i << ", " << workers << " workers";
    }
    size_t holdings = 0;
    for (const auto& [worker, blocks] : model.all()) {
      for (const auto& [name, path] : blocks) EXPECT_TRUE(index.holds(worker, name));
      holdings += blocks.size();
    }
    EXPECT_EQ(index.counts().evicted, 0U);
    EXPECT_EQ(index.counts().refused, 0U);
    // Those of cleared workers go little by little.
    EXPECT_GE(index.holdings(), holdings);
  }
}

TEST(PrefixIndex, EmptiesWhenAllIsRemoved) {
  Rng rng(5);
  PrefixIndex index({.budget_bytes = 1 << 20, .workers = 8});
  Model model;
  for (int i = 0; i < 500; ++i) step(index, model, rng, 8, /*removes=*/true);
  for (uint32_t worker = 0; worker < 8000; worker += 1000) index.remove(worker, model.names(worker));
  const Path one = {1, 2};
  Model other;
  for (int i = 0; i < 3000; ++i) {  // each store sweeps some of the table
    store(index, other, 0, {}, one);
    index.remove(0, std::vector<uint64_t>{name_of(0, one)});
  }
  EXPECT_EQ(index.holdings(), 0U);
  EXPECT_EQ(index.counts().blocks, 0U);
}

TEST(PrefixIndex, KeepsItsBudgetAndEveryBlockReachable) {
  for (const uint32_t workers : {1U, 5U, 12U}) {
    Rng rng(workers + 10);
    const size_t budget = 128 << 10;
    PrefixIndex index({.budget_bytes = budget, .workers = workers});
    Model model;
    for (int i = 0; i < 8000; ++i) {
      // Wide trees this time: most paths are new.
      const auto worker = static_cast<uint32_t>(rng.below(workers));
      Path path;
      for (size_t t = 0; t < kTokens * (1 + rng.below(8)); ++t)
        path.push_back(static_cast<uint32_t>(rng.below(t < 2 ? 3 : 5000)));
      path.resize(path.size() / kTokens * kTokens);
      store(index, model, worker, {}, path);
      ASSERT_LE(index.counts().blocks, index.capacity());
      ASSERT_LE(index.bytes(), budget);
      if (i % 100 != 99) continue;
      for (const auto& [id, blocks] : model.all()) {
        for (const auto& [name, blocks_path] : blocks) {
          if (!index.holds(id, name) || blocks_path.size() == kTokens) continue;
          const Path parent(blocks_path.begin(), blocks_path.end() - kTokens);
          ASSERT_TRUE(index.holds(id, name_of(id, parent)));
        }
      }
    }
    EXPECT_GT(index.counts().evicted, 1000U);
    EXPECT_EQ(index.counts().orphans, 0U);
  }
}

TEST(PrefixIndex, EvictsTheLeastRecentlyUsed) {
  PrefixIndex index({.budget_bytes = 64 << 10, .workers = 2});
  Model model;
  Rng rng(3);
  const Path hot = random_blocks(rng, 100);
  store(index, model, 1, {}, hot);
  for (uint32_t i = 0; i < 10 * index.capacity(); ++i) {
    ASSERT_EQ(match(index, hot), (std::vector<Held>{{1, 100}})) << i;
    store(index, model, 0, {}, {1000 + i, 0, 1, 2});
  }
  EXPECT_GT(index.counts().evicted, 9 * index.capacity());
}

TEST(PrefixIndex, AResetForgetsAtOnceAndItsSlotComesBack) {
  PrefixIndex index({.budget_bytes = 1 << 20, .workers = 3});
  Model model;
  const Path path = {1, 2, 3, 4};
  for (int i = 0; i < 1000; ++i) {
    for (const uint32_t worker : {10U, 11U, 12U}) store(index, model, worker, {}, path);
    ASSERT_EQ(match(index, path), (std::vector<Held>{{10, 2}, {11, 2}, {12, 2}}));
    index.clear(11);
    ASSERT_EQ(match(index, path), (std::vector<Held>{{10, 2}, {12, 2}}));
  }
  EXPECT_EQ(index.counts().refused, 0U);
  // A fourth worker gets nothing while there are three, and one when one has gone.
  store(index, model, 11, {}, path);
  store(index, model, 13, {}, path);
  EXPECT_EQ(index.counts().refused, 2U);
  index.clear(10);
  store(index, model, 13, {}, path);
  EXPECT_EQ(match(index, path), (std::vector<Held>{{11, 2}, {12, 2}, {13, 2}}));
}

TEST(PrefixIndex, ALostParentMakesOrphans) {
  PrefixIndex index({.budget_bytes = 1 << 20, .workers = 1});
  const std::vector<uint64_t> names = {1, 2};
  const Path tokens = {1, 2, 3, 4};
  index.store(0, {.engine_hashes = names, .parent = 99, .root = kRoot, .tokens = tokens, .block_tokens = kTokens});
  EXPECT_EQ(index.counts().orphans, 2U);
  EXPECT_EQ(index.counts().blocks, 0U);
}

TEST(PrefixIndex, AdaptersBlockSizesAndSaltsDoNotMix) {
  std::set<BlockHash> roots = {chain_root("", 16), chain_root("", 32), chain_root("lora", 16)};
  EXPECT_EQ(roots.size(), 3U);
  const Path tokens = {1, 2};
  EXPECT_NE(chain_block(kRoot, tokens), chain_block(kRoot, tokens, "picture"));
  EXPECT_NE(chain_block(kRoot, tokens), chain_block(kRoot + 1, tokens));
}

}  // namespace
}  // namespace kindred::fleet

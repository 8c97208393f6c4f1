#include "engine/prefix_cache.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <memory>
#include <set>

#include "base/rng.h"

namespace kindred::engine {
namespace {

constexpr uint32_t kBlock = 4;
constexpr size_t kCells = 8;  // of counts

// KV as llama.cpp keeps it: cells that may belong to several sequences.
class FakeKv final : public KvStore {
 public:
  struct Cell {
    Token token;
  };

  void write(SequenceId sequence, uint32_t position, Token token) {
    auto& path = of_[sequence];
    ASSERT_EQ(path.size(), position) << "a hole";
    path.push_back(std::make_shared<Cell>(Cell{token}));
  }
  void copy(SequenceId from, SequenceId to, uint32_t begin, uint32_t end) override {
    ++operations;
    const auto source = of_[from];
    auto& target = of_[to];
    EXPECT_EQ(target.size(), begin) << "a hole, or cells in the way";
    EXPECT_LE(end, source.size());
    for (uint32_t i = begin; i < std::min<size_t>(end, source.size()); ++i) target.push_back(source[i]);
  }
  void remove(SequenceId sequence, uint32_t begin) override {
    ++operations;
    auto& path = of_[sequence];
    if (path.size() > begin) path.resize(begin);
  }
  std::vector<Token> tokens(SequenceId sequence) {
    std::vector<Token> tokens;
    for (const auto& cell : of_[sequence]) tokens.push_back(cell->token);
    return tokens;
  }
  size_t physical() const {
    std::set<const Cell*> cells;
    for (const auto& [sequence, path] : of_) {
      for (const auto& cell : path) cells.insert(cell.get());
    }
    return cells.size();
  }

  int operations = 0;

 private:
  std::map<SequenceId, std::vector<std::shared_ptr<Cell>>> of_;
};

// What a token adds to the counts in these tests.
size_t cell_of(Token token) { return static_cast<size_t>(token * 5 + 3) % kCells; }

expert::ExpertShape shape() {
  expert::ExpertShape shape;
  shape.layers = {0};
  shape.experts = kCells;
  shape.top_k = 1;
  return shape;
}

std::vector<SequenceId> holders(int count) {
  std::vector<SequenceId> ids;
  for (int i = 0; i < count; ++i) ids.push_back(100 + i);
  return ids;
}

// A request as the scheduler runs it.
struct Request {
  SequenceId sequence = 0;
  std::vector<Token> prompt;
  PrefixCache::Node node = PrefixCache::kRoot;
  uint32_t first_block = 0;
  std::vector<std::vector<uint8_t>> counts;
  uint32_t private_cells = 0;
  bool stored = false;
};

Request begin(PrefixCache& cache, FakeKv& kv, SequenceId sequence, std::vector<Token> prompt) {
  Request request;
  request.sequence = sequence;
  request.prompt = std::move(prompt);
  const auto match = cache.match(request.prompt);
  cache.pin(match.node);
  request.node = match.node;
  request.first_block = match.blocks;
  const auto size = static_cast<uint32_t>(request.prompt.size());
  const uint32_t cached = std::min(match.blocks * kBlock, size - 1);
  if (cached > 0) cache.copy_to(match.node, sequence, cached);
  request.counts.resize(size / kBlock - match.blocks, std::vector<uint8_t>(kCells, 0));
  request.private_cells = size - cached;
  expert::ExpertCounts total(shape());
  cache.add_counts(match.node, total);
  for (uint32_t i = cached; i < size; ++i) {
    kv.write(sequence, i, request.prompt[i]);
    if (i < match.blocks * kBlock) continue;
    ++total.data[cell_of(request.prompt[i])];
    ++total.tokens;
    const uint32_t block = i / kBlock - match.blocks;
    if (block < request.counts.size()) ++request.counts[block][cell_of(request.prompt[i])];
  }
  EXPECT_EQ(kv.tokens(sequence), request.prompt);
  EXPECT_EQ(total.tokens, size);
  expert::ExpertCounts truth(shape());
  for (const Token token : request.prompt) ++truth.data[cell_of(token)];
  EXPECT_EQ(total.data, truth.data);
  return request;
}

void store(PrefixCache& cache, Request& request) {
  const auto inserted = cache.insert(request.prompt, request.sequence, request.first_block, request.counts);
  cache.pin(inserted.node);
  cache.unpin(request.node);
  request.node = inserted.node;
  request.private_cells -= inserted.blocks * kBlock;
}

Request start(PrefixCache& cache, FakeKv& kv, SequenceId sequence, std::vector<Token> prompt) {
  Request request = begin(cache, kv, sequence, std::move(prompt));
  store(cache, request);
  return request;
}

void end(PrefixCache& cache, FakeKv& kv, const Request& request) {
  kv.remove(request.sequence, 0);
  cache.unpin(request.node);
}

std::vector<Token> tokens(std::initializer_list<Token> list) { return list; }

TEST(PrefixCache, FindsTheLongestPath) {
  FakeKv kv;
  PrefixCache cache(kv, kBlock, holders(4), kCells);
  EXPECT_EQ(cache.match(tokens({1, 2, 3, 4})).blocks, 0U);
  end(cache, kv, start(cache, kv, 0, tokens({1, 2, 3, 4, 5, 6, 7, 8, 9})));
  EXPECT_EQ(cache.blocks(), 2U);
  EXPECT_EQ(kv.physical(), 8U);
  EXPECT_EQ(cache.match(tokens({1, 2, 3})).blocks, 0U);
  EXPECT_EQ(cache.match(tokens({1, 2, 3, 4})).blocks, 1U);
  EXPECT_EQ(cache.match(tokens({1, 2, 3, 4, 5, 6, 7, 9})).blocks, 1U);
  EXPECT_EQ(cache.match(tokens({1, 2, 3, 4, 5, 6, 7, 8, 1, 1, 1, 1})).blocks, 2U);
  EXPECT_EQ(cache.match(tokens({5, 6, 7, 8})).blocks, 0U);  // the chain counts, not the block
}

TEST(PrefixCache, BranchesShareTheirPrefix) {
  FakeKv kv;
  PrefixCache cache(kv, kBlock, holders(4), kCells);
  end(cache, kv, start(cache, kv, 0, tokens({1, 1, 1, 1, 2, 2, 2, 2})));
  end(cache, kv, start(cache, kv, 1, tokens({1, 1, 1, 1, 3, 3, 3, 3})));
  end(cache, kv, start(cache, kv, 2, tokens({1, 1, 1, 1, 2, 2, 2, 2, 4, 4, 4, 4})));  // extends a leaf
  EXPECT_EQ(cache.blocks(), 4U);
  EXPECT_EQ(kv.physical(), 16U);
  EXPECT_EQ(cache.evict(100), 4U);
  EXPECT_EQ(kv.physical(), 0U);
}

TEST(PrefixCache, EvictsTheLeastRecentlyUsedEnds) {
  FakeKv kv;
  PrefixCache cache(kv, kBlock, holders(4), kCells);
  const auto a = tokens({1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3});
  const auto b = tokens({5, 5, 5, 5, 6, 6, 6, 6});
  end(cache, kv, start(cache, kv, 0, a));
  end(cache, kv, start(cache, kv, 0, b));
  cache.match(tokens({1, 1, 1, 1}));  // only the first block of `a` is used again
  kv.operations = 0;
  EXPECT_EQ(cache.evict(2), 2U);
  EXPECT_EQ(kv.operations, 1);  // one path, one operation
  EXPECT_EQ(cache.match(a).blocks, 1U);
  EXPECT_EQ(cache.match(b).blocks, 2U);
  EXPECT_EQ(kv.physical(), 12U);
}

TEST(PrefixCache, PinnedPathsStay) {
  FakeKv kv;
  PrefixCache cache(kv, kBlock, holders(2), kCells);
  const Request running = start(cache, kv, 0, tokens({1, 1, 1, 1, 2, 2, 2, 2}));
  EXPECT_EQ(cache.evictable(), 0U);
  EXPECT_EQ(cache.evict(5), 0U);
  end(cache, kv, start(cache, kv, 1, tokens({1, 1, 1, 1, 3, 3, 3, 3})));
  EXPECT_EQ(cache.evictable(), 1U);
  // Both holders are in use; a third path takes the unpinned one's.
  end(cache, kv, start(cache, kv, 1, tokens({4, 4, 4, 4})));
  EXPECT_EQ(cache.match(tokens({1, 1, 1, 1, 3, 3, 3, 3})).blocks, 1U);
  EXPECT_EQ(cache.match(tokens({4, 4, 4, 4})).blocks, 1U);
  end(cache, kv, running);
  EXPECT_EQ(cache.evict(100), 3U);
  EXPECT_EQ(cache.blocks(), 0U);
  EXPECT_EQ(kv.physical(), 0U);
}

TEST(PrefixCache, StoresNothingWithoutAHolder) {
  FakeKv kv;
  PrefixCache cache(kv, kBlock, holders(1), kCells);
  const Request first = start(cache, kv, 0, tokens({1, 1, 1, 1}));
  const Request second = start(cache, kv, 1, tokens({2, 2, 2, 2}));
  EXPECT_EQ(cache.blocks(), 1U);
  EXPECT_EQ(second.private_cells, 4U);
  end(cache, kv, first);
  end(cache, kv, second);
}

// Random requests over few tokens, so that paths are shared, split, extended and evicted all the time.
TEST(PrefixCache, RandomOperationsKeepTheBooks) {
  for (uint64_t seed = 0; seed < 20; ++seed) {
    Rng rng(seed);
    FakeKv kv;
    PrefixCache cache(kv, kBlock, holders(static_cast<int>(1 + rng.below(6))), kCells);
    std::vector<SequenceId> idle = {0, 1, 2, 3, 4};
    std::vector<Request> running;
    for (int step = 0; step < 400; ++step) {
      const uint64_t what = rng.below(10);
      if (what < 5 && !idle.empty()) {
        std::vector<Token> prompt(1 + rng.below(24));
        for (size_t i = 0; i < prompt.size(); ++i) prompt[i] = static_cast<Token>(i % kBlock == 0 ? rng.below(2) : 0);
        running.push_back(begin(cache, kv, idle.back(), prompt));
        idle.pop_back();
      } else if (what < 7) {
        // Later than it began, so that two may have computed the same blocks.
        const auto waiting = std::ranges::find(running, false, &Request::stored);
        if (waiting == running.end()) continue;
        store(cache, *waiting);
        waiting->stored = true;
      } else if (what < 9 && !running.empty()) {
        const size_t which = rng.below(running.size());
        end(cache, kv, running[which]);
        idle.push_back(running[which].sequence);
        running.erase(running.begin() + static_cast<std::ptrdiff_t>(which));
      } else {
        const uint32_t evictable = cache.evictable();
        const auto wanted = static_cast<uint32_t>(rng.below(6));
        ASSERT_EQ(cache.evict(wanted), std::min(wanted, evictable));
      }
      size_t own = 0;
      for (const Request& request : running) {
        own += request.private_cells;
        ASSERT_EQ(kv.tokens(request.sequence), request.prompt);
      }
      ASSERT_EQ(kv.physical(), cache.blocks() * kBlock + own) << "seed " << seed << " step " << step;
    }
    for (const Request& request : running) end(cache, kv, request);
    ASSERT_EQ(cache.evictable(), cache.blocks());
    cache.evict(cache.blocks());
    ASSERT_EQ(kv.physical(), 0U);
  }
}

}  // namespace
}  // namespace kindred::engine

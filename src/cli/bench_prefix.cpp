// `kindred bench prefix`: the prefix index on one core. Conversations share a system prompt with others and go on
// with blocks of their own; some are held by several workers. The index is filled to its budget, then:
//   insert: blocks stored by events, and as many evicted, with the index full;
//   look-up: whole prompts, block by block, their hashes at hand;
//   hash + look-up: the same from token ids.

#include <fmt/format.h>

#include <algorithm>
#include <vector>

#include "base/rng.h"
#include "cli/bench.h"
#include "cli/terminal.h"
#include "fleet/prefix_index.h"

namespace kindred::cli {
namespace {

constexpr double kAimLookupsPerS = 5e6;
constexpr double kAimBytes = 40;
constexpr uint32_t kBlockTokens = 16;
constexpr fleet::BlockHash kRoot = 1;

struct PrefixOptions {
  std::vector<std::string> blocks = {"1000", "100000", "1000000", "10000000"}, workers = {"1", "8", "64"};
  int64_t depth = 64, shared_percent = 10, lookups = 4'000'000, seed = 1;
  BenchOutput output;
};

struct PrefixRow {
  size_t blocks = 0, workers = 0, bytes = 0, held = 0, holdings = 0;
  double fill_per_s = 0, insert_per_s = 0, lookups_per_s = 0, hashed_per_s = 0, hit_share = 0;
};

// Conversation c: its first quarter is one of `systems` system prompts. A pure function of c, so that nothing but
// the index takes memory.
class Conversations {
 public:
  Conversations(size_t depth, size_t systems, uint64_t seed) : depth_(depth), systems_(systems), seed_(seed) {}

  void tokens(size_t c, std::vector<uint32_t>& out) const {
    out.clear();
    for (size_t b = 0; b < depth_; ++b) {
      const uint64_t of = mix64(seed_ ^ (b < depth_ / 4 ? c % systems_ : c + systems_)) + b;
      for (uint32_t t = 0; t < kBlockTokens; ++t)
        out.push_back(static_cast<uint32_t>(mix64(of * kBlockTokens + t) % 128'000));
    }
  }
  void names(size_t c, size_t worker, std::vector<uint64_t>& out) const {
    out.clear();
    for (size_t b = 0; b < depth_; ++b) {
      out.push_back(mix64(mix64((b < depth_ / 4 ? c % systems_ : c + systems_) * depth_ + b) ^ worker));
    }
  }

 private:
  size_t depth_, systems_;
  uint64_t seed_;
};

class PrefixBench {
 public:
  PrefixBench(const PrefixOptions& options, size_t blocks, size_t workers)
      : options_(options),
        workers_(workers),
        depth_(std::min<size_t>(static_cast<size_t>(options.depth), blocks / 4)),
        conversations_(depth_, 64, static_cast<uint64_t>(options.seed)),
        rng_(static_cast<uint64_t>(options.seed)),
        index_({.budget_bytes = budget(blocks, workers), .workers = static_cast<uint32_t>(workers)}) {
    row_.blocks = blocks;
    row_.workers = workers;
  }

  PrefixRow run() {
    const auto capacity = static_cast<double>(index_.capacity());
    while (index_.counts().evicted == 0) fill_s_ += store(next_++);
    row_.fill_per_s = static_cast<double>(index_.counts().stored) / fill_s_;
    row_.bytes = index_.bytes();
    row_.held = index_.counts().blocks;
    row_.holdings = index_.holdings();
    const uint64_t before = index_.counts().stored;
    double insert_s = 0;
    const double most = std::min(capacity, 500'000.0);
    while (static_cast<double>(index_.counts().stored - before) < most) insert_s += store(next_++);
    row_.insert_per_s = static_cast<double>(index_.counts().stored - before) / insert_s;
    look_up(/*hashed=*/false);
    look_up(/*hashed=*/true);
    return row_;
  }

 private:
  // So that the index has room for so many blocks: searched, as the share of what does not grow differs.
  static size_t budget(size_t blocks, size_t workers) {
    size_t bytes = blocks * 38;
    while (fleet::PrefixIndex::capacity_of({.budget_bytes = bytes, .workers = static_cast<uint32_t>(workers)}) <
           blocks) {
      bytes += 1 + bytes / 200;
    }
    return bytes;
  }

  // Stores a conversation at its worker, and one in ten at a second. Returns the seconds that the index took.
  double store(size_t c) {
    double took = 0;
    conversations_.tokens(c, tokens_);
    const bool twice = workers_ > 1 && mix64(c) % 100 < static_cast<uint64_t>(options_.shared_percent);
    for (size_t copy = 0; copy < (twice ? 2U : 1U); ++copy) {
      const size_t worker = (c + copy) % workers_;
      conversations_.names(c, worker, names_);
      took += seconds([&] {
        index_.store(
            static_cast<uint32_t>(worker),
            {.engine_hashes = names_, .parent = {}, .root = kRoot, .tokens = tokens_, .block_tokens = kBlockTokens});
      });
    }
    return took;
  }

  // Random ones of the conversations that are most likely still there. Their hashes or tokens are made in batches,
  // larger than the processor's caches would like, outside the time that counts.
  void look_up(bool hashed) {
    constexpr size_t kBatch = 256;
    const size_t kept = std::max<size_t>(1, row_.held / depth_ / 2);
    std::vector<std::vector<uint32_t>> tokens(kBatch);
    std::vector<std::vector<fleet::BlockHash>> chains(kBatch);
    std::vector<fleet::BlockHash> chain;
    std::vector<fleet::PrefixIndex::Held> held;
    double took = 0;
    size_t done = 0, found = 0;
    while (done < static_cast<size_t>(options_.lookups)) {
      for (size_t i = 0; i < kBatch; ++i) {
        conversations_.tokens(next_ - 1 - rng_.below(std::min(kept, next_)), tokens[i]);
        chains[i].clear();
        fleet::chain_blocks(kRoot, tokens[i], kBlockTokens, chains[i]);
      }
      took += seconds([&] {
        for (size_t i = 0; i < kBatch; ++i) {
          if (hashed) {
            chain.clear();
            fleet::chain_blocks(kRoot, tokens[i], kBlockTokens, chain);
          }
          index_.match(hashed ? chain : chains[i], held);
          uint32_t best = 0;
          for (const auto& one : held) best = std::max(best, one.blocks);
          found += best;
        }
      });
      done += kBatch * depth_;
    }
    // What is not found costs nothing behind the first block, so only found ones count.
    (hashed ? row_.hashed_per_s : row_.lookups_per_s) = static_cast<double>(found) / took;
    row_.hit_share = static_cast<double>(found) / static_cast<double>(done);
  }

  const PrefixOptions& options_;
  size_t workers_, depth_;
  Conversations conversations_;
  Rng rng_;
  fleet::PrefixIndex index_;
  PrefixRow row_;
  size_t next_ = 0;
  double fill_s_ = 0;
  std::vector<uint32_t> tokens_;
  std::vector<uint64_t> names_;
};

Result<std::vector<size_t>> numbers(const std::vector<std::string>& texts, const char* field, size_t least,
                                    size_t most) {
  std::vector<size_t> out;
  for (const std::string& text : texts) {
    const bool digits =
        !text.empty() && text.size() < 10 && std::ranges::all_of(text, [](char c) { return c >= '0' && c <= '9'; });
    const size_t value = digits ? std::stoul(text) : 0;
    if (value < least || value > most) {
      return invalid(fmt::format("{}: got '{}', accepted: {} to {}", field, text, least, most), field);
    }
    out.push_back(value);
  }
  return out;
}

Status measure_prefix(const PrefixOptions& options) {
  const auto blocks = numbers(options.blocks, "blocks", 100, 100'000'000);
  if (!blocks) return blocks.error();
  const auto workers = numbers(options.workers, "workers", 1, 512);
  if (!workers) return workers.error();
  const Machine machine = this_machine();
  Table table({"blocks", "workers", "bytes/block", "held by", "fill M/s", "insert M/s", "look-up M/s",
               "hash + look-up M/s", "found"});
  Json json = {{"bench", "prefix"},
               {"machine", machine_json(machine)},
               {"depth", options.depth},
               {"aim_lookups_per_s", kAimLookupsPerS},
               {"aim_bytes_per_block", kAimBytes},
               {"rows", Json::array()}};
  Progress progress("filling and looking up", blocks->size() * workers->size());
  size_t done = 0;
  for (const size_t b : *blocks) {
    for (const size_t w : *workers) {
      const PrefixRow row = PrefixBench(options, b, w).run();
      const double bytes = static_cast<double>(row.bytes) / static_cast<double>(row.held);
      const double copies = static_cast<double>(row.holdings) / static_cast<double>(row.held);
      table.row({fmt::format("{}", row.held), fmt::format("{}", w), fmt::format("{:.1f}", bytes),
                 fmt::format("{:.2f}", copies), fmt::format("{:.1f}", row.fill_per_s / 1e6),
                 fmt::format("{:.1f}", row.insert_per_s / 1e6), fmt::format("{:.1f}", row.lookups_per_s / 1e6),
                 fmt::format("{:.1f}", row.hashed_per_s / 1e6), fmt::format("{:.0f} %", row.hit_share * 100)});
      json["rows"].push_back({{"blocks", row.held},
                              {"workers", w},
                              {"bytes", row.bytes},
                              {"bytes_per_block", bytes},
                              {"workers_per_block", copies},
                              {"fill_per_s", row.fill_per_s},
                              {"inserts_per_s", row.insert_per_s},
                              {"lookups_per_s", row.lookups_per_s},
                              {"hashed_lookups_per_s", row.hashed_per_s},
                              {"found_share", row.hit_share}});
      progress.set(++done);
    }
  }
  if (options.output.json) {
    fmt::print("{}\n", dump_json(json));
    return {};
  }
  fmt::print("prompts of {} blocks of {} tokens, a quarter of each shared; {} % of them at two workers\n\n{}\n",
             options.depth, kBlockTokens, options.shared_percent, table.text());
  fmt::print("  aim: {:.0f} M look-ups/s on one core, {:.0f} bytes per block\n  {}\n", kAimLookupsPerS / 1e6, kAimBytes,
             machine_text(machine));
  return {};
}

}  // namespace

int bench_prefix(Args args) {
  PrefixOptions options;
  ConfigSchema schema("bench prefix [--blocks N]... [--workers N]...",
                      "Measures the index of who holds which KV blocks, on one core, filled to its budget.");
  schema.list("blocks", &options.blocks, "size of the index; may be repeated");
  schema.list("workers", &options.workers, "workers that hold them; may be repeated");
  schema.integer("depth", &options.depth, 4, 10'000, "blocks of a prompt");
  schema.integer("shared_percent", &options.shared_percent, 0, 100, "of prompts that two workers hold");
  schema.integer("lookups", &options.lookups, 1000, 1'000'000'000, "blocks looked up for each figure");
  schema.integer("seed", &options.seed, 0, 1LL << 40, "of the synthetic prompts");
  options.output.declare(schema, /*draws=*/false);
  if (const auto status = parse_bench_flags(schema, args)) return *status;
  if (const Status measured = measure_prefix(options); !measured) return fail("bench prefix", measured.error());
  return 0;
}

}  // namespace kindred::cli

// What prompts that begin alike have shown of their experts: for SGLang, whose decode worker is chosen before the
// prefill has run. Learned from the prefill servers' own answers (router/routed_experts.h), which the router asks for
// at a sampling rate; found by the hashes of a prompt's pieces (router/prompt_prefix.h), the longest known prefix
// first.
//
// Of a prompt that is learned, prefixes of 32, 48, 72, 108, … tokens are kept, and the whole of it; so of whatever
// two prompts have in common, two thirds are found. Where in the text a prefix of so many tokens ends is not known: it
// is taken to end at the same share of the bytes.
//
// Bounded by bytes: a prefix costs two for each expert and layer and kEntryBytes; the least recently used go.
//
// Thread-safety: any thread; the store is under one mutex, held for a hash look-up per piece, or an insertion per
// prefix. Metrics are as base/metrics.h.
#pragma once

#include <atomic>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/json.h"
#include "base/metrics.h"
#include "expert/counts.h"
#include "fleet/prefix_index.h"
#include "router/history_options.h"
#include "router/routed_experts.h"

namespace kindred::router {

// A prompt as the history looks at it.
struct HistoryKey {
  std::vector<fleet::BlockHash> pieces;
  size_t prompt_bytes = 0;
};

struct KnownPrefix {
  std::shared_ptr<const expert::ExpertCounts> counts;  // null: not known
  double share = 0;                                    // of the prompt's bytes that they are of
};

class History {
 public:
  // Pieces of a prompt that are looked at; about a million tokens.
  static constexpr size_t kMostPieces = 16'384;
  static constexpr size_t kEntryBytes = 224;  // list and map nodes, heads, their allocations
  // A prompt that is known so far is not asked about again.
  static constexpr double kKnownWell = 0.9;

  // Null where the options name no shape. Error: kInvalid, naming `history_shape`.
  static Result<std::unique_ptr<History>> make(const HistoryOptions& options);

  // None: no shape is known for the model.
  std::optional<RoutedShape> shape(std::string_view model) const;
  // `fingerprint`: of the workers, so that another version of a model has a history of its own.
  static HistoryKey key(std::string_view model, std::string_view fingerprint, std::string_view prompt);

  // With less than `least_share` of the prompt known, nothing is. Counts as a look-up.
  KnownPrefix find(const HistoryKey& key, double least_share);
  // Whether to ask the server about a prompt of which `known_share` is known: of all that are not known well, the
  // share `sample`, evenly spread.
  bool asks(double known_share, double sample);
  // Takes in what an answer told of the prompt; returns the counts of all of it. Error: as RoutedExpertsReader::take();
  // nothing is kept then.
  Result<std::shared_ptr<const expert::ExpertCounts>> learn(const HistoryKey& key, RoutedExpertsReader& answer);
  // The answer did not come, or not whole.
  void lost() { refused(RoutedExpertsReader::Fault::kCut); }
  // True once: for the log.
  bool first_missing() { return !missing_told_.exchange(true); }

  size_t bytes() const;
  size_t entries() const;
  Json status() const;
  std::string metrics();

 private:
  struct Prefix {
    std::shared_ptr<const expert::ExpertShape> shape;
    PrefixCounts counts;
  };
  struct Entry {
    fleet::BlockHash hash;
    std::shared_ptr<const Prefix> prefix;
  };

  History(std::vector<std::pair<std::string, RoutedShape>> shapes, size_t limit_bytes);
  static size_t bytes_of(const Prefix& prefix) { return kEntryBytes + prefix.counts.cells.size() * sizeof(uint16_t); }
  void refused(RoutedExpertsReader::Fault fault);
  void put(fleet::BlockHash hash, std::shared_ptr<const Prefix> prefix);  // under the mutex
  void drop_oldest();                                                     // under the mutex
  static std::shared_ptr<const expert::ExpertCounts> widened(const Prefix& prefix);

  const std::vector<std::pair<std::string, RoutedShape>> shapes_;  // by model; empty: any other
  const size_t limit_bytes_;
  std::atomic<uint64_t> askable_{0};
  std::atomic<bool> missing_told_{false};

  mutable std::mutex mutex_;  // guards what follows
  size_t bytes_ = 0;
  std::list<Entry> entries_;  // the last used first
  std::unordered_map<fleet::BlockHash, std::list<Entry>::iterator> by_hash_;

  Registry registry_;
  Counter &hits_, &short_, &misses_, &asked_, &learned_, &evicted_;
};

}  // namespace kindred::router

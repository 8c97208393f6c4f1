#include "fleet/kv_events.h"

#include <xxhash.h>

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "base/msgpack.h"

namespace kindred::fleet {
namespace {

using At = MsgpackDocument::At;
using Kind = MsgpackDocument::Kind;

constexpr uint32_t kMaxBlockTokens = 1U << 16;

// Fields by name, or by position behind the tag.
struct Field {
  std::string_view name;
  uint32_t position;
};
constexpr Field kHashes = {"block_hashes", 1}, kParent = {"parent_block_hash", 2}, kTokens = {"token_ids", 3},
                kBlockSize = {"block_size", 4}, kLoraId = {"lora_id", 5}, kStoredMedium = {"medium", 6},
                kLoraName = {"lora_name", 7}, kExtraKeys = {"extra_keys", 8}, kStoredGroup = {"group_idx", 9},
                kRemovedMedium = {"medium", 2}, kRemovedGroup = {"group_idx", 3};

class EventReader {
 public:
  EventReader(const MsgpackDocument& document, PrefixIndex::WorkerId worker, PrefixIndex& index, KvEventCounts& counts)
      : document_(document), worker_(worker), index_(index), counts_(counts) {}

  void batch() {
    const At root = document_.root();
    const auto events =
        document_.kind(root) == Kind::kMap ? document_.member(root, "events") : document_.element(root, 1);
    if (!events || document_.kind(*events) != Kind::kArray) {
      ++counts_.malformed;
      return;
    }
    At at = document_.first(*events);
    for (uint32_t i = 0; i < document_.size(*events); ++i, at = document_.next(at)) {
      ++(event(at) ? counts_.events : counts_.malformed);
    }
  }
  uint32_t block_tokens() const { return block_tokens_; }

 private:
  bool event(At at) {
    const auto tag = document_.kind(at) == Kind::kMap ? document_.member(at, "type") : document_.element(at, 0);
    const auto type = tag ? document_.text(*tag) : std::nullopt;
    if (!type) return false;
    if (*type == "BlockStored") return stored(at);
    if (*type == "BlockRemoved") return removed(at);
    if (*type != "AllBlocksCleared") return false;
    index_.clear(worker_);
    return true;
  }

  // No value: left out, or nil.
  std::optional<At> field(At event, const Field& field) const {
    const auto at = document_.kind(event) == Kind::kMap ? document_.member(event, field.name)
                                                        : document_.element(event, field.position);
    return at && document_.kind(*at) != Kind::kNull ? at : std::nullopt;
  }

  std::optional<uint64_t> hash(At at) const {
    if (const auto number = document_.integer(at)) return number;
    const auto bytes = document_.text(at);
    if (!bytes || bytes->empty()) return std::nullopt;
    return XXH3_64bits(bytes->data(), bytes->size());
  }

  bool hashes(At event, std::vector<uint64_t>& out) const {
    out.clear();
    const auto list = field(event, kHashes);
    if (!list || document_.kind(*list) != Kind::kArray) return false;
    At at = document_.first(*list);
    for (uint32_t i = 0; i < document_.size(*list); ++i, at = document_.next(at)) {
      const auto one = hash(at);
      if (!one) return false;
      out.push_back(*one);
    }
    return true;
  }

  bool tokens(At event) {
    tokens_.clear();
    const auto list = field(event, kTokens);
    if (!list || document_.kind(*list) != Kind::kArray) return false;
    At at = document_.first(*list);
    for (uint32_t i = 0; i < document_.size(*list); ++i, at = document_.next(at)) {
      const auto token = document_.unsigned_integer(at);
      if (!token || *token > UINT32_MAX) return false;
      tokens_.push_back(static_cast<uint32_t>(*token));
    }
    return true;
  }

  // What concerns other memory, or another group's caches, says nothing of whether a prefix is at hand.
  bool elsewhere(At event, const Field& medium, const Field& group) {
    const auto where = field(event, medium);
    const auto of = field(event, group);
    const auto name = where ? document_.text(*where) : std::nullopt;
    const auto number = of ? document_.integer(*of) : std::nullopt;
    const bool other = (name && *name != "GPU") || number.value_or(0) != 0;
    counts_.ignored += other ? 1 : 0;
    return other;
  }

  std::string adapter(At event) const {
    if (const auto at = field(event, kLoraName)) {
      if (const auto name = document_.text(*at)) return std::string(*name);
    }
    const auto id = field(event, kLoraId);
    const auto number = id ? document_.integer(*id) : std::nullopt;
    return number ? "#" + std::to_string(*number) : std::string();
  }

  // What sets blocks apart beside their tokens; the adapter's name is in the root already.
  bool salts(At event, std::string_view adapter, size_t count) {
    salts_.clear();
    salt_views_.clear();
    const auto list = field(event, kExtraKeys);
    if (!list) return true;
    if (document_.kind(*list) != Kind::kArray || document_.size(*list) != count) return false;
    At at = document_.first(*list);
    for (uint32_t i = 0; i < count; ++i, at = document_.next(at)) {
      std::string& salt = salts_.emplace_back();
      if (document_.kind(at) == Kind::kNull) continue;
      if (document_.kind(at) != Kind::kArray) return false;
      At key = document_.first(at);
      for (uint32_t k = 0; k < document_.size(at); ++k, key = document_.next(key)) {
        if (adapter.empty() || document_.text(key) != adapter) document_.append_canonical(key, salt);
      }
    }
    salt_views_.assign(salts_.begin(), salts_.end());
    return true;
  }

  bool stored(At event) {
    const auto size = field(event, kBlockSize);
    const auto block_tokens = size ? document_.unsigned_integer(*size) : std::nullopt;
    if (!block_tokens || *block_tokens == 0 || *block_tokens > kMaxBlockTokens) return false;
    if (!hashes(event, hashes_) || !tokens(event) || tokens_.size() != hashes_.size() * *block_tokens) return false;
    const std::string lora = adapter(event);
    if (!salts(event, lora, hashes_.size())) return false;
    StoredBlocks blocks;
    if (const auto parent = field(event, kParent)) {
      blocks.parent = hash(*parent);
      if (!blocks.parent) return false;
    }
    if (elsewhere(event, kStoredMedium, kStoredGroup)) return true;
    block_tokens_ = static_cast<uint32_t>(*block_tokens);
    blocks.engine_hashes = hashes_;
    blocks.root = chain_root(lora, block_tokens_);
    blocks.tokens = tokens_;
    blocks.block_tokens = block_tokens_;
    blocks.salts = salt_views_;
    index_.store(worker_, blocks);
    return true;
  }

  bool removed(At event) {
    if (!hashes(event, hashes_)) return false;
    if (!elsewhere(event, kRemovedMedium, kRemovedGroup)) index_.remove(worker_, hashes_);
    return true;
  }

  const MsgpackDocument& document_;
  PrefixIndex::WorkerId worker_;
  PrefixIndex& index_;
  KvEventCounts& counts_;
  uint32_t block_tokens_ = 0;
  std::vector<uint64_t> hashes_;
  std::vector<uint32_t> tokens_;
  std::vector<std::string> salts_;
  std::vector<std::string_view> salt_views_;
};

}  // namespace

uint32_t apply_kv_events(std::span<const uint8_t> payload, PrefixIndex::WorkerId worker, PrefixIndex& index,
                         KvEventCounts& counts) {
  ++counts.messages;
  const Result<MsgpackDocument> document = MsgpackDocument::parse(payload);
  if (!document) {
    ++counts.malformed;
    return 0;
  }
  EventReader reader(*document, worker, index, counts);
  reader.batch();
  return reader.block_tokens();
}

}  // namespace kindred::fleet

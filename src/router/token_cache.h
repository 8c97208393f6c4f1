// Token ids of prompts, by a hash of what was tokenised, within a bound on bytes; the least recently used go.
//
// Thread-safety: all methods take one mutex.
#pragma once

#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace kindred::router {

using TokenIds = std::shared_ptr<const std::vector<uint32_t>>;

class TokenCache {
 public:
  explicit TokenCache(size_t limit_bytes) : limit_bytes_(limit_bytes) {}

  // 128 bits, as two prompts that got one key would be taken for each other.
  struct Key {
    uint64_t low = 0, high = 0;
    bool operator==(const Key&) const = default;
  };
  static Key key(std::string_view bytes);

  TokenIds find(const Key& key);
  void add(const Key& key, TokenIds tokens);  // one longer than the limit is not kept
  size_t bytes() const;

 private:
  struct Entry {
    Key key;
    TokenIds tokens;
  };
  struct Hash {
    size_t operator()(const Key& key) const { return key.low; }
  };
  static size_t bytes_of(const Entry& entry);

  mutable std::mutex mutex_;
  const size_t limit_bytes_;
  size_t bytes_ = 0;
  std::list<Entry> entries_;  // the last used first
  std::unordered_map<Key, std::list<Entry>::iterator, Hash> by_key_;
};

}  // namespace kindred::router

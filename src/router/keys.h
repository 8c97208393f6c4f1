// API keys: who may call the router, and how much.
//
// Text form, one key a line: `name:key` or `name:sha256:<64 hex digits of the key's SHA-256>`, then, if wanted,
// limits: `rpm=600 tpm=100000`. Empty lines and lines that begin with '#' say nothing.
//
// Only digests are kept, and no error or log quotes a key.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "net/http_message.h"

namespace kindred::router {

// Per minute; 0: unlimited.
struct KeyLimits {
  uint64_t requests_per_min = 0;
  uint64_t tokens_per_min = 0;
  bool operator==(const KeyLimits&) const = default;
};

using KeyDigest = std::array<unsigned char, 32>;  // SHA-256
KeyDigest digest_of(std::string_view key);

// Immutable, so thread-safe.
class KeyRing {
 public:
  static constexpr size_t kMostKeys = 4096;
  static constexpr size_t kLeastKeyBytes = 8, kMostKeyBytes = 512;

  struct Key {
    std::string name;  // 1 to 64 of letters, digits, '.', '_', '-'; unique
    KeyDigest digest{};
    KeyLimits limits;
  };

  KeyRing() = default;
  // `origin` begins the messages of errors: "keys.txt:3: …".
  static Result<KeyRing> parse(std::string_view text, std::string_view origin);

  // Takes the same time whichever key it is, or none: every digest is compared, whole.
  const Key* find(std::string_view presented) const;
  const std::vector<Key>& keys() const { return keys_; }
  bool empty() const { return keys_.empty(); }

 private:
  std::vector<Key> keys_;
};

// The keys in force. Thread-safe.
class KeyStore {
 public:
  // Either may be empty; both together are one ring. Error: kInvalid, or that of reading the file.
  static Result<std::shared_ptr<KeyStore>> load(std::string file, std::string text);

  std::shared_ptr<const KeyRing> current() const;
  // Reads the file again. After an error the keys stay as they were.
  Status reload();

 private:
  KeyStore(std::string file, std::string text) : file_(std::move(file)), text_(std::move(text)) {}

  const std::string file_, text_;
  mutable std::mutex mutex_;
  std::shared_ptr<const KeyRing> ring_;
};

// What a request presents: `Authorization: Bearer KEY`, else `x-api-key: KEY`. Empty without either, and for
// another scheme.
std::string_view presented_key(const net::Headers& headers);

// A single secret from a file (its first line) or the environment. Empty where neither is given. Error: kInvalid
// naming `field`, for a file that cannot be read or holds no usable key.
Result<std::string> read_secret(const std::string& file, const char* environment, const std::string& field);

// Compares in time that depends on the lengths at most.
bool same_secret(std::string_view a, std::string_view b);

}  // namespace kindred::router

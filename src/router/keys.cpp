#include "router/keys.h"

#include <fmt/format.h>
#include <openssl/crypto.h>
#include <openssl/sha.h>

#include <algorithm>
#include <charconv>
#include <cstdlib>

#include "base/config.h"
#include "net/ascii.h"

namespace kindred::router {
namespace {

constexpr std::string_view kDigestPrefix = "sha256:";
constexpr uint64_t kMostPerMinute = 1'000'000'000'000;

std::string_view take_word(std::string_view& text) {
  const size_t begin = std::min(text.find_first_not_of(" \t\r"), text.size());
  text.remove_prefix(begin);
  const size_t end = std::min(text.find_first_of(" \t\r"), text.size());
  const std::string_view word = text.substr(0, end);
  text.remove_prefix(end);
  return word;
}

bool is_name(std::string_view name) {
  return !name.empty() && name.size() <= 64 && std::all_of(name.begin(), name.end(), [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '.' || c == '_' ||
           c == '-';
  });
}

bool is_secret(std::string_view key) {
  return key.size() >= KeyRing::kLeastKeyBytes && key.size() <= KeyRing::kMostKeyBytes &&
         std::all_of(key.begin(), key.end(), [](char c) { return c > ' ' && c <= '~'; });
}

std::string what_a_secret_is() {
  return fmt::format("a key has {} to {} printable ASCII characters without spaces", KeyRing::kLeastKeyBytes,
                     KeyRing::kMostKeyBytes);
}

std::optional<KeyDigest> parse_digest(std::string_view hex) {
  KeyDigest out{};
  if (hex.size() != 2 * out.size()) return std::nullopt;
  for (size_t i = 0; i < out.size(); ++i) {
    const int high = net::hex_value(hex[2 * i]), low = net::hex_value(hex[2 * i + 1]);
    if (high < 0 || low < 0) return std::nullopt;
    out[i] = static_cast<unsigned char>(high * 16 + low);
  }
  return out;
}

Status parse_limit(std::string_view word, KeyLimits& limits) {
  const size_t equals = word.find('=');
  const std::string_view name = word.substr(0, equals);
  uint64_t* target = name == "rpm" ? &limits.requests_per_min : name == "tpm" ? &limits.tokens_per_min : nullptr;
  // Not quoted: it may be a piece of a key with a space in it.
  if (target == nullptr || equals == std::string_view::npos)
    return invalid("behind the key stand rpm=N and tpm=N only");
  const std::string_view number = word.substr(equals + 1);
  const auto [end, fault] = std::from_chars(number.data(), number.data() + number.size(), *target);
  if (fault != std::errc{} || end != number.data() + number.size() || *target == 0 || *target > kMostPerMinute) {
    return invalid(fmt::format("{} is a whole number from 1 to {}", name, kMostPerMinute));
  }
  return {};
}

Result<KeyRing::Key> parse_key(std::string_view line) {
  std::string_view rest = line;
  const std::string_view word = take_word(rest);
  const size_t colon = word.find(':');
  if (colon == std::string_view::npos) return invalid("expected name:key or name:sha256:<hex>");
  KeyRing::Key key;
  key.name = word.substr(0, colon);
  if (!is_name(key.name)) return invalid("a name has 1 to 64 letters, digits, '.', '_' or '-'");
  const std::string_view secret = word.substr(colon + 1);
  if (secret.starts_with(kDigestPrefix)) {
    const auto digest = parse_digest(secret.substr(kDigestPrefix.size()));
    if (!digest) return invalid("sha256: is followed by 64 hex digits");
    key.digest = *digest;
  } else {
    if (!is_secret(secret)) return invalid(what_a_secret_is());
    key.digest = digest_of(secret);
  }
  for (std::string_view limit = take_word(rest); !limit.empty(); limit = take_word(rest)) {
    if (Status parsed = parse_limit(limit, key.limits); !parsed) return std::move(parsed).error();
  }
  return key;
}

}  // namespace

KeyDigest digest_of(std::string_view key) {
  KeyDigest out{};
  SHA256(reinterpret_cast<const unsigned char*>(key.data()), key.size(), out.data());
  return out;
}

Result<KeyRing> KeyRing::parse(std::string_view text, std::string_view origin) {
  KeyRing ring;
  for (size_t number = 1; !text.empty(); ++number) {
    const size_t end = std::min(text.find('\n'), text.size());
    std::string_view line = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
    const auto wrong = [&](std::string_view why) { return invalid(fmt::format("{}:{}: {}", origin, number, why)); };
    line.remove_prefix(std::min(line.find_first_not_of(" \t\r"), line.size()));
    if (line.empty() || line.front() == '#') continue;
    if (ring.keys_.size() == kMostKeys) return wrong(fmt::format("more than {} keys", kMostKeys));
    Result<Key> key = parse_key(line);
    if (!key) return wrong(key.error().message);
    for (const Key& other : ring.keys_) {
      if (other.name == key->name) return wrong(fmt::format("the name '{}' is given twice", key->name));
      if (other.digest == key->digest) return wrong(fmt::format("the same key as that of '{}'", other.name));
    }
    ring.keys_.push_back(*std::move(key));
  }
  return ring;
}

const KeyRing::Key* KeyRing::find(std::string_view presented) const {
  const KeyDigest digest = digest_of(presented);
  size_t found = keys_.size();
  for (size_t i = 0; i < keys_.size(); ++i) {
    const bool same = CRYPTO_memcmp(keys_[i].digest.data(), digest.data(), digest.size()) == 0;
    found = same ? i : found;
  }
  return found < keys_.size() && !presented.empty() ? &keys_[found] : nullptr;
}

Result<std::shared_ptr<KeyStore>> KeyStore::load(std::string file, std::string text) {
  std::shared_ptr<KeyStore> store(new KeyStore(std::move(file), std::move(text)));  // the constructor is private
  if (Status read = store->reload(); !read) return std::move(read).error();
  return store;
}

std::shared_ptr<const KeyRing> KeyStore::current() const {
  const std::lock_guard lock(mutex_);
  return ring_;
}

Status KeyStore::reload() {
  std::string all = text_;
  std::string origin = "the environment's API keys";
  if (!file_.empty()) {
    Result<std::string> read = read_file(file_);
    if (!read) return std::move(read).error();
    if (!all.empty() && !read->ends_with('\n')) *read += '\n';
    all = *read + all;
    origin = file_;
  }
  Result<KeyRing> ring = KeyRing::parse(all, origin);
  if (!ring) return std::move(ring).error();
  // No keys at all would let everybody in.
  if (ring->empty()) return invalid(fmt::format("{} names no API key", origin), "api_keys_file");
  const std::lock_guard lock(mutex_);
  ring_ = std::make_shared<const KeyRing>(*std::move(ring));
  return {};
}

std::string_view presented_key(const net::Headers& headers) {
  constexpr std::string_view kBearer = "Bearer ";
  if (const std::string_view* given = headers.find("Authorization")) {
    std::string_view value = *given;
    if (value.size() <= kBearer.size() || !net::equals_ignore_case(value.substr(0, kBearer.size()), kBearer)) return {};
    value.remove_prefix(kBearer.size());
    value.remove_prefix(std::min(value.find_first_not_of(' '), value.size()));
    return value;
  }
  const std::string_view* given = headers.find("x-api-key");
  return given == nullptr ? std::string_view() : *given;
}

Result<std::string> read_secret(const std::string& file, const char* environment, const std::string& field) {
  std::string secret;
  if (!file.empty()) {
    Result<std::string> read = read_file(file);
    if (!read) return invalid(fmt::format("{}: {}", field, read.error().message), field);
    std::string_view first = std::string_view(*read).substr(0, read->find('\n'));
    secret = take_word(first);
  } else if (const char* given = std::getenv(environment); given != nullptr && *given != '\0') {
    secret = given;
  } else {
    return secret;
  }
  if (!is_secret(secret)) {
    return invalid(fmt::format("{}: {}; {} holds none", field, what_a_secret_is(), file.empty() ? environment : file),
                   field);
  }
  return secret;
}

bool same_secret(std::string_view a, std::string_view b) {
  const KeyDigest left = digest_of(a), right = digest_of(b);
  return CRYPTO_memcmp(left.data(), right.data(), left.size()) == 0;
}

}  // namespace kindred::router

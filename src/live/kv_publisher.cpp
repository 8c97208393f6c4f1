#include "live/kv_publisher.h"

#include <fmt/format.h>

#include <array>

#include "base/bytes.h"

namespace kindred::live {
namespace {

constexpr size_t kReplayMessages = 10'000;  // vLLM's buffer_steps
constexpr uint64_t kEndOfReplay = UINT64_MAX;

}  // namespace

Result<std::unique_ptr<KvPublisher>> KvPublisher::bind(const net::ZmqContext& context, const std::string& host,
                                                       uint16_t port, uint32_t piece_tokens, const Clock& clock) {
  const auto at = [&](uint32_t number) {
    return port == 0 ? fmt::format("tcp://{}:*", host) : fmt::format("tcp://{}:{}", host, port + number);
  };
  net::ZmqLimits limits;
  limits.queue_messages = 10'000;
  Result<net::ZmqSocket> events = net::ZmqSocket::bind(context, net::ZmqKind::kPublisher, at(0), limits);
  if (!events) return std::move(events).error();
  Result<net::ZmqSocket> replay = net::ZmqSocket::bind(context, net::ZmqKind::kRouter, at(1), limits);
  if (!replay) return std::move(replay).error();
  return std::unique_ptr<KvPublisher>(
      new KvPublisher(*std::move(events), *std::move(replay), piece_tokens, clock));  // the constructor is private
}

CacheListener KvPublisher::listener() {
  return {.on_prefilled = [this](const Ticket& ticket, size_t held) { stored(ticket, held); },
          .on_evicted = [this](uint32_t engine, const std::vector<uint64_t>& pieces) { evicted(engine, pieces); },
          .on_cleared = [this] { cleared(); }};
}

void KvPublisher::send(Json event) {
  const double now_s = static_cast<double>(clock_.unix_seconds());
  const Json batch = {{"ts", now_s}, {"events", Json::array({std::move(event)})}};
  std::string payload = dump_msgpack(batch);
  const std::string number = big_endian64(number_++);
  const std::array<std::string_view, 3> parts = {std::string_view(), number, payload};
  events_.send(parts);
  sent_.push_back(std::move(payload));
  if (sent_.size() > kReplayMessages) sent_.pop_front();
}

// Those of the first `held` pieces that were not there before, in runs of neighbours.
void KvPublisher::stored(const Ticket& ticket, size_t held) {
  const std::vector<uint64_t>& pieces = ticket.job.pieces;
  size_t from = 0;
  std::vector<bool> fresh(held);
  for (size_t i = 0; i < held; ++i) {
    std::set<uint32_t>& engines = holders_[pieces[i]];
    fresh[i] = engines.empty();
    engines.insert(ticket.place.engine);
  }
  while (from < held) {
    if (!fresh[from]) {
      ++from;
      continue;
    }
    size_t to = from;
    while (to < held && fresh[to]) ++to;
    const auto token = [&](size_t piece) {
      return ticket.job.tokens->begin() + static_cast<std::ptrdiff_t>(piece * piece_tokens_);
    };
    send({{"type", "BlockStored"},
          {"block_hashes", std::vector<uint64_t>(pieces.begin() + static_cast<std::ptrdiff_t>(from),
                                                 pieces.begin() + static_cast<std::ptrdiff_t>(to))},
          {"parent_block_hash", from == 0 ? Json() : Json(pieces[from - 1])},
          {"token_ids", std::vector<uint32_t>(token(from), token(to))},
          {"block_size", piece_tokens_},
          {"lora_id", nullptr},
          {"medium", "GPU"}});
    from = to;
  }
}

void KvPublisher::evicted(uint32_t engine, const std::vector<uint64_t>& pieces) {
  std::vector<uint64_t> gone;
  for (const uint64_t piece : pieces) {
    const auto found = holders_.find(piece);
    if (found == holders_.end()) continue;
    found->second.erase(engine);
    if (!found->second.empty()) continue;
    holders_.erase(found);
    gone.push_back(piece);
  }
  if (!gone.empty()) send({{"type", "BlockRemoved"}, {"block_hashes", std::move(gone)}, {"medium", "GPU"}});
}

// A process that has started anew counts from 0 again.
void KvPublisher::cleared() {
  holders_.clear();
  sent_.clear();
  number_ = 0;
  send({{"type", "AllBlocksCleared"}});
}

void KvPublisher::serve_replay() {
  while (const auto asked = replay_.receive()) {
    const auto from = asked->size() == 3 ? parse_big_endian64(asked->back()) : std::nullopt;
    if (!from) continue;
    const uint64_t first = number_ - sent_.size();
    for (uint64_t n = std::max(*from, first); n < number_; ++n) {
      const std::string number = big_endian64(n);
      const std::array<std::string_view, 4> parts = {asked->front(), std::string_view(), number, sent_[n - first]};
      if (!replay_.send(parts)) break;
    }
    const std::string end = big_endian64(kEndOfReplay);
    const std::array<std::string_view, 4> parts = {asked->front(), std::string_view(), end, std::string_view()};
    replay_.send(parts);
  }
}

}  // namespace kindred::live

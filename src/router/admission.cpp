#include "router/admission.h"

#include <algorithm>
#include <utility>

#include "base/result.h"

namespace kindred::router {

bool Admission::may_start(Lane lane) const {
  if (lane == Lane::kInteractive) return running_ < options_.running;
  return waiting(Lane::kInteractive) == 0 && running_ + options_.batch_headroom < options_.running;
}

void Admission::start(Ticket ticket, Entry& entry) {
  entry.runs = true;
  ++running_;
  if (entry.claim.lane == Lane::kBatch) entry.batch_at = batch_.insert(batch_.end(), ticket);
}

Admission::Verdict Admission::arrive(Ticket ticket, Claim claim, Changes& changes) {
  claim.cost = std::clamp(claim.cost, 1U, kMaxCost);
  if (runs_now(claim.lane)) {  // and nobody is overtaken
    Entry& entry = entries_.emplace(ticket, Entry{.claim = std::move(claim), .batch_at = {}}).first->second;
    start(ticket, entry);
    return Verdict::kRuns;
  }
  if (lane_of(claim).waiting >= options_.waiting && !make_room(claim, changes)) return Verdict::kRefused;
  enqueue(ticket, claim);
  entries_.emplace(ticket, Entry{.claim = std::move(claim), .batch_at = {}});
  preempt(changes);
  return Verdict::kWaits;
}

void Admission::leave(Ticket ticket, Changes& changes) {
  const auto at = entries_.find(ticket);
  KINDRED_CHECK(at != entries_.end());
  const Entry& entry = at->second;
  if (!entry.runs) {
    dequeue(ticket, entry.claim);
  } else {
    --running_;
    if (entry.preempted) --preempting_;
    else if (entry.claim.lane == Lane::kBatch) batch_.erase(entry.batch_at);
  }
  entries_.erase(at);
  fill(changes);
}

void Admission::set_limits(AdmissionOptions options, Changes& changes) {
  options_ = options;
  fill(changes);
}

void Admission::fill(Changes& changes) {
  for (const Lane lane : {Lane::kInteractive, Lane::kBatch}) {
    while (waiting(lane) > 0 && may_start(lane)) {
      const Ticket ticket = next(lanes_[static_cast<size_t>(lane)]);
      start(ticket, entries_.at(ticket));
      changes.admitted.push_back(ticket);
    }
  }
}

void Admission::preempt(Changes& changes) {
  while (preempting_ < waiting(Lane::kInteractive) && !batch_.empty()) {
    const Ticket youngest = batch_.back();
    batch_.pop_back();
    entries_.at(youngest).preempted = true;
    ++preempting_;
    changes.preempted.push_back(youngest);
  }
}

void Admission::enqueue(Ticket ticket, const Claim& claim) {
  LaneQueue& lane = lane_of(claim);
  Level& level = lane.levels[claim.priority];
  const auto [at, fresh] = level.keys.try_emplace(claim.key);
  if (fresh) give_turn(level, claim.key, level.now);
  at->second.tickets.push_back(ticket);
  ++lane.waiting;
}

void Admission::drop_key(Level& level, const std::string& key) {
  level.turns.erase(level.keys.at(key).turn);
  level.keys.erase(key);
}

void Admission::dequeue(Ticket ticket, const Claim& claim) {
  LaneQueue& lane = lane_of(claim);
  const auto level = lane.levels.find(claim.priority);
  std::deque<Ticket>& tickets = level->second.keys.at(claim.key).tickets;
  tickets.erase(std::find(tickets.begin(), tickets.end(), ticket));
  if (tickets.empty()) drop_key(level->second, claim.key);
  if (level->second.keys.empty()) lane.levels.erase(level);
  --lane.waiting;
}

void Admission::give_turn(Level& level, const std::string& key, uint64_t at) {
  const Turn turn{at, ++turns_given_};
  level.keys.at(key).turn = turn;
  level.turns.emplace(turn, key);
}

Admission::Ticket Admission::next(LaneQueue& lane) {
  const auto level = lane.levels.begin();
  Level& of = level->second;
  const auto first = of.turns.begin();
  const std::string key = first->second;
  of.now = first->first.first;
  of.turns.erase(first);
  KeyQueue& queue = of.keys.at(key);
  const Ticket ticket = queue.tickets.front();
  queue.tickets.pop_front();
  --lane.waiting;
  if (queue.tickets.empty()) of.keys.erase(key);
  else give_turn(of, key, of.now + entries_.at(ticket).claim.cost);
  if (of.keys.empty()) lane.levels.erase(level);
  return ticket;
}

bool Admission::make_room(const Claim& newcomer, Changes& changes) {
  LaneQueue& lane = lane_of(newcomer);
  if (lane.levels.empty()) return false;
  const auto last = std::prev(lane.levels.end());
  if (last->first < newcomer.priority) return false;
  const auto longest =
      std::max_element(last->second.keys.begin(), last->second.keys.end(),
                       [](const auto& a, const auto& b) { return a.second.tickets.size() < b.second.tickets.size(); });
  if (last->first == newcomer.priority) {
    const auto own = last->second.keys.find(newcomer.key);
    const size_t has = own == last->second.keys.end() ? 0 : own->second.tickets.size();
    if (longest->second.tickets.size() < has + 2) return false;
  }
  const Ticket victim = longest->second.tickets.back();
  const auto entry = entries_.find(victim);
  dequeue(victim, Claim(entry->second.claim));
  entries_.erase(entry);
  changes.refused.push_back(victim);
  return true;
}

}  // namespace kindred::router

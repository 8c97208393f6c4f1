#include "router/admission.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>

#include "base/rng.h"

namespace kindred::router {
namespace {

using Ticket = Admission::Ticket;
using Verdict = Admission::Verdict;

Claim claim(std::string key, int priority = 0, Lane lane = Lane::kInteractive, uint32_t cost = 1) {
  return {std::move(key), priority, lane, cost};
}

// Lets the ones that run leave, oldest first, and tells in which order the others were admitted.
std::vector<Ticket> service_order(Admission& admission, std::vector<Ticket> running) {
  std::vector<Ticket> order;
  while (!running.empty()) {
    Admission::Changes changes;
    admission.leave(running.front(), changes);
    running.erase(running.begin());
    for (const Ticket ticket : changes.admitted) {
      order.push_back(ticket);
      running.push_back(ticket);
    }
  }
  return order;
}

TEST(Admission, RunsUpToTheLimitThenQueuesThenRefuses) {
  Admission admission({.running = 2, .waiting = 1});
  Admission::Changes changes;
  EXPECT_EQ(admission.arrive(1, claim("a"), changes), Verdict::kRuns);
  EXPECT_EQ(admission.arrive(2, claim("a"), changes), Verdict::kRuns);
  EXPECT_EQ(admission.arrive(3, claim("a"), changes), Verdict::kWaits);
  EXPECT_EQ(admission.arrive(4, claim("a"), changes), Verdict::kRefused);
  admission.leave(1, changes);
  EXPECT_EQ(changes.admitted, std::vector<Ticket>{3});
  EXPECT_EQ(admission.running(), 2U);
  EXPECT_EQ(admission.waiting(), 0U);
  admission.leave(2, changes);
  admission.leave(3, changes);
  EXPECT_EQ(admission.running(), 0U);
  EXPECT_TRUE(changes.refused.empty() && changes.preempted.empty());
}

TEST(Admission, LowerPriorityNumbersGoFirst) {
  Admission admission({.running = 1, .waiting = 10});
  Admission::Changes changes;
  admission.arrive(1, claim("a"), changes);
  admission.arrive(2, claim("a", 5), changes);
  admission.arrive(3, claim("a", 0), changes);
  admission.arrive(4, claim("a", -5), changes);
  admission.arrive(5, claim("b", 0), changes);
  EXPECT_EQ(service_order(admission, {1}), (std::vector<Ticket>{4, 3, 5, 2}));
}

TEST(Admission, KeysShareByCost) {
  Admission admission({.running = 1, .waiting = 100});
  Admission::Changes changes;
  admission.arrive(1, claim("x"), changes);
  for (Ticket i = 0; i < 20; ++i) admission.arrive(100 + i, claim("many"), changes);
  for (Ticket i = 0; i < 3; ++i) admission.arrive(200 + i, claim("few"), changes);
  std::vector<Ticket> order = service_order(admission, {1});
  EXPECT_EQ(std::vector<Ticket>(order.begin(), order.begin() + 7),
            (std::vector<Ticket>{100, 200, 101, 201, 102, 202, 103}));

  admission.arrive(2, claim("x"), changes);
  for (Ticket i = 0; i < 20; ++i) admission.arrive(300 + i, claim("heavy", 0, Lane::kInteractive, 4), changes);
  for (Ticket i = 0; i < 20; ++i) admission.arrive(400 + i, claim("light"), changes);
  order = service_order(admission, {2});
  const auto heavy = std::count_if(order.begin(), order.begin() + 20, [](Ticket t) { return t < 400; });
  EXPECT_GE(heavy, 3);
  EXPECT_LE(heavy, 5);
}

TEST(Admission, AFullQueueIsSharedTooAndBelongsToTheFirstPriorities) {
  Admission admission({.running = 1, .waiting = 4});
  Admission::Changes changes;
  admission.arrive(1, claim("x"), changes);
  for (Ticket i = 2; i < 6; ++i) EXPECT_EQ(admission.arrive(i, claim("flood"), changes), Verdict::kWaits);
  EXPECT_EQ(admission.arrive(6, claim("flood"), changes), Verdict::kRefused);
  EXPECT_EQ(admission.arrive(7, claim("other"), changes), Verdict::kWaits);
  EXPECT_EQ(changes.refused, std::vector<Ticket>{5});  // the newest of the longest
  EXPECT_EQ(admission.arrive(8, claim("other"), changes), Verdict::kWaits);
  EXPECT_EQ(admission.arrive(9, claim("other"), changes), Verdict::kRefused);  // two each
  changes = {};
  EXPECT_EQ(admission.arrive(10, claim("flood", 1), changes), Verdict::kRefused);
  EXPECT_EQ(admission.arrive(11, claim("flood", -1), changes), Verdict::kWaits);
  EXPECT_EQ(changes.refused.size(), 1U);
  EXPECT_EQ(admission.waiting(), 4U);
}

TEST(Admission, BatchTakesIdleRoomOnlyAndMakesWay) {
  Admission admission({.running = 4, .waiting = 8, .batch_headroom = 1});
  Admission::Changes changes;
  for (Ticket i = 1; i <= 3; ++i) EXPECT_EQ(admission.arrive(i, claim("b", 0, Lane::kBatch), changes), Verdict::kRuns);
  EXPECT_EQ(admission.arrive(4, claim("b", 0, Lane::kBatch), changes), Verdict::kWaits);  // the headroom
  EXPECT_EQ(admission.arrive(5, claim("i"), changes), Verdict::kRuns);
  EXPECT_TRUE(changes.preempted.empty());
  EXPECT_EQ(admission.arrive(6, claim("i"), changes), Verdict::kWaits);
  EXPECT_EQ(changes.preempted, std::vector<Ticket>{3});  // the youngest, and one only
  EXPECT_EQ(admission.arrive(7, claim("i"), changes), Verdict::kWaits);
  EXPECT_EQ(changes.preempted, (std::vector<Ticket>{3, 2}));
  changes = {};
  admission.leave(3, changes);
  EXPECT_EQ(changes.admitted, std::vector<Ticket>{6});
  admission.leave(7, changes);  // gave up waiting
  admission.leave(2, changes);
  EXPECT_EQ(changes.admitted, std::vector<Ticket>{6});  // 4 still waits: no headroom
  admission.leave(5, changes);
  EXPECT_EQ(changes.admitted, (std::vector<Ticket>{6, 4}));
}

TEST(Admission, LimitsMayChange) {
  Admission admission({.running = 1, .waiting = 4});
  Admission::Changes changes;
  for (Ticket i = 1; i <= 4; ++i) admission.arrive(i, claim("a"), changes);
  admission.set_limits({.running = 3, .waiting = 1}, changes);
  EXPECT_EQ(changes.admitted, (std::vector<Ticket>{2, 3}));
  admission.set_limits({.running = 1, .waiting = 1}, changes);
  admission.leave(1, changes);
  EXPECT_EQ(admission.running(), 2U);
  EXPECT_EQ(admission.waiting(), 1U);
}

// Against every rule that the header states, with random requests of all kinds.
class RandomTraffic {
 public:
  RandomTraffic(uint64_t seed, AdmissionOptions options) : options_(options), admission_(options), rng_(seed) {}

  void step() {
    Admission::Changes changes;
    const bool arrives = rng_.below(100) < 55 || (running_.empty() && waiting_.empty());
    if (arrives) arrive(changes);
    else leave(changes);
    apply(changes);
    check();
  }
  void drain() {
    while (!running_.empty() || !waiting_.empty()) {
      Admission::Changes changes;
      leave(changes);
      apply(changes);
      check();
    }
    EXPECT_EQ(admission_.running(), 0U);
    EXPECT_EQ(admission_.waiting(), 0U);
  }

 private:
  void arrive(Admission::Changes& changes) {
    const Ticket ticket = ++last_;
    const Claim made =
        claim(std::string(1, static_cast<char>('a' + rng_.below(4))), static_cast<int>(rng_.below(3)),
              rng_.below(3) == 0 ? Lane::kBatch : Lane::kInteractive, 1 + static_cast<uint32_t>(rng_.below(80)));
    const bool room = running_.size() < options_.running && count(Lane::kInteractive) == 0;
    const Verdict verdict = admission_.arrive(ticket, made, changes);
    if (made.lane == Lane::kInteractive && room) {
      EXPECT_EQ(verdict, Verdict::kRuns);
    }
    if (verdict == Verdict::kRuns) running_.emplace(ticket, made);
    if (verdict == Verdict::kWaits) waiting_.emplace(ticket, made);
    if (verdict == Verdict::kRefused) {
      EXPECT_EQ(count(made.lane), options_.waiting);
    }
  }

  void leave(Admission::Changes& changes) {
    auto& from = running_.empty() || (!waiting_.empty() && rng_.below(5) == 0) ? waiting_ : running_;
    auto at = std::next(from.begin(), static_cast<std::ptrdiff_t>(rng_.below(from.size())));
    admission_.leave(at->first, changes);
    preempted_.erase(at->first);
    from.erase(at);
  }

  void apply(const Admission::Changes& changes) {
    for (const Ticket ticket : changes.refused) {
      ASSERT_EQ(waiting_.count(ticket), 1U);
      waiting_.erase(ticket);
    }
    for (const Ticket ticket : changes.admitted) {
      const auto at = waiting_.find(ticket);
      ASSERT_NE(at, waiting_.end());
      const Claim& made = at->second;
      for (const auto& [other, theirs] : waiting_) {
        if (theirs.lane != made.lane) continue;
        EXPECT_GE(theirs.priority, made.priority);
        // First come first served within a key.
        if (theirs.priority == made.priority && theirs.key == made.key) {
          EXPECT_GE(other, ticket);
        }
      }
      if (made.lane == Lane::kBatch) {
        EXPECT_EQ(count(Lane::kInteractive), 0U);
      }
      running_.emplace(ticket, made);
      waiting_.erase(at);
    }
    for (const Ticket ticket : changes.preempted) {
      ASSERT_EQ(running_.count(ticket), 1U);
      EXPECT_EQ(running_.at(ticket).lane, Lane::kBatch);
      EXPECT_TRUE(preempted_.insert(ticket).second) << "told twice";
    }
  }

  void check() {
    ASSERT_EQ(admission_.running(), running_.size());
    ASSERT_EQ(admission_.waiting(Lane::kInteractive), count(Lane::kInteractive));
    ASSERT_EQ(admission_.waiting(Lane::kBatch), count(Lane::kBatch));
    ASSERT_LE(running_.size(), options_.running);
    for (const Lane lane : {Lane::kInteractive, Lane::kBatch}) ASSERT_LE(count(lane), options_.waiting);
    // No place idles while an interactive request waits.
    if (count(Lane::kInteractive) > 0) {
      ASSERT_EQ(running_.size(), options_.running);
    }
  }

  size_t count(Lane lane) const {
    return static_cast<size_t>(
        std::count_if(waiting_.begin(), waiting_.end(), [&](const auto& entry) { return entry.second.lane == lane; }));
  }

  AdmissionOptions options_;
  Admission admission_;
  Rng rng_;
  Ticket last_ = 0;
  std::map<Ticket, Claim> running_, waiting_;
  std::set<Ticket> preempted_;
};

TEST(Admission, KeepsItsRulesUnderRandomTraffic) {
  for (uint64_t seed = 1; seed <= 30; ++seed) {
    RandomTraffic traffic(seed, {.running = 1 + seed % 7, .waiting = 1 + seed % 11, .batch_headroom = seed % 3});
    for (int i = 0; i < 2'000 && !::testing::Test::HasFatalFailure(); ++i) traffic.step();
    traffic.drain();
  }
}

// With one place, a flood of other keys at the same priority delays a request by a bounded number of services.
TEST(Admission, NobodyStarvesWithinAPriority) {
  Admission admission({.running = 1, .waiting = 64});
  Admission::Changes changes;
  Ticket last = 0;
  admission.arrive(++last, claim("z"), changes);
  Ticket runs = last;
  const Ticket patient = ++last;
  for (int i = 0; i < 3; ++i)
    admission.arrive(100 + i, claim("p", 0, Lane::kInteractive, Admission::kMaxCost), changes);
  admission.arrive(patient, claim("p"), changes);
  last = 1000;
  int services = 0;
  for (bool served = false; !served; ++services) {
    ASSERT_LT(services, 3 * 8 * 64 + 8);
    for (int k = 0; k < 8; ++k) admission.arrive(++last, claim("flood" + std::to_string(k)), changes);
    changes = {};
    admission.leave(runs, changes);
    ASSERT_EQ(changes.admitted.size(), 1U);
    runs = changes.admitted.front();
    served = runs == patient;
  }
}

}  // namespace
}  // namespace kindred::router

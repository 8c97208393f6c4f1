// Who is served now, who waits, and who is told to come back later: bookkeeping without clock or sockets.
//
// Places. At most `running` requests run. A request keeps its place until it leaves, however long it streams.
// Waiting. At most `waiting` requests of each lane wait. Of the interactive lane the lowest `priority` number
// goes first; within a priority, keys share by start-time fair queueing over the costs of their requests
// (each service moves a key's virtual time on by its cost, and the least is next: as fair as deficit
// round-robin, without runs of one key); within a key, first come first served. So within a priority nobody
// starves; a priority does wait for all those before it.
// Overflow. A newcomer that finds its lane's queue full takes the place of the newest waiting request of the
// key with most of them, at the last priority, if that priority is behind its own, or if it is its own and
// that key has at least two more waiting than the newcomer's. Otherwise the newcomer is refused.
// Batch. A batch request gets a place only while no interactive request waits, and while `batch_headroom`
// places besides its own are free. For each interactive request that waits, one running batch request is
// preempted, the one that began last first; whoever calls ends it, and its place is free once it has left.
//
// Bounds: `running` + 2 × `waiting` requests; as many keys as requests wait.
// Thread-safety: none.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <list>
#include <map>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace kindred::router {

enum class Lane { kInteractive, kBatch };

struct AdmissionOptions {
  size_t running = 4096;
  size_t waiting = 1024;
  size_t batch_headroom = 0;
};

struct Claim {
  std::string key;   // whose request it is; all without a name share one turn
  int priority = 0;  // a lower number goes first
  Lane lane = Lane::kInteractive;
  uint32_t cost = 1;  // 1 to kMaxCost: what a request takes of its key's turn
};

class Admission {
 public:
  using Ticket = uint64_t;
  static constexpr uint32_t kMaxCost = 64;

  // What a call has done to other requests (and, on arrive(), maybe to its own).
  struct Changes {
    std::vector<Ticket> admitted;   // waited, now run
    std::vector<Ticket> refused;    // waited, lost their place in the queue
    std::vector<Ticket> preempted;  // run, and are to leave
  };
  enum class Verdict { kRuns, kWaits, kRefused };

  explicit Admission(AdmissionOptions options) : options_(options) {}

  // `ticket` is new. After kRefused, and for those in Changes::refused, leave() is not called.
  Verdict arrive(Ticket ticket, Claim claim, Changes& changes);
  // Whether arrive() would say kRuns.
  bool runs_now(Lane lane) const { return waiting(lane) == 0 && may_start(lane); }
  // Of one that runs or waits.
  void leave(Ticket ticket, Changes& changes);
  // Who runs goes on, and who waits stays, also where a new limit is lower.
  void set_limits(AdmissionOptions options, Changes& changes);

  size_t running() const { return running_; }
  size_t waiting() const { return lanes_[0].waiting + lanes_[1].waiting; }
  size_t waiting(Lane lane) const { return lanes_[static_cast<size_t>(lane)].waiting; }

 private:
  struct Entry {
    Claim claim;
    bool runs = false;
    bool preempted = false;
    std::list<Ticket>::iterator batch_at;  // of a running batch request
  };
  // A virtual time, and what settles ties.
  using Turn = std::pair<uint64_t, uint64_t>;
  struct KeyQueue {
    std::deque<Ticket> tickets;
    Turn turn;
  };
  // One priority: its keys, and in which order they are served. A key that has nothing waiting is forgotten;
  // when it comes back it begins at the virtual time of the last service.
  struct Level {
    std::unordered_map<std::string, KeyQueue> keys;
    std::map<Turn, std::string> turns;
    uint64_t now = 0;
  };
  struct LaneQueue {
    std::map<int, Level> levels;
    size_t waiting = 0;
  };

  LaneQueue& lane_of(const Claim& claim) { return lanes_[static_cast<size_t>(claim.lane)]; }
  bool may_start(Lane lane) const;
  void start(Ticket ticket, Entry& entry);
  void enqueue(Ticket ticket, const Claim& claim);
  void dequeue(Ticket ticket, const Claim& claim);
  static void drop_key(Level& level, const std::string& key);
  void give_turn(Level& level, const std::string& key, uint64_t at);
  Ticket next(LaneQueue& lane);
  bool make_room(const Claim& newcomer, Changes& changes);
  void fill(Changes& changes);
  void preempt(Changes& changes);

  AdmissionOptions options_;
  std::unordered_map<Ticket, Entry> entries_;
  std::array<LaneQueue, 2> lanes_;
  std::list<Ticket> batch_;  // running and not preempted, by when they began
  size_t running_ = 0;
  uint64_t turns_given_ = 0;
  size_t preempting_ = 0;  // preempted that have not left
};

}  // namespace kindred::router

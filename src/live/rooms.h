// Where the two legs of a request meet that SGLang's routers send to two workers at once.
//
// Thread-safety: confined to the fleet's thread.
#pragma once

#include <boost/asio/steady_timer.hpp>
#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "net/task.h"

namespace kindred::live {

struct Room {
  explicit Room(const net::asio::any_io_executor& executor) : wake(executor) {}

  std::string lease = {};  // once prefill has ended
  bool taken = false;      // the decode worker has the KV
  bool failed = false;     // one of the two has left without
  net::asio::steady_timer wake;
};

class Rooms {
 public:
  // The room of that number, for who comes first and who comes second.
  std::shared_ptr<Room> enter(uint64_t number, const net::asio::any_io_executor& executor) {
    std::weak_ptr<Room>& place = rooms_[number];
    std::shared_ptr<Room> room = place.lock();
    if (!room) place = room = std::make_shared<Room>(executor);
    return room;
  }
  void sweep() {
    std::erase_if(rooms_, [](const auto& entry) { return entry.second.expired(); });
  }

 private:
  std::map<uint64_t, std::weak_ptr<Room>> rooms_;
};

}  // namespace kindred::live

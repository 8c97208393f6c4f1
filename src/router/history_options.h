// What `kindred router` can be told of the history of signatures (router/history.h).
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace kindred::router {

struct HistoryOptions {
  // "[MODEL=]LAYERSxEXPERTSxTOP_K": hidden layers, experts of a layer, experts of a token. Empty: no history.
  std::vector<std::string> shapes;
  size_t bytes = 128ULL << 20;  // of counts kept
  double sample = 0.1;          // share of the requests whose prompt is not known that servers are asked about
  double least_share = 0.25;    // of a prompt that must be known

  bool operator==(const HistoryOptions&) const = default;
};

}  // namespace kindred::router

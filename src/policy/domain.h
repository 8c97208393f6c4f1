// Decode by domain: requests carry a label ("code", "de"), and each label has its worker. The oracle that
// expert signatures are compared with: it knows what they have to guess.
//
// Rules. A new label goes to the worker whose labels have the least share of the requests seen so far (the
// fewer labels, then the lower index, on ties), and stays there. Every kLabelReviewEvery requests one label
// may move from the worker with the most share to the one with the least, if that makes the larger of the
// two clearly smaller. While a label's worker is not available, its requests go to whoever would get a new
// label; when the worker has left the fleet, for good. The load cap is the band's: over it, the least loaded
// of the others. A request without a label, or with one too many, is placed by load alone, with a reason.
//
// Thread-safety: none. Equal sequences of calls give equal decisions. O(workers + labels) a decision.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "policy/chooser.h"
#include "policy/decode_policy.h"

namespace kindred::policy {

inline constexpr std::string_view kDomainName = "domain";
inline constexpr size_t kMaxLabels = 256;
inline constexpr size_t kMaxLabelBytes = 128;  // for who reads labels from the outside
inline constexpr uint64_t kLabelReviewEvery = 64;

class DomainPolicy final : public DecodePolicy {
 public:
  DomainPolicy(Chooser chooser, double load_cap) : chooser_(chooser), load_cap_(load_cap) {}

  std::optional<Decision> choose(const DecodeSnapshot& snapshot, const DecodeRequest& request) override;
  std::string_view name() const override { return kDomainName; }

 private:
  struct Label {
    std::string url;   // of its worker
    double share = 0;  // requests seen; halved now and then, so that it follows the traffic
  };

  // Position of the label's worker, which is available; the label is noted. No value: one label too many.
  std::optional<uint32_t> home(std::span<const WorkerView> workers, std::span<const uint32_t> available,
                               const DecodeRequest& request);
  uint32_t least_share(std::span<const WorkerView> workers, std::span<const uint32_t> among) const;
  std::vector<double> shares(std::span<const WorkerView> workers) const;
  void review(std::span<const WorkerView> workers, std::span<const uint32_t> available);

  Chooser chooser_;
  double load_cap_;
  std::map<std::string, Label, std::less<>> labels_;
  uint64_t seen_ = 0;
};

}  // namespace kindred::policy

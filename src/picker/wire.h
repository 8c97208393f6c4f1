// Between the messages of picker/message.h and those on the wire.
//
// Thread-safety: pure functions.
#pragma once

#include "ext_proc.pb.h"
#include "picker/message.h"

namespace kindred::picker {

inline constexpr std::string_view kSubsetNamespace = "envoy.lb.subset_hint";
inline constexpr std::string_view kSubsetKey = "x-gateway-destination-endpoint-subset";
inline constexpr std::string_view kLbNamespace = "envoy.lb";
inline constexpr std::string_view kServedKey = "x-gateway-destination-endpoint-served";

// Takes the bytes of bodies out of `message`. Nothing: it holds none of the parts there are.
std::optional<FromProxy> read_message(envoy::service::ext_proc::v3::ProcessingRequest& message);
envoy::service::ext_proc::v3::ProcessingResponse write_message(ToProxy message);

}  // namespace kindred::picker

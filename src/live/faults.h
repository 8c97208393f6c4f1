// The script of what befalls a fleet: a YAML (or JSON) list of
//   {at_s: 2.5, worker: 1, kind: kill, for_s: 3}
// kind: kill, restart, stall, slow (with factor), reset, wrong_counts; options.h says what each does.
//
// Thread-safety: pure functions.
#pragma once

#include <string_view>
#include <vector>

#include "base/result.h"
#include "live/options.h"

namespace kindred::live {

std::string_view to_string(FaultKind kind);

// Error: kInvalid: everything that is wrong, each with line, field and what is accepted; kTooLarge.
Result<std::vector<Fault>> parse_faults(std::string_view text, size_t workers);

}  // namespace kindred::live

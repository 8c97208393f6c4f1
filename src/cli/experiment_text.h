// A switchback experiment's report (GET /experiment) for people.
//
// Thread-safety: pure function.
#pragma once

#include <string>

#include "base/json.h"

namespace kindred::cli {

std::string experiment_text(const Json& report);

}  // namespace kindred::cli

// Keeps expert counts from clients that did not ask for them: they reveal something of the prompt.
//
// Thread-safety: pure functions.
#pragma once

#include <string>

namespace kindred::router {

// Cuts the fields `expert_counts`, `decode_expert_counts` and `expert_gates` out of the top level of a JSON
// object; every other byte stays as it is, and what is no JSON object is left alone. Event streams are not
// looked into: workers put counts there only when the request asks (docs/kindred-dialect.md, section 5).
void remove_expert_counts(std::string& answer);

}  // namespace kindred::router

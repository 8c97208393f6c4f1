// Which API a request speaks, as far as the router has to know: where its streams end, and how an error of the
// router's own looks to its client.
//
// Thread-safety: pure functions.
#pragma once

#include <string_view>

namespace kindred::router {

enum class ApiForm {
  kOpenAi,     // completions and all that is none of the others; unnamed events, the last one `[DONE]`
  kResponses,  // OpenAI's /v1/responses; named events, the last one `response.completed` or its like
  kMessages,   // Anthropic's /v1/messages; named events, the last one `message_stop`; errors in a form of its own
};

ApiForm api_form(std::string_view path);

// Whether events have names, so that an error can be told by its own.
inline bool names_events(ApiForm form) { return form != ApiForm::kOpenAi; }
// Whether a stream of named events is whole with the event `name`. An error ends it, too.
bool ends_stream(ApiForm form, std::string_view name);
// Whether an event of that name may carry generated text, reasoning or a tool call.
bool carries_output(ApiForm form, std::string_view name);

}  // namespace kindred::router

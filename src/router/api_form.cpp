#include "router/api_form.h"

namespace kindred::router {
namespace {

bool is_below(std::string_view path, std::string_view root) {
  return path.starts_with(root) && (path.size() == root.size() || path[root.size()] == '/');
}

}  // namespace

ApiForm api_form(std::string_view path) {
  if (is_below(path, "/v1/messages")) return ApiForm::kMessages;
  return is_below(path, "/v1/responses") ? ApiForm::kResponses : ApiForm::kOpenAi;
}

bool ends_stream(ApiForm form, std::string_view name) {
  if (name == "error") return true;
  if (form == ApiForm::kMessages) return name == "message_stop";
  return name == "response.completed" || name == "response.incomplete" || name == "response.failed" ||
         name == "response.cancelled";
}

bool carries_output(ApiForm form, std::string_view name) {
  return form == ApiForm::kMessages ? name == "content_block_delta" : name.ends_with(".delta");
}

}  // namespace kindred::router

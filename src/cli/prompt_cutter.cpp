#include "cli/prompt_cutter.h"

#include <fmt/format.h>

#include <algorithm>

#include "cli/chat_load.h"
#include "cli/prompts.h"

namespace kindred::cli {

Result<PromptCutter> PromptCutter::make(const net::Endpoint& worker, const std::string& path) {
  const Result<std::vector<Prompt>> prompts = load_prompts(path);
  if (!prompts) return prompts.error();
  std::string all;
  for (const Prompt& prompt : *prompts) all += prompt.text + "\n\n";
  PromptCutter out(worker);
  const Result<Json> whole = out.ask("/tokenize", {{"prompt", all}, {"add_special_tokens", false}});
  if (!whole) return whole.error();
  const Result<Json> plain = out.ask("/tokenize", {{"prompt", "a"}, {"add_special_tokens", false}});
  if (!plain) return plain.error();
  const Json message = {{"role", "user"}, {"content", "a"}};
  const Result<Json> chat = out.ask("/tokenize", {{"messages", Json::array({message})}});
  if (!chat) return chat.error();
  for (const Json& token : whole->value("tokens", Json::array())) out.tokens_.push_back(token.get<int32_t>());
  if (out.tokens_.empty()) return Error{ErrorCode::kCorrupt, "/tokenize: no tokens"};
  out.template_tokens_ = static_cast<uint32_t>(std::max(chat->value("count", 0) - plain->value("count", 0), 0));
  return out;
}

Result<std::string> PromptCutter::cut(uint32_t tokens, Rng& rng) const {
  const uint32_t wanted = std::max(tokens, template_tokens_ + 1) - template_tokens_;
  const uint64_t from = rng.below(tokens_.size());
  Json ids = Json::array();
  for (uint32_t i = 0; i < wanted; ++i) ids.push_back(tokens_[(from + i) % tokens_.size()]);
  const Result<Json> text = ask("/detokenize", {{"tokens", std::move(ids)}});
  if (!text) return text.error();
  return text->value("prompt", "");
}

Result<Json> PromptCutter::ask(const std::string& target, const Json& body) const {
  const Result<std::string> answer = fetch(worker_, target, dump_json(body));
  if (!answer) return answer.error();
  Json json = parse_json(*answer);
  if (!json.is_object()) return Error{ErrorCode::kCorrupt, fmt::format("{}: not a JSON object", target)};
  return json;
}

}  // namespace kindred::cli

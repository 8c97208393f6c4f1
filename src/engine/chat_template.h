// The model's chat template (Jinja, from the GGUF), interpreted by llama.cpp's own interpreter.
//
// Security: a control token such as <|im_end|> that a client writes into a message must stay text.
// Two things see to it. The interpreter marks strings that came from messages, and marked text is
// never read as control tokens. Since some of its filters lose the mark, every control token's text
// inside a message is also replaced by a placeholder before rendering and put back, as plain text,
// behind it.
//
// Thread-safety: immutable after create(); render() may be called from any thread.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/result.h"
#include "engine/model.h"
#include "engine/openai_request.h"

namespace kindred::engine {

// A piece of a rendered prompt. `control`: the text of exactly one control token of the template's own;
// otherwise text in which no control token may be recognised.
struct PromptPart {
  std::string text;
  bool control = false;
  bool operator==(const PromptPart&) const = default;
};

struct TemplateTokens {
  std::string bos, eos;               // their texts; may be empty
  std::vector<std::string> controls;  // the texts of all control tokens
};
TemplateTokens template_tokens(const Model& model);

class ChatTemplate {
 public:
  // Error: kInvalid if `source` does not parse.
  static Result<ChatTemplate> create(std::string source, TemplateTokens tokens);
  ChatTemplate(ChatTemplate&&) noexcept;
  ChatTemplate& operator=(ChatTemplate&&) noexcept;
  ~ChatTemplate();

  // Error: kInvalid if the template refuses the messages (its own words) or fails on them.
  Result<std::vector<PromptPart>> render(std::span<const ChatMessage> messages, bool add_generation_prompt) const;

 private:
  struct Impl;
  explicit ChatTemplate(std::unique_ptr<const Impl> impl);
  std::unique_ptr<const Impl> impl_;
};

std::vector<Token> tokenize_parts(const Model& model, std::span<const PromptPart> parts);

}  // namespace kindred::engine

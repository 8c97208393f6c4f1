#include "engine/chat_template.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <exception>

#include "jinja/caps.h"
#include "jinja/lexer.h"
#include "jinja/parser.h"
#include "jinja/runtime.h"

namespace kindred::engine {
namespace {

// Noncharacters of Unicode, which no text has reason to hold. A message that holds kOpen all the same
// has it replaced like a control token, so that every kOpen in a rendered prompt is ours.
constexpr std::string_view kOpen = "\xEF\xB7\x90";   // U+FDD0
constexpr std::string_view kClose = "\xEF\xB7\x91";  // U+FDD1

// Finds the longest of some texts at a place. Nearly every place is dismissed by its first byte.
class Matcher {
 public:
  Matcher() = default;
  explicit Matcher(std::vector<std::string> texts) : texts_(std::move(texts)) {
    std::stable_sort(texts_.begin(), texts_.end(),
                     [](const std::string& a, const std::string& b) { return a.size() > b.size(); });
    for (const std::string& text : texts_) first_[static_cast<uint8_t>(text.front())] = true;
  }

  const std::string* find(std::string_view in, size_t at) const {
    if (!first_[static_cast<uint8_t>(in[at])]) return nullptr;
    const std::string_view rest = in.substr(at);
    for (const std::string& text : texts_) {
      if (rest.starts_with(text)) return &text;
    }
    return nullptr;
  }
  size_t index(const std::string* text) const { return static_cast<size_t>(text - texts_.data()); }
  size_t size() const { return texts_.size(); }
  const std::string& operator[](size_t i) const { return texts_[i]; }

 private:
  std::vector<std::string> texts_;
  std::array<bool, 256> first_{};
};

}  // namespace

struct ChatTemplate::Impl {
  std::string source;
  std::string bos, eos;
  Matcher controls;
  Matcher literals;  // what is replaced in messages: the control tokens and kOpen
  jinja::program program;
  bool typed_content = false;  // the template takes a list of parts only

  std::string escape(std::string_view text) const;
  jinja::value message_value(const ChatMessage& message) const;
  std::vector<PromptPart> cut(const std::vector<jinja::string_part>& rendered) const;
  size_t literal_at(std::string_view text, size_t& at) const;
};

std::string ChatTemplate::Impl::escape(std::string_view text) const {
  std::string out;
  for (size_t at = 0; at < text.size();) {
    const std::string* found = literals.find(text, at);
    if (!found) {
      out.push_back(text[at++]);
      continue;
    }
    out += fmt::format("{}{}{}", kOpen, literals.index(found), kClose);
    at += found->size();
  }
  return out;
}

jinja::value ChatTemplate::Impl::message_value(const ChatMessage& message) const {
  auto content = jinja::mk_val<jinja::value_string>(escape(message.content));
  content->val_str.mark_input();
  auto out = jinja::mk_val<jinja::value_object>();
  // Not marked: the parser accepts three roles only, and some templates build control tokens from them.
  out->insert("role", jinja::mk_val<jinja::value_string>(message.role));
  if (!typed_content) {
    out->insert("content", content);
    return out;
  }
  auto part = jinja::mk_val<jinja::value_object>();
  part->insert("type", jinja::mk_val<jinja::value_string>(std::string("text")));
  part->insert("text", content);
  auto parts = jinja::mk_val<jinja::value_array>();
  parts->push_back(part);
  out->insert("content", parts);
  return out;
}

// If a placeholder stands at `at`, moves behind it and returns the literal's index; else literals.size().
size_t ChatTemplate::Impl::literal_at(std::string_view text, size_t& at) const {
  std::string_view rest = text.substr(at);
  if (!rest.starts_with(kOpen)) return literals.size();
  rest.remove_prefix(kOpen.size());
  size_t index = literals.size();
  const auto [end, error] = std::from_chars(rest.data(), rest.data() + rest.size(), index);
  const auto digits = static_cast<size_t>(end - rest.data());
  if (error != std::errc() || index >= literals.size() || !rest.substr(digits).starts_with(kClose))
    return literals.size();  // a template has cut the message; what is left is text
  at += kOpen.size() + digits + kClose.size();
  return index;
}

std::vector<PromptPart> ChatTemplate::Impl::cut(const std::vector<jinja::string_part>& rendered) const {
  std::vector<PromptPart> out;
  std::string plain;
  const auto flush = [&] {
    if (!plain.empty()) out.push_back({std::exchange(plain, {}), false});
  };
  for (const jinja::string_part& part : rendered) {
    for (size_t at = 0; at < part.val.size();) {
      if (const size_t literal = literal_at(part.val, at); literal < literals.size()) {
        plain += literals[literal];
        continue;
      }
      const std::string* control = part.is_input ? nullptr : controls.find(part.val, at);
      if (!control) {
        plain.push_back(part.val[at++]);
        continue;
      }
      flush();
      out.push_back({*control, true});
      at += control->size();
    }
  }
  flush();
  return out;
}

ChatTemplate::ChatTemplate(std::unique_ptr<const Impl> impl) : impl_(std::move(impl)) {}
ChatTemplate::ChatTemplate(ChatTemplate&&) noexcept = default;
ChatTemplate& ChatTemplate::operator=(ChatTemplate&&) noexcept = default;
ChatTemplate::~ChatTemplate() = default;

Result<ChatTemplate> ChatTemplate::create(std::string source, TemplateTokens tokens) {
  auto impl = std::make_unique<Impl>();
  std::erase_if(tokens.controls, [](const std::string& text) { return text.empty(); });
  impl->controls = Matcher(tokens.controls);
  tokens.controls.emplace_back(kOpen);
  impl->literals = Matcher(std::move(tokens.controls));
  impl->bos = std::move(tokens.bos);
  impl->eos = std::move(tokens.eos);
  try {
    jinja::lexer lexer;
    const jinja::lexer_result lexed = lexer.tokenize(source);
    impl->program = jinja::parse_from_tokens(lexed);
    impl->source = lexed.source;
    const jinja::caps caps = jinja::caps_get(impl->program);
    impl->typed_content = caps.supports_typed_content && !caps.supports_string_content;
  } catch (const std::exception& error) {
    return invalid(fmt::format("the model's chat template cannot be used: {}", error.what()));
  }
  return ChatTemplate(std::move(impl));
}

Result<std::vector<PromptPart>> ChatTemplate::render(std::span<const ChatMessage> messages,
                                                     bool add_generation_prompt) const {
  try {
    jinja::context context(impl_->source);
    auto list = jinja::mk_val<jinja::value_array>();
    for (const ChatMessage& message : messages) list->push_back(impl_->message_value(message));
    context.set_val("messages", list);
    context.set_val("bos_token", jinja::mk_val<jinja::value_string>(impl_->bos));
    context.set_val("eos_token", jinja::mk_val<jinja::value_string>(impl_->eos));
    context.set_val("add_generation_prompt", jinja::mk_val<jinja::value_bool>(add_generation_prompt));
    jinja::runtime runtime(context);
    const jinja::value_array results = runtime.execute(impl_->program);
    return impl_->cut(jinja::runtime::gather_string_parts(results)->val_str.parts);
  } catch (const std::exception& error) {
    return invalid(fmt::format("messages: the model's chat template refuses them: {}", error.what()), "messages");
  }
}

TemplateTokens template_tokens(const Model& model) {
  TemplateTokens out{model.bos_text(), model.eos_text(), {}};
  for (uint32_t id = 0; id < model.info().vocabulary; ++id) {
    const auto token = static_cast<Token>(id);
    // Control tokens are those with a text that ordinary output does not show.
    if (!model.piece(token, false).empty()) continue;
    if (std::string text = model.piece(token, true); !text.empty()) out.controls.push_back(std::move(text));
  }
  return out;
}

std::vector<Token> tokenize_parts(const Model& model, std::span<const PromptPart> parts) {
  std::vector<Token> out;
  for (const PromptPart& part : parts) {
    const std::vector<Token> tokens = model.tokenize(part.text, part.control);
    out.insert(out.end(), tokens.begin(), tokens.end());
  }
  return out;
}

}  // namespace kindred::engine

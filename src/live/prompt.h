// The words of a fleet without a model: how prompts become tokens, and what is answered.
//
// A token is up to four bytes of text, so that prompts have about as many as with a real tokenizer, and prompts with
// an equal beginning have equal first tokens. The answer is a function of the prompt and the position, the same at
// every worker: an answer that two workers made between them can be checked word by word.
//
// Thread-safety: pure functions.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace kindred::live {

inline constexpr size_t kTokenBytes = 4;

void append_tokens(std::string_view text, std::vector<uint32_t>& out);
// Begins a chat message; `append_tokens` of its content follows.
void append_role(std::string_view role, std::vector<uint32_t>& out);

uint64_t prompt_hash(std::span<const uint32_t> tokens);
// Of each whole piece: of its tokens and all before it.
std::vector<uint64_t> piece_hashes(std::span<const uint32_t> tokens, uint32_t piece_tokens);

// The text of generated token `position` (from 0), with the space before it.
std::string answer_word(uint64_t prompt, uint32_t position);

}  // namespace kindred::live

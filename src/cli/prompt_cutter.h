// Prompts of given lengths, cut out of the prompts of a file by a worker's own tokeniser.
//
// Thread-safety: none. Each cut asks the worker.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/json.h"
#include "base/result.h"
#include "base/rng.h"
#include "net/http_message.h"

namespace kindred::cli {

class PromptCutter {
 public:
  // `path`: a prompt file (cli/prompts.h). Errors: those of reading it, kUnavailable, kCorrupt.
  static Result<PromptCutter> make(const net::Endpoint& worker, const std::string& path);

  // A chat message that has `tokens` with what the chat template puts around it, or little more if that alone is as
  // long; from anywhere in the file's prompts, which repeat. Where a cut parts a word, a token or two are different.
  Result<std::string> cut(uint32_t tokens, Rng& rng) const;

 private:
  explicit PromptCutter(net::Endpoint worker) : worker_(std::move(worker)) {}
  Result<Json> ask(const std::string& target, const Json& body) const;

  net::Endpoint worker_;
  std::vector<int32_t> tokens_;
  uint32_t template_tokens_ = 0;
};

}  // namespace kindred::cli

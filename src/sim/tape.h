// Which experts a request's tokens use, as bit masks, so that a step's distinct experts are an OR of rows.
//
// A tape is drawn once and shared by many requests: a request is a tape and a place on it. At 100 requests a
// second, 500 tokens each and 48 layers of 128 experts, drawing each token anew would be 2·10^9 draws a
// simulated second; OR-ing rows of a tape is 5·10^6 words.
//
// Thread-safety: plain values; a const tape may be read by any thread.
#pragma once

#include <cassert>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "expert/counts.h"

namespace kindred::sim {

class ExpertTape {
 public:
  // [tokens, L, words] of zeros, words = ceil(E / 64).
  ExpertTape(const expert::ExpertShape& shape, uint32_t tokens)
      : layers_(static_cast<uint32_t>(shape.layers.size())),
        words_((shape.experts + 63) / 64),
        tokens_(tokens),
        bits_(static_cast<size_t>(tokens) * layers_ * words_, 0) {}

  uint32_t layers() const { return layers_; }
  uint32_t words() const { return words_; }  // a layer
  uint32_t tokens() const { return tokens_; }

  // [L, words], bit e % 64 of word e / 64 of row l: the token uses expert e of that layer.
  std::span<const uint64_t> token(uint32_t t) const {
    assert(t < tokens_);
    return {bits_.data() + row(t), row(1)};
  }
  void set(uint32_t t, uint32_t layer, uint32_t expert) {
    bits_[row(t) + layer * words_ + expert / 64] |= uint64_t{1} << (expert % 64);
  }

 private:
  size_t row(uint32_t t) const { return static_cast<size_t>(t) * layers_ * words_; }

  uint32_t layers_, words_, tokens_;
  std::vector<uint64_t> bits_;
};

// What the simulator has to know of one request's experts.
struct RequestExperts {
  std::shared_ptr<const expert::ExpertCounts> prompt;  // what prefill reports; never null
  std::shared_ptr<const ExpertTape> decode;            // never null, at least one token
  uint32_t first = 0;                                  // generated token i uses decode->token((first + i) % tokens())
  uint32_t domain = 0;
};

}  // namespace kindred::sim

// How likely one token of a request is to use each expert, packed so that a router can keep it for every request in
// flight, and so that adding it to a worker and taking it away again are exact.
//
// A request's inclusion probability is p[l,e] = c[l,e] / T, the share of its prompt's tokens that chose the expert.
// A batch leaves an expert unused with probability q[l,e] = prod_r (1 - p_r[l,e]). Kept as a product of floats, q
// would drift as requests come and go, and could not be divided back from 0. So each request stores -ln(1 - p) as
// one of 256 codes that stand for whole numbers of units, and a worker keeps their sum, an integer: leaving takes
// away exactly what joining has added.
//
// Codes are dense near 0, where most of 128 experts are, and coarse near 1: unit(c) = c + 16129 (c / 255)^3, of
// 1 / 4096 each. p is kept within 4 % of itself between 0.01 and 0.9, and capped at 0.982.
//
// Memory: L * E bytes a request (6,144 at 48 x 128). Thread-safety: plain values and pure functions.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "expert/counts.h"

namespace kindred::expert {

struct Inclusion {
  ExpertShape shape;
  std::vector<uint8_t> codes;  // [L, E]
};

// `sharpen` > 0: p^sharpen, scaled so that a layer still sums to top_k (or to what the cap leaves of it); 1: as
// counted. counts.tokens > 0.
Inclusion pack_inclusion(const ExpertCounts& counts, double sharpen = 1);

// p of each cell, as a worker's sums have it. Equal lengths.
void unpack_inclusion(std::span<const uint8_t> codes, std::span<float> out);

// Adds the units of a request `times` times to a worker's `sums`, or takes them away again where `times` is negative.
// Equal lengths. Sums wrap around, so that what is taken away was exactly what was added whatever else was.
void add_inclusion(std::span<const uint8_t> codes, int32_t times, std::span<uint32_t> sums);

// q of each sum, in [0, 1]; 1 where nobody is. Returns the expected distinct experts of all layers together,
// E|U| = sum (1 - q). Equal lengths.
double unused_shares(std::span<const uint32_t> sums, std::span<float> out);

}  // namespace kindred::expert

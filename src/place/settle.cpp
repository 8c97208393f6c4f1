#include "place/settle.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "base/result.h"
#include "base/rng.h"
#include "expert/assign.h"

namespace kindred::place {
namespace {

constexpr uint32_t kCapAttempts = 5;

}  // namespace

void Settler::begin(const Rows& rows) {
  rows_ = rows;
  const size_t n = rows.load.size();
  KINDRED_CHECK(rows.ranks > 0 && n % rows.ranks == 0 && rows.cost.size() == n * rows.ranks);
  slots_ = static_cast<uint32_t>(n / rows.ranks);
  mean_ = std::accumulate(rows.load.begin(), rows.load.end(), 0.0) / rows.ranks;
  // Relative to what is being added up, so that rounding never looks like a gain.
  const auto [least, most] = std::minmax_element(rows.cost.begin(), rows.cost.end());
  const double scale = std::max({rows.beta * mean_, std::abs(*least), std::abs(*most), 1e-300});
  least_gain_ = 1e-11 * static_cast<double>(n) * scale;
  penalty_ = std::isfinite(rows.load_cap) ? first_penalty() : 0;
  entering_.resize(slots_);
  entering_load_.resize(slots_);
  settled_pair_.assign(size_t{rows.ranks} * rows.ranks, 0);
}

// Per unit of load above the cap: a few times what a unit of any row can save by being elsewhere. settle() raises it
// where that is not enough.
double Settler::first_penalty() const {
  double most = rows_.beta;
  for (size_t row = 0; row < rows_.load.size(); ++row) {
    const std::span<const double> costs = rows_.cost.subspan(row * rows_.ranks, rows_.ranks);
    const auto [least_cost, most_cost] = std::minmax_element(costs.begin(), costs.end());
    if (rows_.load[row] > 0) most = std::max(most, (*most_cost - *least_cost) / rows_.load[row]);
  }
  return 4 * most;
}

void Settler::load_state(std::span<const uint32_t> rank, State& state) const {
  const uint32_t ranks = rows_.ranks;
  state.member.assign(rank.size(), 0);
  state.load.assign(ranks, 0.0);
  state.objective = 0;
  std::vector<uint32_t> filled(ranks, 0);
  for (uint32_t row = 0; row < rank.size(); ++row) {
    const uint32_t r = rank[row];
    KINDRED_CHECK(r < ranks && filled[r] < slots_);
    state.member[r * slots_ + filled[r]++] = row;
    state.load[r] += rows_.load[row];
    state.objective += cost(row, r);
  }
  for (const double load : state.load) state.objective += load_price(load);
}

double Settler::load_price(double load) const {
  const double price = rows_.beta * std::abs(load - mean_);
  return load > rows_.load_cap ? price + penalty_ * (load - rows_.load_cap) : price;
}

Settler::Swap Settler::best_swap(const State& state, uint32_t a, uint32_t b) {
  const uint32_t* on_a = &state.member[a * slots_];
  const uint32_t* on_b = &state.member[b * slots_];
  const double load_a = state.load[a], load_b = state.load[b];
  const double now = load_price(load_a) + load_price(load_b);
  double cheapest_entering = std::numeric_limits<double>::infinity();
  for (uint32_t j = 0; j < slots_; ++j) {
    entering_[j] = cost(on_b[j], a) - cost(on_b[j], b);
    entering_load_[j] = rows_.load[on_b[j]];
    cheapest_entering = std::min(cheapest_entering, entering_[j]);
  }
  // No swap leaves the two ranks' price below this: it is convex, and their sum stays.
  const double most_price_gain = now - rows_.beta * std::abs(load_a + load_b - 2 * mean_);
  Swap best{.delta = -least_gain_, .a = a, .b = b, .i = slots_, .j = 0};
  for (uint32_t i = 0; i < slots_; ++i) {
    const double leaving = cost(on_a[i], b) - cost(on_a[i], a);
    if (leaving + cheapest_entering - most_price_gain >= best.delta) continue;
    const double load_i = rows_.load[on_a[i]];
    for (uint32_t j = 0; j < slots_; ++j) {
      const double moved = load_i - entering_load_[j];
      const double delta = leaving + entering_[j] + load_price(load_a - moved) + load_price(load_b + moved) - now;
      if (delta < best.delta) best = {.delta = delta, .a = a, .b = b, .i = i, .j = j};
    }
  }
  return best;
}

void Settler::apply(State& state, const Swap& swap) {
  uint32_t& on_a = state.member[swap.a * slots_ + swap.i];
  uint32_t& on_b = state.member[swap.b * slots_ + swap.j];
  const double moved = rows_.load[on_a] - rows_.load[on_b];
  state.load[swap.a] -= moved;
  state.load[swap.b] += moved;
  state.objective += swap.delta;
  std::swap(on_a, on_b);
  for (uint32_t r = 0; r < rows_.ranks; ++r) {
    for (const uint32_t changed : {swap.a, swap.b}) {
      settled_pair_[std::min(r, changed) * rows_.ranks + std::max(r, changed)] = 0;
    }
  }
}

void Settler::descend(State& state) {
  size_t left = 64 * rows_.load.size() + 1024;  // far more swaps than are ever needed
  for (bool again = true; again;) {
    again = false;
    for (uint32_t a = 0; a < rows_.ranks; ++a) {
      for (uint32_t b = a + 1; b < rows_.ranks; ++b) {
        if (settled_pair_[a * rows_.ranks + b] != 0) continue;
        for (;;) {
          const Swap swap = best_swap(state, a, b);
          if (swap.i == slots_ || left == 0) break;
          apply(state, swap);
          again = true;
          --left;
        }
        settled_pair_[a * rows_.ranks + b] = 1;
      }
    }
  }
}

// A row and the one elsewhere that is cheapest to swap it with, whatever that does to the loads.
void Settler::kick(State& state, Rng& rng) {
  const auto a = static_cast<uint32_t>(rng.below(rows_.ranks));
  const auto i = static_cast<uint32_t>(rng.below(slots_));
  const auto b = static_cast<uint32_t>((a + 1 + rng.below(rows_.ranks - 1)) % rows_.ranks);
  const uint32_t row = state.member[a * slots_ + i];
  Swap swap{.delta = std::numeric_limits<double>::infinity(), .a = a, .b = b, .i = i, .j = 0};
  const double leaving = cost(row, b) - cost(row, a);
  const double now = load_price(state.load[a]) + load_price(state.load[b]);
  for (uint32_t j = 0; j < slots_; ++j) {
    const uint32_t other = state.member[b * slots_ + j];
    const double delta = leaving + cost(other, a) - cost(other, b);
    if (delta < swap.delta) {
      swap.delta = delta;
      swap.j = j;
    }
  }
  const double moved = rows_.load[row] - rows_.load[state.member[b * slots_ + swap.j]];
  swap.delta += load_price(state.load[a] - moved) + load_price(state.load[b] + moved) - now;
  apply(state, swap);
}

void Settler::search(State& best, uint32_t kicks) {
  descend(best);
  if (rows_.ranks < 2) return;
  Rng rng(slots_);
  State trial;
  for (uint32_t failed = 0, round = 0; failed < kicks && round < 16 * kicks; ++round) {
    trial = best;
    kick(trial, rng);
    kick(trial, rng);
    descend(trial);
    if (trial.objective < best.objective - least_gain_) {
      std::swap(best, trial);
      failed = 0;
    } else {
      ++failed;
    }
    std::fill(settled_pair_.begin(), settled_pair_.end(), uint8_t{1});
  }
}

Settled Settler::finish(const State& state) const {
  Settled out;
  out.rank.resize(rows_.load.size());
  std::vector<double> load(rows_.ranks, 0.0);
  for (uint32_t r = 0; r < rows_.ranks; ++r) {
    for (uint32_t i = 0; i < slots_; ++i) {
      const uint32_t row = state.member[r * slots_ + i];
      out.rank[row] = r;
      out.objective += cost(row, r);
      load[r] += rows_.load[row];
    }
    out.objective += rows_.beta * std::abs(load[r] - mean_);
    if (load[r] > rows_.load_cap * (1 + 1e-9)) out.excess += load[r] - rows_.load_cap;
  }
  return out;
}

// Ranks of one source cost a row alike. Too little to matter, but enough to spread such rows from the start, saves
// most of the shortest paths.
std::vector<uint32_t> Settler::assign_at(std::span<const double> price, double& bound) {
  const size_t ranks = rows_.ranks, count = rows_.load.size();
  const double nudge = least_gain_ / static_cast<double>(count * ranks);
  priced_.resize(count * ranks);
  for (size_t row = 0; row < count; ++row) {
    for (size_t r = 0; r < ranks; ++r) {
      priced_[row * ranks + r] =
          rows_.cost[row * ranks + r] + price[r] * rows_.load[row] + nudge * static_cast<double>((row + r) % ranks);
    }
  }
  const std::vector<uint32_t> capacity(ranks, slots_);
  Result<expert::Assignment> assigned = expert::assign_rows(priced_, capacity);
  KINDRED_CHECK(assigned.ok());  // finite costs, room for all
  // What prices give back to the mean, and more than all nudges together.
  const double shift = std::accumulate(price.begin(), price.end(), 0.0) * mean_ + least_gain_;
  bound = std::max(bound, assigned->total - shift);
  return std::move(assigned->column);
}

Settled Settler::settle(const Rows& rows, const SettleOptions& options) {
  begin(rows);
  std::vector<double> price(rows.ranks, 0.0);
  double bound = -std::numeric_limits<double>::infinity();
  State best, trial;
  load_state(assign_at(price, bound), best);
  for (uint32_t round = 0; round < options.price_rounds; ++round) {
    const State& from = round == 0 ? best : trial;
    const double step = rows.beta / static_cast<double>(round + 2);
    for (uint32_t r = 0; r < rows.ranks; ++r) {
      const double over = (from.load[r] - mean_) / std::max(mean_, 1e-300);
      price[r] = std::clamp(price[r] + step * std::clamp(4 * over, -1.0, 1.0), -rows.beta, rows.beta);
    }
    load_state(assign_at(price, bound), trial);
    if (trial.objective < best.objective) best = trial;
  }
  Settled out;
  for (uint32_t attempt = 0; attempt < kCapAttempts; ++attempt) {
    std::fill(settled_pair_.begin(), settled_pair_.end(), uint8_t{0});
    search(best, options.kicks);
    out = finish(best);
    if (out.excess == 0) break;
    penalty_ *= 8;
    load_state(out.rank, best);
  }
  out.bound = std::min(bound, out.objective);
  return out;
}

}  // namespace kindred::place

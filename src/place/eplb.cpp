#include "place/eplb.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>

namespace kindred::place {
namespace {

struct Packing {
  std::vector<uint32_t> pack, position;  // [items]: which pack, and which place in it
};

// items / packs items into each pack.
Packing pack_evenly(std::span<const double> weight, uint32_t packs) {
  const auto items = static_cast<uint32_t>(weight.size());
  const uint32_t room = items / packs;
  Packing out{.pack = std::vector<uint32_t>(items), .position = std::vector<uint32_t>(items, 0)};
  if (room == 1) {
    std::iota(out.pack.begin(), out.pack.end(), 0U);
    return out;
  }
  std::vector<uint32_t> order(items);
  std::iota(order.begin(), order.end(), 0U);
  std::stable_sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) { return weight[a] > weight[b]; });
  std::vector<double> sum(packs, 0.0);
  std::vector<uint32_t> filled(packs, 0);
  for (const uint32_t item : order) {
    uint32_t lightest = packs;
    for (uint32_t p = 0; p < packs; ++p) {
      if (filled[p] < room && (lightest == packs || sum[p] < sum[lightest])) lightest = p;
    }
    out.pack[item] = lightest;
    out.position[item] = filled[lightest]++;
    sum[lightest] += weight[item];
  }
  return out;
}

// The item of each replica: each item once, then always the one with the most weight per replica.
std::vector<uint32_t> replicate(std::span<const double> weight, uint32_t replicas, std::vector<uint32_t>& copies) {
  const auto items = static_cast<uint32_t>(weight.size());
  std::vector<uint32_t> item_of(items);
  std::iota(item_of.begin(), item_of.end(), 0U);
  copies.assign(items, 1);
  while (item_of.size() < replicas) {
    uint32_t hottest = 0;
    for (uint32_t i = 1; i < items; ++i) {
      if (weight[i] / copies[i] > weight[hottest] / copies[hottest]) hottest = i;
    }
    item_of.push_back(hottest);
    ++copies[hottest];
  }
  return item_of;
}

Status check_shape(uint32_t experts, const EplbShape& shape) {
  if (shape.replicas < experts) {
    return invalid(fmt::format("{} replicas for {} experts; accepted: at least one each", shape.replicas, experts),
                   "replicas");
  }
  if (shape.ranks < 1 || shape.nodes < 1 || shape.groups < 1) return invalid("ranks, nodes and groups begin at 1");
  if (shape.replicas % shape.ranks != 0) {
    return invalid(fmt::format("{} replicas do not divide among {} ranks", shape.replicas, shape.ranks), "replicas");
  }
  if (shape.groups % shape.nodes != 0) return {};  // global: the rest does not matter
  if (experts % shape.groups != 0) {
    return invalid(fmt::format("{} experts do not divide into {} groups", experts, shape.groups), "groups");
  }
  if (shape.ranks % shape.nodes != 0) {
    return invalid(fmt::format("{} ranks do not divide among {} nodes", shape.ranks, shape.nodes), "nodes");
  }
  return {};
}

// Experts in the order of the nodes that get them, a node's after another: groups packed by their load.
std::vector<uint32_t> experts_by_node(std::span<const double> load, uint32_t groups, uint32_t nodes) {
  const auto experts = static_cast<uint32_t>(load.size());
  const uint32_t group_size = experts / groups, groups_per_node = groups / nodes;
  std::vector<double> of_group(groups, 0.0);
  for (uint32_t e = 0; e < experts; ++e) of_group[e / group_size] += load[e];
  const Packing nodes_of = pack_evenly(of_group, nodes);
  std::vector<uint32_t> order(experts);
  for (uint32_t g = 0; g < groups; ++g) {
    const uint32_t begin = (nodes_of.pack[g] * groups_per_node + nodes_of.position[g]) * group_size;
    for (uint32_t i = 0; i < group_size; ++i) order[begin + i] = g * group_size + i;
  }
  return order;
}

}  // namespace

Result<EplbLayer> eplb_layer(std::span<const double> load, const EplbShape& shape) {
  const auto experts = static_cast<uint32_t>(load.size());
  if (Status good = check_shape(experts, shape); !good) return std::move(good).error();
  const bool hierarchical = shape.groups % shape.nodes == 0;
  const uint32_t groups = hierarchical ? shape.groups : 1, nodes = hierarchical ? shape.nodes : 1;
  const std::vector<uint32_t> order = experts_by_node(load, groups, nodes);
  const uint32_t experts_per_node = experts / nodes, replicas_per_node = shape.replicas / nodes;
  const uint32_t ranks_per_node = shape.ranks / nodes, slots = shape.replicas / shape.ranks;

  EplbLayer out{.expert_of = std::vector<uint32_t>(shape.replicas), .copies = std::vector<uint32_t>(experts)};
  for (uint32_t node = 0; node < nodes; ++node) {
    const std::span<const uint32_t> here(order.data() + node * experts_per_node, experts_per_node);
    std::vector<double> weight;
    for (const uint32_t e : here) weight.push_back(load[e]);
    std::vector<uint32_t> copies;
    const std::vector<uint32_t> item_of = replicate(weight, replicas_per_node, copies);
    std::vector<double> of_replica;
    for (const uint32_t item : item_of) of_replica.push_back(weight[item] / copies[item]);
    const Packing ranks_of = pack_evenly(of_replica, ranks_per_node);
    for (uint32_t i = 0; i < replicas_per_node; ++i) {
      const uint32_t slot = node * replicas_per_node + ranks_of.pack[i] * slots + ranks_of.position[i];
      out.expert_of[slot] = here[item_of[i]];
    }
    for (uint32_t i = 0; i < experts_per_node; ++i) out.copies[here[i]] = copies[i];
  }
  return out;
}

Result<Placement> place_eplb(const Problem& problem) {
  const uint32_t experts = problem.traffic.experts, slots = problem.slots();
  const EplbShape shape{.replicas = experts + problem.redundant,
                        .groups = problem.groups,
                        .nodes = problem.nodes,
                        .ranks = problem.ranks()};
  Placement placement{.layers = problem.traffic.layers, .experts = experts, .ranks = problem.ranks()};
  for (uint32_t l = 0; l < placement.layers; ++l) {
    const Result<EplbLayer> layer = eplb_layer(problem.traffic.load(l), shape);
    if (!layer) return layer.error();
    std::vector<uint32_t> rank(experts, problem.ranks());
    for (uint32_t slot = 0; slot < layer->expert_of.size(); ++slot) {
      const uint32_t e = layer->expert_of[slot];
      if (rank[e] == problem.ranks()) rank[e] = slot / slots;
      else placement.copies.push_back({.layer = l, .expert = e, .rank = slot / slots});
    }
    placement.rank.insert(placement.rank.end(), rank.begin(), rank.end());
  }
  std::sort(placement.copies.begin(), placement.copies.end());
  return placement;
}

}  // namespace kindred::place

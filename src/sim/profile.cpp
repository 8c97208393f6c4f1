#include "sim/profile.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <set>

#include "base/config.h"
#include "base/json.h"

namespace kindred::sim {
namespace {

constexpr double kMostFigure = 1e15;
constexpr size_t kMostText = 1024;
constexpr size_t kMostList = 1024;

// Calls visit(path, field, least) for each number and visit(path, text) for each text. `least` is 0, or what a
// number has to exceed or reach.
template <class P, class V>
void visit_fields(P& p, V& visit) {
  visit.text("name", p.name);
  visit.text("gpu", p.gpu);
  visit.text("model", p.model);
  visit.text("dtype", p.dtype);
  visit.text("kernel", p.kernel);
  visit.number("dims.layers", p.dims.layers, 1);
  visit.number("dims.moe_layers", p.dims.moe_layers, 1);
  visit.number("dims.hidden", p.dims.hidden, 1);
  visit.number("dims.experts", p.dims.experts, 1);
  visit.number("dims.top_k", p.dims.top_k, 1);
  visit.number("dims.heads", p.dims.heads, 1);
  visit.number("dims.kv_heads", p.dims.kv_heads, 1);
  visit.number("dims.head_dim", p.dims.head_dim, 1);
  visit.number("dims.vocab", p.dims.vocab, 1);
  visit.number("dims.window_layers", p.dims.window_layers, 0);
  visit.number("dims.window_tokens", p.dims.window_tokens, 0);
  visit.number("moe.a_us", p.moe.a_us, 0);
  visit.number("moe.b_us", p.moe.b_us, 0);
  visit.number("moe.token_us", p.moe.token_us, 0);
  visit.number("moe.power", p.moe.power, 1);
  visit.number("moe.block_factor", p.moe.block_factor, 0.01);
  visit.text("moe.source", p.moe.source);
  const auto law = [&visit](const std::string& path, auto& of) {
    visit.number(path + ".launch_us", of.launch_us, 0);
    visit.number(path + ".request_us", of.request_us, 0);
    visit.number(path + ".token_us", of.token_us, 0);
  };
  law("attention.decode", p.attention.decode);
  law("attention.decode_window", p.attention.decode_window);
  visit.number("attention.prefill_us_per_context", p.attention.prefill_us_per_context, 0);
  visit.text("attention.source", p.attention.source);
  visit.number("gemm.launch_us", p.gemm.launch_us, 0);
  visit.number("gemm.bytes_per_us", p.gemm.bytes_per_us, 1);
  visit.number("gemm.flops_per_us", p.gemm.flops_per_us, 1);
  visit.number("gemm.power", p.gemm.power, 1);
  visit.number("gemm.edge", p.gemm.edge, 0);
  visit.text("gemm.source", p.gemm.source);
  visit.number("memory.hbm_bytes", p.memory.hbm_bytes, 1);
  visit.number("memory.usable_share", p.memory.usable_share, 0);
  visit.number("memory.dense_weight_bytes", p.memory.dense_weight_bytes, 0);
  visit.number("memory.expert_weight_bytes", p.memory.expert_weight_bytes, 0);
  visit.number("memory.kv_bytes_per_token", p.memory.kv_bytes_per_token, 1);
  visit.text("memory.source", p.memory.source);
  visit.number("kv_link.bytes_per_us", p.kv_link.bytes_per_us, 1);
  visit.number("kv_link.latency_us", p.kv_link.latency_us, 0);
  visit.text("kv_link.source", p.kv_link.source);
  visit.number("host.step_us", p.host.step_us, 0);
  visit.number("host.layer_us", p.host.layer_us, 0);
  visit.text("host.source", p.host.source);
}

// Only expert parallelism needs it, so a file may leave it out.
template <class A, class V>
void visit_all_to_all(A& a, V& visit) {
  visit.number("all_to_all.dispatch_us", a.dispatch_us, 0);
  visit.number("all_to_all.dispatch_bytes_per_us", a.dispatch_bytes_per_us, 1);
  visit.number("all_to_all.combine_us", a.combine_us, 0);
  visit.number("all_to_all.combine_bytes_per_us", a.combine_bytes_per_us, 1);
  visit.number("all_to_all.ranks", a.ranks, 2);
  visit.text("all_to_all.source", a.source);
}

Json::json_pointer pointer(std::string_view path) {
  std::string text = "/";
  for (const char c : path) text += c == '.' ? '/' : c;
  return Json::json_pointer(text);
}

Error refused(std::string_view path, std::string_view got, std::string_view accepted) {
  return invalid(fmt::format("{}: {}; accepted: {}", path, got, accepted), std::string(path));
}

struct Writer {
  Json out = Json::object();
  void text(std::string_view path, const std::string& value) { out[pointer(path)] = value; }
  void number(std::string_view path, uint32_t value, double) { out[pointer(path)] = value; }
  // Six digits are more than was measured, and keep files readable.
  void number(std::string_view path, double value, double) {
    out[pointer(path)] = std::stod(fmt::format("{:.6g}", value));
  }
};

class Checker {
 public:
  Status status;
  void text(std::string_view path, const std::string& value) {
    if (status.ok() && (value.empty() || value.size() > kMostText)) {
      status = refused(path, "it is empty or too long", fmt::format("a text of 1 to {} bytes", kMostText));
    }
  }
  void number(std::string_view path, double value, double least) {
    if (status.ok() && !(value >= least && value <= kMostFigure)) {
      status = refused(path, fmt::format("got {}", value), fmt::format("a number from {} to {:g}", least, kMostFigure));
    }
  }
};

class Reader {
 public:
  explicit Reader(const Json& from) : from_(from) {}

  Status status;
  std::set<std::string> known;

  const Json* find(std::string_view path) {
    const Json* at = &from_;
    std::string prefix;
    for (size_t begin = 0; begin <= path.size();) {
      const size_t end = std::min(path.find('.', begin), path.size());
      const std::string key(path.substr(begin, end - begin));
      prefix += (begin == 0 ? "" : ".") + key;
      known.insert(prefix);
      if (at != nullptr) {
        const auto found = at->is_object() ? at->find(key) : at->end();
        at = at->is_object() && found != at->end() ? &*found : nullptr;
      }
      begin = end + 1;
    }
    return at;
  }
  void text(std::string_view path, std::string& value) {
    const Json* got = need(path, "a text");
    if (got == nullptr) return;
    if (!got->is_string()) return fail(path, *got, "a text");
    value = got->get<std::string>();
  }
  void number(std::string_view path, uint32_t& value, double least) {
    const std::string accepted = fmt::format("a whole number from {} to 4294967295", least);
    const Json* got = need(path, accepted);
    if (got == nullptr) return;
    if (!got->is_number_unsigned() || got->get<uint64_t>() > UINT32_MAX) return fail(path, *got, accepted);
    value = got->get<uint32_t>();
  }
  void number(std::string_view path, double& value, double least) {
    const std::string accepted = fmt::format("a number from {} to {:g}", least, kMostFigure);
    const Json* got = need(path, accepted);
    if (got == nullptr) return;
    if (!got->is_number()) return fail(path, *got, accepted);
    value = got->get<double>();
  }
  void fail(std::string_view path, const Json& got, std::string_view accepted) {
    if (status.ok()) status = refused(path, "got " + dump_json(got).substr(0, 80), accepted);
  }

 private:
  const Json* need(std::string_view path, std::string_view accepted) {
    const Json* got = find(path);
    if (got == nullptr && status.ok()) {
      const std::string section(path.substr(0, path.find('.')));
      const bool gone = section != path && find(section) == nullptr;
      status =
          gone ? invalid(fmt::format("{}: the profile has no figures for this kernel, which the model needs", section),
                         section)
               : refused(path, "it is missing", accepted);
    }
    return got;
  }
  const Json& from_;
};

void read_lists(Reader& reader, Profile& profile) {
  if (const Json* blocks = reader.find("moe.blocks"); blocks != nullptr && blocks->is_array()) {
    for (const Json& block : *blocks) {
      if (!block.is_object() || !block.contains("rows") || !block["rows"].is_number_unsigned() ||
          !block.contains("tile_us") || !block["tile_us"].is_number() || block.size() != 2) {
        return reader.fail("moe.blocks", block, "objects of rows (whole number) and tile_us (number)");
      }
      profile.moe.blocks.push_back({block["rows"].get<uint32_t>(), block["tile_us"].get<double>()});
    }
  }
  if (const Json* list = reader.find("projections"); list != nullptr && list->is_array()) {
    for (const Json& item : *list) {
      const char* accepted = "objects of name (text), n, k (whole numbers), count and weight_bytes (numbers)";
      if (!item.is_object() || item.size() != 5) return reader.fail("projections", item, accepted);
      const auto number = [&item](const char* key) { return item.contains(key) && item[key].is_number(); };
      if (!item.contains("name") || !item["name"].is_string() || !number("n") || !number("k") || !number("count") ||
          !number("weight_bytes")) {
        return reader.fail("projections", item, accepted);
      }
      profile.projections.push_back({item["name"].get<std::string>(), item["n"].get<uint32_t>(),
                                     item["k"].get<uint32_t>(), item["count"].get<double>(),
                                     item["weight_bytes"].get<double>()});
    }
  }
  if (const Json* sizes = reader.find("graph_sizes"); sizes != nullptr) {
    if (!sizes->is_array()) return reader.fail("graph_sizes", *sizes, "a list of batch sizes");
    for (const Json& size : *sizes) {
      if (!size.is_number_unsigned()) return reader.fail("graph_sizes", size, "whole numbers");
      profile.graph_sizes.push_back(size.get<uint32_t>());
    }
  }
}

Status check_known(const Json& object, const std::string& prefix, const std::set<std::string>& known) {
  for (const auto& item : object.items()) {
    const std::string path = prefix.empty() ? item.key() : prefix + "." + item.key();
    if (!known.contains(path)) {
      return invalid(fmt::format("{}: unknown field; docs/simulator.md lists those of a profile", path.substr(0, 80)),
                     path);
    }
    if (item.value().is_object()) {
      if (Status inner = check_known(item.value(), path, known); !inner) return inner;
    }
  }
  return {};
}

Status check_blocks(const MoeFigures& moe) {
  if (moe.blocks.empty() || moe.blocks.size() > kMostList) {
    return refused("moe.blocks", fmt::format("{} entries", moe.blocks.size()), "1 to 1024 entries");
  }
  uint32_t before = 0;
  for (const MoeBlock& block : moe.blocks) {
    if (block.rows <= before || !(block.tile_us >= 0 && block.tile_us <= kMostFigure)) {
      return refused("moe.blocks", fmt::format("rows {}, tile_us {}", block.rows, block.tile_us),
                     "ascending rows above 0 and tile_us of at least 0");
    }
    before = block.rows;
  }
  return {};
}

Status check_projections(const Profile& profile) {
  bool head = false;
  for (const Projection& projection : profile.projections) {
    head = head || projection.name == "head";
    if (projection.n == 0 || projection.k == 0 || !(projection.count >= 0 && projection.count <= kMostFigure) ||
        !(projection.weight_bytes > 0 && projection.weight_bytes <= 8)) {
      return refused("projections", fmt::format("'{}' has a size out of range", projection.name),
                     "n and k above 0, count from 0, weight_bytes above 0, at most 8");
    }
  }
  if (!head || profile.projections.size() > kMostList) {
    return invalid("projections: the profile has no projection called 'head', which the model needs", "projections");
  }
  return {};
}

}  // namespace

Status Profile::check() const {
  Checker checker;
  visit_fields(*this, checker);
  if (all_to_all.ranks > 0) visit_all_to_all(all_to_all, checker);
  if (!checker.status.ok()) return checker.status;
  const auto at_most = [](const char* field, uint32_t value, const char* of, uint32_t most) -> Status {
    if (value <= most) return {};
    return refused(field, fmt::format("got {}", value), fmt::format("at most {} ({})", of, most));
  };
  if (Status good = at_most("dims.moe_layers", dims.moe_layers, "dims.layers", dims.layers); !good) return good;
  if (Status good = at_most("dims.window_layers", dims.window_layers, "dims.layers", dims.layers); !good) return good;
  if (Status good = at_most("dims.top_k", dims.top_k, "dims.experts", dims.experts); !good) return good;
  if (memory.usable_share > 1)
    return refused("memory.usable_share", fmt::format("got {}", memory.usable_share), "at most 1");
  if (dims.window_layers > 0 && dims.window_tokens == 0) {
    return refused("dims.window_tokens", "got 0", "the window's length, as dims.window_layers is not 0");
  }
  if (Status good = check_blocks(moe); !good) return good;
  if (Status good = check_projections(*this); !good) return good;
  if (!std::is_sorted(graph_sizes.begin(), graph_sizes.end(), std::less_equal<>()) ||
      (!graph_sizes.empty() && graph_sizes.front() == 0)) {
    return refused("graph_sizes", "they do not ascend from 1 on", "ascending batch sizes");
  }
  return {};
}

uint64_t Profile::kv_capacity_tokens(uint32_t ranks) const {
  const double free =
      ranks * (memory.hbm_bytes * memory.usable_share - memory.dense_weight_bytes) - memory.expert_weight_bytes;
  return free > 0 ? static_cast<uint64_t>(free / memory.kv_bytes_per_token) : 0;
}

Status Profile::check_ranks(uint32_t ranks) const {
  if (ranks == 0 || dims.experts % ranks != 0) {
    return refused("ranks", fmt::format("got {}", ranks),
                   fmt::format("a divisor of the {} experts of {}", dims.experts, model));
  }
  if (ranks > 1 && all_to_all.ranks == 0) {
    return invalid(
        fmt::format("all_to_all: profile '{}' has no figures for this kernel, which {} ranks need", name, ranks),
        "all_to_all");
  }
  if (kv_capacity_tokens(ranks) == 0) {
    return invalid(
        fmt::format("ranks: the weights of {} leave no room for KV on {} x {} ({:.0f} GB of weights); use "
                    "more ranks",
                    model, ranks, gpu, (ranks * memory.dense_weight_bytes + memory.expert_weight_bytes) / 1e9),
        "ranks");
  }
  return {};
}

Status Profile::check_experts(const expert::ExpertShape& shape) const {
  if (shape.experts == dims.experts && shape.top_k == dims.top_k && !shape.layers.empty() &&
      shape.layers.size() <= dims.layers) {
    return {};
  }
  return invalid(fmt::format("experts: they are of another model: {} layers of {} experts, top {}; profile '{}' ({}) "
                             "has {} MoE layers of {} experts, top {}",
                             shape.layers.size(), shape.experts, shape.top_k, name, model, dims.moe_layers,
                             dims.experts, dims.top_k),
                 "experts");
}

Result<Profile> parse_profile(std::string_view json) {
  const Json object = parse_json(json);
  if (!object.is_object()) return invalid("a profile is one JSON object");
  Reader reader(object);
  const Json* version = reader.find("v");
  if (version == nullptr || *version != 1) return refused("v", version == nullptr ? "it is missing" : "another", "1");
  Profile profile;
  visit_fields(profile, reader);
  if (reader.find("all_to_all") != nullptr) visit_all_to_all(profile.all_to_all, reader);
  read_lists(reader, profile);
  if (!reader.status.ok()) return reader.status.error();
  if (Status known = check_known(object, "", reader.known); !known) return std::move(known).error();
  if (Status good = profile.check(); !good) return std::move(good).error();
  return profile;
}

Result<Profile> load_profile(const std::string& path) {
  const Result<std::string> text = read_file(path);
  if (!text) return text.error();
  Result<Profile> profile = parse_profile(*text);
  if (profile) return profile;
  return Error{profile.error().code, fmt::format("{}: {}", path, profile.error().message), profile.error().field};
}

std::string profile_json(const Profile& profile) {
  Writer writer;
  writer.out["v"] = 1;
  visit_fields(profile, writer);
  if (profile.all_to_all.ranks > 0) visit_all_to_all(profile.all_to_all, writer);
  for (const MoeBlock& block : profile.moe.blocks) {
    Json item = {{"rows", block.rows}, {"tile_us", std::stod(fmt::format("{:.6g}", block.tile_us))}};
    writer.out["moe"]["blocks"].push_back(std::move(item));
  }
  for (const Projection& projection : profile.projections) {
    Json item = {{"name", projection.name},
                 {"n", projection.n},
                 {"k", projection.k},
                 {"count", projection.count},
                 {"weight_bytes", projection.weight_bytes}};
    writer.out["projections"].push_back(std::move(item));
  }
  if (!profile.graph_sizes.empty()) writer.out["graph_sizes"] = profile.graph_sizes;
  return dump_json(writer.out, 1) + "\n";
}

Status save_profile(const Profile& profile, const std::string& path) {
  if (Status good = profile.check(); !good) return good;
  return write_file(path, profile_json(profile));
}

}  // namespace kindred::sim

// What a worker does: run prompts, generate, or both.
#pragma once

#include <array>
#include <optional>
#include <string_view>

namespace kindred {

enum class Role { kPrefill, kDecode, kBoth };

constexpr std::string_view to_string(Role role) {
  constexpr std::array<std::string_view, 3> kNames{"prefill", "decode", "both"};
  return kNames.at(static_cast<size_t>(role));
}

constexpr std::optional<Role> parse_role(std::string_view name) {
  for (const Role role : {Role::kPrefill, Role::kDecode, Role::kBoth}) {
    if (name == to_string(role)) return role;
  }
  return std::nullopt;
}

}  // namespace kindred

// One schema per subcommand feeds its flags, its YAML file, its --help and its validation.
//
// An option is bound to a field of a plain options struct, which holds the default until a file or a
// flag overrides it; flags win over the file. `token_budget` in YAML is `--token-budget` on the
// command line (underscores are accepted there too). Lists are YAML sequences or repeated flags.
// Errors name the option, what was given and what is accepted; an unknown name gets the nearest
// valid one.
//
// Thread-safety: none. The bound fields must outlive the schema.
#pragma once

#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "base/result.h"

namespace YAML {
class Node;
}  // namespace YAML

namespace kindred {

class ConfigSchema {
 public:
  // `usage`: what stands behind "kindred " in the help, e.g. "router [--config fleet.yaml]".
  // `about`: one or two sentences.
  ConfigSchema(std::string usage, std::string about) : usage_(std::move(usage)), about_(std::move(about)) {}

  void text(std::string name, std::string* field, std::string help);
  void flag(std::string name, bool* field, std::string help);
  void integer(std::string name, int64_t* field, int64_t least, int64_t most, std::string help);
  void real(std::string name, double* field, double least, double most, std::string help);
  void choice(std::string name, std::string* field, std::vector<std::string> accepted, std::string help);
  void list(std::string name, std::vector<std::string>* field, std::string help);
  // Arguments without a flag; at most `most` of them.
  void positional(std::string name, std::vector<std::string>* field, size_t most, std::string help);

  Status parse_flags(std::span<const char* const> args);
  // `--config FILE` among the flags is read first; the schema adds that flag itself when asked.
  void accept_config_file() { config_file_ = true; }
  Status parse_yaml(std::string_view yaml, std::string_view origin);
  // The same, but goes on after an error: everything that is wrong, in the order of the text. Fields that are
  // right are set either way.
  std::vector<Error> check_yaml(std::string_view yaml, std::string_view origin);
  // `--config` of `args`; empty: none is given.
  static std::string config_path(std::span<const char* const> args);

  // The values as they are now, as a JSON object, lists as arrays.
  std::string to_json() const;

  std::string help() const;  // for a terminal
  bool help_requested() const { return help_requested_; }

 private:
  struct Integer {
    int64_t* field;
    int64_t least, most;
  };
  struct Real {
    double* field;
    double least, most;
  };
  struct Choice {
    std::string* field;
    std::vector<std::string> accepted;
  };
  using Target = std::variant<std::string*, bool*, Integer, Real, Choice, std::vector<std::string>*>;
  struct Option {
    std::string name;  // with underscores
    std::string help;
    Target target;
    bool list_given = false;  // the first value of a list replaces the default, later ones append
  };
  struct Positional {
    std::string name, help;
    std::vector<std::string>* field;
    size_t most;
  };

  Option* find(std::string_view name);
  Error unknown(std::string_view name, std::string_view origin) const;
  Status set_entry(const std::string& name, const YAML::Node& node, std::string_view where);
  Status set(Option& option, std::string_view value, std::string_view origin);

  std::string usage_, about_;
  std::vector<Option> options_;
  std::vector<Positional> positionals_;
  bool config_file_ = false;
  bool help_requested_ = false;
};

// Edits (insert, delete, replace, swap neighbours) from `a` to `b`; for "did you mean".
size_t edit_distance(std::string_view a, std::string_view b);

Result<std::string> read_file(const std::string& path);
// Writes beside the target and renames, so that a reader sees the old file or the new one.
Status write_file(const std::string& path, std::string_view bytes);

}  // namespace kindred

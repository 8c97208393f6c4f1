#include "base/config.h"

#include <fmt/format.h>
#include <yaml-cpp/yaml.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <fstream>
#include <sstream>

#include "base/json.h"

namespace kindred {
namespace {

std::string underscored(std::string_view name) {
  std::string out(name);
  std::replace(out.begin(), out.end(), '-', '_');
  return out;
}

std::string flag_of(std::string_view name) {
  std::string out = "--" + std::string(name);
  std::replace(out.begin(), out.end(), '_', '-');
  return out;
}

template <class T>
bool parse_number(std::string_view text, T& value) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc{} && end == text.data() + text.size();
}

template <class... F>
struct Overloaded : F... {
  using F::operator()...;
};
template <class... F>
Overloaded(F...) -> Overloaded<F...>;

}  // namespace

void ConfigSchema::text(std::string name, std::string* field, std::string help) {
  options_.push_back({std::move(name), std::move(help), field});
}
void ConfigSchema::flag(std::string name, bool* field, std::string help) {
  options_.push_back({std::move(name), std::move(help), field});
}
void ConfigSchema::integer(std::string name, int64_t* field, int64_t least, int64_t most, std::string help) {
  options_.push_back({std::move(name), std::move(help), Integer{field, least, most}});
}
void ConfigSchema::real(std::string name, double* field, double least, double most, std::string help) {
  options_.push_back({std::move(name), std::move(help), Real{field, least, most}});
}
void ConfigSchema::choice(std::string name, std::string* field, std::vector<std::string> accepted, std::string help) {
  options_.push_back({std::move(name), std::move(help), Choice{field, std::move(accepted)}});
}
void ConfigSchema::list(std::string name, std::vector<std::string>* field, std::string help) {
  options_.push_back({std::move(name), std::move(help), field});
}
void ConfigSchema::positional(std::string name, std::vector<std::string>* field, size_t most, std::string help) {
  positionals_.push_back({std::move(name), std::move(help), field, most});
}

ConfigSchema::Option* ConfigSchema::find(std::string_view name) {
  const std::string wanted = underscored(name);
  const auto it = std::find_if(options_.begin(), options_.end(), [&](const Option& o) { return o.name == wanted; });
  return it == options_.end() ? nullptr : &*it;
}

Error ConfigSchema::unknown(std::string_view name, std::string_view origin) const {
  std::string nearest;
  size_t best = std::numeric_limits<size_t>::max();
  for (const Option& option : options_) {
    const size_t distance = edit_distance(underscored(name), option.name);
    if (distance < best) {
      best = distance;
      nearest = option.name;
    }
  }
  const bool flags = origin.empty();
  std::string message =
      flags ? fmt::format("unknown option {}", name) : fmt::format("{}: unknown key '{}'", origin, name);
  if (!nearest.empty())
    message += fmt::format("; the nearest valid one is {}", flags ? flag_of(nearest) : "'" + nearest + "'");
  return invalid(std::move(message), std::string(name));
}

Status ConfigSchema::set(Option& option, std::string_view value, std::string_view origin) {
  const std::string where = origin.empty() ? flag_of(option.name) : fmt::format("{}: {}", origin, option.name);
  const auto wrong = [&](std::string accepted) -> Status {
    return invalid(fmt::format("{}: got '{}', accepted: {}", where, value, accepted), option.name);
  };
  return std::visit(
      Overloaded{
          [&](std::string* field) -> Status {
            *field = value;
            return {};
          },
          [&](bool* field) -> Status {
            if (value == "true" || value == "yes" || value == "on" || value == "1") *field = true;
            else if (value == "false" || value == "no" || value == "off" || value == "0") *field = false;
            else return wrong("true, false");
            return {};
          },
          [&](const Integer& target) -> Status {
            int64_t number = 0;
            if (!parse_number(value, number) || number < target.least || number > target.most) {
              return wrong(fmt::format("a whole number from {} to {}", target.least, target.most));
            }
            *target.field = number;
            return {};
          },
          [&](const Real& target) -> Status {
            double number = 0;
            if (!parse_number(value, number) || !(number >= target.least && number <= target.most)) {
              return wrong(fmt::format("a number from {} to {}", target.least, target.most));
            }
            *target.field = number;
            return {};
          },
          [&](const Choice& target) -> Status {
            if (std::find(target.accepted.begin(), target.accepted.end(), value) == target.accepted.end()) {
              return wrong(fmt::format("{}", fmt::join(target.accepted, ", ")));
            }
            *target.field = value;
            return {};
          },
          [&](std::vector<std::string>* field) -> Status {
            if (!option.list_given) field->clear();
            option.list_given = true;
            field->emplace_back(value);
            return {};
          },
      },
      option.target);
}

Status ConfigSchema::parse_flags(std::span<const char* const> args) {
  if (config_file_) {  // the file first, whatever its place on the line, so that flags win
    for (size_t i = 0; i < args.size(); ++i) {
      const std::string_view arg = args[i];
      std::string path;
      if (arg == "--config" && i + 1 < args.size()) path = args[i + 1];
      else if (arg.starts_with("--config=")) path = arg.substr(9);
      if (path.empty()) continue;
      Result<std::string> yaml = read_file(path);
      if (!yaml) return std::move(yaml).error();
      if (Status parsed = parse_yaml(*yaml, path); !parsed) return parsed;
    }
  }
  for (Option& option : options_) option.list_given = false;

  std::vector<std::string> rest;
  for (size_t i = 0; i < args.size(); ++i) {
    const std::string_view arg = args[i];
    if (arg == "--help" || arg == "-h") {
      help_requested_ = true;
      return {};
    }
    if (!arg.starts_with("--")) {
      rest.emplace_back(arg);
      continue;
    }
    const size_t equals = arg.find('=');
    const std::string_view name = arg.substr(2, equals == std::string_view::npos ? equals : equals - 2);
    if (config_file_ && name == "config") {
      if (equals == std::string_view::npos && ++i == args.size()) return invalid("--config needs a file", "config");
      continue;
    }
    Option* option = find(name);
    if (option == nullptr) return unknown(arg.substr(0, equals), {});
    std::string_view value = "true";
    if (equals != std::string_view::npos) {
      value = arg.substr(equals + 1);
    } else if (!std::holds_alternative<bool*>(option->target)) {
      if (++i == args.size()) return invalid(fmt::format("{} needs a value", arg), option->name);
      value = args[i];
    }
    if (Status done = set(*option, value, {}); !done) return done;
  }

  size_t next = 0;
  for (const Positional& positional : positionals_) {
    const size_t take = std::min(positional.most, rest.size() - next);
    positional.field->assign(rest.begin() + static_cast<ptrdiff_t>(next),
                             rest.begin() + static_cast<ptrdiff_t>(next + take));
    next += take;
  }
  if (next < rest.size()) return invalid(fmt::format("unexpected argument '{}'", rest[next]));
  return {};
}

Status ConfigSchema::set_entry(const std::string& name, const YAML::Node& node, std::string_view where) {
  Option* option = find(name);
  if (option == nullptr) return unknown(name, where);
  option->list_given = false;
  const bool list = std::holds_alternative<std::vector<std::string>*>(option->target);
  if (list && node.IsSequence()) {
    std::get<std::vector<std::string>*>(option->target)->clear();
    for (const auto& item : node) {
      if (!item.IsScalar()) return invalid(fmt::format("{}: {}: expected a list of words", where, name), name);
      if (Status done = set(*option, item.Scalar(), where); !done) return done;
    }
    return {};
  }
  if (node.IsScalar()) return set(*option, node.Scalar(), where);
  return invalid(fmt::format("{}: {}: expected {}", where, name, list ? "a list" : "a single value"), name);
}

std::vector<Error> ConfigSchema::check_yaml(std::string_view yaml, std::string_view origin) {
  std::vector<Error> problems;
  try {
    const YAML::Node root = YAML::Load(std::string(yaml));
    if (root.IsNull()) return problems;
    if (!root.IsMap()) {
      problems.push_back(invalid(fmt::format("{}: expected `key: value` lines at the top", origin)));
      return problems;
    }
    for (const auto& entry : root) {
      const std::string where = fmt::format("{}:{}", origin, entry.first.Mark().line + 1);
      if (!entry.first.IsScalar()) {
        problems.push_back(invalid(fmt::format("{}: a key must be a word", where)));
        continue;
      }
      if (Status done = set_entry(entry.first.Scalar(), entry.second, where); !done) {
        problems.push_back(std::move(done).error());
      }
    }
  } catch (const YAML::Exception& error) {
    problems.push_back(invalid(fmt::format("{}:{}: {}", origin, error.mark.line + 1, error.msg)));
  }
  return problems;
}

Status ConfigSchema::parse_yaml(std::string_view yaml, std::string_view origin) {
  std::vector<Error> problems = check_yaml(yaml, origin);
  if (!problems.empty()) return std::move(problems.front());
  return {};
}

std::string ConfigSchema::config_path(std::span<const char* const> args) {
  std::string path;
  for (size_t i = 0; i < args.size(); ++i) {
    const std::string_view arg = args[i];
    if (arg == "--config" && i + 1 < args.size()) path = args[i + 1];
    else if (arg.starts_with("--config=")) path = arg.substr(9);
  }
  return path;
}

std::string ConfigSchema::to_json() const {
  Json out = Json::object();
  for (const Option& option : options_) {
    std::visit(Overloaded{
                   [&](const std::string* field) { out[option.name] = *field; },
                   [&](const bool* field) { out[option.name] = *field; },
                   [&](const Integer& target) { out[option.name] = *target.field; },
                   [&](const Real& target) { out[option.name] = *target.field; },
                   [&](const Choice& target) { out[option.name] = *target.field; },
                   [&](const std::vector<std::string>* field) { out[option.name] = *field; },
               },
               option.target);
  }
  return dump_json(out);
}

std::string ConfigSchema::help() const {
  std::string out = fmt::format("usage: kindred {}\n\n{}\n", usage_, about_);
  for (const Positional& p : positionals_) out += fmt::format("\n  {:<28} {}", p.name, p.help);
  if (!positionals_.empty()) out += "\n";
  if (config_file_)
    out += fmt::format("\n  {:<28} {}", "--config FILE", "YAML file with the keys below (underscores for hyphens)");
  for (const Option& option : options_) {
    std::string left = flag_of(option.name), now;
    std::visit(
        Overloaded{
            [&](const std::string* field) { left += " TEXT", now = *field; },
            [&](const bool* field) { now = *field ? "true" : ""; },
            [&](const Integer& t) { left += " N", now = fmt::format("{}", *t.field); },
            [&](const Real& t) { left += " X", now = fmt::format("{}", *t.field); },
            [&](const Choice& t) { left += " " + fmt::format("{}", fmt::join(t.accepted, "|")), now = *t.field; },
            [&](const std::vector<std::string>* field) {
              left += " TEXT …", now = fmt::format("{}", fmt::join(*field, ", "));
            },
        },
        option.target);
    out += left.size() > 28 ? fmt::format("\n  {}\n  {:<28} {}", left, "", option.help)
                            : fmt::format("\n  {:<28} {}", left, option.help);
    if (!now.empty()) out += fmt::format(" [{}]", now);
  }
  return out + "\n";
}

size_t edit_distance(std::string_view a, std::string_view b) {
  // Optimal string alignment over three rows: two back, one back, current.
  std::vector<size_t> before(b.size() + 1), above(b.size() + 1), row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) above[j] = j;
  for (size_t i = 1; i <= a.size(); ++i) {
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      row[j] = std::min({above[j] + 1, row[j - 1] + 1, above[j - 1] + (a[i - 1] == b[j - 1] ? 0U : 1U)});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) row[j] = std::min(row[j], before[j - 2] + 1);
    }
    std::swap(before, above);
    std::swap(above, row);
  }
  return above[b.size()];
}

Result<std::string> read_file(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  std::ostringstream text;
  // A directory opens and then fails to read.
  if (in) text << in.rdbuf();
  if (!in || !text)
    return Error{errno == ENOENT ? ErrorCode::kNotFound : ErrorCode::kIo,
                 fmt::format("cannot read {}: {}", path, std::strerror(errno)), path};
  return std::move(text).str();
}

Status write_file(const std::string& path, std::string_view bytes) {
  const std::string part = path + ".part";
  std::ofstream out(part, std::ios::binary | std::ios::trunc);
  out.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  out.close();
  if (!out || std::rename(part.c_str(), path.c_str()) != 0) {
    const Error error{ErrorCode::kIo, fmt::format("cannot write {}: {}", path, std::strerror(errno)), path};
    std::remove(part.c_str());
    return error;
  }
  return {};
}

}  // namespace kindred

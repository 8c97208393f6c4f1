#include "sim/trace_reader.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <optional>

#include "base/json.h"
#include "sim/text_file.h"

namespace kindred::sim {
namespace {

constexpr uint32_t kMostTokens = 100'000'000;
constexpr size_t kMostTraceRequests = 50'000'000;
constexpr double kMostTraceSeconds = 1e10;
constexpr size_t kMostTraceDomains = 256;
constexpr int kMostProfileRow = 1'000'000'000;

// Puts requests into a trace; what every format has to check.
class TraceBuilder {
 public:
  explicit TraceBuilder(const std::string& origin) : origin_(origin) {}

  Error wrong(uint64_t line, std::string_view field, std::string_view what) const {
    return invalid(fmt::format("{}: line {}: {}: {}", origin_, line, field, what), std::string(field));
  }

  // `at_s` in the file's own time.
  Status add(uint64_t line, std::string_view time_field, double at_s, TraceRequest request) {
    if (started_ && at_s < last_s_) {
      return wrong(line, time_field, "earlier than the line before; sort the trace by time");
    }
    if (!started_) first_s_ = at_s;
    started_ = true;
    last_s_ = at_s;
    if (request.output_tokens == 0) {
      ++trace_.skipped;
      return {};
    }
    if (trace_.requests.size() == kMostTraceRequests) {
      return wrong(line, "line", fmt::format("more than {} requests", kMostTraceRequests));
    }
    request.arrival_s = at_s - first_s_;
    trace_.requests.push_back(std::move(request));
    return {};
  }

  Result<int32_t> domain(uint64_t line, const std::string& name) {
    auto& names = trace_.domains;
    const auto found = std::find(names.begin(), names.end(), name);
    if (found != names.end()) return static_cast<int32_t>(found - names.begin());
    if (names.size() == kMostTraceDomains) {
      return wrong(line, "domain", fmt::format("more than {} different names", kMostTraceDomains));
    }
    names.push_back(name);
    return static_cast<int32_t>(names.size() - 1);
  }

  Result<Trace> finish() {
    if (trace_.requests.empty()) return invalid(fmt::format("{}: no request that generates a token", origin_));
    return std::move(trace_);
  }

 private:
  const std::string& origin_;
  Trace trace_;
  bool started_ = false;
  double first_s_ = 0, last_s_ = 0;
};

// --- Mooncake and Kindred ------------------------------------------------------------------------

Result<uint32_t> json_tokens(const TraceBuilder& builder, uint64_t line, const Json& object, const char* field,
                             uint32_t least) {
  const auto found = object.find(field);
  if (found == object.end()) return builder.wrong(line, field, "it is missing");
  if (!found->is_number_unsigned() || found->get<uint64_t>() < least || found->get<uint64_t>() > kMostTokens) {
    return builder.wrong(line, field,
                         fmt::format("got {}; accepted: a whole number from {} to {}", dump_json(*found).substr(0, 40),
                                     least, kMostTokens));
  }
  return found->get<uint32_t>();
}

Status read_extras(TraceBuilder& builder, uint64_t line, const Json& object, TraceRequest& request) {
  if (const auto ids = object.find("hash_ids"); ids != object.end()) {
    const size_t most = (size_t{request.prompt_tokens} + Trace{}.block_tokens - 1) / Trace{}.block_tokens;
    if (!ids->is_array() || ids->size() > most) {
      return builder.wrong(line, "hash_ids",
                           fmt::format("accepted: a list of at most {} whole numbers, one for 512 "
                                       "tokens of input_length",
                                       most));
    }
    for (const Json& id : *ids) {
      if (!id.is_number_unsigned()) return builder.wrong(line, "hash_ids", "accepted: whole numbers");
      request.blocks.push_back(id.get<uint64_t>());
    }
  }
  if (const auto row = object.find("expert_profile"); row != object.end()) {
    if (!row->is_number_unsigned() || row->get<uint64_t>() > kMostProfileRow) {
      return builder.wrong(line, "expert_profile",
                           fmt::format("accepted: a whole number from 0 to {}", kMostProfileRow));
    }
    request.expert_profile = row->get<int32_t>();
  }
  if (const auto name = object.find("domain"); name != object.end()) {
    if (!name->is_string()) return builder.wrong(line, "domain", "accepted: a name");
    Result<int32_t> index = builder.domain(line, name->get<std::string>());
    if (!index) return std::move(index).error();
    request.domain = *index;
  }
  return {};
}

Result<Trace> parse_lines(std::string_view text, const std::string& origin) {
  TraceBuilder builder(origin);
  uint64_t line = 0;
  for (size_t begin = 0; begin < text.size();) {
    ++line;
    const size_t end = std::min(text.find('\n', begin), text.size());
    const std::string_view one = text.substr(begin, end - begin);
    begin = end + 1;
    if (one.find_first_not_of(" \t\r") == std::string_view::npos) continue;
    const Json object = parse_json(one);
    if (!object.is_object()) return builder.wrong(line, "line", "not one JSON object");
    const auto at = object.find("timestamp");
    if (at == object.end()) return builder.wrong(line, "timestamp", "it is missing");
    if (!at->is_number() || !(at->get<double>() >= 0 && at->get<double>() <= 1e3 * kMostTraceSeconds)) {
      return builder.wrong(line, "timestamp",
                           fmt::format("got {}; accepted: milliseconds from 0", dump_json(*at).substr(0, 40)));
    }
    TraceRequest request;
    const Result<uint32_t> input = json_tokens(builder, line, object, "input_length", 1);
    if (!input) return input.error();
    const Result<uint32_t> output = json_tokens(builder, line, object, "output_length", 0);
    if (!output) return output.error();
    request.prompt_tokens = *input;
    request.output_tokens = *output;
    if (Status read = read_extras(builder, line, object, request); !read) return std::move(read).error();
    if (Status added = builder.add(line, "timestamp", at->get<double>() / 1e3, std::move(request)); !added) {
      return std::move(added).error();
    }
  }
  return builder.finish();
}

// --- Azure and BurstGPT --------------------------------------------------------------------------

// "2023-11-16 18:15:46.6805900", with T instead of the blank and with a UTC offset of zero ("Z", "+00:00") if need
// be -> seconds since 1970.
std::optional<double> parse_date(std::string_view text) {
  const auto part = [&text](size_t at, size_t length) -> std::optional<int> {
    int value = 0;
    if (text.size() < at + length) return std::nullopt;
    const auto [rest, code] = std::from_chars(text.data() + at, text.data() + at + length, value);
    if (code != std::errc() || rest != text.data() + at + length || value < 0) return std::nullopt;
    return value;
  };
  const auto year = part(0, 4), month = part(5, 2), day = part(8, 2), hour = part(11, 2), minute = part(14, 2);
  const auto second = part(17, 2);
  if (!year || !month || !day || !hour || !minute || !second || text[4] != '-' || text[7] != '-' ||
      (text[10] != ' ' && text[10] != 'T') || text[13] != ':' || text[16] != ':' || *month < 1 || *month > 12 ||
      *day < 1 || *day > 31 || *hour > 23 || *minute > 59 || *second > 60) {
    return std::nullopt;
  }
  double fraction = 0;
  std::string_view rest = text.substr(19);
  if (rest.starts_with('.')) {
    size_t digits = 1;
    for (double unit = 0.1; digits < rest.size() && rest[digits] >= '0' && rest[digits] <= '9'; ++digits, unit /= 10) {
      fraction += unit * (rest[digits] - '0');
    }
    rest.remove_prefix(digits);
  }
  if (!rest.empty() && rest != "Z" && rest != "+00:00") return std::nullopt;
  // Days since 1970 in the Gregorian calendar, years beginning in March.
  const int64_t y = *month <= 2 ? *year - 1 : *year;
  const int64_t months = (*month + 9) % 12;
  const int64_t days = 365 * y + y / 4 - y / 100 + y / 400 + (153 * months + 2) / 5 + *day - 1 - 719468;
  return static_cast<double>(days * 86400 + *hour * 3600 + *minute * 60 + *second) + fraction;
}

struct TraceColumns {
  const char *time, *prompt, *output;
  bool dates;
};

Result<Trace> parse_table(std::string text, const std::string& origin, const TraceColumns& names) {
  const Result<CsvTable> table = CsvTable::parse(std::move(text), origin);
  if (!table) return table.error();
  const Result<size_t> time = table->column(names.time), prompt = table->column(names.prompt),
                       output = table->column(names.output);
  for (const Result<size_t>* column : {&time, &prompt, &output}) {
    if (!column->ok()) return column->error();
  }
  TraceBuilder builder(origin);
  for (size_t row = 0; row < table->rows(); ++row) {
    TraceRequest request;
    double at_s = 0;
    if (names.dates) {
      const std::optional<double> date = parse_date(table->cell(row, *time));
      if (!date) {
        return builder.wrong(table->line(row), names.time,
                             fmt::format("got '{}'; accepted: a date like 2023-11-16 18:15:46.68, UTC",
                                         table->cell(row, *time).substr(0, 40)));
      }
      at_s = *date;
    } else {
      const Result<double> seconds = table->number(row, *time, 0, kMostTraceSeconds);
      if (!seconds) return seconds.error();
      at_s = *seconds;
    }
    const Result<uint32_t> prompt_tokens = table->whole(row, *prompt, 1);
    if (!prompt_tokens) return prompt_tokens.error();
    const Result<uint32_t> output_tokens = table->whole(row, *output, 0);
    if (!output_tokens) return output_tokens.error();
    if (*prompt_tokens > kMostTokens || *output_tokens > kMostTokens) {
      return builder.wrong(table->line(row), *prompt_tokens > kMostTokens ? names.prompt : names.output,
                           fmt::format("more than {} tokens", kMostTokens));
    }
    request.prompt_tokens = *prompt_tokens;
    request.output_tokens = *output_tokens;
    if (Status added = builder.add(table->line(row), names.time, at_s, std::move(request)); !added) {
      return std::move(added).error();
    }
  }
  return builder.finish();
}

}  // namespace

Result<Trace> parse_trace(std::string text, const std::string& origin) {
  const size_t begin = text.find_first_not_of(" \t\r\n");
  if (begin == std::string::npos) return invalid(fmt::format("{}: empty", origin));
  if (text[begin] == '{') return parse_lines(text, origin);
  const std::string header = text.substr(0, std::min(text.find('\n'), size_t{400}));
  if (header.find("ContextTokens") != std::string::npos) {
    return parse_table(std::move(text), origin, {"TIMESTAMP", "ContextTokens", "GeneratedTokens", true});
  }
  if (header.find("Request tokens") != std::string::npos) {
    return parse_table(std::move(text), origin, {"Timestamp", "Request tokens", "Response tokens", false});
  }
  return invalid(
      fmt::format("{}: line 1: no trace format that is known; accepted: JSON lines with timestamp, "
                  "input_length, output_length (Mooncake), or CSV with TIMESTAMP, ContextTokens, "
                  "GeneratedTokens (Azure) or Timestamp, Request tokens, Response tokens (BurstGPT)",
                  origin));
}

Result<Trace> read_trace(const std::string& path) {
  Result<std::string> text = read_text(path);
  if (!text) return std::move(text).error();
  return parse_trace(*std::move(text), path);
}

std::string trace_to_jsonl(const Trace& trace) {
  std::string out;
  for (const TraceRequest& request : trace.requests) {
    Json line = {{"timestamp", request.arrival_s * 1e3},
                 {"input_length", request.prompt_tokens},
                 {"output_length", request.output_tokens},
                 {"hash_ids", request.blocks}};
    if (request.expert_profile >= 0) line["expert_profile"] = request.expert_profile;
    if (request.domain >= 0) line["domain"] = trace.domains[static_cast<size_t>(request.domain)];
    out += dump_json(line) + "\n";
  }
  return out;
}

}  // namespace kindred::sim

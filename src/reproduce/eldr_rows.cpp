#include "reproduce/eldr_rows.h"

#include <fmt/format.h>

#include <algorithm>

#include "sim/text_file.h"

namespace kindred::reproduce {
namespace {

constexpr size_t kMainRows = 180;  // 3 models x 2 workloads x 5 rates x 6 policies
constexpr double kMostMs = 1e6;

}  // namespace

std::string_view to_string(Workload workload) {
  switch (workload) {
    case Workload::kTask: return "task";
    case Workload::kLanguage: return "language";
  }
  return "";
}

Result<std::vector<EldrRow>> read_eldr_rows(const std::string& path, Workload workload) {
  auto text = sim::read_text(path);
  if (!text) return std::move(text).error();
  const auto table = sim::CsvTable::parse(*std::move(text), path);
  if (!table) return table.error();
  constexpr std::array kNames = {"setting",   "policy",    "variant",   "rate",
                                 "tpot50_ms", "tpot95_ms", "tpot99_ms", "ttft50_ms"};
  std::array<size_t, kNames.size()> columns{};
  for (size_t i = 0; i < kNames.size(); ++i) {
    const Result<size_t> column = table->column(kNames[i]);
    if (!column) return column.error();
    columns[i] = *column;
  }
  std::vector<EldrRow> out;
  for (size_t r = 0; r < table->rows(); ++r) {
    EldrRow row;
    row.workload = workload;
    // "gptoss-cache-0", "qwen-count_idf": the model, and what the variant says already.
    const std::string_view setting = table->cell(r, columns[0]);
    row.model = setting.substr(0, setting.find('-'));
    row.policy = table->cell(r, columns[1]);
    row.variant = table->cell(r, columns[2]);
    const Result<uint32_t> rate = table->whole(r, columns[3], 1);
    if (!rate) return rate.error();
    row.rate = *rate;
    const std::array figures = {&row.tpot50_ms, &row.tpot95_ms, &row.tpot99_ms, &row.ttft50_ms};
    for (size_t f = 0; f < figures.size(); ++f) {
      const Result<double> value = table->number(r, columns[4 + f], 0, kMostMs);
      if (!value) return value.error();
      *figures[f] = *value;
    }
    out.push_back(std::move(row));
  }
  return out;
}

Result<std::vector<EldrRow>> read_eldr_main(const std::string& folder) {
  std::vector<EldrRow> out;
  for (const Workload workload : kWorkloads) {
    auto rows = read_eldr_rows(fmt::format("{}/main_{}_all_policies.csv", folder, to_string(workload)), workload);
    if (!rows) return rows;
    out.insert(out.end(), rows->begin(), rows->end());
  }
  if (out.size() != kMainRows) {
    return invalid(fmt::format("{}: {} rows of main tables; accepted: {}", folder, out.size(), kMainRows), "rows");
  }
  return out;
}

std::vector<EldrRow> round_robin_rows(std::span<const EldrRow> rows) {
  std::vector<EldrRow> out;
  std::ranges::copy_if(rows, std::back_inserter(out), [](const EldrRow& row) { return row.policy == "rr"; });
  return out;
}

const EldrRow* find_row(std::span<const EldrRow> rows, Workload workload, std::string_view model,
                        std::string_view policy, uint32_t rate) {
  const auto found = std::ranges::find_if(rows, [&](const EldrRow& row) {
    return row.workload == workload && row.model == model && row.policy == policy && row.rate == rate;
  });
  return found == rows.end() ? nullptr : &*found;
}

}  // namespace kindred::reproduce

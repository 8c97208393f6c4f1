// ELDR's published measurements (data/reference/eldr), as they were transcribed.
//
// Thread-safety: pure functions.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"

namespace kindred::reproduce {

enum class Workload : uint8_t { kTask, kLanguage };
inline constexpr std::array kWorkloads = {Workload::kTask, Workload::kLanguage};
std::string_view to_string(Workload workload);

inline constexpr std::array<uint32_t, 5> kEldrRates = {20, 40, 60, 80, 100};  // requests a second

struct EldrRow {
  Workload workload = Workload::kTask;
  std::string model;    // "qwen", "gptoss", "gemma"
  std::string policy;   // "rr", "random", "jsq", "p2c", "domain", "eldr"
  std::string variant;  // "tau-0.2"; equals the policy in the main tables
  uint32_t rate = 0;    // requests a second
  double tpot50_ms = 0, tpot95_ms = 0, tpot99_ms = 0, ttft50_ms = 0;
};

// Error: as CsvTable's.
Result<std::vector<EldrRow>> read_eldr_rows(const std::string& path, Workload workload);

// The main tables of both workloads in `folder`: 180 rows. Error: kInvalid if there are not as many.
Result<std::vector<EldrRow>> read_eldr_main(const std::string& folder);

// Only what a calibration may see.
std::vector<EldrRow> round_robin_rows(std::span<const EldrRow> rows);

// The row of that cell; null: there is none.
const EldrRow* find_row(std::span<const EldrRow> rows, Workload workload, std::string_view model,
                        std::string_view policy, uint32_t rate);

}  // namespace kindred::reproduce

#include <gtest/gtest.h>

#include <cmath>

#include "reproduce/eldr_run.h"

namespace kindred::reproduce {
namespace {

const std::string kTables = KINDRED_SOURCE_DIR "/data/reference/eldr";

TEST(EldrRows, MainTablesAreWhole) {
  const auto rows = read_eldr_main(kTables);
  ASSERT_TRUE(rows) << rows.error().message;
  EXPECT_EQ(rows->size(), 180U);
  for (const EldrModel& model : eldr_models()) {
    for (const Workload workload : kWorkloads) {
      for (const std::string_view policy : kEldrPolicies) {
        for (const uint32_t rate : kEldrRates) {
          EXPECT_NE(find_row(*rows, workload, model.key, policy, rate), nullptr) << model.key << policy << rate;
        }
      }
    }
  }
  EXPECT_EQ(find_row(*rows, Workload::kTask, "qwen", "eldr", 60)->tpot50_ms, 22.615);
  EXPECT_EQ(round_robin_rows(*rows).size(), 30U);
}

TEST(EldrRows, SettingsNameTheirModel) {
  const auto rows = read_eldr_rows(kTables + "/fig16_prefix_cache.csv", Workload::kTask);
  ASSERT_TRUE(rows) << rows.error().message;
  EXPECT_EQ(rows->front().model, "gptoss");
  EXPECT_FALSE(read_eldr_rows(kTables + "/README.md", Workload::kTask));
  EXPECT_FALSE(read_eldr_rows(kTables + "/nowhere.csv", Workload::kTask));
}

TEST(EldrLaw, GraphsArePadded) {
  EXPECT_EQ(captured_size(1), 1U);
  EXPECT_EQ(captured_size(3), 4U);
  EXPECT_EQ(captured_size(5), 8U);
  EXPECT_EQ(captured_size(56), 56U);
  EXPECT_EQ(captured_size(57), 64U);
  EXPECT_EQ(captured_size(257), 272U);
  EXPECT_EQ(captured_size(600), 600U);
}

TEST(EldrLaw, KernelsAreThoseOfTheNearestSize) {
  EXPECT_EQ(kTunedSizes[tuned_class(56)], 48U);  // as far from 64: the smaller one
  EXPECT_EQ(kTunedSizes[tuned_class(64)], 64U);
  EXPECT_EQ(kTunedSizes[tuned_class(88)], 96U);
  EXPECT_EQ(kTunedSizes[tuned_class(4096)], 1024U);
}

// Round-robin rows made by a known law are explained by what is fitted to them.
TEST(EldrLaw, FindsALawAgain) {
  const EldrModel& model = eldr_models()[0];
  std::array<std::vector<double>, 2> mixed;
  for (size_t n = 0; n <= 256; ++n) {
    mixed[0].push_back(128 * (1 - std::pow(1 - 8.0 / 128, n)));
    mixed[1].push_back(0.95 * mixed[0].back());
  }
  DecodeLaw law{
      .fixed_ms = 5, .token_us = 60, .expert_us = model.expert_bytes / (5.3e6 * model.bandwidth_share), .kernel = {}};
  law.kernel.fill(1);
  std::vector<EldrRow> rows;
  for (const Workload workload : kWorkloads) {
    for (const uint32_t rate : kEldrRates) {
      EldrRow row;
      row.workload = workload;
      row.model = "qwen";
      row.policy = "rr";
      row.rate = rate;
      row.tpot50_ms = round_robin_tpot_ms(law, model, rate, mixed[static_cast<size_t>(workload)]);
      rows.push_back(row);
    }
  }
  const auto fit = fit_law(model, rows, mixed);
  ASSERT_TRUE(fit) << fit.error().message;
  EXPECT_NEAR(fit->law.token_us, 60, 3);
  EXPECT_NEAR(fit->law.fixed_ms, 5, 0.3);
  EXPECT_LT(fit->rms, 0.01);
  for (const double kernel : fit->law.kernel) EXPECT_NEAR(kernel, 1, 0.05);
  rows.resize(2);
  EXPECT_FALSE(fit_law(model, rows, mixed));
}

// A small run of everything; figures are the command's business.
TEST(EldrRun, ShuffledExpertsGainNothing) {
  size_t seen = 0, of = 0;
  const auto run = run_eldr({.folder = kTables,
                             .seconds = 4,
                             .rates = {60},
                             .models = {"gptoss"},
                             .calibration = 160,
                             .gates = false,  // seconds; SyntheticGates has tests of its own
                             .scaling = false,
                             .threads = 2,
                             .on_cell = [&](size_t done, size_t all) {
                               seen = done;
                               of = all;
                             }});
  ASSERT_TRUE(run) << run.error().message;
  EXPECT_EQ(seen, of);
  EXPECT_EQ(run->cells.size(), of);
  const auto tpot = [&](std::string_view policy, std::string_view variant = {}) {
    const Predicted* cell = find_cell(run->cells, Workload::kTask, "gptoss", policy, 60, variant);
    EXPECT_NE(cell, nullptr) << policy << variant;
    return cell == nullptr ? 0 : cell->cell.tpot50_ms;
  };
  // So short a run is over before batches are full; what there is to gain is gone with another one's experts.
  EXPECT_LT(tpot("eldr") / tpot("rr"), 0.98);
  EXPECT_GT(tpot("eldr", "shuffled") / tpot("rr", "shuffled"), 0.99);
  EXPECT_GT(tpot("eldr", "tau 0.3"), 0);
}

}  // namespace
}  // namespace kindred::reproduce

#include "sim/cluster.h"

#include <gtest/gtest.h>

#include "sim/cluster_testing.h"

namespace kindred::sim {
namespace {

using testing::TestModel;

LinearCost usual_cost() {
  LinearCost cost;
  cost.host_s = 0.002;
  cost.prefill_token_s = 2e-5;
  cost.expert_s = 1e-4;
  cost.context_token_s = 1e-7;
  cost.kv_token_s = 1e-6;
  return cost;
}

void expect_conserved(const SimResult& run, std::span<const SimRequest> requests) {
  ASSERT_EQ(run.requests.size(), requests.size());
  uint64_t tokens = 0, decoded = 0;
  for (size_t i = 0; i < requests.size(); ++i) {
    const RequestRecord& record = run.requests[i];
    if (record.ended == Ended::kOk) {
      EXPECT_EQ(record.generated, requests[i].output_tokens);
      EXPECT_GE(record.last_ns, record.first_ns);
      EXPECT_GE(record.first_ns, record.arrival_ns);
    }
    tokens += record.generated;
  }
  for (const WorkerReport& worker : run.workers) {
    EXPECT_EQ(worker.kv_left_blocks, 0U) << worker.name;
    EXPECT_LE(worker.kv_peak, 1) << worker.name;
    decoded += worker.all_decode_tokens;
  }
  EXPECT_EQ(run.ledger_left, 0);
  EXPECT_LE(decoded, tokens);  // first tokens, and those after a preemption, come from prompts
}

std::string fingerprint(const SimResult& run) {
  std::string out;
  for (const RequestRecord& r : run.requests) {
    out += std::to_string(r.first_ns) + "," + std::to_string(r.last_ns) + "," + std::to_string(r.prefill_worker) + "," +
           std::to_string(r.decode_worker) + ";";
  }
  return out;
}

TEST(Cluster, EveryRequestEndsAndNothingIsLeft) {
  const TestModel model;
  for (const char* policy : {"least-loaded", "round-robin", "power-of-two", "random", "locality-band"}) {
    ClusterOptions options = testing::pd(2, 3, usual_cost(), 4096);
    options.router.decode.name = policy;
    const auto requests = testing::poisson_load(model, 40, 400, 200, 50, 3);
    const Result<SimResult> run = run_cluster(options, requests);
    ASSERT_TRUE(run) << run.error().message;
    expect_conserved(*run, requests);
    for (const RequestRecord& record : run->requests) EXPECT_EQ(record.ended, Ended::kOk);
  }
}

TEST(Cluster, EqualInputsGiveEqualResults) {
  const TestModel model;
  ClusterOptions options = testing::pd(2, 4, usual_cost(), 4096);
  options.router.decode.name = "power-of-two";
  const auto requests = testing::poisson_load(model, 60, 300, 200, 50, 3);
  const Result<SimResult> one = run_cluster(options, requests), two = run_cluster(options, requests);
  ASSERT_TRUE(one && two);
  EXPECT_EQ(fingerprint(*one), fingerprint(*two));
  options.router.decode.seed = 2;
  const Result<SimResult> other = run_cluster(options, requests);
  ASSERT_TRUE(other);
  EXPECT_NE(fingerprint(*one), fingerprint(*other));
}

TEST(Cluster, PreemptsWhenDecodeRunsOutOfBlocks) {
  const TestModel model;
  ClusterOptions options = testing::pd(1, 1, usual_cost(), 1024);
  std::vector<SimRequest> requests;
  for (int i = 0; i < 6; ++i) requests.push_back(model.request(0, 128, 300));
  const Result<SimResult> run = run_cluster(options, requests);
  ASSERT_TRUE(run) << run.error().message;
  expect_conserved(*run, requests);
  EXPECT_GT(run->workers[1].preemptions, 0U);
  EXPECT_GT(run->workers[1].prefill_tokens, 0U);  // computed again
  EXPECT_GT(run->workers[1].kv_peak, 0.9);
}

TEST(Cluster, PlainWorkersDoItAll) {
  const TestModel model;
  ClusterOptions options;
  options.groups = {testing::group(Role::kBoth, 2, usual_cost(), 4096)};
  options.router.decode.name = "least-loaded";
  const auto requests = testing::poisson_load(model, 10, 100, 200, 50, 3);
  const Result<SimResult> run = run_cluster(options, requests);
  ASSERT_TRUE(run) << run.error().message;
  expect_conserved(*run, requests);
  EXPECT_GT(run->workers[0].steps, 0U);
  EXPECT_GT(run->workers[1].steps, 0U);
}

TEST(Cluster, UnlikeWorkersGoAtTheirOwnSpeed) {
  const TestModel model;
  LinearCost slow = usual_cost(), fast = usual_cost();
  slow.host_s = 0.02;
  ClusterOptions options = testing::pd(1, 1, fast);
  options.groups.push_back(testing::group(Role::kDecode, 1, slow));
  options.router.decode.name = "least-loaded";
  const auto requests = testing::poisson_load(model, 20, 300, 100, 50, 3);
  const Result<SimResult> run = run_cluster(options, requests);
  ASSERT_TRUE(run) << run.error().message;
  EXPECT_GT(run->workers[1].steps, 3 * run->workers[2].steps);
  EXPECT_GT(run->workers[1].decode_tokens, run->workers[2].decode_tokens);  // the ledger tells
}

TEST(Cluster, EqualPrefixesMeetAtTheirWorker) {
  const TestModel model;
  ClusterOptions options = testing::pd(4, 1, usual_cost());
  std::vector<SimRequest> requests;
  for (uint32_t i = 0; i < 80; ++i) {
    SimRequest request = model.request(0.2 * i, 256, 2);
    for (uint64_t b = 0; b < 4; ++b) request.blocks.push_back(100 * (i % 4) + b);  // four prompts
    requests.push_back(std::move(request));
  }
  for (const char* policy : {"prefix-hash", "kv-aware"}) {
    options.router.prefill.name = policy;
    const Result<SimResult> run = run_cluster(options, requests);
    ASSERT_TRUE(run) << run.error().message;
    uint64_t cached = 0;
    for (const WorkerReport& worker : run->workers) cached += worker.cached_tokens;
    EXPECT_EQ(cached, 76U * 192) << policy;  // all but the first of each; the last piece is always computed
  }
  options.router.prefill.name = "round-robin";
  const Result<SimResult> run = run_cluster(options, requests);
  ASSERT_TRUE(run) << run.error().message;
  // Request i and i + 4 meet by chance of the rotation: 4 prompts, 4 workers.
  expect_conserved(*run, requests);
}

// A router's own ledger is immediate: alone, it misses nothing between two polls. Several routers know of each other's
// requests only what polls tell.
TEST(Cluster, PolledLoadIsAsOldAsThePoll) {
  const TestModel model;
  LinearCost cost = usual_cost();
  cost.context_token_s = 4e-6;  // who has more requests is slower for each of them
  ClusterOptions options = testing::pd(1, 4, cost);
  options.router.fleet.load = fleet::LoadSource::kPolled;
  const auto requests = testing::poisson_load(model, 60, 1000, 100, 60, 3);
  const auto mean_tpot_s = [&](uint32_t routers, int64_t poll_ms) {
    options.routers = routers;
    options.poll_ms = poll_ms;
    const Result<SimResult> run = run_cluster(options, requests);
    EXPECT_TRUE(run);
    expect_conserved(*run, requests);
    double sum_s = 0;
    for (const RequestRecord& record : run->requests) sum_s += record.tpot_s();
    return sum_s / static_cast<double>(requests.size());
  };
  EXPECT_EQ(mean_tpot_s(1, 50), mean_tpot_s(1, 4000));
  const double fresh_s = mean_tpot_s(4, 50), stale_s = mean_tpot_s(4, 4000);
  EXPECT_NE(fresh_s, mean_tpot_s(1, 50));
  EXPECT_GT(stale_s, 1.02 * fresh_s);
}

TEST(Cluster, AFullDecodePoolRefuses) {
  const TestModel model;
  ClusterOptions options = testing::pd(1, 1, usual_cost());
  options.router.decode_inflight = 2;
  std::vector<SimRequest> requests;
  for (int i = 0; i < 5; ++i) requests.push_back(model.request(0, 100, 20));
  const Result<SimResult> run = run_cluster(options, requests);
  ASSERT_TRUE(run) << run.error().message;
  size_t refused = 0;
  for (const RequestRecord& record : run->requests) refused += record.ended == Ended::kRoomFull ? 1 : 0;
  EXPECT_EQ(refused, 3U);
  expect_conserved(*run, requests);
}

TEST(Cluster, SaysWhatIsWrong) {
  const TestModel model;
  const std::vector<SimRequest> one = {model.request(0, 100, 20)};
  const auto message = [&](const ClusterOptions& options, std::span<const SimRequest> requests) {
    const Result<SimResult> run = run_cluster(options, requests);
    return run ? std::string("no error") : run.error().message;
  };
  EXPECT_EQ(message(testing::pd(1, 1, usual_cost(), 64), one),
            "request 0: 120 tokens of KV do not fit into a worker of 'decode', which holds 64 tokens: it needs more KV "
            "memory (--kv-tokens), or shorter requests");
  ClusterOptions mixed = testing::pd(1, 1, usual_cost());
  mixed.groups[0].role = Role::kBoth;
  EXPECT_EQ(message(mixed, one), "accepted: prefill and decode workers, or workers that do both, not a mixture");
  EXPECT_EQ(message(testing::pd(1, 1, usual_cost()), {}), "no request arrives");
  const std::vector<SimRequest> unsorted = {model.request(1, 10, 2), model.request(0.5, 10, 2)};
  EXPECT_EQ(message(testing::pd(1, 1, usual_cost()), unsorted), "request 1: arrives before the one before");
  TestModel other;
  other.shape = testing::small_shape(2, 32, 2);
  Rng rng(1);
  other.tape = testing::uniform_tape(other.shape, 8, rng);
  const std::vector<SimRequest> two_models = {model.request(0, 10, 2), other.request(0.5, 10, 2)};
  EXPECT_EQ(message(testing::pd(1, 1, usual_cost()), two_models),
            "request 1: its experts are those of another model than request 0's");
  ClusterOptions unknown = testing::pd(1, 1, usual_cost());
  unknown.router.decode.name = "best";
  EXPECT_NE(message(unknown, one).find("accepted: locality-band"), std::string::npos);
  ClusterOptions event = testing::pd(1, 1, usual_cost());
  event.script = {{.at_s = 1, .worker = 2}};
  EXPECT_EQ(message(event, one), "event at 1 s for worker 2; accepted: from 0 s, workers 0 to 1");
}

}  // namespace
}  // namespace kindred::sim

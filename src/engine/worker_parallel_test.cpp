// A worker with several engines: which of them takes a request, and what they say of their load.
#include "base/bytes.h"
#include "engine/worker_testing.h"
#include "fleet/engine_trace.h"
#include "fleet/load_report.h"
#include "net/zmq.h"

namespace kindred::engine {
namespace {

using namespace testing;

class ParallelWorker : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    loop_ = std::make_unique<Loop>();
    WorkerOptions options = role(Role::kBoth);
    options.traces_port = 0;
    options.expert_pressure = [](uint32_t rank) { return rank == 1 ? 2.5 : 0.0; };
    node_ = std::make_unique<Node>(*loop_, std::move(options), Node::small(), 2);
    alone_ = std::make_unique<Node>(*loop_, role(Role::kBoth));
  }
  static void TearDownTestSuite() {
    node_.reset();
    alone_.reset();
    loop_.reset();
  }
  static json body(int i) {
    return {{"prompt", "Number " + std::to_string(i) + " of the series:"}, {"max_tokens", 8}, {"seed", i}};
  }
  static double generated(int engine) {
    const double value = node_->metric("vllm:generation_tokens_total{model_name=\"" + bundled_model().info().name +
                                       "\",engine=\"" + std::to_string(engine) + "\"}");
    return value;
  }
  static json loads(const std::string& query = "") { return node_->get("/v1/loads" + query).parsed()["loads"]; }

  static inline std::unique_ptr<Loop> loop_;
  static inline std::unique_ptr<Node> node_, alone_;
};

TEST_F(ParallelWorker, OutputsAreThoseOfOneEngine) {
  for (int i = 0; i < 6; ++i) {
    const Reply two = node_->post("/v1/completions", body(i)), one = alone_->post("/v1/completions", body(i));
    ASSERT_EQ(two.status, 200) << two.body;
    EXPECT_EQ(two.parsed()["choices"], one.parsed()["choices"]);
  }
  EXPECT_GT(generated(0), 0);  // in turns
  EXPECT_GT(generated(1), 0);
}

TEST_F(ParallelWorker, APinnedRequestGoesWhereItIsPinned) {
  for (int rank = 0; rank < 2; ++rank) {
    const double here = generated(rank), other = generated(1 - rank);
    for (int i = 0; i < 3; ++i) {
      ASSERT_EQ(node_->post("/v1/completions", body(i), {{"X-data-parallel-rank", std::to_string(rank)}}).status, 200);
    }
    EXPECT_GT(generated(rank), here);
    EXPECT_EQ(generated(1 - rank), other);
  }
}

TEST_F(ParallelWorker, BadHeadersAndPrioritiesAreNamed) {
  for (const char* rank : {"2", "-1", "x", "", "0x1", "99999999999999999999"}) {
    const Reply reply = node_->post("/v1/completions", body(1), {{"X-data-parallel-rank", rank}});
    EXPECT_EQ(reply.status, 400) << rank;
    EXPECT_NE(reply.body.find("X-data-parallel-rank"), std::string::npos) << reply.body;
    EXPECT_NE(reply.body.find("from 0 to 1"), std::string::npos) << reply.body;
  }
  EXPECT_EQ(alone_->post("/v1/completions", body(1), {{"X-data-parallel-rank", "0"}}).status, 200);
  EXPECT_EQ(alone_->post("/v1/completions", body(1), {{"X-data-parallel-rank", "1"}}).status, 400);
  for (const char* id : {"", "12", "0123456789abcdeg", "0123456789abcdef0"}) {
    const Reply reply = node_->post("/v1/completions", body(1), {{"X-Kindred-Dispatch", id}});
    EXPECT_EQ(reply.status, 400) << id;
    EXPECT_NE(reply.body.find("X-Kindred-Dispatch"), std::string::npos) << reply.body;
  }
  for (const json& priority : {json(1.5), json("1"), json(UINT64_MAX), json(true)}) {
    json with = body(1);
    with["priority"] = priority;
    const Reply reply = node_->post("/v1/completions", with);
    EXPECT_EQ(reply.status, 400) << priority;
    EXPECT_EQ(reply.parsed()["error"]["param"], "priority");
  }
  json lowest = body(1);
  lowest["priority"] = INT64_MIN;
  EXPECT_EQ(node_->post("/v1/completions", lowest).status, 200);
}

TEST_F(ParallelWorker, LoadsReadLikeThoseOfSglang) {
  fleet::LoadReport report;
  for (int i = 0; i < 500 && report.requests() != 0; ++i) {  // an engine publishes its end after its last event
    report = fleet::parse_sglang_loads(node_->get("/v1/loads").body);
  }
  EXPECT_EQ(report.requests(), 0);
  EXPECT_EQ(report.kv_usage, 0);
  const json all = loads();
  ASSERT_EQ(all.size(), 2U);
  for (size_t rank = 0; rank < 2; ++rank) {
    EXPECT_EQ(all[rank]["dp_rank"], rank);
    EXPECT_EQ(all[rank]["max_total_num_tokens"], Node::small().kv_tokens);
    EXPECT_EQ(all[rank]["max_running_requests"], Node::small().sequences);
    EXPECT_EQ(all[rank]["num_waiting_uncached_tokens"], 0);
    EXPECT_EQ(all[rank]["kindred"]["expert_pressure"], rank == 1 ? 2.5 : 0.0);
  }
  const std::string labels = "{model_name=\"" + bundled_model().info().name + "\",engine=\"1\"}";
  EXPECT_EQ(node_->metric("kindred_expert_pressure" + labels), 2.5);
  EXPECT_EQ(node_->metric("kindred_waiting_prefill_tokens" + labels), 0);
  const json one = loads("?dp_rank=1");
  ASSERT_EQ(one.size(), 1U);
  EXPECT_EQ(one[0]["dp_rank"], 1);
  const Reply none = node_->get("/v1/loads?dp_rank=2");
  EXPECT_EQ(none.status, 400);
  EXPECT_NE(none.body.find("dp_rank"), std::string::npos);
}

TEST_F(ParallelWorker, SaysHowManyAndPushesTracesThatIncludeADispatch) {
  const json kindred = node_->get("/v1/models").parsed()["data"][0]["kindred"];
  EXPECT_EQ(kindred["data_parallel_size"], 2);
  EXPECT_EQ(alone_->get("/v1/models").parsed()["data"][0]["kindred"].contains("traces"), false);
  const std::string endpoint = kindred["traces"];
  const net::ZmqContext context;
  auto socket = net::ZmqSocket::connect(context, net::ZmqKind::kSubscriber, endpoint);
  ASSERT_TRUE(socket.ok());
  const uint64_t epoch = loads()[0]["kindred"]["epoch"];
  ASSERT_EQ(node_
                ->post("/v1/completions", body(3),
                       {{"X-data-parallel-rank", "1"}, {"X-Kindred-Dispatch", "00000000000000ab"}})
                .status,
            200);
  bool found = false;
  for (int i = 0; i < 5000 && !found; ++i) {
    const auto parts = socket->receive();
    if (!parts) {
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
      continue;
    }
    const auto trace = fleet::parse_trace(as_bytes(parts->at(2)));
    ASSERT_TRUE(trace.ok());
    EXPECT_EQ(trace->epoch, epoch);
    EXPECT_EQ(trace->expert_pressure, trace->rank == 1 ? 2.5 : 0.0);
    found = trace->received == std::vector<uint64_t>{0xab};
    if (found) {
      EXPECT_EQ(trace->rank, 1U);
    }
  }
  EXPECT_TRUE(found);
}

}  // namespace
}  // namespace kindred::engine

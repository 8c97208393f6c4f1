#include "sim/expert_process.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <bit>
#include <cmath>
#include <filesystem>

#include "base/config.h"
#include "expert/testing.h"
#include "sim/step_time.h"
#include "sim/synthetic_gates.h"

namespace kindred::sim {
namespace {

const expert::ExpertShape kShape{.layers = {0, 1, 2}, .experts = 64, .top_k = 6};

std::unique_ptr<ExpertProcess> made(Result<std::unique_ptr<ExpertProcess>> process) {
  EXPECT_TRUE(process.ok()) << process.error().message;
  return *std::move(process);
}

SyntheticOptions options() {
  SyntheticOptions o;
  o.shape = kShape;
  o.base = 0.5;
  o.domain = 1;
  o.request = 0.5;
  o.phase = 0.3;
  o.prototypes = 4;
  o.tape_tokens = 40;
  return o;
}

uint32_t ones(std::span<const uint64_t> words) {
  uint32_t sum = 0;
  for (const uint64_t word : words) sum += static_cast<uint32_t>(std::popcount(word));
  return sum;
}

// Distinct experts, mean over layers, of one token of each request.
double union_size(const std::vector<RequestExperts>& batch, uint32_t token) {
  std::vector<uint64_t> words(batch[0].decode->token(0).size(), 0);
  for (const RequestExperts& request : batch) {
    const auto row = request.decode->token((request.first + token) % request.decode->tokens());
    for (size_t i = 0; i < words.size(); ++i) words[i] |= row[i];
  }
  return ones(words) / static_cast<double>(batch[0].decode->layers());
}

TEST(ExpertProcess, UniformExpertsFollowTheClosedForm) {
  const auto process = made(make_uniform(kShape, 7));
  for (const uint32_t batch : {1U, 4U, 16U, 64U}) {
    double sum = 0;
    constexpr int kBatches = 300;
    uint64_t number = 0;
    for (int b = 0; b < kBatches; ++b) {
      std::vector<RequestExperts> requests;
      for (uint32_t i = 0; i < batch; ++i) requests.push_back(process->experts({.prompt_tokens = 1}, number++));
      sum += union_size(requests, 0);
    }
    // A batch's |U|, mean of 3 layers, varies by less than 2.5; so the mean of 300 by less than 0.15.
    EXPECT_NEAR(sum / kBatches, uniform_union(64, 6, batch), 0.5) << batch;
  }
}

TEST(ExpertProcess, EveryTokenHasTopKExperts) {
  SyntheticOptions skewed = options();
  skewed.domain = 8;  // a few experts take nearly all draws
  for (const SyntheticOptions& o : {options(), skewed}) {
    const auto process = made(make_synthetic(o));
    const RequestExperts one = process->experts({.prompt_tokens = 100}, 0);
    for (uint32_t t = 0; t < one.decode->tokens(); ++t) {
      for (uint32_t l = 0; l < 3; ++l) EXPECT_EQ(ones(one.decode->token(t).subspan(l, 1)), 6);
    }
    EXPECT_EQ(one.prompt->tokens, 100);
    EXPECT_TRUE(one.prompt->rows_sum_to_tokens());
  }
}

// However long a prompt is and wherever on its tape it begins, its counts are those of so many tokens.
TEST(ExpertProcess, PromptsOfAnyLength) {
  const auto process = made(make_synthetic(options()));
  for (const uint32_t tokens : {0U, 1U, 15U, 16U, 17U, 39U, 40U, 41U, 333U}) {
    for (uint64_t number = 0; number < 20; ++number) {
      const RequestExperts one = process->experts({.prompt_tokens = tokens}, number);
      ASSERT_EQ(one.prompt->tokens, tokens);
      ASSERT_TRUE(one.prompt->rows_sum_to_tokens()) << tokens << " tokens, request " << number;
      for (const uint32_t count : one.prompt->data) ASSERT_LE(count, tokens);
    }
  }
}

TEST(ExpertProcess, DependsOnSeedAndNumberAlone) {
  const auto first = made(make_synthetic(options())), second = made(make_synthetic(options()));
  SyntheticOptions reseeded = options();
  reseeded.seed = 2;
  const auto other = made(make_synthetic(reseeded));
  bool differs = false;
  for (uint64_t i = 0; i < 20; ++i) (void)second->experts({.prompt_tokens = 9}, 19 - i);
  for (uint64_t i = 0; i < 20; ++i) {
    const RequestExperts a = first->experts({.prompt_tokens = 33}, i);
    const RequestExperts b = second->experts({.prompt_tokens = 33}, i);
    const RequestExperts c = other->experts({.prompt_tokens = 33}, i);
    EXPECT_EQ(a.domain, b.domain);
    EXPECT_EQ(a.first, b.first);
    EXPECT_EQ(a.prompt->data, b.prompt->data);
    EXPECT_TRUE(std::ranges::equal(a.decode->token(a.first), b.decode->token(b.first)));
    differs = differs || a.prompt->data != c.prompt->data;
  }
  EXPECT_TRUE(differs);
}

TEST(ExpertProcess, DomainsAreTheTracesOrDrawnByShare) {
  SyntheticOptions o = options();
  o.domain_share = {7, 1, 1, 1};
  const auto process = made(make_synthetic(o));
  int code = 0;
  for (uint64_t i = 0; i < 1000; ++i) code += process->experts({.prompt_tokens = 1}, i).domain == 0 ? 1 : 0;
  EXPECT_NEAR(code, 700, 60);  // four standard deviations
  EXPECT_EQ(process->experts({.prompt_tokens = 1, .domain = 2}, 5).domain, 2);
  EXPECT_EQ(process->experts({.prompt_tokens = 1, .domain = 6}, 5).domain, 2);
}

// Same-domain requests share experts, different prototypes of one domain not all of them.
TEST(ExpertProcess, BatchesOfOneDomainUseFewerExperts) {
  const auto process = made(make_synthetic(options()));
  double same = 0, mixed = 0;
  uint64_t number = 0;
  for (int b = 0; b < 200; ++b) {
    std::vector<RequestExperts> one, any;
    for (int32_t i = 0; i < 16; ++i) {
      one.push_back(process->experts({.prompt_tokens = 1, .domain = b % 4}, number++));
      any.push_back(process->experts({.prompt_tokens = 1, .domain = i % 4}, number++));
    }
    same += union_size(one, 3);
    mixed += union_size(any, 3);
  }
  EXPECT_LT(same, 0.9 * mixed);
}

// Gates say how likely each expert was: a softmax over all of them, which follows what was chosen without being it.
TEST(SyntheticGates, SumToTheTokensAndFollowTheCounts) {
  auto process = made(make_synthetic(options()));
  auto gates = make_synthetic_gates(options());
  ASSERT_TRUE(gates) << gates.error().message;
  for (const uint32_t tokens : {1U, 7U, 40U, 200U, 1000U}) {
    TraceRequest request;
    request.prompt_tokens = tokens;
    for (uint64_t number = 0; number < 6; ++number) {
      const RequestExperts experts = process->experts(request, number);
      const std::vector<float> sums = (*gates)->prompt_gates(request, number);
      ASSERT_EQ(sums.size(), kShape.cells());
      for (size_t l = 0; l < kShape.layers.size(); ++l) {
        double sum = 0, with = 0, counted = 0, gate2 = 0, count2 = 0;
        for (size_t e = 0; e < kShape.experts; ++e) {
          const double gate = sums[l * kShape.experts + e];
          const double count = experts.prompt->row(l)[e];
          EXPECT_GE(gate, 0);
          EXPECT_LE(gate, tokens * 1.001);
          sum += gate;
          counted += count;
          with += gate * count;
          gate2 += gate * gate;
          count2 += count * count;
        }
        EXPECT_NEAR(sum, tokens, 1e-3 * tokens + 1e-3);
        EXPECT_EQ(counted, tokens * kShape.top_k);
        // A whole tape: the same tokens, so nearly the same direction. Fewer: a token's eight neighbours are in it.
        if (tokens < 40) continue;
        EXPECT_GT(with / std::sqrt(gate2 * count2), 0.9);
      }
    }
  }
}

// The choice is the highest logits': an expert that a token chooses has more of its softmax than one that it does not.
TEST(SyntheticGates, ChosenExpertsAreTheLikeliest) {
  SyntheticOptions one = options();
  one.tape_tokens = 1;  // so a prompt of one token is the whole tape
  auto process = made(make_synthetic(one));
  auto gates = make_synthetic_gates(one);
  ASSERT_TRUE(gates) << gates.error().message;
  TraceRequest request;
  request.prompt_tokens = 1;
  for (uint64_t number = 0; number < 16; ++number) {
    const RequestExperts experts = process->experts(request, number);
    const std::vector<float> sums = (*gates)->prompt_gates(request, number);
    for (size_t l = 0; l < kShape.layers.size(); ++l) {
      float least_chosen = 1, most_other = 0;
      for (size_t e = 0; e < kShape.experts; ++e) {
        const float gate = sums[l * kShape.experts + e];
        if (experts.prompt->row(l)[e] > 0) least_chosen = std::min(least_chosen, gate);
        else most_other = std::max(most_other, gate);
      }
      EXPECT_GE(least_chosen, most_other);
    }
  }
}

TEST(ExpertProcess, NamesOptionsOutOfRange) {
  const auto field = [](const std::function<void(SyntheticOptions&)>& change) {
    SyntheticOptions o = options();
    change(o);
    const auto process = make_synthetic(std::move(o));
    return process.ok() ? std::string("accepted") : process.error().field;
  };
  EXPECT_EQ(field([](SyntheticOptions& o) { o.domain = -1; }), "domain");
  EXPECT_EQ(field([](SyntheticOptions& o) { o.phase = NAN; }), "phase");
  EXPECT_EQ(field([](SyntheticOptions& o) { o.shape.top_k = 65; }), "top_k");
  EXPECT_EQ(field([](SyntheticOptions& o) { o.shape.layers = {}; }), "layers");
  EXPECT_EQ(field([](SyntheticOptions& o) { o.domains = {}; }), "domains");
  EXPECT_EQ(field([](SyntheticOptions& o) { o.domain_share = {1}; }), "domain_share");
  EXPECT_EQ(field([](SyntheticOptions& o) { o.prototypes = 0; }), "prototypes");
  EXPECT_EQ(field([](SyntheticOptions& o) { o.tape_tokens = 0; }), "tape_tokens");
}

TEST(RecordedProcess, TapesHaveTheRecordedCounts) {
  const expert::Activations activations = expert::made_up_activations(12, 3);
  const auto process = made(make_recorded(activations, 1));
  EXPECT_EQ(process->domains().size(), 3);
  for (int32_t i = 0; i < 12; ++i) {
    const RequestExperts one = process->experts({.prompt_tokens = 5, .expert_profile = i}, 0);
    EXPECT_TRUE(std::ranges::equal(one.prompt->data, activations.prefill(static_cast<size_t>(i))));
    EXPECT_EQ(process->domains()[one.domain], activations.domains[static_cast<size_t>(i)]);
    ASSERT_EQ(one.decode->tokens(), activations.decode_tokens[static_cast<size_t>(i)]);
    std::vector<uint32_t> counts(activations.shape.cells(), 0);
    for (uint32_t t = 0; t < one.decode->tokens(); ++t) {
      for (uint32_t l = 0; l < 3; ++l) {
        ASSERT_EQ(ones(one.decode->token(t).subspan(l, 1)), 2);
        for (uint32_t e = 0; e < 16; ++e) counts[l * 16 + e] += one.decode->token(t)[l] >> e & 1;
      }
    }
    EXPECT_TRUE(std::ranges::equal(counts, activations.decode(static_cast<size_t>(i))));
  }
  for (uint64_t n = 0; n < 30; ++n) EXPECT_EQ(process->experts({.domain = 1}, n).domain, 1);
}

TEST(RecordedProcess, NeedsDecodeCounts) {
  expert::Activations activations = expert::made_up_activations(4, 2);
  activations.decode_counts.clear();
  EXPECT_EQ(make_recorded(activations, 1).error().field, "activations");
}

class TokenDecisions : public testing::Test {
 protected:
  void SetUp() override {
    folder_ = testing::TempDir() + "kindred-token-decisions_" + std::to_string(getpid());
    std::filesystem::create_directories(folder_);
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }
  void write(const std::string& name, const std::string& bytes) {
    ASSERT_TRUE(write_file(folder_ + "/" + name, bytes).ok());
  }
  Result<std::unique_ptr<ExpertProcess>> load() { return load_token_decisions(folder_, shape_, 1); }

  std::string folder_;
  const TokenFileShape shape_{.layers = 2, .experts = 4, .top_k = 1};
};

TEST_F(TokenDecisions, AreReplayedInOrder) {
  write("experts.u8", std::string("\0\1\1\2\2\3\3\0\1\1\2\2", 12));  // six tokens of two layers
  write("index.jsonl",
        "{\"token_offset\": 0, \"decode_tokens\": 4, \"domain\": \"code\"}\n"
        "{\"token_offset\": 4, \"decode_tokens\": 2, \"domain\": \"math\"}\n");
  const auto process = made(load());
  EXPECT_EQ(process->domains(), (std::vector<std::string>{"code", "math"}));
  const RequestExperts one = process->experts({.expert_profile = 0}, 0);
  EXPECT_EQ(one.prompt->tokens, 2);
  EXPECT_EQ(one.prompt->data, (std::vector<uint32_t>{1, 1, 0, 0, 0, 1, 1, 0}));
  ASSERT_EQ(one.decode->tokens(), 2);
  EXPECT_EQ(one.decode->token(0)[0], uint64_t{1} << 2);
  EXPECT_EQ(one.decode->token(0)[1], uint64_t{1} << 3);
  EXPECT_EQ(one.decode->token(1)[0], uint64_t{1} << 3);
  EXPECT_EQ(process->experts({.expert_profile = 1}, 0).domain, 1);
}

TEST_F(TokenDecisions, NameWhatIsWrong) {
  write("experts.u8", std::string("\0\1\1\2", 4));
  const auto refused = [this](const std::string& index) {
    write("index.jsonl", index);
    const auto process = load();
    return process.ok() ? Error{} : process.error();
  };
  EXPECT_EQ(refused("{\"token_offset\": 1, \"decode_tokens\": 2, \"domain\": \"x\"}\n").field, "token_offset");
  EXPECT_EQ(refused("{\"token_offset\": 0, \"decode_tokens\": -2, \"domain\": \"x\"}\n").field, "decode_tokens");
  const Error error = refused("{\"token_offset\": 0, \"decode_tokens\": 2, \"domain\": \"x\"}\n{}\n");
  EXPECT_NE(error.message.find("line 2"), std::string::npos) << error.message;
  write("experts.u8", std::string("\0\1\1\7", 4));
  EXPECT_EQ(refused("{\"token_offset\": 0, \"decode_tokens\": 2, \"domain\": \"x\"}\n").code, ErrorCode::kCorrupt);
}

}  // namespace
}  // namespace kindred::sim

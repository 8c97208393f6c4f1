#include "fleet/dialect.h"

#include <gtest/gtest.h>

#include "fleet/fleet.h"

namespace kindred::fleet {
namespace {

// As each engine answers, shortened to what is read and some that is not.
constexpr const char* kVllmModels =
    R"({"object":"list","data":[
      {"id":"Qwen/Qwen3-30B-A3B","object":"model","created":1764000000,"owned_by":"vllm","root":"Qwen/Qwen3-30B-A3B",
       "parent":null,"max_model_len":40960,"permission":[{"id":"modelperm-1","object":"model_permission"}]},
      {"id":"sql-lora","object":"model","created":1764000000,"owned_by":"vllm","root":"/adapters/sql",
       "parent":"Qwen/Qwen3-30B-A3B","max_model_len":null,"permission":[]}]})";
constexpr const char* kSglangModels =
    R"({"object":"list","data":[{"id":"deepseek","object":"model","created":1,"owned_by":"sglang","root":"deepseek",
        "parent":null,"max_model_len":163840}]})";
constexpr const char* kSglangInfo =
    R"({"model_path":"deepseek","tp_size":8,"disaggregation_mode":"prefill","disaggregation_bootstrap_port":8999,
        "version":"0.5.4.post1","internal_states":[{"avg_spec_accept_length":1.0}]})";
constexpr const char* kLlamaModels =
    R"({"models":[{"name":"m.gguf"}],"object":"list","data":[{"id":"m.gguf","object":"model","created":1,
        "owned_by":"llamacpp","meta":{"vocab_type":1,"n_vocab":32000,"n_ctx_train":4096}}]})";
constexpr const char* kLlamaProps =
    R"({"default_generation_settings":{"n_ctx":4096},"total_slots":4,"model_path":"m.gguf","chat_template":"{{x}}",
        "build_info":"b6500-0a1b2c3"})";

Description described(const char* models, const char* info, std::optional<Dialect> configured = {}) {
  Result<Description> out = parse_models(models);
  EXPECT_TRUE(out.ok());
  complete(*out, parse_server_info(info), configured);
  return *std::move(out);
}

TEST(Dialects, AreFoundOutByWhatEachEngineSaysOfItself) {
  const Description vllm = described(kVllmModels, R"({"version":"0.11.2"})");
  EXPECT_EQ(vllm.dialect, Dialect::kVllm);
  EXPECT_EQ(vllm.version, "0.11.2");
  EXPECT_EQ(vllm.fingerprint, "vllm:0.11:40960:Qwen/Qwen3-30B-A3B");
  EXPECT_EQ(vllm.models.size(), 2U);
  ASSERT_EQ(vllm.adapters.size(), 1U);
  EXPECT_EQ(vllm.adapters[0].first, "sql-lora");
  EXPECT_EQ(vllm.adapters[0].second, "Qwen/Qwen3-30B-A3B");

  const Description sglang = described(kSglangModels, kSglangInfo);
  EXPECT_EQ(sglang.dialect, Dialect::kSglang);
  EXPECT_EQ(sglang.role, Role::kPrefill);
  EXPECT_EQ(sglang.bootstrap_port, 8999);
  EXPECT_EQ(sglang.fingerprint, "sglang:0.5:163840:deepseek");

  const Description llama = described(kLlamaModels, kLlamaProps);
  EXPECT_EQ(llama.dialect, Dialect::kLlamaServer);
  EXPECT_EQ(llama.version, "b6500-0a1b2c3");
  EXPECT_TRUE(llama.fingerprint.empty());
}

TEST(Dialects, AreFoundOutBehindAnotherOwnersName) {
  constexpr const char* models = R"({"data":[{"id":"m","owned_by":"acme","max_model_len":100}]})";
  EXPECT_EQ(described(models, R"({"version":"0.9.1"})").dialect, Dialect::kVllm);
  EXPECT_EQ(described(models, kSglangInfo).dialect, Dialect::kSglang);
  EXPECT_EQ(described(models, kLlamaProps).dialect, Dialect::kLlamaServer);
  EXPECT_EQ(described(models, "<html>").dialect, Dialect::kOpenAi);
  EXPECT_EQ(described(models, R"({"version":"1.2","commit":"abc"})").dialect, Dialect::kOpenAi);  // somebody else's
}

TEST(Dialects, ConfigurationWins) {
  EXPECT_EQ(described(kVllmModels, R"({"version":"0.11.2"})", Dialect::kOpenAi).dialect, Dialect::kOpenAi);
  EXPECT_EQ(described(R"({"data":[{"id":"m"}]})", "", Dialect::kVllm).fingerprint, "vllm::0:m");
}

TEST(Dialects, NamesRoundTrip) {
  for (const std::string_view name : {"kindred", "vllm", "sglang", "llama-server", "openai"}) {
    ASSERT_TRUE(parse_dialect(name).has_value()) << name;
    EXPECT_EQ(to_string(*parse_dialect(name)), name);
  }
  EXPECT_FALSE(parse_dialect("VLLM").has_value());
}

TEST(Dialects, UntrustedAnswersLeaveThingsOut) {
  const ServerInfo odd =
      parse_server_info(R"({"version":"a b","disaggregation_mode":7,"disaggregation_bootstrap_port":70000})");
  EXPECT_EQ(odd.version, "");
  EXPECT_EQ(odd.role, Role::kBoth);
  EXPECT_EQ(odd.bootstrap_port, 8998);
  EXPECT_FALSE(parse_server_info("[1]").dialect.has_value());
}

TEST(Dialects, OnlyMatchingWorkersPairInARollingUpgrade) {
  ManualClock clock;
  Fleet fleet(clock);
  const auto worker = [&](const char* url, Role role, const char* version) {
    const WorkerId id = fleet.add({.url = url, .role = role});
    const std::string info = std::string(R"({"version":")") + version + R"("})";
    fleet.report_up(id, described(kVllmModels, info.c_str()));
    EXPECT_EQ(fleet.health(id), Health::kUp);
    return id;
  };
  const WorkerId old_prefill = worker("http://p0", Role::kPrefill, "0.10.2");
  const WorkerId new_prefill = worker("http://p1", Role::kPrefill, "0.11.0");
  const WorkerId new_decode = worker("http://d1", Role::kDecode, "0.11.1");  // a patch apart: they pair
  const Snapshot prefill =
      fleet.snapshot({.role = Role::kPrefill, .model = "sql-lora", .paired = true, .dialect = Dialect::kVllm});
  EXPECT_FALSE(prefill.views[old_prefill].available);
  EXPECT_TRUE(prefill.views[new_prefill].available);
  const std::string of_old = fleet.description(old_prefill).fingerprint;
  EXPECT_EQ(fleet.snapshot({.role = Role::kDecode, .fingerprint = of_old}).available, 0U);
  EXPECT_TRUE(fleet.serving("sql-lora").paired_by[static_cast<size_t>(Dialect::kVllm)]);
  EXPECT_FALSE(fleet.serving("sql-lora").paired_by[static_cast<size_t>(Dialect::kKindred)]);
  fleet.report_out(new_decode, "upgrading");
  EXPECT_FALSE(fleet.serving("sql-lora").paired);
}

TEST(Dialects, SglangsFieldForARankByItsVersion) {
  for (const char* version : {"0.5.9", "0.5.6.post2", "0.4.10"}) {
    EXPECT_EQ(sglang_rank_field(version), "data_parallel_rank") << version;
  }
  for (const char* version : {"0.5.10", "0.5.10rc0", "0.5.23", "0.6.0", "1.0.0", "", "0.6.dev1", "main"}) {
    EXPECT_EQ(sglang_rank_field(version), "routed_dp_rank") << version;
  }
}

TEST(Dialects, RolesAreCheckedWhereTheEngineSaysThem) {
  ManualClock clock;
  Fleet fleet(clock);
  const WorkerId decode = fleet.add({.url = "http://d", .role = Role::kDecode});
  fleet.report_up(decode, described(kSglangModels, kSglangInfo));
  EXPECT_NE(fleet.worker_status(decode).problem.find("says its role is prefill"), std::string::npos);
  const WorkerId prefill = fleet.add({.url = "http://p", .role = Role::kPrefill});
  fleet.report_up(prefill, described(kSglangModels, R"({"disaggregation_mode":"null"})"));
  EXPECT_NE(fleet.worker_status(prefill).problem.find("says its role is both"), std::string::npos);
  const WorkerId llama = fleet.add({.url = "http://l", .role = Role::kDecode});
  fleet.report_up(llama, described(kLlamaModels, kLlamaProps));
  EXPECT_NE(fleet.worker_status(llama).problem.find("does not speak"), std::string::npos);
}

}  // namespace
}  // namespace kindred::fleet

#include "sim/profile.h"

#include <gtest/gtest.h>

#include <filesystem>

#include "base/config.h"
#include "base/json.h"

namespace kindred::sim {
namespace {

const std::string kProfiles = KINDRED_SOURCE_DIR "/profiles/";

Profile shipped(const std::string& name) {
  Result<Profile> profile = load_profile(kProfiles + name + ".json");
  EXPECT_TRUE(profile.ok()) << profile.error().message;
  return *std::move(profile);
}

// The error of a shipped profile after one change.
Error error_after(const std::function<void(Json&)>& change) {
  Json json = parse_json(profile_json(shipped("h200-qwen3-30b-a3b")));
  change(json);
  const Result<Profile> profile = parse_profile(dump_json(json));
  EXPECT_FALSE(profile.ok());
  return profile.ok() ? Error{} : profile.error();
}

TEST(Profile, ShippedFilesLoadAndSayWhereFiguresComeFrom) {
  size_t files = 0;
  for (const auto& entry : std::filesystem::directory_iterator(kProfiles)) {
    if (entry.path().extension() != ".json") continue;
    const Result<Profile> profile = load_profile(entry.path().string());
    ASSERT_TRUE(profile.ok()) << profile.error().message;
    EXPECT_EQ(profile->name + ".json", entry.path().filename());
    // Attention over long prompts was measured for none of them.
    EXPECT_NE(profile->attention.source.find("not measured"), std::string::npos) << profile->name;
    EXPECT_NE(profile->moe.source.find("held out"), std::string::npos) << profile->name;
    ++files;
  }
  EXPECT_EQ(files, 15);
}

TEST(Profile, SurvivesItsFile) {
  const Profile profile = shipped("b200-gpt-oss-120b");
  const std::string json = profile_json(profile);
  const Result<Profile> again = parse_profile(json);
  ASSERT_TRUE(again.ok()) << again.error().message;
  EXPECT_EQ(profile_json(*again), json);
  EXPECT_EQ(again->dims.window_layers, 18);
  EXPECT_EQ(again->moe.blocks.size(), profile.moe.blocks.size());
}

TEST(Profile, SaysWhichKernelIsMissing) {
  const Error error = error_after([](Json& json) { json.erase("moe"); });
  EXPECT_EQ(error.field, "moe");
  EXPECT_NE(error.message.find("no figures for this kernel"), std::string::npos) << error.message;
  EXPECT_EQ(error_after([](Json& json) { json["attention"].erase("decode"); }).field, "attention.decode.launch_us");
  EXPECT_EQ(error_after([](Json& json) { json["projections"].erase(3); }).field, "projections");  // the head
}

TEST(Profile, NamesWhatIsWrong) {
  EXPECT_EQ(error_after([](Json& json) { json["moe"]["b_us"] = -1; }).field, "moe.b_us");
  EXPECT_EQ(error_after([](Json& json) { json["moe"]["b_us"] = "2"; }).field, "moe.b_us");
  EXPECT_EQ(error_after([](Json& json) { json["moe"]["power"] = 0.5; }).field, "moe.power");
  EXPECT_EQ(error_after([](Json& json) { json["moe"]["blocks"] = Json::array(); }).field, "moe.blocks");
  EXPECT_EQ(error_after([](Json& json) { json["moe"]["blocks"][1]["rows"] = 16; }).field, "moe.blocks");
  EXPECT_EQ(error_after([](Json& json) { json["dims"]["top_k"] = 129; }).field, "dims.top_k");
  EXPECT_EQ(error_after([](Json& json) { json["dims"]["layers"] = 0; }).field, "dims.layers");
  EXPECT_EQ(error_after([](Json& json) { json["dims"]["window_layers"] = 24; }).field, "dims.window_tokens");
  EXPECT_EQ(error_after([](Json& json) { json["host"]["speed"] = 1; }).field, "host.speed");
  EXPECT_EQ(error_after([](Json& json) { json["moe"]["source"] = ""; }).field, "moe.source");
  EXPECT_EQ(error_after([](Json& json) { json["graph_sizes"] = {8, 4}; }).field, "graph_sizes");
  EXPECT_EQ(error_after([](Json& json) { json["v"] = 2; }).field, "v");
  EXPECT_EQ(error_after([](Json& json) { json.erase("gpu"); }).field, "gpu");
  EXPECT_FALSE(parse_profile("[]").ok());
  EXPECT_FALSE(parse_profile("{").ok());
  EXPECT_EQ(load_profile("/nowhere/profile.json").error().code, ErrorCode::kNotFound);
}

TEST(Profile, WeightsAndKvHaveToFit) {
  const Profile small = shipped("h200-qwen3-30b-a3b");
  EXPECT_TRUE(small.check_ranks(1).ok());
  // 126.9 GB usable, 61.1 GB of weights, 96 KiB a token.
  EXPECT_NEAR(static_cast<double>(small.kv_capacity_tokens(1)), 65.8e9 / 98304, 0.01e6);
  EXPECT_EQ(small.check_ranks(3).error().field, "ranks");
  EXPECT_EQ(small.check_ranks(0).error().field, "ranks");
  const Profile large = shipped("h200-qwen3-235b-a22b");
  EXPECT_EQ(large.check_ranks(1).error().field, "ranks");
  EXPECT_TRUE(large.check_ranks(8).ok());
  Profile without = small;
  without.all_to_all = {};
  EXPECT_TRUE(without.check_ranks(1).ok());
  EXPECT_EQ(without.check_ranks(8).error().field, "all_to_all");
  const Result<Profile> again = parse_profile(profile_json(without));
  ASSERT_TRUE(again.ok()) << again.error().message;
  EXPECT_EQ(again->all_to_all.ranks, 0);
}

TEST(Profile, RefusesExpertsOfAnotherModel) {
  const Profile profile = shipped("h200-qwen3-30b-a3b");
  EXPECT_TRUE(profile.check_experts({.layers = {0, 1, 2}, .experts = 128, .top_k = 8}).ok());
  EXPECT_EQ(profile.check_experts({.layers = {0, 1, 2}, .experts = 32, .top_k = 8}).error().field, "experts");
  EXPECT_EQ(profile.check_experts({.layers = {0, 1, 2}, .experts = 128, .top_k = 4}).error().field, "experts");
  EXPECT_EQ(profile.check_experts({.layers = {}, .experts = 128, .top_k = 8}).error().field, "experts");
}

}  // namespace
}  // namespace kindred::sim

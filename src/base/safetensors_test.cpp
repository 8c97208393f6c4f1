#include "base/safetensors.h"

#include <gtest/gtest.h>

#include <cstring>
#include <string>

#include "base/rng.h"

namespace kindred {
namespace {

std::string file_of(const std::string& header, const std::string& data) {
  const uint64_t size = header.size();
  std::string out(8, '\0');
  std::memcpy(out.data(), &size, 8);
  return out + header + data;
}

std::string sample() {
  const std::vector<float> reals = {1.5F, -2.0F, 0.25F, 1e-20F, 3.0F, 7.0F};
  const std::vector<uint8_t> bytes = {1, 0, 1};
  const std::vector<uint32_t> words = {4'000'000'000U};
  const std::vector<uint16_t> halves = {65'535, 1};
  SafetensorsWriter writer;
  writer.metadata("model", "a \"quoted\" näme");
  writer.metadata("seed", "42");
  writer.tensor<float>("reals", {2, 3}, reals);
  writer.tensor<uint8_t>("bytes", {3}, bytes);
  writer.tensor<uint32_t>("words", {1}, words);
  writer.tensor<uint16_t>("halves", {2, 1}, halves);
  writer.tensor<uint32_t>("empty", {0, 4}, {});
  return writer.finish();
}

TEST(Safetensors, RoundTrips) {
  const auto file = Safetensors::parse(sample());
  ASSERT_TRUE(file.ok()) << file.error().message;
  EXPECT_EQ(*file->read<float>("reals", 2), (std::vector<float>{1.5F, -2.0F, 0.25F, 1e-20F, 3.0F, 7.0F}));
  EXPECT_EQ(*file->read<uint8_t>("bytes", 1), (std::vector<uint8_t>{1, 0, 1}));
  EXPECT_EQ(*file->read<uint32_t>("words", 1), (std::vector<uint32_t>{4'000'000'000U}));
  EXPECT_EQ(*file->read<uint16_t>("halves", 2), (std::vector<uint16_t>{65'535, 1}));
  EXPECT_TRUE(file->read<uint32_t>("empty", 2)->empty());
  EXPECT_EQ(file->find("reals")->shape, (std::vector<uint64_t>{2, 3}));
  EXPECT_EQ(*file->metadata("model"), "a \"quoted\" näme");
  EXPECT_EQ(*file->metadata_number("seed"), 42U);
}

TEST(Safetensors, NamesWhatIsMissingOrOfAnotherType) {
  const auto file = Safetensors::parse(sample());
  ASSERT_TRUE(file.ok());
  EXPECT_NE(file->read<float>("absent", 1).error().message.find("'absent' is missing"), std::string::npos);
  EXPECT_NE(file->read<float>("words", 1).error().message.find("U32 [1]"), std::string::npos);
  EXPECT_FALSE(file->read<float>("reals", 1).ok());
  EXPECT_FALSE(file->metadata("absent").ok());
  EXPECT_FALSE(file->metadata_number("model").ok());
  EXPECT_FALSE(file->has("absent"));
}

TEST(Safetensors, ReadsWhatTheReferenceWrites) {
  const std::string header = R"({"a":{"dtype":"F32","shape":[],"data_offsets":[0,4]}}  )";
  const auto file = Safetensors::parse(file_of(header, std::string("\0\0\x80\x3f", 4)));
  ASSERT_TRUE(file.ok()) << file.error().message;
  EXPECT_EQ(*file->read<float>("a", 0), std::vector<float>{1.0F});
}

TEST(Safetensors, RefusesBadFiles) {
  const std::string data(16, 'x');
  const char* headers[] = {
      "",
      "[]",
      "{",
      R"({"a":1})",
      R"({"a":{"dtype":"F32","shape":[4]}})",
      R"({"a":{"dtype":"BF16","shape":[8],"data_offsets":[0,16]}})",
      R"({"a":{"dtype":"F32","shape":[4],"data_offsets":[0]}})",
      R"({"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16,16]}})",
      R"({"a":{"dtype":"F32","shape":[4],"data_offsets":[16,0]}})",
      R"({"a":{"dtype":"F32","shape":[5],"data_offsets":[0,20]}})",                    // past the end
      R"({"a":{"dtype":"F32","shape":[3],"data_offsets":[0,16]}})",                    // shape too small
      R"({"a":{"dtype":"F32","shape":[3],"data_offsets":[0,12]}})",                    // bytes left over
      R"({"a":{"dtype":"F32","shape":[3],"data_offsets":[4,16]}})",                    // a gap
      R"({"a":{"dtype":"F32","shape":[-4],"data_offsets":[0,16]}})",                   // negative
      R"({"a":{"dtype":"F32","shape":[4.0],"data_offsets":[0,16]}})",                  // no integer
      R"({"a":{"dtype":"F32","shape":[4611686018427387905],"data_offsets":[0,4]}})",   // product wraps to 4
      R"({"a":{"dtype":"U8","shape":[1,1,1,1,1,1,1,1,16],"data_offsets":[0,16]}})",    // too many dimensions
      R"({"a":{"dtype":"F32","shape":[4],"data_offsets":[0,18446744073709551616]}})",  // beyond 64 bits
      R"({"a":{"dtype":"U8","shape":[16],"data_offsets":[0,16]},"a":{"dtype":"U8","shape":[0],"data_offsets":[16,16]}})",
      R"({"a":{"dtype":"U8","shape":[16],"data_offsets":[0,16]},"b":{"dtype":"U8","shape":[8],"data_offsets":[8,16]}})",
      R"({"__metadata__":{"k":1},"a":{"dtype":"U8","shape":[16],"data_offsets":[0,16]}})",
      R"({"__metadata__":{"k":"1","k":"2"},"a":{"dtype":"U8","shape":[16],"data_offsets":[0,16]}})",
      R"({"__metadata__":[],"a":{"dtype":"U8","shape":[16],"data_offsets":[0,16]}})",
  };
  for (const char* header : headers) {
    const auto file = Safetensors::parse(file_of(header, data));
    ASSERT_FALSE(file.ok()) << header;
    EXPECT_EQ(file.error().code, ErrorCode::kCorrupt);
  }
  EXPECT_FALSE(Safetensors::parse("").ok());
  EXPECT_FALSE(Safetensors::parse("1234567").ok());
  EXPECT_FALSE(Safetensors::parse(std::string(8, '\xff')).ok());
  const std::string nested = std::string(5000, '[');
  EXPECT_FALSE(Safetensors::parse(file_of(nested, "")).ok());
}

TEST(Safetensors, EveryTruncationIsAnError) {
  const std::string whole = sample();
  for (size_t size = 0; size < whole.size(); ++size)
    EXPECT_FALSE(Safetensors::parse(whole.substr(0, size)).ok()) << size;
}

TEST(Safetensors, SurvivesFlippedBytes) {
  const std::string whole = sample();
  Rng rng(3);
  for (int i = 0; i < 3000; ++i) {
    std::string bent = whole;
    for (int flips = 0; flips < 3; ++flips) bent[rng.below(bent.size())] = static_cast<char>(rng.next());
    const auto file = Safetensors::parse(std::move(bent));
    if (file.ok()) (void)file->read<float>("reals", 2);
  }
}

TEST(Safetensors, SaysWhichFile) {
  const auto file = Safetensors::load("/nonexistent/file.safetensors");
  ASSERT_FALSE(file.ok());
  EXPECT_NE(file.error().message.find("/nonexistent/file.safetensors"), std::string::npos);
}

}  // namespace
}  // namespace kindred

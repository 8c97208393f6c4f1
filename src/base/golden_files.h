// For tests: the golden vectors of a family (tests/data/golden/README.md describes them).
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <string>
#include <vector>

#include "base/json.h"

namespace kindred {

// Runs `check` on every file whose name starts with `family`, from tests/data/golden or from
// $KINDRED_GOLDEN_DIR if that is set. One test per family, not one per file: the files are then found
// when the test runs, not when it was built.
inline void for_each_golden(const std::string& family, const std::function<void(const Json&)>& check) {
  const char* given = std::getenv("KINDRED_GOLDEN_DIR");
  const std::filesystem::path directory =
      given != nullptr && *given != '\0' ? given : KINDRED_SOURCE_DIR "/tests/data/golden";
  ASSERT_TRUE(std::filesystem::is_directory(directory)) << directory << " is no directory";
  std::vector<std::filesystem::path> files;
  for (const auto& entry : std::filesystem::directory_iterator(directory)) {
    const std::string name = entry.path().filename().string();
    if (name.starts_with(family) && entry.path().extension() == ".json") files.push_back(entry.path());
  }
  std::sort(files.begin(), files.end());
  if (files.empty() && given != nullptr) GTEST_SKIP() << "no " << family << "* in " << directory;
  ASSERT_FALSE(files.empty()) << "no " << family << "* in " << directory;
  for (const std::filesystem::path& file : files) {
    SCOPED_TRACE(file.filename().string());
    std::ifstream in(file);
    const Json golden = Json::parse(in, nullptr, false);
    ASSERT_FALSE(golden.is_discarded());
    check(golden);
    if (::testing::Test::HasFatalFailure()) return;
  }
  ::testing::Test::RecordProperty("files", static_cast<int>(files.size()));
}

// Row-major numbers of a list of lists (of lists).
template <class T>
void flatten_into(const Json& list, std::vector<T>& out) {
  for (const Json& element : list) {
    if (element.is_array()) flatten_into(element, out);
    else out.push_back(element.get<T>());
  }
}

template <class T>
std::vector<T> flat(const Json& list) {
  std::vector<T> out;
  flatten_into(list, out);
  return out;
}

}  // namespace kindred

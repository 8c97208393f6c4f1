#include "net/task.h"

#include <gtest/gtest.h>

#include <vector>

namespace kindred::net {
namespace {

TEST(Cancel, RunsCallbacksOnceInOrder) {
  CancelSource source;
  std::vector<int> ran;
  const auto first = source.token().on_cancel([&] { ran.push_back(1); });
  const auto second = source.token().on_cancel([&] { ran.push_back(2); });
  EXPECT_FALSE(source.token().cancelled());
  source.cancel();
  source.cancel();
  EXPECT_EQ(ran, (std::vector{1, 2}));
  EXPECT_TRUE(source.token().cancelled());
}

TEST(Cancel, ARegistrationThatIsGoneIsNotCalled) {
  CancelSource source;
  bool called = false;
  {
    const auto registration = source.token().on_cancel([&] { called = true; });
  }
  auto other = source.token().on_cancel([&] { called = true; });
  other = CancelToken::Registration();
  source.cancel();
  EXPECT_FALSE(called);
}

TEST(Cancel, ARegistrationMayMoveAndReplaceAnother) {
  CancelSource source;
  std::vector<int> ran;
  auto one = source.token().on_cancel([&] { ran.push_back(1); });
  auto two = source.token().on_cancel([&] { ran.push_back(2); });
  one = std::move(two);
  const CancelToken::Registration kept(std::move(one));
  source.cancel();
  EXPECT_EQ(ran, std::vector{2});
}

TEST(Cancel, ALateRegistrationIsCalledAtOnce) {
  CancelSource source;
  source.cancel();
  bool called = false;
  const auto registration = source.token().on_cancel([&] { called = true; });
  EXPECT_TRUE(called);
}

TEST(Cancel, CallbacksMayUnregisterOthersAndDestroyTheSource) {
  auto source = std::make_unique<CancelSource>();
  const CancelToken token = source->token();
  std::vector<int> ran;
  CancelToken::Registration first, second, third;
  first = token.on_cancel([&] {
    ran.push_back(1);
    first = {};   // itself
    second = {};  // the next one
    source.reset();
  });
  second = token.on_cancel([&] { ran.push_back(2); });
  third = token.on_cancel([&] { ran.push_back(3); });
  source->cancel();
  EXPECT_EQ(ran, (std::vector{1, 3}));
  EXPECT_TRUE(token.cancelled());
}

TEST(Cancel, ADefaultTokenIsNeverCancelled) {
  const CancelToken token;
  const auto registration = token.on_cancel([] { FAIL(); });
  EXPECT_FALSE(token.cancelled());
}

}  // namespace
}  // namespace kindred::net

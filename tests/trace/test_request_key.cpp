// The key is part of the format: the vectors stand in docs/trace-format.md and may never change.
#include <gtest/gtest.h>

#include <cstdio>
#include <set>
#include <vector>

#include "trace/event.h"
#include "trace/request_key.h"

namespace assay {
namespace {

TEST(RequestKey, MatchesTheVectorsOfTheSpecification) {
  const std::vector<int64_t> tokens = {1, 2, 3};
  EXPECT_EQ(RequestKey({}, 0), 0x7bdc4ab889ee5b72u);
  EXPECT_EQ(RequestKey(tokens, 0), 0x324d6f75cb604f8eu);
  EXPECT_EQ(RequestKey(tokens, 1), 0xafc3c177541c64b4u);
}

TEST(RequestKey, TellsPromptsAndOrdinalsApart) {
  std::set<uint64_t> keys;
  std::vector<int64_t> tokens;
  for (int64_t length = 0; length < 50; ++length) {
    for (int64_t ordinal = 0; ordinal < 20; ++ordinal) keys.insert(RequestKey(tokens, ordinal));
    tokens.push_back(0);
  }
  EXPECT_EQ(keys.size(), 50u * 20);
  EXPECT_EQ(keys.count(0), 0u);
  EXPECT_NE(RequestKey(std::vector<int64_t>{1, 2}, 0), RequestKey(std::vector<int64_t>{2, 1}, 0));
}

TEST(Phase, NamesParseBackAndUnknownOnesAreUnknown) {
  for (int i = 0; i < 8; ++i) EXPECT_EQ(ParsePhase(NameOf(static_cast<Phase>(i))), static_cast<Phase>(i));
  EXPECT_EQ(ParsePhase("prefil"), Phase::kUnknown);
  EXPECT_EQ(NameOf(static_cast<Phase>(200)), "unknown");
}

}  // namespace
}  // namespace assay

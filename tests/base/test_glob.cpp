#include <gtest/gtest.h>

#include "base/glob.h"

namespace assay {
namespace {

TEST(GlobMatches, StarsQuestionMarksAndSets) {
  EXPECT_TRUE(GlobMatches("layers.*.attn.*", "layers.12.attn.out"));
  EXPECT_FALSE(GlobMatches("layers.*.attn.*", "layers.12.mlp.down"));
  EXPECT_TRUE(GlobMatches("*a*b", "xaxxab"));
  EXPECT_TRUE(GlobMatches("layers.[0-3].out", "layers.2.out"));
  EXPECT_TRUE(GlobMatches("*", ""));
  EXPECT_FALSE(GlobMatches("?", ""));
  for (const char* other : {"layers.[!0-3].out", "layers.[^0-3].out"}) {
    EXPECT_FALSE(GlobMatches(other, "layers.2.out")) << other;
    EXPECT_TRUE(GlobMatches(other, "layers.7.out")) << other;
  }
}

TEST(GlobMatches, OpenSetsAndBracketsInSetsAreText) {
  EXPECT_FALSE(GlobMatches("a[bc", "ab"));
  EXPECT_TRUE(GlobMatches("a[bc", "a[bc"));
  EXPECT_TRUE(GlobMatches("a[]]b", "a]b"));
  EXPECT_TRUE(GlobMatches("a[!]]b", "axb"));
}

}  // namespace
}  // namespace assay

#include <gtest/gtest.h>

#include <algorithm>

#include "oracle/row_walk.h"

namespace assay::oracle {
namespace {

using Met = std::vector<std::vector<int64_t>>;

TEST(RowWalk, TheRightWalkMeetsEachRowOnce) {
  const RowWalk view{1024, 4, 256};
  EXPECT_EQ(RowsThatMeet(view, 3, view).value(), (Met{{0}, {0}, {0}, {0}, {1}, {1}, {1}, {1}, {2}, {2}, {2}, {2}}));
}

// A view [T, H, d] of wider heads, walked as if [T · H, d] had T rows.
TEST(RowWalk, StrideOfTheHeadsTakenForThatOfTheRowsMeetsTheFirstHeadsOnly) {
  EXPECT_EQ(RowsThatMeet({1024, 4, 256}, 5, {256, 1, 0}).value(),
            (Met{{0}, {1}, {2}, {3}, {4}, {}, {}, {}, {}, {}, {}, {}, {}, {}, {}, {}, {}, {}, {}, {}}));
}

// Rows 704 apart stepped through by 64: every eleventh step meets a row.
TEST(RowWalk, RowsOfAWiderMatrixTakenAsGaplessAreMetByTheirMultiple) {
  const Met met = RowsThatMeet({704, 1, 0}, 23, {64, 1, 0}).value();
  EXPECT_EQ(met[0], (std::vector<int64_t>{0}));
  EXPECT_EQ(met[1], (std::vector<int64_t>{11}));
  EXPECT_EQ(met[2], (std::vector<int64_t>{22}));
  for (size_t t = 3; t < 23; ++t) EXPECT_TRUE(met[t].empty()) << t;
}

TEST(RowWalk, OverlappingRowsAreMetSeveralTimes) {
  EXPECT_EQ(RowsThatMeet({4, 2, 2}, 2, {2, 2, 2}).value(), (Met{{0}, {0, 1}, {1}, {}}));
}

TEST(RowWalk, OtherWalksHoldNeitherTheRightOneNorOneTwice) {
  const RowWalk view{1024, 4, 256};
  const std::vector<RowWalk> walks = OtherWalks(view, 5, 64);
  EXPECT_NE(std::find(walks.begin(), walks.end(), RowWalk{256, 1, 0}), walks.end());
  for (size_t i = 0; i < walks.size(); ++i) {
    EXPECT_FALSE(walks[i] == view);
    EXPECT_EQ(std::count(walks.begin(), walks.end(), walks[i]), 1);
  }
  EXPECT_TRUE(OtherWalks({64, 1, 0}, 5, 64).empty()) << "a gapless matrix has no other stride";
}

TEST(RowWalk, SizesThatDoNotFitAreRefused) {
  EXPECT_FALSE(RowsThatMeet({INT64_MAX, 4, 256}, 5, {256, 1, 0}).ok());
  EXPECT_FALSE(RowsThatMeet({4, 1, 0}, -1, {4, 1, 0}).ok());
  EXPECT_FALSE(RowsThatMeet({4, INT64_MAX / 2, 1}, 5, {4, 1, 0}).ok());
  EXPECT_TRUE(RowsThatMeet({4, 1, 0}, 0, {4, 1, 0}).value().empty());
}

}  // namespace
}  // namespace assay::oracle

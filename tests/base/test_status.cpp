#include <gtest/gtest.h>

#include "base/status.h"

namespace assay {
namespace {

Result<int> Half(int value) {
  if (value % 2 != 0) return Status::BadInput("odd");
  return value / 2;
}

Status Quarter(int value, int* out) {
  ASSAY_ASSIGN_OR_RETURN(int half, Half(value));
  ASSAY_ASSIGN_OR_RETURN(*out, Half(half));
  return {};
}

TEST(Status, MacroPassesTheValueOn) {
  int out = 0;
  EXPECT_TRUE(Quarter(12, &out).ok());
  EXPECT_EQ(out, 3);
}

TEST(Status, MacroReturnsTheFirstError) {
  int out = 7;
  const Status status = Quarter(6, &out);
  EXPECT_EQ(status.code(), Code::kBadInput);
  EXPECT_EQ(status.message(), "odd");
  EXPECT_EQ(out, 7);
}

}  // namespace
}  // namespace assay

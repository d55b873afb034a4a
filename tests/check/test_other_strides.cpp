// Other strides than a view's own, tried on the memory behind it: what a kernel that takes them gives is named, and
// whatever strides a trace has, nothing outside of the recorded memory is read.
#include <gtest/gtest.h>

#include <cstdint>
#include <string>

#include "check/check.h"
#include "small_trace.h"
#include "verdicts.h"

namespace assay {
namespace {

using testing::Judge;
using testing::Noise;
using testing::Put;
using testing::SmallTrace;
using Values = std::vector<float>;

// mlp.act is the last 4 of 7 rows in memory; the kernel steps by `pitch` from its first one. The weight is one row, so
// that no address follows from its stride `other`, which is the one to be tried on mlp.act.
CheckResult Down(int64_t other, int64_t pitch, bool noise = false) {
  constexpr int64_t kRows = 4, kFirst = 3, kCols = 16;
  SmallTrace t;
  const uint64_t a = t.Request({1, 2, 3, 4});
  const std::vector<RowRun> rows = {{a, 0, kRows, 0, false}};
  const Values memory = Noise((kFirst + kRows) * kCols, 1), weight = Noise(kCols, 2);
  Values y;
  for (int64_t r = 0; r < kRows; ++r) {
    double sum = 0;
    for (int64_t c = 0; c < kCols; ++c) {
      sum +=
          double{memory[static_cast<size_t>(kFirst * kCols + r * pitch + c)]} * double{weight[static_cast<size_t>(c)]};
    }
    y.push_back(static_cast<float>(sum));
  }
  const uint64_t base = 0x10000;
  t.Record("layers.0.mlp.down_proj.weight", "out in", {1, kCols}, weight,
           {.step = -1, .phase = Phase::kLoad, .strides = {other, 1}});
  t.Record("layers.0.mlp.act.storage", "n", {static_cast<int64_t>(memory.size())}, memory, {.address = base});
  t.Record("layers.0.mlp.act", "T f", {kRows, kCols}, Values(memory.begin() + kFirst * kCols, memory.end()),
           {.rows = rows, .address = base + 4 * kFirst * kCols});
  t.Record("layers.0.mlp.down", "T h", {kRows, 1}, noise ? Noise(kRows, 3) : y, {.rows = rows});
  return Judge(t, {"linear"});
}
TEST(OtherStrides, RowsReadBackwardsAreAStride) {
  EXPECT_FIRST(Down(-16, -16), "layers.0.mlp.down", "STRIDE");
  EXPECT_RULED_OUT(Down(-16, 16));
}
// Values lie behind the keys of a fused row; the kernel takes the base pointer, and finds keys.
CheckResult Fused(bool from_the_beginning) {
  constexpr int64_t kRows = 9, kCols = 8, kPitch = 2 * kCols;
  SmallTrace t;
  const uint64_t a = t.Request({1, 2, 3});
  const std::vector<RowRun> rows = {{a, 0, kRows, 0, false}};
  const Values memory = Noise(kRows * kPitch, 1), weight = Noise(3 * kCols, 2);
  Values second, y;
  for (int64_t r = 0; r < kRows; ++r) {
    const auto row = memory.begin() + r * kPitch;
    second.insert(second.end(), row + kCols, row + kPitch);
    for (int64_t n = 0; n < 3; ++n) {
      double sum = 0;
      for (int64_t c = 0; c < kCols; ++c)
        sum += double{row[(from_the_beginning ? 0 : kCols) + c]} * double{weight[static_cast<size_t>(n * kCols + c)]};
      y.push_back(static_cast<float>(sum));
    }
  }
  const uint64_t base = 0x10000;
  t.Record("layers.0.mlp.down_proj.weight", "out in", {3, kCols}, weight, {.step = -1, .phase = Phase::kLoad});
  t.Record("layers.0.mlp.act.storage", "n", {kRows * kPitch}, memory, {.address = base});
  // The recorder reads by strides from where the view begins.
  t.Record("layers.0.mlp.act", "T f", {kRows, kCols}, Values(memory.begin() + kCols, memory.end()),
           {.rows = rows, .address = base + 4 * kCols, .strides = {kPitch, 1}});
  t.Record("layers.0.mlp.down", "T h", {kRows, 3}, y, {.rows = rows});
  return Judge(t, {"linear"});
}
TEST(OtherStrides, ViewReadFromTheBeginningOfItsStorageIsAStride) {
  EXPECT_RULED_OUT(Fused(false));
  const CheckResult r = Fused(true);
  EXPECT_FIRST(r, "layers.0.mlp.down", "STRIDE");
  EXPECT_NE(r.findings[0].evidence[0].find("from the beginning of its storage"), std::string::npos);
}

// The first two end before and behind the memory, the others overflow an int64.
TEST(OtherStrides, MemoryOutsideOfTheStorageIsNotRead) {
  for (const int64_t other :
       {-(int64_t{1} << 40), int64_t{1} << 40, int64_t{1} << 62, -(int64_t{1} << 62), INT64_MAX, INT64_MIN}) {
    const CheckResult r = Down(other, 16, true);
    ASSERT_FALSE(r.findings.empty()) << other;
    EXPECT_EQ(r.findings[0].name, "layers.0.mlp.down");
    EXPECT_NE(r.findings[0].cls, "STRIDE");
  }
}

// A wrong norm of eight axes with operands of 28 strides an axis, 28^8 mixtures; `ones`: extents of the axes behind the
// second, where every stride stays inside of the memory.
CheckResult ManyStrides(bool ones, int64_t step) {
  SmallTrace t;
  const uint64_t a = t.Request({1, 2});
  std::vector<int64_t> shape(8, ones ? 1 : 2);
  shape[0] = shape[1] = shape[7] = 2;
  const size_t n = ones ? 8 : 256;
  const Put rows{.rows = {{a, 0, 2, 0, false}}};
  const std::string axes = "T a b c d e f g";
  t.Record("layers.0.my.x.storage", "n", {static_cast<int64_t>(n)}, Noise(n, 1));
  t.Record("layers.0.my.x", axes, shape, Noise(n, 1), rows);
  t.Record("layers.0.my.w", "g", {2}, Noise(2, 2));
  std::string inputs = "layers.0.my.x,layers.0.my.w";
  for (int64_t i = 0; i < 28; ++i) {
    const std::string name = "layers.0.my.s" + std::to_string(i);
    inputs += "," + name;
    t.Record(name, "i a b c d e f g", std::vector<int64_t>(8, 1), Noise(1, 3),
             {.strides = std::vector<int64_t>(8, step + i)});
  }
  Put result = rows;
  result.meta = {{"op", "rmsnorm"}, {"inputs", inputs}};
  t.Record("layers.0.my.y", axes, shape, Noise(n, 4), result);
  return Judge(t, {"declared"});
}
TEST(OtherStrides, AFewOfManyMixturesAreTried) {
  for (const bool ones : {false, true}) {
    const CheckResult r = ManyStrides(ones, int64_t{1} << 40);
    ASSERT_FALSE(r.findings.empty()) << ones;
    EXPECT_EQ(r.findings[0].name, "layers.0.my.y");
    EXPECT_NE(r.findings[0].cls, "STRIDE");
  }
}

}  // namespace
}  // namespace assay

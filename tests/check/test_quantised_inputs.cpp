// Codes of an activation that do not come back to it: read by another pitch, wrapped, or of another scale.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>

#include "small_trace.h"
#include "verdicts.h"

namespace assay {
namespace {

using testing::Judge;
using testing::Noise;
using testing::SmallTrace;
using Values = std::vector<float>;

constexpr int64_t kRows = 14, kSize = 32, kPitch = 2 * kSize;

// The activation is the first half of each row of `memory`; codes are of at(row, column) under the scale of their row,
// its largest magnitude over `top`, through `store`.
CheckResult Codes(
    const std::function<double(const Values&, int64_t, int64_t)>& at, double top = 127,
    const std::function<double(double)>& store = [](double z) { return std::clamp(z, -127.0, 127.0); }) {
  const Values memory = Noise(kRows * kPitch, 9);
  std::vector<int8_t> codes;
  Values scales;
  for (int64_t r = 0; r < kRows; ++r) {
    double largest = 0;
    for (int64_t c = 0; c < kSize; ++c) largest = std::max(largest, std::abs(at(memory, r, c)));
    scales.push_back(static_cast<float>(largest / top));
    for (int64_t c = 0; c < kSize; ++c)
      codes.push_back(static_cast<int8_t>(store(std::nearbyint(at(memory, r, c) / double{scales.back()}))));
  }
  SmallTrace t;
  const uint64_t a = t.Request({1, 2, 3});
  const std::vector<RowRun> rows = {{a, 0, kRows, 0, false}};
  t.Record("layers.0.mlp.act.storage", "n", {kRows * kPitch}, memory, {.address = 1 << 30});
  t.Record("layers.0.mlp.act", "T f", {kRows, kSize}, memory,
           {.rows = rows, .address = 1 << 30, .strides = {kPitch, 1}});
  t.Record("layers.0.mlp.act.q", "T f", {kRows, kSize}, codes, {.rows = rows, .meta = {{"quant", "int8_token"}}});
  t.Record("layers.0.mlp.act.q_scale", "T one", {kRows, 1}, scales, {.rows = rows, .meta = {{"quant", "int8_token"}}});
  return Judge(t, {"quantised-inputs"});
}
double Own(const Values& memory, int64_t r, int64_t c) { return double{memory[static_cast<size_t>(r * kPitch + c)]}; }

TEST(QuantisedInputs, RowsReadByTheirWidthInPlaceOfTheirPitchAreAStride) {
  EXPECT_RULED_OUT(Codes(Own));
  const CheckResult r = Codes([](const Values& memory, int64_t row, int64_t c) {
    return double{memory[static_cast<size_t>(row * kSize + c)]};
  });
  ASSERT_EQ(r.findings.size(), 1u);
  EXPECT_EQ(r.findings[0].name, "layers.0.mlp.act.q");
  EXPECT_EQ(r.findings[0].cls, "STRIDE");
}
TEST(QuantisedInputs, CodesThatWrappedAreARangeFault) {
  EXPECT_RULED_OUT(Codes(Own, 127.6));  // cut
  const CheckResult r = Codes(Own, 127.6, [](double z) { return z > 127 ? z - 256 : z; });
  ASSERT_EQ(r.findings.size(), 1u);
  EXPECT_EQ(r.findings[0].name, "layers.0.mlp.act.q");
  EXPECT_EQ(r.findings[0].cls, "RANGE");
}
TEST(QuantisedInputs, CodesOfAnotherActivationAreNeither) {
  const CheckResult r = Codes([](const Values& memory, int64_t row, int64_t c) {
    return double{memory[static_cast<size_t>((row * 7 + 3) % kRows * kPitch + (c * 5 + 1) % kSize)]};
  });
  EXPECT_FIRST(r, "layers.0.mlp.act.q", "Q-SCALE");
}

}  // namespace
}  // namespace assay

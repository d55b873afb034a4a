// The tanh form of GELU written out on tensors in bf16, as `gelu_new` is: what its roundings cost is allowed, and no
// other function or order of gate and up passes for it.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <vector>

#include "check/check.h"
#include "small_trace.h"
#include "verdicts.h"

namespace assay {
namespace {

using testing::Bf16;
using testing::Judge;
using testing::Noise;
using testing::SmallTrace;

constexpr int64_t kRows = 16, kF = 64;

// As eager code does it: each step makes a tensor.
double GeluNew(double x) {
  const double cubic = Bf16(0.044715 * Bf16(x * x * x)), argument = Bf16(std::sqrt(2 / M_PI) * Bf16(x + cubic));
  return Bf16(Bf16(0.5 * x) * Bf16(1 + Bf16(std::tanh(argument))));
}
double Silu(double x) { return Bf16(x / (1 + std::exp(-x))); }
double Gelu(double x) { return Bf16(x / 2 * std::erfc(-x / std::sqrt(2.0))); }

// mlp.act of gates in ±4 and ups in ±1, or of gates alone.
CheckResult Activated(const std::function<double(double)>& act, const char* declared, bool gated,
                      bool swapped = false) {
  SmallTrace t;
  const uint64_t a = t.Request(std::vector<int64_t>(kRows, 1));
  testing::Put put{.rows = {{a, 0, kRows, 0, false}}, .compute = DType::kBF16};
  std::vector<float> gate = Noise(kRows * kF, 1), up = Noise(kRows * kF, 2), y;
  for (float& g : gate) g = static_cast<float>(Bf16(4 * double{g}));
  for (float& u : up) u = static_cast<float>(Bf16(u));
  for (size_t i = 0; i < gate.size(); ++i) {
    const double of = act(double{swapped ? up[i] : gate[i]}), by = double{swapped ? gate[i] : up[i]};
    y.push_back(static_cast<float>(gated ? Bf16(of * by) : of));
  }
  t.Record("layers.0.mlp.gate", "T f", {kRows, kF}, gate, put);
  if (gated) t.Record("layers.0.mlp.up", "T f", {kRows, kF}, up, put);
  put.meta = {{"activation", declared}};
  t.Record("layers.0.mlp.act", "T f", {kRows, kF}, y, put);
  return Judge(t, {"experts"});
}

TEST(Activations, GeluNewWrittenOutInBf16IsRight) {
  EXPECT_RULED_OUT(Activated(GeluNew, "gelu_new", true));
  EXPECT_RULED_OUT(Activated(GeluNew, "gelu_new", false));
}

// The fused function rounds once, and what rounds at each step is not it.
TEST(Activations, StepsInBf16AreNotTheFusedFunction) {
  EXPECT_FALSE(Activated(GeluNew, "gelu_tanh", false).findings.empty());
}

TEST(Activations, OtherFunctionsForGeluNewAreNamed) {
  for (const bool gated : {false, true}) {
    const CheckResult silu = Activated(Silu, "gelu_new", gated);
    EXPECT_FIRST(silu, "layers.0.mlp.act", "KERNEL");
    EXPECT_NE(silu.findings[0].evidence[0].find("fits the activation silu"), std::string::npos);
    const CheckResult other = Activated(GeluNew, "silu", gated);
    EXPECT_FIRST(other, "layers.0.mlp.act", "KERNEL");
    EXPECT_NE(other.findings[0].evidence[0].find("fits the activation gelu_tanh"), std::string::npos);
  }
}

TEST(Activations, GateAndUpInTheOtherOrderAreNamed) {
  EXPECT_FIRST(Activated(GeluNew, "gelu_new", true, true), "layers.0.mlp.act", "MOE-LAYOUT");
  EXPECT_FIRST(Activated(Gelu, "gelu_new", true, true), "layers.0.mlp.act", "MOE-LAYOUT");
}

}  // namespace
}  // namespace assay

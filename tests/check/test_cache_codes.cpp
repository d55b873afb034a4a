// Cache rows whose bytes were read as another 8-bit type, and rows that only look so.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>

#include "small_trace.h"
#include "tensor/decode.h"
#include "verdicts.h"

namespace assay {
namespace {

using testing::Judge;
using testing::Noise;
using testing::SmallTrace;
using Values = std::vector<float>;

constexpr int64_t kRows = 12, kHeads = 2, kWidth = 8;
constexpr double kScale = 0.02;

// The byte of the nearest finite value.
uint32_t Encode(double x, DType dtype) {
  uint32_t best = 0;
  double nearest = HUGE_VAL;
  for (uint32_t byte = 0; byte < 256; ++byte) {
    const double value = DecodeBits(byte, dtype);
    if (std::isfinite(value) && std::abs(value - x) < nearest) nearest = std::abs(value - x), best = byte;
  }
  return best;
}
Values ThroughCodes(Values x, DType written, DType read) {
  for (float& v : x) v = static_cast<float>(DecodeBits(Encode(double{v} / kScale, written), read) * kScale);
  return x;
}
const Values& Keys() {
  static const Values k = Noise(kRows * kHeads * kWidth, 3);
  return k;
}
using Meta = std::vector<std::pair<std::string_view, std::string_view>>;
const Meta kE4m3 = {{"kv_cache_dtype", "fp8_e4m3"}, {"k_scale", "0.02"}};

CheckResult Written(const Values& back) {
  SmallTrace t;
  const uint64_t a = t.Request({1, 2, 3});
  const std::vector<RowRun> rows = {{a, 0, kRows, 0, false}};
  t.Record("layers.0.attn.k", "T Hkv d", {kRows, kHeads, kWidth}, Keys(), {.rows = rows});
  t.Record("layers.0.attn.kv_write", "T Hkv d", {kRows, kHeads, kWidth}, back,
           {.rows = rows, .meta = kE4m3, .compute = DType::kF8E4M3FN});
  return Judge(t, {"cache-write"});
}
CheckResult Read(const Values& back) {
  SmallTrace t;
  const uint64_t a = t.Request({1, 2, 3});
  const std::vector<RowRun> rows = {{a, 0, kRows, 0, false}};
  t.Record("layers.0.attn.kv_write", "T Hkv d", {kRows, kHeads, kWidth},
           ThroughCodes(Keys(), DType::kF8E4M3FN, DType::kF8E4M3FN),
           {.rows = rows, .meta = kE4m3, .compute = DType::kF8E4M3FN});
  t.Record("layers.0.attn.k_read", "T Hkv d", {kRows, kHeads, kWidth}, back,
           {.rows = rows, .meta = kE4m3, .compute = DType::kF8E4M3FN});
  return Judge(t, {"cache-read"});
}

TEST(CacheCodes, BytesReadAsAnotherTypeAreAScaleFault) {
  EXPECT_RULED_OUT(Written(ThroughCodes(Keys(), DType::kF8E4M3FN, DType::kF8E4M3FN)));
  for (const DType read : {DType::kF8E5M2, DType::kF8E5M2FNUZ, DType::kI8}) {
    const CheckResult r = Written(ThroughCodes(Keys(), DType::kF8E4M3FN, read));
    EXPECT_FIRST(r, "layers.0.attn.kv_write", "KV-SCALE");
    EXPECT_NE(r.findings[0].evidence[0].find(NameOf(read)), std::string::npos) << r.findings[0].evidence[0];
  }
  const CheckResult other = Written(ThroughCodes(Keys(), DType::kF8E5M2, DType::kF8E4M3FN));
  EXPECT_FIRST(other, "layers.0.attn.kv_write", "KV-SCALE");
}
TEST(CacheCodes, RowsGatheredWithAnotherTypeAreAScaleFault) {
  EXPECT_RULED_OUT(Read(ThroughCodes(Keys(), DType::kF8E4M3FN, DType::kF8E4M3FN)));
  EXPECT_FIRST(Read(ThroughCodes(Keys(), DType::kF8E4M3FN, DType::kF8E5M2)), "layers.0.attn.k_read", "KV-SCALE");
}
// Neither another row nor another code: nobody is blamed without evidence.
TEST(CacheCodes, OwnRowsChangedInNoKnownWayAreOfUnknownCause) {
  Values back = Keys();
  for (float& v : back) v = static_cast<float>(std::copysign(std::pow(std::abs(double{v}), 0.37), double{v}));
  EXPECT_FIRST(Written(back), "layers.0.attn.kv_write", "KERNEL");
}
TEST(CacheCodes, RowsOfSomebodyElseStayTheirIdentity) {
  EXPECT_FIRST(Written(ThroughCodes(Noise(kRows * kHeads * kWidth, 99), DType::kF8E4M3FN, DType::kF8E4M3FN)),
               "layers.0.attn.kv_write", "KV-IDENT");
}

}  // namespace
}  // namespace assay

// Operations that took something else than their operands: keys left out or of other slots, another rank's numbers, the
// buffer of another layer, rows at another pitch, squares that leave the range.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>

#include "check/check.h"
#include "small_trace.h"
#include "verdicts.h"

namespace assay {
namespace {

using testing::ExpectNamed;
using testing::Judge;
using testing::Noise;
using testing::Put;
using testing::SmallTrace;

double At(const std::vector<float>& x, int64_t i) { return double{x[static_cast<size_t>(i)]}; }

// ---- attention -----------------------------------------------------------------------------------------------------

constexpr int64_t kWidth = 4, kKeys = 21, kFirst = 15;  // one head; the last six positions are a second chunk

// Which key row each position reads, and whether query at q sees the key at p.
struct Kernel {
  std::function<int64_t(int64_t)> row = [](int64_t p) { return p; };
  std::function<bool(int64_t, int64_t)> sees = [](int64_t q, int64_t p) { return p <= q; };
  double slope = 0;
};
std::vector<float> Attend(const std::vector<float>& q, const std::vector<float>& k, const std::vector<float>& v,
                          int64_t first, const Kernel& kernel) {
  std::vector<float> out;
  for (int64_t t = 0; t < kKeys - first; ++t) {
    double total = 0, sum[kWidth] = {};
    for (int64_t p = 0; p < kKeys; ++p) {
      if (!kernel.sees(first + t, p)) continue;
      const int64_t row = kernel.row(p);
      double score = 0;
      for (int64_t i = 0; i < kWidth; ++i) score += At(q, t * kWidth + i) * At(k, row * kWidth + i) / 2;
      const double weight = std::exp(score + kernel.slope * static_cast<double>(p - first - t));
      total += weight;
      for (int64_t i = 0; i < kWidth; ++i) sum[i] += weight * At(v, row * kWidth + i);
    }
    for (double x : sum) out.push_back(static_cast<float>(x / total));
  }
  return out;
}

// Keys of a pool whose slot of position p is slot_of(p), the block table recorded; two slots a block.
int64_t SlotOf(int64_t p) { return (10 - p / 2) * 2 + p % 2 + 2; }

CheckResult SecondChunk(const Kernel& kernel, bool pool = false) {
  SmallTrace t;
  const uint64_t a = t.Request(std::vector<int64_t>(kFirst, 1));
  const std::vector<float> q = Noise(kKeys * kWidth, 1), k = Noise(kKeys * kWidth, 2), v = Noise(kKeys * kWidth, 3);
  const std::vector<RowRun> before = {{a, 0, kFirst, 0, false}}, now = {{a, 0, kKeys - kFirst, kFirst, false}};
  const auto part = [](const std::vector<float>& x, int64_t from, int64_t to) {
    return std::vector<float>(x.begin() + from * kWidth, x.begin() + to * kWidth);
  };
  for (const auto& [name, x] : {std::pair<const char*, const std::vector<float>&>{"k", k}, {"v", v}})
    t.Record(std::string("layers.0.attn.") + name, "T Hkv d", {kFirst, 1, kWidth}, part(x, 0, kFirst),
             {.rows = before});
  for (const auto& [name, x] : {std::pair<const char*, const std::vector<float>&>{"k", k}, {"v", v}})
    t.Record(std::string("layers.0.attn.") + name, "T Hkv d", {kKeys - kFirst, 1, kWidth}, part(x, kFirst, kKeys),
             {.rows = now, .step = 1});
  t.Record("layers.0.attn.q", "T H d", {kKeys - kFirst, 1, kWidth}, q.size() > 0 ? part(q, 0, kKeys - kFirst) : q,
           {.rows = now, .step = 1});
  std::vector<float> used_k = k, used_v = v;
  if (pool) {
    std::vector<float> pool_k = Noise(24 * kWidth, 4), pool_v = Noise(24 * kWidth, 5);
    std::vector<int64_t> table;
    for (int64_t p = 0; p < kKeys; ++p) {
      std::copy_n(k.begin() + p * kWidth, kWidth, pool_k.begin() + SlotOf(p) * kWidth);
      std::copy_n(v.begin() + p * kWidth, kWidth, pool_v.begin() + SlotOf(p) * kWidth);
      if (p % 2 == 0) table.push_back(SlotOf(p) / 2);
    }
    t.Record("block_table", "T n", {1, static_cast<int64_t>(table.size())}, table,
             {.rows = {{a, 0, 1, kKeys - 1, false}}, .step = 1, .meta = {{"block_size", "2"}}});
    t.Record("layers.0.attn.k_cache", "S Hkv d", {24, 1, kWidth}, pool_k, {.step = 1});
    t.Record("layers.0.attn.v_cache", "S Hkv d", {24, 1, kWidth}, pool_v, {.step = 1});
    used_k = pool_k;
    used_v = pool_v;
  }
  t.Record("layers.0.attn.out", "T H dv", {kKeys - kFirst, 1, kWidth}, Attend(q, used_k, used_v, kFirst, kernel),
           {.rows = now, .step = 1, .meta = {{"softmax_scale", "0.5"}}});
  return Judge(t, {"attention"});
}

TEST(OtherKeys, RightCallIsRuledOut) {
  EXPECT_RULED_OUT(SecondChunk({}));
  Kernel paged;
  paged.row = SlotOf;
  EXPECT_RULED_OUT(SecondChunk(paged, true));
}
TEST(OtherKeys, CausalBoundCountedFromTheChunkIsAMask) {
  Kernel kernel;
  kernel.sees = [](int64_t q, int64_t p) { return p <= q - kFirst; };
  const CheckResult r = SecondChunk(kernel);
  EXPECT_FIRST(r, "layers.0.attn.out", "MASK");
  EXPECT_EQ(r.findings[0].constant_value, -kFirst);
}
TEST(OtherKeys, KeysBehindTheLastTileAreAMaskWithTheirNumber) {
  Kernel kernel;
  kernel.sees = [](int64_t q, int64_t p) { return p <= q && p < 16; };
  const CheckResult r = SecondChunk(kernel);
  EXPECT_FIRST(r, "layers.0.attn.out", "MASK");
  EXPECT_EQ(r.findings[0].constant_value, -5);
}
TEST(OtherKeys, PoolReadWithoutItsTableIsAnotherIdentity) {
  EXPECT_FIRST(SecondChunk({}, true), "layers.0.attn.out", "KV-IDENT");  // slot p for position p
}

// Two ranks of one head each; rank 1 takes slope `used`.
CheckResult Slopes(double used) {
  SmallTrace t(2);
  const uint64_t a = t.Request(std::vector<int64_t>(kKeys, 1));
  const std::vector<RowRun> rows = {{a, 0, kKeys, 0, false}};
  for (int32_t rank = 0; rank < 2; ++rank) {
    const auto seed = static_cast<uint64_t>(10 * rank);
    const std::vector<float> q = Noise(kKeys * kWidth, seed + 1), k = Noise(kKeys * kWidth, seed + 2),
                             v = Noise(kKeys * kWidth, seed + 3), slope = {rank == 0 ? 0.5F : 0.125F};
    const Put put{.rows = rows, .rank = rank, .shard = {rank, 2, rank * kWidth, 2 * kWidth}};
    t.Record("layers.0.attn.q", "T H d", {kKeys, 1, kWidth}, q, put);
    t.Record("layers.0.attn.k", "T Hkv d", {kKeys, 1, kWidth}, k, put);
    t.Record("layers.0.attn.v", "T Hkv d", {kKeys, 1, kWidth}, v, put);
    t.Record("layers.0.attn.alibi_slopes", "H", {1}, slope, {.rank = rank, .shard = {rank, 2, rank, 2}});
    Kernel kernel;
    kernel.slope = rank == 0 ? 0.5 : used;
    Put out = put;
    out.meta = {{"softmax_scale", "0.5"}};
    t.Record("layers.0.attn.out", "T H dv", {kKeys, 1, kWidth}, Attend(q, k, v, 0, kernel), out);
  }
  return Judge(t, {"attention"});
}
TEST(OtherRanks, SlopesOfAnotherRankAreAShard) {
  ExpectNamed(Slopes(0.5), "layers.0.attn.out", "TP-SHARD");
  EXPECT_RULED_OUT(Slopes(0.125));
}
TEST(OtherRanks, SlopesOfNoRankAreNoShard) { EXPECT_NE(Slopes(0.3).findings.at(0).cls, "TP-SHARD"); }

// Two ranks of one head each; rank 1 attends over the keys and values of rank `read`.
CheckResult Keys(int32_t read) {
  SmallTrace t(2);
  const uint64_t a = t.Request(std::vector<int64_t>(kKeys, 1));
  const std::vector<RowRun> rows = {{a, 0, kKeys, 0, false}};
  for (int32_t rank = 0; rank < 2; ++rank) {
    const auto noise = [&](int32_t of, uint64_t seed) {
      return Noise(kKeys * kWidth, static_cast<uint64_t>(10 * of) + seed);
    };
    const std::vector<float> q = noise(rank, 1);
    const Put put{.rows = rows, .rank = rank, .shard = {rank, 2, rank * kWidth, 2 * kWidth}};
    t.Record("layers.0.attn.q", "T H d", {kKeys, 1, kWidth}, q, put);
    t.Record("layers.0.attn.k", "T Hkv d", {kKeys, 1, kWidth}, noise(rank, 2), put);
    t.Record("layers.0.attn.v", "T Hkv d", {kKeys, 1, kWidth}, noise(rank, 3), put);
    const int32_t from = rank == 0 ? 0 : read;
    Put out = put;
    out.meta = {{"softmax_scale", "0.5"}};
    t.Record("layers.0.attn.out", "T H dv", {kKeys, 1, kWidth}, Attend(q, noise(from, 2), noise(from, 3), 0, {}), out);
  }
  return Judge(t, {"attention"});
}
TEST(OtherRanks, KeysOfAnotherRankAreAShard) {
  ExpectNamed(Keys(0), "layers.0.attn.out", "TP-SHARD");
  EXPECT_RULED_OUT(Keys(1));
}

// ---- products, sums, activations -----------------------------------------------------------------------------------

// Each rank multiplies its columns; rank 1 with those of rank `columns`, plus `noise`.
CheckResult RowParallel(int32_t columns, float noise) {
  constexpr int64_t kRows = 12, kIn = 8, kOut = 10;
  SmallTrace t(2);
  const uint64_t a = t.Request(std::vector<int64_t>(kRows, 1));
  const std::vector<float> w[2] = {Noise(kOut * kIn, 1), Noise(kOut * kIn, 2)}, bias = Noise(kOut, 3);
  for (int32_t rank = 0; rank < 2; ++rank) {
    const std::vector<float> x = Noise(kRows * kIn, 5 + static_cast<uint64_t>(rank));
    const std::vector<float>& used = w[rank == 0 ? 0 : columns];
    std::vector<float> y;
    for (int64_t r = 0; r < kRows; ++r) {
      for (int64_t n = 0; n < kOut; ++n) {
        double sum = rank == 0 ? At(bias, n) : 0;
        for (int64_t k = 0; k < kIn; ++k) sum += At(x, r * kIn + k) * At(used, n * kIn + k);
        y.push_back(static_cast<float>(sum * (rank == 0 ? 1 : 1 + double{noise} * At(x, r * kIn) * At(used, n * kIn))));
      }
    }
    const Shard shard{rank, 2, rank * kIn, 2 * kIn};
    Put load{.step = -1, .rank = rank, .phase = Phase::kLoad};
    t.Record("layers.1.attn.o_proj.bias", "out", {kOut}, bias, load);
    load.shard = shard;
    load.meta = {{"shard_axis", "1"}};
    t.Record("layers.1.attn.o_proj.weight", "out in", {kOut, kIn}, w[rank], load);
    const std::vector<RowRun> rows = {{a, 0, kRows, 0, false}};
    t.Record("layers.1.attn.out", "T H dv", {kRows, 2, kIn / 2}, x, {.rows = rows, .rank = rank, .shard = shard});
    t.Record("layers.1.attn.o_proj.partial", "T h", {kRows, kOut}, y, {.rows = rows, .rank = rank});
  }
  return Judge(t, {"linear"});
}
TEST(OtherRanks, PartialProductsOfARowParallelLayerAreJudged) {
  EXPECT_RULED_OUT(RowParallel(1, 0));
  EXPECT_EQ(RowParallel(1, 0).coverage.results_judged, 2U);
  ExpectNamed(RowParallel(0, 0), "layers.1.attn.o_proj.partial", "TP-SHARD");
  ExpectNamed(RowParallel(1, 1), "layers.1.attn.o_proj.partial", "KERNEL");
}

// moe.out of two layers; the second holds what the first one's buffer holds.
CheckResult TwoLayers(bool stale) {
  SmallTrace t;
  const uint64_t a = t.Request({1, 2, 3});
  std::vector<float> kept;
  for (const char* layer : {"layers.1.", "layers.2."}) {
    const uint64_t seed = layer[7] == '1' ? 1 : 2;
    const std::vector<float> routed = Noise(36, seed), shared = Noise(36, seed + 10);
    std::vector<float> sum;
    for (size_t i = 0; i < 36; ++i) sum.push_back(routed[i] + shared[i]);
    const std::string name = layer;
    const Put put{.rows = {{a, 0, 3, 0, false}}};
    t.Record(name + "moe.routed", "T h", {3, 12}, routed, put);
    t.Record(name + "moe.shared", "T h", {3, 12}, shared, put);
    t.Record(name + "moe.out", "T h", {3, 12}, stale && seed == 2 ? kept : sum, put);
    kept = sum;
  }
  return Judge(t, {"reductions"});
}
TEST(OtherBuffers, ResultOfAnotherLayerInTheStepWasNotWritten) {
  EXPECT_FIRST(TwoLayers(true), "layers.2.moe.out", "UNWRITTEN");
  EXPECT_RULED_OUT(TwoLayers(false));
}

// Gate and up are views of a row of `kPitch`; the kernel steps by `pitch`.
CheckResult Fused(int64_t pitch) {
  constexpr int64_t kRows = 9, kF = 6, kPitch = 16;
  SmallTrace t;
  const uint64_t a = t.Request(std::vector<int64_t>(kRows, 1));
  const std::vector<float> memory = Noise(kRows * kPitch, 1);
  std::vector<float> y;
  for (int64_t r = 0; r < kRows; ++r) {
    for (int64_t c = 0; c < kF; ++c) {
      const double g = At(memory, r * pitch + c), u = At(memory, r * pitch + kF + c);
      y.push_back(static_cast<float>(g / (1 + std::exp(-g)) * u));
    }
  }
  const std::vector<RowRun> rows = {{a, 0, kRows, 0, false}};
  for (int64_t j = 0; j < 2; ++j) {
    const std::string name = j == 0 ? "layers.0.mlp.gate" : "layers.0.mlp.up";
    const uint64_t base = 0x10000;
    const std::vector<float> view(memory.begin() + j * kF, memory.end());
    t.Record(name, "T f", {kRows, kF}, view,
             {.rows = rows, .address = base + static_cast<uint64_t>(j * kF) * 4, .strides = {kPitch, 1}});
    t.Record(name + ".storage", "n", {kRows * kPitch}, memory, {.address = base});
  }
  t.Record("layers.0.mlp.act", "T f", {kRows, kF}, y, {.rows = rows, .meta = {{"activation", "silu"}}});
  return Judge(t, {"experts"});
}
TEST(OtherBuffers, BothHalvesReadAtAnotherPitchAreAStride) {
  EXPECT_FIRST(Fused(12), "layers.0.mlp.act", "STRIDE");
  EXPECT_RULED_OUT(Fused(16));
}

// Keys and values are views of one fused row; the cache is given rows at another pitch.
CheckResult Written(int64_t pitch) {
  constexpr int64_t kRows = 9, kHead = 8, kPitch = 4 * kHead;
  SmallTrace t;
  const uint64_t a = t.Request(std::vector<int64_t>(kRows, 1));
  const std::vector<float> memory = Noise(kRows * kPitch, 1);
  std::vector<float> y;
  for (int64_t r = 0; r < kRows; ++r) {
    for (int64_t j : {kHead, 2 * kHead}) {
      for (int64_t c = 0; c < kHead; ++c) y.push_back(memory[static_cast<size_t>(r * pitch + j + c)]);
    }
  }
  const std::vector<RowRun> rows = {{a, 0, kRows, 0, false}};
  for (int64_t j : {int64_t{1}, int64_t{2}}) {
    const std::string name = j == 1 ? "layers.0.attn.k" : "layers.0.attn.v";
    const uint64_t base = 0x10000;
    const std::vector<float> view(memory.begin() + j * kHead, memory.end());
    t.Record(name, "T Hkv d", {kRows, 1, kHead}, view,
             {.rows = rows, .address = base + static_cast<uint64_t>(j * kHead) * 4, .strides = {kPitch, kHead, 1}});
    t.Record(name + ".storage", "n", {kRows * kPitch}, memory, {.address = base});
  }
  t.Record("layers.0.attn.kv_write", "T Hkv d", {kRows, 1, 2 * kHead}, y, {.rows = rows});
  return Judge(t, {"cache-write"});
}
TEST(OtherBuffers, RowsWrittenToTheCacheAtAnotherPitchAreAStride) {
  ExpectNamed(Written(8), "layers.0.attn.kv_write", "STRIDE");
  EXPECT_RULED_OUT(Written(32));
}

// A norm whose largest rows come out as zeros; scale: of the rows from the third on.
CheckResult Squares(float scale, bool zeros, DType compute = DType::kF16, int64_t first_wrong = 3) {
  constexpr int64_t kRows = 6, kCols = 32;
  SmallTrace t;
  const uint64_t a = t.Request(std::vector<int64_t>(kRows, 1));
  std::vector<float> x = Noise(kRows * kCols, 1), w = Noise(kCols, 2), y;
  for (size_t i = 3 * kCols; i < x.size(); ++i) x[i] *= scale;
  const Put put{.rows = {{a, 0, kRows, 0, false}}, .compute = compute};
  for (int64_t r = 0; r < kRows; ++r) {
    double square = 0;
    for (int64_t c = 0; c < kCols; ++c) square += At(x, r * kCols + c) * At(x, r * kCols + c);
    for (int64_t c = 0; c < kCols; ++c) {
      const double normed = At(x, r * kCols + c) / std::sqrt(square / kCols + 1e-6) * At(w, c);
      y.push_back(zeros && r >= first_wrong ? 0 : static_cast<float>(normed));
    }
  }
  t.Record("layers.0.input_layernorm.weight", "h", {kCols}, w, {.step = -1, .phase = Phase::kLoad});
  t.Record("embed", "T h", {kRows, kCols}, x, put);
  t.Record("layers.0.input_norm", "T h", {kRows, kCols}, y, put);
  return Judge(t, {"norms"});
}
TEST(OtherRange, RowsOfZerosBeyondTheSquaresOfF16AreRange) {
  ExpectNamed(Squares(500, true), "layers.0.input_norm", "RANGE");
  ExpectNamed(Squares(5, true), "layers.0.input_norm", "UNWRITTEN");  // squares fit
  EXPECT_RULED_OUT(Squares(500, false));
  ExpectNamed(Squares(500, true, DType::kBF16), "layers.0.input_norm", "UNWRITTEN");    // no f16 takes part
  ExpectNamed(Squares(500, true, DType::kF16, 0), "layers.0.input_norm", "UNWRITTEN");  // small rows are 0 as well
}

// A norm of 256 columns whose root is stored in bf16, or multiplied by one constant.
CheckResult Roots(bool coarse, double times) {
  constexpr int64_t kRows = 24, kCols = 256;
  SmallTrace t;
  const uint64_t a = t.Request(std::vector<int64_t>(kRows, 1));
  const std::vector<float> x = Noise(kRows * kCols, 1), w = Noise(kCols, 2);
  std::vector<float> y;
  for (int64_t r = 0; r < kRows; ++r) {
    double square = 0;
    for (int64_t c = 0; c < kCols; ++c) square += At(x, r * kCols + c) * At(x, r * kCols + c);
    double root = times / std::sqrt(square / kCols + 1e-6);
    int exponent = 0;
    const double m = std::frexp(root, &exponent);
    if (coarse) root = std::ldexp(std::nearbyint(std::ldexp(m, 8)), exponent - 8);
    for (int64_t c = 0; c < kCols; ++c) y.push_back(static_cast<float>(At(x, r * kCols + c) * root * At(w, c)));
  }
  t.Record("layers.0.input_layernorm.weight", "h", {kCols}, w, {.step = -1, .phase = Phase::kLoad});
  t.Record("embed", "T h", {kRows, kCols}, x, {.rows = {{a, 0, kRows, 0, false}}});
  t.Record("layers.0.input_norm", "T h", {kRows, kCols}, y, {.rows = {{a, 0, kRows, 0, false}}});
  return Judge(t, {"norms"});
}
TEST(OtherRange, RootsOfANormThatAreValuesOfBf16ArePrecision) {
  ExpectNamed(Roots(true, 1), "layers.0.input_norm", "PRECISION");
  ExpectNamed(Roots(false, 1.01), "layers.0.input_norm", "SCALE");
  EXPECT_RULED_OUT(Roots(false, 1));
}

// Result and operand in bf16, the sum of squares rounded at each step or multiplied by one constant: rows of 160
// columns do not say what their factors come from.
CheckResult ShortRows(bool coarse, double times, int64_t scaled_rows = 40) {
  constexpr int64_t kRows = 40, kCols = 160;
  const auto bf16 = [](double x) {
    int exponent = 0;
    const double m = std::frexp(x, &exponent);
    return std::ldexp(std::nearbyint(std::ldexp(m, 8)), exponent - 8);
  };
  SmallTrace t;
  const uint64_t a = t.Request(std::vector<int64_t>(kRows, 1));
  std::vector<float> x = Noise(kRows * kCols, 1), w = Noise(kCols, 2), y;
  for (std::vector<float>* v : {&x, &w}) {
    for (float& e : *v) e = static_cast<float>(bf16(e));
  }
  for (int64_t r = 0; r < kRows; ++r) {
    double sum = 0;
    for (int64_t c = 0; c < kCols; ++c) {
      sum += At(x, r * kCols + c) * At(x, r * kCols + c);
      if (coarse) sum = bf16(sum);
    }
    double root = (r < scaled_rows ? times : 1) / std::sqrt(sum / kCols + 1e-6);
    if (coarse) root = bf16(root);
    for (int64_t c = 0; c < kCols; ++c)
      y.push_back(static_cast<float>(bf16(bf16(At(x, r * kCols + c) * root) * At(w, c))));
  }
  const testing::Put put{.rows = {{a, 0, kRows, 0, false}}, .compute = DType::kBF16};
  t.Record("layers.0.input_layernorm.weight", "h", {kCols}, w, {.step = -1, .phase = Phase::kLoad});
  t.Record("embed", "T h", {kRows, kCols}, x, put);
  t.Record("layers.0.input_norm", "T h", {kRows, kCols}, y, put);
  return Judge(t, {"norms"});
}
TEST(OtherRange, ShortRowsOffByFactorsOfTheirOwnArePrecision) {
  ExpectNamed(ShortRows(true, 1), "layers.0.input_norm", "PRECISION");
  ExpectNamed(ShortRows(false, 1.02), "layers.0.input_norm", "SCALE");
  const CheckResult some = ShortRows(false, 1.02, 20);  // half of the rows
  ASSERT_FALSE(some.findings.empty());
  EXPECT_NE(some.findings[0].cls, "PRECISION");
  EXPECT_RULED_OUT(ShortRows(false, 1));
}

// The norm behind attention of a stream whose branch has a factor, which stands on `out` as the table says.
CheckResult Branch(double factor) {
  constexpr int64_t kRows = 6, kCols = 32;
  SmallTrace t;
  const uint64_t a = t.Request(std::vector<int64_t>(kRows, 1));
  std::vector<float> x = Noise(kRows * kCols, 1), o = Noise(kRows * kCols, 4), w = Noise(kCols, 2), y, out;
  for (size_t i = 0; i < 8; ++i) x[i] = -0.22F * o[i] * (1 + 1e-5F);  // nearly cancels
  const std::vector<float> down = Noise(kRows * kCols, 5);
  for (int64_t r = 0; r < kRows; ++r) {
    std::vector<float> sum;
    double square = 0;
    for (int64_t i = r * kCols; i < (r + 1) * kCols; ++i) {
      const auto at = static_cast<size_t>(i);
      sum.push_back(x[at] + static_cast<float>(factor) * o[at]);
      out.push_back(x[at] + 0.22F * o[at] + 0.22F * down[at]);
      square += double{sum.back()} * double{sum.back()};
    }
    for (int64_t c = 0; c < kCols; ++c)
      y.push_back(static_cast<float>(At(sum, c) / std::sqrt(square / kCols + 1e-6) * At(w, c)));
  }
  const std::vector<RowRun> rows = {{a, 0, kRows, 0, false}};
  t.Record("layers.0.post_attention_layernorm.weight", "h", {kCols}, w, {.step = -1, .phase = Phase::kLoad});
  t.Record("embed", "T h", {kRows, kCols}, x, {.rows = rows});
  t.Record("layers.0.attn.o_proj", "T h", {kRows, kCols}, o, {.rows = rows});
  t.Record("layers.0.post_norm", "T h", {kRows, kCols}, y, {.rows = rows});
  t.Record("layers.0.mlp.down", "T h", {kRows, kCols}, down, {.rows = rows});
  t.Record("layers.0.out", "T h", {kRows, kCols}, out, {.rows = rows, .meta = {{"branch_scale", "0.22"}}});
  return Judge(t, {"norms"});
}
TEST(BranchScale, OfTheStreamHoldsForTheNormBehindAttention) {
  EXPECT_RULED_OUT(Branch(0.22));
  EXPECT_FALSE(Branch(0.23).findings.empty());
  EXPECT_FALSE(Branch(1).findings.empty());
}

}  // namespace
}  // namespace assay

// Measure against the definition (reference.h) over dtypes, shapes, strides, layouts and instruction sets.
#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <string>

#include "reference.h"
#include "stats/float_environment.h"
#include "stats/measure.h"

namespace assay {
namespace {

using testing::MeasureReference;
using testing::Reference;

std::vector<Isa> UsableIsas() {
  std::vector<Isa> isas;
  for (Isa isa : {Isa::kPortable, Isa::kAvx2, Isa::kAvx512}) {
    if (IsaUsable(isa)) isas.push_back(isa);
  }
  return isas;
}

// What the elements look like: patterns of bits, so that every dtype gets its own special values.
enum class Fill { kRandomBits, kModest, kZeros, kConstant };

std::vector<uint8_t> MakeData(DType dtype, int64_t n, Fill fill, uint32_t seed) {
  std::mt19937 rng(seed);
  std::vector<uint8_t> bytes(static_cast<size_t>(n * 8 + 64));
  if (fill == Fill::kRandomBits) {
    for (uint8_t& b : bytes) b = static_cast<uint8_t>(rng());
  } else if (fill != Fill::kZeros) {
    std::normal_distribution<float> normal;
    for (int64_t k = 0; k < n; ++k) {
      const float value = fill == Fill::kConstant ? 0.7f : normal(rng);
      const uint32_t f32 = std::bit_cast<uint32_t>(value);
      if (dtype == DType::kF32) {
        std::memcpy(bytes.data() + k * 4, &f32, 4);
      } else if (dtype == DType::kBF16) {
        const uint16_t b = static_cast<uint16_t>(f32 >> 16);
        std::memcpy(bytes.data() + k * 2, &b, 2);
      } else if (dtype == DType::kF64) {
        const double d = static_cast<double>(value);
        std::memcpy(bytes.data() + k * 8, &d, 8);
      } else if (dtype == DType::kF16) {
        const uint16_t h = static_cast<uint16_t>(0x3000 + rng() % 0x0c00 + (rng() & 1) * 0x8000);
        std::memcpy(bytes.data() + k * 2, &h, 2);
      } else {
        const uint64_t bits = rng() & 0x3f;
        std::memcpy(bytes.data() + k * BitsOf(dtype) / 8, &bits, static_cast<size_t>(std::max(1, BitsOf(dtype) / 8)));
      }
    }
  }
  return bytes;
}

// Bounds of docs/numerics.md. Sums: one rounding in double an addition; the AVX-512 kernel lets float sums of types of
// 32 bits or fewer run for up to 8 additions first, the AVX2 kernel those of 16 bits or fewer. Sketch: float running
// sums of at most 256 additions, then double.
double SumBound(DType dtype, Isa isa, double n) {
  const int widest = isa == Isa::kAvx512 ? 32 : isa == Isa::kAvx2 ? 16 : 0;  // that is added in float
  return n * 0x1p-53 + (IsFloat(dtype) && BitsOf(dtype) <= widest ? 11 * 0x1p-24 : 0);
}

// Errors relative to the sums of magnitudes, since the sums themselves may cancel.
void ExpectSums(const Stats& got, const Reference& want, DType dtype, Isa isa, const std::string& what) {
  const double n = static_cast<double>(want.stats.count);
  // Random f64 patterns reach 1e308: their sums may leave the range, and then say so by being infinite or NaN.
  if (!std::isfinite(static_cast<double>(want.sum_abs))) return;
  EXPECT_LE(std::abs(got.sum - static_cast<double>(want.sum)),
            SumBound(dtype, isa, n) * static_cast<double>(want.sum_abs))
      << what;
  if (std::isfinite(static_cast<double>(want.sum_sq))) {
    EXPECT_LE(std::abs(got.sum_sq - static_cast<double>(want.sum_sq)),
              SumBound(dtype, isa, n + 1) * static_cast<double>(want.sum_sq))
        << what;
  }
  for (int k = 0; k < kSketchSize; ++k) {
    EXPECT_LE(std::abs(got.sketch[k] - static_cast<double>(want.sketch[k])),
              (256 * 0x1p-24 + n * 0x1p-53) * static_cast<double>(want.sketch_abs[k]))
        << what << " bucket " << k;
  }
}

// Cells of rows and heads are folded from the reference's 64 buckets, as the definition has it.
void ExpectSegment(const Segment& got, const Reference& want, const LogicalLayout& logical,
                   const MeasureOptions& options, DType dtype, const std::string& what) {
  const Stats& a = got.stats;
  const Stats& b = want.stats;
  EXPECT_EQ(a.count, b.count) << what;
  EXPECT_EQ(a.nan, b.nan) << what;
  EXPECT_EQ(a.pos_inf, b.pos_inf) << what;
  EXPECT_EQ(a.neg_inf, b.neg_inf) << what;
  EXPECT_EQ(a.zero, b.zero) << what;
  EXPECT_EQ(a.subnormal, b.subnormal) << what;
  EXPECT_EQ(a.digest, b.digest) << what;
  if (b.count == b.nonfinite()) {
    EXPECT_TRUE(std::isnan(a.min) && std::isnan(a.max) && std::isnan(a.abs_max)) << what;
  } else {
    EXPECT_EQ(std::bit_cast<uint64_t>(a.min), std::bit_cast<uint64_t>(b.min)) << what;
    EXPECT_EQ(std::bit_cast<uint64_t>(a.max), std::bit_cast<uint64_t>(b.max)) << what;
    EXPECT_EQ(a.abs_max, b.abs_max) << what;
    EXPECT_EQ(a.abs_max_index, b.abs_max_index) << what;
  }
  ExpectSums(a, want, dtype, options.isa, what);
  if (logical.row_axis >= 0 && options.row_grid) {
    ASSERT_EQ(got.rows.size(), static_cast<size_t>(got.n_rows)) << what;
    for (int64_t r = 0; r < got.n_rows; ++r) {
      const RowCell& cell = got.rows[static_cast<size_t>(r)];
      auto it = want.rows.find(got.first_row + r);
      const testing::ReferenceCell empty;
      const testing::ReferenceCell& ref = it == want.rows.end() ? empty : it->second;
      EXPECT_EQ(cell.digest, ref.digest) << what << " row " << r;
      EXPECT_EQ(cell.nonfinite, ref.nonfinite) << what << " row " << r;
      const double norm_sq = static_cast<double>(ref.sum_sq);
      if (!std::isfinite(norm_sq)) continue;
      const double n = static_cast<double>(b.count);
      EXPECT_LE(std::abs(cell.sum_sq - norm_sq), SumBound(dtype, options.isa, n + 1) * norm_sq) << what << " row " << r;
      for (int k = 0; k < kRowSketchSize; ++k) {
        long double folded = 0;
        for (int q = k; q < kSketchSize; q += kRowSketchSize) folded += ref.sketch[q];
        EXPECT_LE(std::abs(cell.sketch[k] - static_cast<double>(folded)), 256 * 0x1p-24 * std::sqrt(norm_sq * n))
            << what << " row " << r;
      }
    }
  }
  if (logical.head_axis >= 0 && options.head_grid) {
    for (size_t h = 0; h < got.heads.size(); ++h) {
      const HeadCell& cell = got.heads[h];
      auto it = want.heads.find(static_cast<int64_t>(h));
      const testing::ReferenceCell empty;
      const testing::ReferenceCell& ref = it == want.heads.end() ? empty : it->second;
      EXPECT_EQ(cell.nonfinite, ref.nonfinite) << what << " head " << h;
      const double norm_sq = static_cast<double>(ref.sum_sq);
      if (!std::isfinite(norm_sq)) continue;
      const double n = static_cast<double>(b.count);
      EXPECT_LE(std::abs(cell.sum_sq - norm_sq), SumBound(dtype, options.isa, n + 1) * norm_sq)
          << what << " head " << h;
      for (int k = 0; k < kHeadSketchSize; ++k) {
        long double folded = 0;
        for (int q = k; q < kSketchSize; q += kHeadSketchSize) folded += ref.sketch[q];
        EXPECT_LE(std::abs(cell.sketch[k] - static_cast<double>(folded)), 256 * 0x1p-24 * std::sqrt(norm_sq * n))
            << what << " head " << h;
      }
    }
  }
}

// Measures on every instruction set and compares with the definition, segment by segment.
void Check(const TensorView& view, const LogicalLayout& logical, const std::string& what) {
  for (Isa isa : UsableIsas()) {
    MeasureOptions options;
    options.isa = isa;
    std::vector<Segment> segments;
    const std::string where = what + " " + std::string(NameOf(view.dtype)) + " " + NameOf(isa);
    const Status status = Measure(view, logical, options, &segments);
    ASSERT_TRUE(status.ok()) << where << ": " << status.message();
    if (logical.row_axis < 0) {
      ASSERT_EQ(segments.size(), 1u);
      const int64_t rows = view.rank() >= 2 ? view.shape[0] : 1;
      ExpectSegment(segments[0], MeasureReference(view, logical, 0, 0, rows, logical.row_offset), logical, options,
                    view.dtype, where);
      continue;
    }
    for (const Segment& s : segments) {
      ExpectSegment(s, MeasureReference(view, logical, s.request, s.first_row, s.n_rows, s.first_position), logical,
                    options, view.dtype, where + " segment at " + std::to_string(s.first_position));
    }
  }
}

constexpr DType kAll[] = {DType::kF64,    DType::kF32,    DType::kF16,        DType::kBF16,       DType::kF8E4M3FN,
                          DType::kF8E5M2, DType::kI64,    DType::kF8E4M3FNUZ, DType::kF8E5M2FNUZ, DType::kF8E8M0,
                          DType::kI32,    DType::kF4E2M1, DType::kI16,        DType::kI8,         DType::kU64,
                          DType::kU32,    DType::kU16,    DType::kU8,         DType::kBool};

// Lengths on both sides of a group of 8, of the widths of vectors and of a block; random bits give every special value.
TEST(Measure, EveryLengthOfAContiguousVectorAgreesWithTheDefinition) {
  for (DType dtype : kAll) {
    for (Fill fill : {Fill::kRandomBits, Fill::kModest, Fill::kZeros}) {
      const std::vector<uint8_t> bytes = MakeData(dtype, 700, fill, 3);
      for (int64_t n : {1, 2, 7, 8, 9, 15, 16, 17, 24, 31, 33, 64, 130, 131, 257, 600}) {
        const int64_t stride = 1;
        Check({bytes.data(), dtype, {&n, 1}, {&stride, 1}, 0}, {}, "vector of " + std::to_string(n));
      }
    }
  }
}

// 61000 elements, above where kernels keep running sums; equal elements are what rounding errors add up on.
TEST(Measure, LargeMatrixUsesTheRunningSumsAndAgrees) {
  for (DType dtype : {DType::kF32, DType::kBF16, DType::kF16, DType::kF64, DType::kF8E4M3FN, DType::kI8, DType::kI32}) {
    for (Fill fill : {Fill::kModest, Fill::kConstant, Fill::kRandomBits}) {
      const int64_t shape[] = {61, 1000}, strides[] = {1000, 1};
      const std::vector<uint8_t> bytes = MakeData(dtype, 61000, fill, 9);
      const RowRun runs[] = {{77, 0, 61, 3, false}};
      LogicalLayout logical;
      logical.row_axis = 0;
      logical.runs = runs;
      Check({bytes.data(), dtype, shape, strides, 0}, logical, "matrix");
    }
  }
}

// Squares of small numbers underflow in float32, those of large ones overflow: whole tensors, single heads and single
// elements of such size, of the two types that have the range for it.
TEST(Measure, SquaresBeyondTheRangeOfFloatAreNotLost) {
  for (DType dtype : {DType::kBF16, DType::kF32}) {
    const int64_t bytes_each = BitsOf(dtype) / 8;
    for (int exponent : {-50, -54, -56, -58, -62, -70, -100, -126, 50, 51, 57, 58, 59, 60, 61, 64, 96}) {
      for (int larger : {0, 1, 64, 256}) {  // columns of each row that are 2^8 times as large
        std::vector<uint8_t> bytes = MakeData(dtype, 5 * 1024, Fill::kModest, 17);
        for (int64_t k = 0; k < 5 * 1024; ++k) {
          uint32_t bits = 0;
          uint8_t* upper = reinterpret_cast<uint8_t*>(&bits) + 4 - bytes_each;
          std::memcpy(upper, bytes.data() + k * bytes_each, static_cast<size_t>(bytes_each));
          const int more = k % 1024 < larger ? 8 : 0;
          const float x = std::bit_cast<float>(bits) * static_cast<float>(PowerOfTwo(exponent + more));
          bits = std::bit_cast<uint32_t>(x);
          std::memcpy(bytes.data() + k * bytes_each, upper, static_cast<size_t>(bytes_each));
        }
        const std::string what = "2^" + std::to_string(exponent) + ", larger " + std::to_string(larger);
        const int64_t shape[] = {5, 4, 256}, strides[] = {1024, 256, 1}, n = 5 * 1024, stride = 1;
        const RowRun runs[] = {{5, 0, 5, 0, false}};
        LogicalLayout logical;
        logical.row_axis = 0;
        logical.head_axis = 1;
        logical.runs = runs;
        Check({bytes.data(), dtype, shape, strides, 0}, logical, what);
        Check({bytes.data(), dtype, {&n, 1}, {&stride, 1}, 0}, {}, what + " flat");
      }
    }
  }
}

// Heads of 6 and 72 columns and shards that begin at column 3 do not lie on whole groups.
TEST(Measure, HeadsAndShardsOfATokenTensorAgree) {
  for (DType dtype : kAll) {
    const std::vector<uint8_t> bytes = MakeData(dtype, 20000, Fill::kRandomBits, 21);
    for (int64_t d : {6, 8, 16, 64, 72}) {
      const int64_t shape[] = {9, 4, d}, strides[] = {4 * d, d, 1};
      const RowRun runs[] = {{5, 0, 3, 62, false}, {6, 4, 5, 0, true}};
      LogicalLayout logical;
      logical.row_axis = 0;
      logical.head_axis = 1;
      logical.runs = runs;
      logical.full_cols = 12 * d;
      logical.col_offset = 4 * d;
      Check({bytes.data(), dtype, shape, strides, 0}, logical, "heads of " + std::to_string(d));
      logical.full_cols = 12 * d + 5;
      logical.col_offset = 4 * d + 3;
      Check({bytes.data(), dtype, shape, strides, 0}, logical, "cut groups, heads of " + std::to_string(d));
    }
  }
}

// Gaps, broadcasts, transpositions and reversed axes, with an odd first element for types of half a byte.
TEST(Measure, StridedBroadcastAndNegativeViewsAgree) {
  for (DType dtype : kAll) {
    const std::vector<uint8_t> bytes = MakeData(dtype, 8000, Fill::kRandomBits, 33);
    const int64_t shape[] = {3, 5, 70};
    const RowRun runs[] = {{1, 0, 5, 100, false}};
    const int64_t sets[][3] = {{350, 70, 1},  {0, 70, 1},    {70, 210, 1},   {1, 3, 15}, {350, 0, 1},
                               {700, 140, 2}, {350, -70, 1}, {-350, 70, -1}, {0, 0, 0}};
    for (const auto& strides : sets) {
      int64_t offset = 0;
      for (int a = 0; a < 3; ++a) offset -= strides[a] < 0 ? strides[a] * (shape[a] - 1) : 0;
      LogicalLayout logical;
      logical.runs = runs;
      logical.row_axis = 1;
      logical.head_axis = 0;
      const std::string what =
          std::to_string(strides[0]) + "," + std::to_string(strides[1]) + "," + std::to_string(strides[2]);
      for (int64_t shift : {0, 1}) Check({bytes.data(), dtype, shape, strides, offset + shift}, logical, what);
      logical = {};
      logical.row_offset = 7;
      Check({bytes.data(), dtype, shape, strides, offset}, logical, what + " without rows");
    }
  }
}

void ExpectSameHistogram(const Stats& x, const Stats& y, const std::string& what) {
  EXPECT_EQ(x.histogram_samples, y.histogram_samples) << what;
  ASSERT_EQ(x.histogram.size(), y.histogram.size()) << what;
  for (size_t k = 0; k < x.histogram.size(); ++k) {
    EXPECT_EQ(x.histogram[k].exponent, y.histogram[k].exponent) << what;
    EXPECT_EQ(x.histogram[k].count, y.histogram[k].count) << what;
  }
}

// Contiguous rows, and rows of contiguous runs, are counted by another way than gathered ones.
TEST(Measure, HistogramOfContiguousRowsIsThatOfTheSameValuesApart) {
  for (DType dtype : {DType::kBF16, DType::kF16, DType::kF32}) {
    for (Fill fill : {Fill::kRandomBits, Fill::kModest, Fill::kZeros, Fill::kConstant}) {
      for (int64_t cols : {1, 7, 8, 9, 64, 255, 256, 512, 513, 5000}) {
        constexpr int64_t kRows = 3;
        const auto bytes_each = static_cast<size_t>(BitsOf(dtype) / 8);
        std::vector<uint8_t> close = MakeData(dtype, kRows * cols, fill, 5);
        if (fill == Fill::kModest) {
          for (size_t k = 0; k < static_cast<size_t>(kRows * cols); k += 3) {  // subnormals among them
            std::memset(close.data() + k * bytes_each, 0, bytes_each);
            close[k * bytes_each] = static_cast<uint8_t>(k);
          }
        }
        std::vector<uint8_t> apart(static_cast<size_t>(2 * kRows * cols) * bytes_each);
        for (size_t k = 0; k < static_cast<size_t>(kRows * cols); ++k) {
          std::memcpy(apart.data() + 2 * k * bytes_each, close.data() + k * bytes_each, bytes_each);
        }
        const int64_t shape[] = {kRows, cols}, near[] = {cols, 1}, far[] = {2 * cols, 2};
        const RowRun runs[] = {{1, 0, kRows, 0, false}};
        LogicalLayout logical;
        logical.runs = runs;
        logical.row_axis = 0;
        std::vector<Segment> a, b;
        ASSERT_TRUE(Measure({close.data(), dtype, shape, near, 0}, logical, {}, &a).ok());
        ASSERT_TRUE(Measure({apart.data(), dtype, shape, far, 0}, logical, {}, &b).ok());
        const std::string what = std::string(NameOf(dtype)) + " " + std::to_string(cols);
        ExpectSameHistogram(a[0].stats, b[0].stats, what);
        if (cols % 16 != 0) continue;
        const int64_t run = cols % 64 == 0 ? cols / 4 : 8;  // heads that are cut out of wider ones
        std::vector<uint8_t> cut(apart.size());
        for (size_t k = 0; k < static_cast<size_t>(kRows * cols); ++k) {
          const size_t to = k / static_cast<size_t>(run) * static_cast<size_t>(2 * run) + k % static_cast<size_t>(run);
          std::memcpy(cut.data() + to * bytes_each, close.data() + k * bytes_each, bytes_each);
        }
        const int64_t heads[] = {kRows, cols / run, run}, wider[] = {2 * cols, 2 * run, 1};
        ASSERT_TRUE(Measure({cut.data(), dtype, heads, wider, 0}, logical, {}, &b).ok());
        ExpectSameHistogram(a[0].stats, b[0].stats, what + " in runs");
      }
    }
  }
}

// 64 intervals of 128 groups and a rest of 127: the 65th interval's group lies inside of the rest (docs/numerics.md).
TEST(Measure, HistogramTakesOneGroupMoreWhereTheSampleDoesNotDivide) {
  ASSERT_LT(Mix64(65) & 127, 127u);  // the last group is there
  const int64_t n = (64 * 128 + 127) * 8, stride = 1;
  for (DType dtype : {DType::kF32, DType::kBF16, DType::kF16, DType::kF64, DType::kF8E5M2}) {
    const std::vector<uint8_t> bytes = MakeData(dtype, n, Fill::kModest, 5);
    std::vector<Segment> segments;
    ASSERT_TRUE(Measure({bytes.data(), dtype, {&n, 1}, {&stride, 1}, 0}, {}, {}, &segments).ok());
    EXPECT_EQ(segments[0].stats.histogram_samples, 520u) << NameOf(dtype);
    uint64_t binned = 0;
    for (const ExponentBin& bin : segments[0].stats.histogram) binned += bin.count;
    EXPECT_LE(binned, 520u);
    EXPECT_GE(binned, 500u) << NameOf(dtype);  // a few of the small floats are zero
  }
}

TEST(Measure, EmptyAndRankZeroViewsAreOneSegment) {
  const float one = -2.5f;
  std::vector<Segment> segments;
  ASSERT_TRUE(Measure({&one, DType::kF32, {}, {}, 0}, {}, {}, &segments).ok());
  ASSERT_EQ(segments.size(), 1u);
  EXPECT_EQ(segments[0].stats.count, 1u);
  EXPECT_EQ(segments[0].stats.sum, -2.5);
  EXPECT_EQ(segments[0].stats.sum_sq, 6.25);
  const int64_t shape[] = {4, 0}, strides[] = {0, 1};
  ASSERT_TRUE(Measure({nullptr, DType::kF32, shape, strides, 0}, {}, {}, &segments).ok());
  ASSERT_EQ(segments.size(), 1u);
  EXPECT_EQ(segments[0].stats.count, 0u);
  EXPECT_TRUE(std::isnan(segments[0].stats.min));
  EXPECT_EQ(segments[0].stats.digest, 0u);
}

// Positions 50 to 199 in segments of 64: cut at 64, 128 and 192, wherever the run begins.
TEST(Measure, SegmentsAreCutAtMultiplesOfTheSegmentLength) {
  std::vector<float> data(200 * 8, 1.0f);
  const int64_t shape[] = {200, 8}, strides[] = {8, 1};
  const RowRun runs[] = {{9, 0, 150, 50, false}, {0, 150, 50, 0, true}};
  LogicalLayout logical;
  logical.row_axis = 0;
  logical.runs = runs;
  std::vector<Segment> s;
  ASSERT_TRUE(Measure({data.data(), DType::kF32, shape, strides, 0}, logical, {}, &s).ok());
  ASSERT_EQ(s.size(), 5u);
  const int64_t want[][3] = {{50, 14, 0}, {64, 64, 14}, {128, 64, 78}, {192, 8, 142}, {0, 50, 150}};
  for (int k = 0; k < 5; ++k) {
    EXPECT_EQ(s[k].first_position, want[k][0]);
    EXPECT_EQ(s[k].n_rows, want[k][1]);
    EXPECT_EQ(s[k].first_row, want[k][2]);
    EXPECT_EQ(s[k].padding, k == 4);
    EXPECT_EQ(s[k].request, k == 4 ? 0u : 9u);
    EXPECT_EQ(s[k].stats.count, static_cast<uint64_t>(want[k][1] * 8));
  }
}

// A recorder measures into the same vector again and again.
TEST(Measure, SegmentsThatAreUsedAgainHoldNothingOfBefore) {
  const auto before = MakeData(DType::kF32, 200 * 24, Fill::kRandomBits, 31);  // NaN and infinities among them
  const auto data = MakeData(DType::kF32, 6 * 8, Fill::kModest, 32);
  const int64_t large_shape[] = {200, 3, 8}, large_strides[] = {24, 8, 1}, shape[] = {6, 8}, strides[] = {8, 1};
  LogicalLayout large, small;
  const RowRun all[] = {{9, 0, 200, 30, false}}, two[] = {{7, 0, 2, 62, false}, {0, 2, 1, 0, true}};
  large.row_axis = small.row_axis = 0;
  large.head_axis = 1;
  large.runs = all;
  small.runs = two;
  for (const int threads : {1, 4}) {
    MeasureOptions options;
    options.threads = threads;
    std::vector<Segment> fresh, used;
    ASSERT_TRUE(Measure({data.data(), DType::kF32, shape, strides, 0}, small, options, &fresh).ok());
    ASSERT_TRUE(Measure({before.data(), DType::kF32, large_shape, large_strides, 0}, large, options, &used).ok());
    ASSERT_EQ(used.size(), 4u);
    ASSERT_TRUE(Measure({data.data(), DType::kF32, shape, strides, 0}, small, options, &used).ok());
    ASSERT_EQ(used.size(), 2u);
    for (size_t i = 0; i < 2; ++i) {
      const Segment &a = fresh[i], &b = used[i];
      EXPECT_EQ(a.request, b.request);
      EXPECT_EQ(a.first_position, b.first_position);
      EXPECT_EQ(a.first_row, b.first_row);
      EXPECT_EQ(a.n_rows, b.n_rows);
      EXPECT_EQ(a.padding, b.padding);
      EXPECT_EQ(a.stats.count, b.stats.count);
      EXPECT_EQ(a.stats.nonfinite(), b.stats.nonfinite());
      EXPECT_EQ(a.stats.sum_sq, b.stats.sum_sq);
      EXPECT_EQ(a.stats.digest, b.stats.digest);
      EXPECT_EQ(a.stats.sketch, b.stats.sketch);
      EXPECT_EQ(a.stats.histogram.size(), b.stats.histogram.size());
      EXPECT_EQ(a.stats.histogram_samples, b.stats.histogram_samples);
      ASSERT_EQ(a.rows.size(), b.rows.size());
      for (size_t r = 0; r < a.rows.size(); ++r) EXPECT_EQ(a.rows[r].sum_sq, b.rows[r].sum_sq);
      EXPECT_TRUE(b.heads.empty());
    }
    // Without rows there is one segment, and a view that does not fit leaves none.
    ASSERT_TRUE(Measure({data.data(), DType::kF32, shape, strides, 0}, {}, options, &used).ok());
    ASSERT_EQ(used.size(), 1u);
    EXPECT_EQ(used[0].request, 0u);
    EXPECT_EQ(used[0].n_rows, 0);
    EXPECT_FALSE(Measure({nullptr, DType::kF32, shape, strides, 0}, {}, options, &used).ok());
    EXPECT_TRUE(used.empty());
  }
}

TEST(Measure, WhatDoesNotFitTogetherIsAUsageError) {
  std::vector<float> data(64);
  const int64_t shape[] = {8, 8}, strides[] = {8, 1}, negative[] = {8, -1}, huge[] = {INT64_MAX, 8};
  std::vector<Segment> s;
  auto code = [&](const TensorView& view, const LogicalLayout& l) { return Measure(view, l, {}, &s).code(); };
  const TensorView good{data.data(), DType::kF32, shape, strides, 0};
  LogicalLayout l;
  EXPECT_EQ(code({nullptr, DType::kF32, shape, strides, 0}, l), Code::kUsage);
  EXPECT_EQ(code({data.data(), DType::kInvalid, shape, strides, 0}, l), Code::kUsage);
  EXPECT_EQ(code({data.data(), DType::kF32, shape, {strides, 1}, 0}, l), Code::kUsage);
  EXPECT_EQ(code({data.data(), DType::kF32, negative, strides, 0}, l), Code::kUsage);
  EXPECT_EQ(code({data.data(), DType::kF32, huge, strides, 0}, l), Code::kUsage);
  l.row_axis = 2;
  EXPECT_EQ(code(good, l), Code::kUsage);
  l = {};
  l.head_axis = 0;
  EXPECT_EQ(code(good, l), Code::kUsage);
  l = {};
  l.full_cols = 12;
  l.col_offset = 5;
  EXPECT_EQ(code(good, l), Code::kUsage);
  l = {};
  l.row_axis = 0;
  const RowRun outside[] = {{0, 5, 4, 0, false}};
  l.runs = outside;
  EXPECT_EQ(code(good, l), Code::kUsage);
  const RowRun far[] = {{0, 0, 4, INT64_MAX - 2, false}};
  l.runs = far;
  EXPECT_EQ(code(good, l), Code::kUsage);
  l.runs = {};
  l.segment_rows = 0;
  EXPECT_EQ(code(good, l), Code::kUsage);
}

}  // namespace
}  // namespace assay

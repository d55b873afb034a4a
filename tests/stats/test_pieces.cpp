// Pieces against the whole: threads, chunks, shards and requests; and the floating-point environment.
#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

#include "stats/float_environment.h"
#include "stats/measure.h"
#include "stats/sketch_math.h"

namespace assay {
namespace {

std::vector<float> Normal(size_t n, uint32_t seed) {
  std::mt19937 rng(seed);
  std::normal_distribution<float> normal;
  std::vector<float> out(n);
  for (float& v : out) v = normal(rng);
  return out;
}

// rows x cols of a matrix with `stride` floats a row; one run.
std::vector<Segment> MeasureRows(const float* data, int64_t rows, int64_t cols, int64_t stride, const RowRun& run,
                                 int64_t full_cols, int64_t col_offset, int64_t segment_rows, int threads = 1) {
  const int64_t shape[] = {rows, cols}, strides[] = {stride, 1};
  LogicalLayout logical;
  logical.row_axis = 0;
  logical.runs = {&run, 1};
  logical.full_cols = full_cols;
  logical.col_offset = col_offset;
  logical.segment_rows = segment_rows;
  MeasureOptions options;
  options.threads = threads;
  std::vector<Segment> out;
  const Status status = Measure({data, DType::kF32, shape, strides, 0}, logical, options, &out);
  EXPECT_TRUE(status.ok()) << status.message();
  return out;
}

// Sums and sketches to rounding, everything else to the last bit.
void ExpectAddsUp(const Stats& sum, const Stats& whole, bool digest) {
  EXPECT_EQ(sum.count, whole.count);
  EXPECT_EQ(sum.min, whole.min);
  EXPECT_EQ(sum.max, whole.max);
  EXPECT_EQ(sum.abs_max, whole.abs_max);
  EXPECT_NEAR(sum.sum_sq, whole.sum_sq, 2 * 11 * 0x1p-24 * whole.sum_sq);  // eleven float roundings in either
  EXPECT_LE(SketchDistance(sum.sketch, whole.sketch), 1e-5 * std::sqrt(whole.sum_sq));
  if (digest) {
    EXPECT_EQ(sum.digest, whole.digest);
  }
}

TEST(Pieces, ChunksOfASequenceAddUpToTheWhole) {
  const int64_t rows = 64, cols = 500;
  const std::vector<float> data = Normal(static_cast<size_t>(rows * cols), 1);
  const Stats whole = MeasureRows(data.data(), rows, cols, cols, {42, 0, rows, 128, false}, 0, 0, 64)[0].stats;
  for (int64_t chunk : {1, 7, 16, 33}) {
    Stats sum;
    for (int64_t t = 0; t < rows; t += chunk) {
      const int64_t n = std::min(chunk, rows - t);
      const RowRun run{42, 0, n, 128 + t, false};
      MergeStats(MeasureRows(data.data() + t * cols, n, cols, cols, run, 0, 0, 64)[0].stats, &sum);
    }
    ExpectAddsUp(sum, whole, true);
  }
}

TEST(Pieces, ShardsOfARowAddUpToTheWhole) {
  const int64_t rows = 20, cols = 768;
  const std::vector<float> data = Normal(static_cast<size_t>(rows * cols), 2);
  const RowRun run{7, 0, rows, 5, false};
  const std::vector<Segment> whole = MeasureRows(data.data(), rows, cols, cols, run, 0, 0, 64);
  for (int64_t shards : {2, 3, 8, 128}) {  // shards of 6 columns cut groups: no digest
    const int64_t width = cols / shards;
    Stats sum;
    std::vector<uint64_t> row_digests(static_cast<size_t>(rows));
    bool split = false;
    for (int64_t s = 0; s < shards; ++s) {
      const auto part = MeasureRows(data.data() + s * width, rows, width, cols, run, cols, s * width, 64);
      MergeStats(part[0].stats, &sum);
      split |= part[0].stats.digest_split;
      for (size_t r = 0; r < row_digests.size(); ++r) row_digests[r] += part[0].rows[r].digest;
    }
    EXPECT_EQ(split, width % 8 != 0);
    ExpectAddsUp(sum, whole[0].stats, !split);
    for (size_t r = 0; r < row_digests.size() && !split; ++r) EXPECT_EQ(row_digests[r], whole[0].rows[r].digest);
  }
}

// Linearity: the sketch of a sum is the sum of the sketches, so a reduction can be checked without its values.
TEST(Pieces, PartialSumsOfRanksAddUpToTheReducedTensor) {
  const int64_t rows = 9, cols = 1024;
  const std::vector<float> a = Normal(static_cast<size_t>(rows * cols), 3);
  const std::vector<float> b = Normal(static_cast<size_t>(rows * cols), 4);
  std::vector<float> c(a.size());
  for (size_t k = 0; k < a.size(); ++k) c[k] = a[k] + b[k];
  const RowRun run{7, 0, rows, 5, false};
  Stats sum = MeasureRows(a.data(), rows, cols, cols, run, 0, 0, 64)[0].stats;
  MergeStats(MeasureRows(b.data(), rows, cols, cols, run, 0, 0, 64)[0].stats, &sum);
  const Stats reduced = MeasureRows(c.data(), rows, cols, cols, run, 0, 0, 64)[0].stats;
  EXPECT_LE(SketchDistance(sum.sketch, reduced.sketch), 1e-5 * std::sqrt(reduced.sum_sq));
}

// What a stale row is recognised by. The segment's digest does depend on them, or rows that changed places would not
// show.
TEST(Pieces, RowDigestsDoNotDependOnPositionOrRequest) {
  const int64_t rows = 6, cols = 333;
  const std::vector<float> data = Normal(static_cast<size_t>(rows * cols), 5);
  const auto a = MeasureRows(data.data(), rows, cols, cols, {1, 0, rows, 0, false}, 0, 0, 64);
  const auto b = MeasureRows(data.data(), rows, cols, cols, {99, 0, rows, 1000, false}, 0, 0, 64);
  for (size_t r = 0; r < 6; ++r) {
    EXPECT_EQ(a[0].rows[r].digest, b[0].rows[r].digest);
    for (size_t q = 0; q < r; ++q) EXPECT_NE(a[0].rows[r].digest, a[0].rows[q].digest);
  }
  EXPECT_NE(a[0].stats.digest, b[0].stats.digest);
}

// All 2048 bits of 64 elements, one at a time, and two elements that change places.
TEST(Pieces, AnyChangedBitChangesTheDigest) {
  std::vector<float> data = Normal(64, 6);
  const RowRun run{1, 0, 1, 0, false};
  const uint64_t before = MeasureRows(data.data(), 1, 64, 64, run, 0, 0, 64)[0].stats.digest;
  for (size_t bit = 0; bit < 64 * 32; ++bit) {
    uint32_t* words = reinterpret_cast<uint32_t*>(data.data());
    words[bit / 32] ^= 1u << bit % 32;
    EXPECT_NE(MeasureRows(data.data(), 1, 64, 64, run, 0, 0, 64)[0].stats.digest, before) << bit;
    words[bit / 32] ^= 1u << bit % 32;
  }
  std::swap(data[3], data[40]);
  EXPECT_NE(MeasureRows(data.data(), 1, 64, 64, run, 0, 0, 64)[0].stats.digest, before);
}

// One long row is cut between groups, many rows between rows; the view is a shard at column 3, so that groups are cut
// too.
TEST(Pieces, ThreadsChangeNeitherCountsNorExtremesNorDigest) {
  std::vector<float> data = Normal(1 << 20, 7);
  data[12345] = std::nanf("");
  data[1 << 19] = -INFINITY;
  data[777] = 1e-40f;
  struct Shape {
    int64_t rows, cols, segment_rows;
  };
  for (const Shape& shape :
       {Shape{1, 1 << 20, 64}, Shape{1024, 1024, 64}, Shape{1024, 1024, 4096}, Shape{999, 1001, 64}}) {
    const RowRun run{3, 0, shape.rows, 10, false};
    auto measure = [&](int threads) {
      return MeasureRows(data.data(), shape.rows, shape.cols, shape.cols, run, shape.cols + 9, 3, shape.segment_rows,
                         threads);
    };
    const std::vector<Segment> one = measure(1);
    for (int threads : {2, 3, 8}) {
      const std::vector<Segment> many = measure(threads);
      ASSERT_EQ(many.size(), one.size());
      for (size_t s = 0; s < one.size(); ++s) {
        const Stats& a = one[s].stats;
        const Stats& b = many[s].stats;
        ExpectAddsUp(b, a, true);
        EXPECT_EQ(a.nan, b.nan);
        EXPECT_EQ(a.neg_inf, b.neg_inf);
        EXPECT_EQ(a.subnormal, b.subnormal);
        EXPECT_EQ(a.abs_max_index, b.abs_max_index);
        EXPECT_EQ(a.histogram_samples, b.histogram_samples);
        ASSERT_EQ(a.histogram.size(), b.histogram.size());
        ASSERT_EQ(one[s].rows.size(), many[s].rows.size());
        for (size_t r = 0; r < one[s].rows.size(); ++r) {
          EXPECT_EQ(one[s].rows[r].digest, many[s].rows[r].digest);
          EXPECT_EQ(one[s].rows[r].nonfinite, many[s].rows[r].nonfinite);
        }
      }
    }
  }
}

#if defined(__x86_64__)
// Subnormals would be counted as zeros, and the host's setting must be as it was afterwards.
TEST(Pieces, FlushToZeroOfTheHostChangesNoStatistic) {
  std::vector<float> data(64, 1e-40f);
  const RowRun run{1, 0, 1, 0, false};
  const Stats before = MeasureRows(data.data(), 1, 64, 64, run, 0, 0, 64)[0].stats;
  const unsigned int host = _mm_getcsr();
  _mm_setcsr(host | 0x8040);  // flush to zero, denormals are zero
  const Stats after = MeasureRows(data.data(), 1, 64, 64, run, 0, 0, 64)[0].stats;
  const unsigned int left = _mm_getcsr();
  _mm_setcsr(host);
  EXPECT_EQ(left, host | 0x8040);
  EXPECT_EQ(before.subnormal, 64u);
  EXPECT_EQ(after.subnormal, 64u);
  EXPECT_EQ(std::bit_cast<uint64_t>(before.sum), std::bit_cast<uint64_t>(after.sum));
  EXPECT_EQ(std::bit_cast<uint64_t>(before.max), std::bit_cast<uint64_t>(after.max));
}
#endif

// Known: -a is 2 away from a, 1.01 a is 0.01 away and parallel to it; estimates are within three standard deviations.
TEST(Pieces, CosineAndRelativeL2OfKnownTensors) {
  const std::vector<float> a = Normal(4096, 8);
  std::vector<float> b = a, c = a;
  for (float& v : b) v *= -1;
  for (float& v : c) v *= 1.01f;
  const RowRun run{1, 0, 1, 0, false};
  const Stats sa = MeasureRows(a.data(), 1, 4096, 4096, run, 0, 0, 64)[0].stats;
  const Stats sb = MeasureRows(b.data(), 1, 4096, 4096, run, 0, 0, 64)[0].stats;
  const Stats sc = MeasureRows(c.data(), 1, 4096, 4096, run, 0, 0, 64)[0].stats;
  EXPECT_EQ(RelativeL2(sa.sketch, sa.sketch, sa.sum_sq), 0);
  EXPECT_EQ(CosineFromSketches(sa.sketch, sa.sketch, sa.sum_sq, sa.sum_sq), 1);
  EXPECT_NEAR(RelativeL2(sb.sketch, sa.sketch, sa.sum_sq), 2, 0.6);
  EXPECT_LT(CosineFromSketches(sb.sketch, sa.sketch, sb.sum_sq, sa.sum_sq), -0.2);
  EXPECT_NEAR(RelativeL2(sc.sketch, sa.sketch, sa.sum_sq), 0.01, 0.003);
  EXPECT_NEAR(CosineFromSketches(sc.sketch, sa.sketch, sc.sum_sq, sa.sum_sq), 1, 1e-4);
}

}  // namespace
}  // namespace assay

// What the tests of this layer share: events from a seed, temporary folders, equality of events field by field.
#pragma once

#include <gtest/gtest.h>
#include <stdlib.h>

#include <cmath>
#include <filesystem>
#include <string>

#include "base/hash.h"
#include "trace/event.h"
#include "trace/writer.h"

namespace assay::testing {

class TempDir {
 public:
  TempDir() {
    std::string pattern = (std::filesystem::temp_directory_path() / "assay-test-XXXXXX").string();
    path_ = ::mkdtemp(pattern.data());
  }
  ~TempDir() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

inline ProcessInfo SomeProcess() {
  ProcessInfo p;
  p.host = "testhost";
  p.rank = 1;
  p.world_size = 2;
  p.command = {"python", "serve.py", "--prompt", "it's a \"test\" $HOME"};
  p.cwd = "/srv/run 1";
  p.meta = {{"engine", "test"}, {"dtype", "bf16"}};
  return p;
}

// A [n_rows, cols] tensor as the recorder would describe it, numbers from the seed.
inline Event SomeEvent(uint64_t seed, int64_t n_rows = 1, int64_t cols = 256, int n_heads = 0) {
  SplitMix64 random(seed);
  const auto centred = [&] { return random.NextDouble() * 2 - 1; };
  Event e;
  e.step = static_cast<int64_t>(seed % 1000);
  e.phase = n_rows == 1 ? Phase::kDecode : Phase::kPrefill;
  e.dtype = DType::kBF16;
  e.compute_dtype = DType::kBF16;
  e.shape = {n_rows, cols};
  e.strides = {cols, 1};
  e.base_address = 0x7f0000000000 + 64 * seed;
  e.row_axis = 0;
  e.head_axis = n_heads > 0 ? 1 : -1;
  for (int64_t row = 0; row < n_rows; row += 64) {
    Segment s;
    s.request = random.Next();
    s.first_position = row;
    s.first_row = row;
    s.n_rows = std::min<int64_t>(64, n_rows - row);
    s.stats.count = static_cast<uint64_t>(s.n_rows * cols);
    s.stats.zero = 1;
    s.stats.min = -3 - random.NextDouble();
    s.stats.max = 3 + random.NextDouble();
    s.stats.abs_max = std::max(-s.stats.min, s.stats.max);
    s.stats.abs_max_index = random.Next() % s.stats.count;
    s.stats.sum = centred();
    s.stats.sum_sq = 256 * random.NextDouble();
    s.stats.digest = random.Next();
    for (double& x : s.stats.sketch) x = 16 * centred();
    s.stats.histogram_samples = 256;
    for (int16_t exponent = -9; exponent <= 1; ++exponent) {
      s.stats.histogram.push_back({exponent, static_cast<uint32_t>(1 + random.Next() % 60)});
    }
    for (int64_t r = 0; r < s.n_rows; ++r) {
      RowCell cell;
      cell.sum_sq = 256 * random.NextDouble();
      for (double& x : cell.sketch) x = 8 * centred();
      cell.digest = random.Next();
      s.rows.push_back(cell);
    }
    for (int h = 0; h < n_heads; ++h) {
      HeadCell cell;
      cell.sum_sq = 64 * random.NextDouble();
      for (double& x : cell.sketch) x = 4 * centred();
      s.heads.push_back(cell);
    }
    e.segments.push_back(std::move(s));
  }
  return e;
}

// NaN equals NaN; everything else by value.
inline void ExpectSame(double a, double b) {
  if (std::isnan(a) && std::isnan(b)) return;
  EXPECT_EQ(a, b);
}

// Stored as float32 relative to the largest magnitude `top`: half a unit of the last place of float32 for values from
// 2^-126 of the largest on, half the smallest subnormal of that scale below.
inline void ExpectRounded(double wrote, double read, double top) {
  if (!std::isfinite(wrote)) return ExpectSame(wrote, read);
  EXPECT_LE(std::abs(wrote - read), std::max(std::abs(wrote) * 0x1p-24, top * 0x1p-149)) << wrote << " " << read;
}

template <class Array>
void ExpectSketch(const Array& wrote, const Array& read) {
  double top = 0;
  for (double x : wrote) {
    if (std::isfinite(x)) top = std::max(top, std::abs(x));
  }
  for (size_t i = 0; i < wrote.size(); ++i) ExpectRounded(wrote[i], read[i], top);
}

inline void ExpectSegment(const Segment& a, const Segment& b) {
  EXPECT_EQ(a.request, b.request);
  EXPECT_EQ(a.first_position, b.first_position);
  EXPECT_EQ(a.n_rows, b.n_rows);
  EXPECT_EQ(a.first_row, b.first_row);
  EXPECT_EQ(a.padding, b.padding);
  EXPECT_EQ(a.stats.count, b.stats.count);
  EXPECT_EQ(a.stats.nan, b.stats.nan);
  EXPECT_EQ(a.stats.pos_inf, b.stats.pos_inf);
  EXPECT_EQ(a.stats.neg_inf, b.stats.neg_inf);
  EXPECT_EQ(a.stats.zero, b.stats.zero);
  EXPECT_EQ(a.stats.subnormal, b.stats.subnormal);
  ExpectSame(a.stats.min, b.stats.min);
  ExpectSame(a.stats.max, b.stats.max);
  ExpectSame(a.stats.abs_max, b.stats.abs_max);
  EXPECT_EQ(a.stats.abs_max_index, b.stats.abs_max_index);
  ExpectSame(a.stats.sum, b.stats.sum);
  ExpectSame(a.stats.sum_sq, b.stats.sum_sq);
  EXPECT_EQ(a.stats.digest, b.stats.digest);
  EXPECT_EQ(a.stats.digest_split, b.stats.digest_split);
  EXPECT_EQ(a.stats.histogram_samples, b.stats.histogram_samples);
  ASSERT_EQ(a.stats.histogram.size(), b.stats.histogram.size());
  for (size_t i = 0; i < a.stats.histogram.size(); ++i) {
    EXPECT_EQ(a.stats.histogram[i].exponent, b.stats.histogram[i].exponent);
    EXPECT_EQ(a.stats.histogram[i].count, b.stats.histogram[i].count);
  }
  ExpectSketch(a.stats.sketch, b.stats.sketch);
  ASSERT_EQ(a.rows.size(), b.rows.size());
  for (size_t i = 0; i < a.rows.size(); ++i) {
    ExpectSame(a.rows[i].sum_sq, b.rows[i].sum_sq);
    EXPECT_EQ(a.rows[i].digest, b.rows[i].digest);
    EXPECT_EQ(a.rows[i].nonfinite, b.rows[i].nonfinite);
    ExpectSketch(a.rows[i].sketch, b.rows[i].sketch);
  }
  ASSERT_EQ(a.heads.size(), b.heads.size());
  for (size_t i = 0; i < a.heads.size(); ++i) {
    ExpectSame(a.heads[i].sum_sq, b.heads[i].sum_sq);
    EXPECT_EQ(a.heads[i].nonfinite, b.heads[i].nonfinite);
    ExpectSketch(a.heads[i].sketch, b.heads[i].sketch);
  }
}

// All but sequence and time, which the writer sets.
inline void ExpectEvent(const Event& a, const Event& b) {
  EXPECT_EQ(a.site, b.site);
  EXPECT_EQ(a.rank, b.rank);
  EXPECT_EQ(a.step, b.step);
  EXPECT_EQ(a.phase, b.phase);
  EXPECT_EQ(a.dtype, b.dtype);
  EXPECT_EQ(a.compute_dtype, b.compute_dtype);
  EXPECT_EQ(a.flags, b.flags);
  EXPECT_EQ(a.shape, b.shape);
  EXPECT_EQ(a.strides, b.strides);
  EXPECT_EQ(a.storage_offset, b.storage_offset);
  EXPECT_EQ(a.base_address, b.base_address);
  EXPECT_EQ(a.stream, b.stream);
  EXPECT_EQ(a.row_axis, b.row_axis);
  EXPECT_EQ(a.head_axis, b.head_axis);
  EXPECT_EQ(a.shard.index, b.shard.index);
  EXPECT_EQ(a.shard.count, b.shard.count);
  EXPECT_EQ(a.shard.col_offset, b.shard.col_offset);
  EXPECT_EQ(a.shard.full_cols, b.shard.full_cols);
  EXPECT_EQ(a.meta, b.meta);
  EXPECT_EQ(a.payload.sha256, b.payload.sha256);
  EXPECT_EQ(a.payload.size_bytes, b.payload.size_bytes);
  EXPECT_EQ(a.payload.rows, b.payload.rows);
  ASSERT_EQ(a.segments.size(), b.segments.size());
  for (size_t i = 0; i < a.segments.size(); ++i) ExpectSegment(a.segments[i], b.segments[i]);
}

}  // namespace assay::testing

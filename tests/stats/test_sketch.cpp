// The sketch as an estimator: how far the estimated distance lies from the true one, over kinds of difference, random
// shapes and salts; and that pieces add up to the whole.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "stats/measure.h"
#include "stats/sketch_math.h"

namespace assay {
namespace {

struct Matrix {
  int64_t rows;
  int64_t heads;
  int64_t d;
  std::vector<float> data;

  int64_t cols() const { return heads * d; }
  float& at(int64_t t, int64_t c) { return data[static_cast<size_t>(t * cols() + c)]; }
};

Matrix Gaussian(int64_t rows, int64_t heads, int64_t d, std::mt19937_64& rng) {
  Matrix m{rows, heads, d, {}};
  m.data.resize(static_cast<size_t>(rows * heads * d));
  std::normal_distribution<float> normal;
  for (float& v : m.data) v = normal(rng);
  return m;
}

using Rng = std::mt19937_64;
int64_t Pick(Rng& rng, int64_t n) { return static_cast<int64_t>(rng() % static_cast<uint64_t>(n)); }

// What becomes of a tensor under one kind of fault.
struct Kind {
  const char* name;
  void (*apply)(Matrix& m, Rng& rng);
};

const Kind kKinds[] = {
    {"gaussian noise",
     [](Matrix& m, Rng& rng) {
       std::normal_distribution<float> normal(0, 0.01f);
       for (float& v : m.data) v += normal(rng);
     }},
    {"outlier channel",
     [](Matrix& m, Rng& rng) {
       const int64_t c = Pick(rng, m.cols());
       for (int64_t t = 0; t < m.rows; ++t) m.at(t, c) += 50.0f + 0.1f * m.at(t, c);
     }},
    {"constant",
     [](Matrix& m, Rng&) {
       for (float& v : m.data) v += 0.5f;
     }},
    {"scale",
     [](Matrix& m, Rng&) {
       for (float& v : m.data) v *= 1.4427f;
     }},
    {"sign flip",
     [](Matrix& m, Rng&) {
       for (float& v : m.data) v = -v;
     }},
    {"permuted heads",
     [](Matrix& m, Rng&) {
       for (int64_t t = 0; t < m.rows; ++t) {
         std::rotate(m.data.begin() + t * m.cols(), m.data.begin() + t * m.cols() + m.d,
                     m.data.begin() + (t + 1) * m.cols());
       }
     }},
    {"stale row",
     [](Matrix& m, Rng& rng) {
       const int64_t from = Pick(rng, m.rows);
       const int64_t to = (from + 1 + Pick(rng, m.rows - 1)) % m.rows;
       for (int64_t c = 0; c < m.cols(); ++c) m.at(to, c) = m.at(from, c);
     }},
    {"zeroed rows",
     [](Matrix& m, Rng& rng) {
       const int64_t from = Pick(rng, m.rows);
       for (int64_t t = from; t < m.rows; ++t) {
         for (int64_t c = 0; c < m.cols(); ++c) m.at(t, c) = 0;
       }
     }},
    {"one element", [](Matrix& m, Rng& rng) { m.at(Pick(rng, m.rows), Pick(rng, m.cols())) += 3.0f; }},
    {"two elements",
     [](Matrix& m, Rng& rng) {
       const int64_t t = Pick(rng, m.rows);
       const int64_t c = Pick(rng, m.cols());
       m.at(t, c) += 3.0f;
       m.at(Pick(rng, m.rows), (c + 1 + Pick(rng, m.cols() - 1)) % m.cols()) -= 2.0f;
     }},
    {"bias",
     [](Matrix& m, Rng& rng) {
       std::normal_distribution<float> normal;
       for (int64_t c = 0; c < m.cols(); ++c) {
         const float b = normal(rng);
         for (int64_t t = 0; t < m.rows; ++t) m.at(t, c) += b;
       }
     }},
    {"row shift", [](Matrix& m, Rng&) { std::rotate(m.data.begin(), m.data.begin() + m.cols(), m.data.end()); }},
    {"rank one",
     [](Matrix& m, Rng& rng) {
       std::normal_distribution<float> normal;
       std::vector<float> u(static_cast<size_t>(m.cols()));
       for (float& v : u) v = normal(rng);
       for (int64_t t = 0; t < m.rows; ++t) {
         const float w = normal(rng);
         for (int64_t c = 0; c < m.cols(); ++c) m.at(t, c) += w * u[static_cast<size_t>(c)];
       }
     }},
    {"periodic columns",
     [](Matrix& m, Rng& rng) {
       const int64_t step = int64_t{1} << (3 + Pick(rng, 4));
       for (int64_t t = 0; t < m.rows; ++t) {
         for (int64_t c = 0; c < m.cols(); c += step) m.at(t, c) += 1.0f;
       }
     }},
};

// REQUIRES: positions that do not cross a multiple of segment_rows.
Segment MeasureWhole(const Matrix& m, uint64_t request, int64_t position, int64_t segment_rows) {
  const int64_t shape[] = {m.rows, m.heads, m.d};
  const int64_t strides[] = {m.heads * m.d, m.d, 1};
  const RowRun runs[] = {{request, 0, m.rows, position, false}};
  LogicalLayout logical;
  logical.row_axis = 0;
  logical.head_axis = 1;
  logical.runs = runs;
  logical.segment_rows = segment_rows;
  std::vector<Segment> segments;
  EXPECT_TRUE(Measure({m.data.data(), DType::kF32, shape, strides, 0}, logical, {}, &segments).ok());
  EXPECT_EQ(segments.size(), 1u);
  return segments.at(0);
}

// What docs/numerics.md promises of the estimate, over faults that are as far from random as faults are: one channel,
// one element, a shift by a row, a period of the columns.
TEST(Sketch, DistanceIsWithinAQuarterOfTheTruthAndUnbiased) {
  constexpr int kSalts = 400;
  constexpr int64_t kDims[] = {8, 16, 24, 50, 64, 96, 128, 192};
  for (const Kind& kind : kKinds) {
    Rng rng(20260 + static_cast<uint64_t>(&kind - kKinds));
    std::vector<double> ratios;
    double squares = 0;
    for (int salt = 0; salt < kSalts; ++salt) {
      const int64_t rows = 2 + Pick(rng, 63);
      const int64_t heads = 2 + Pick(rng, 7);
      const Matrix a = Gaussian(rows, heads, kDims[Pick(rng, 8)], rng);
      Matrix b = a;
      kind.apply(b, rng);
      double truth = 0;
      for (size_t k = 0; k < a.data.size(); ++k) {
        const double d = static_cast<double>(a.data[k]) - static_cast<double>(b.data[k]);
        truth += d * d;
      }
      const uint64_t request = rng();
      const int64_t position = 64 * Pick(rng, 1000);
      const Stats sa = MeasureWhole(a, request, position, 64).stats;
      const Stats sb = MeasureWhole(b, request, position, 64).stats;
      const double ratio = RelativeL2(sb.sketch, sa.sketch, sa.sum_sq) / std::sqrt(truth / sa.sum_sq);
      ratios.push_back(ratio);
      squares += ratio * ratio;
    }
    const double mean = std::accumulate(ratios.begin(), ratios.end(), 0.0) / kSalts;
    double spread = 0;
    int within = 0;
    for (double r : ratios) {
      spread += (r - mean) * (r - mean);
      within += std::abs(r - 1) <= 0.25;
    }
    spread = std::sqrt(spread / kSalts);
    RecordProperty(std::string(kind.name) + " mean", std::to_string(mean));
    printf("%-18s mean %.4f  mean square %.4f  spread %.4f  within 25 %%: %.3f\n", kind.name, mean, squares / kSalts,
           spread, static_cast<double>(within) / kSalts);
    EXPECT_GE(within, kSalts * 97 / 100) << kind.name;
    EXPECT_NEAR(mean, 1, 0.01) << kind.name;
    EXPECT_NEAR(squares / kSalts, 1, 0.02) << kind.name;
    EXPECT_LE(spread, 0.105) << kind.name;
  }
}

}  // namespace
}  // namespace assay

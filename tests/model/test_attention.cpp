// The attention kernel and the merge against long double, element by element, with derived bounds.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "model/attention.h"

namespace assay {
namespace {

// Queries, keys and values of a case, keys and values side by side in rows as the cache holds them.
template <class T>
struct Case {
  int64_t rows, keys, heads, group, qk, v, first, window;
  std::vector<T> q, kv;
  int64_t width() const { return heads / group * (qk + v); }
  AttentionShape shape() const {
    AttentionShape s;
    s.qk_dim = qk;
    s.v_dim = v;
    s.scale = 1.0 / std::sqrt(static_cast<double>(qk));
    s.window = window;
    return s;
  }
};

template <class T>
Case<T> MakeCase(int64_t rows, int64_t keys, int64_t heads, int64_t group, int64_t qk, int64_t v, int64_t first,
                 int64_t window, uint32_t seed) {
  Case<T> c{rows, keys, heads, group, qk, v, first, window, {}, {}};
  std::mt19937 random(seed);
  std::normal_distribution<double> normal;
  c.q.resize(static_cast<size_t>(rows * heads * qk));
  c.kv.resize(static_cast<size_t>(keys * c.width()));
  for (T& x : c.q) x = static_cast<T>(normal(random));
  for (T& x : c.kv) x = static_cast<T>(normal(random));
  return c;
}

template <class T>
// -7 marks what was not written.
void Run(const Case<T>& c, const std::vector<KvRun<T>>& runs, std::vector<T>* out, std::vector<T>* lse) {
  out->assign(static_cast<size_t>(c.rows * c.heads * c.v), T{-7});
  lse->assign(static_cast<size_t>(c.rows * c.heads), T{-7});
  const QueryView<T> query{c.q.data(), c.heads * c.qk, c.qk, c.rows, c.heads, c.first};
  const KvView<T> view{runs, c.width(), c.qk + c.v, 0, c.qk, c.group};
  std::vector<T> scratch;
  Attend(query, view, c.shape(), out->data(), c.heads * c.v, lse->data(), &scratch);
}

// Everything in long double. sensitivity: sum_i p_i |s error| is at most that factor times u (see Check).
template <class T>
void Check(const Case<T>& c, const std::vector<T>& out, const std::vector<T>& lse) {
  const double u = std::numeric_limits<T>::epsilon() / 2;
  for (int64_t t = 0; t < c.rows; ++t) {
    for (int64_t h = 0; h < c.heads; ++h) {
      const int64_t position = c.first + t;
      std::vector<long double> scores;
      std::vector<int64_t> seen;
      long double top = -std::numeric_limits<long double>::infinity(), largest_abs = 0;
      for (int64_t s = 0; s < c.keys; ++s) {
        if (s > position || (c.window > 0 && s <= position - c.window)) continue;
        const T* k = c.kv.data() + s * c.width() + h / c.group * (c.qk + c.v);
        long double dot = 0, abs = 0;
        for (int64_t i = 0; i < c.qk; ++i) {
          const long double p = static_cast<long double>(c.q[static_cast<size_t>((t * c.heads + h) * c.qk + i)]) * k[i];
          dot += p;
          abs += std::fabs(p);
        }
        seen.push_back(s);
        scores.push_back(dot / std::sqrt(static_cast<long double>(c.qk)));
        largest_abs = std::max(largest_abs, abs / std::sqrt(static_cast<long double>(c.qk)));
        top = std::max(top, scores.back());
      }
      const size_t at = static_cast<size_t>(t * c.heads + h);
      if (seen.empty()) {
        EXPECT_EQ(lse[at], -std::numeric_limits<T>::infinity());
        for (int64_t j = 0; j < c.v; ++j) EXPECT_EQ(out[at * static_cast<size_t>(c.v) + static_cast<size_t>(j)], T{0});
        continue;
      }
      long double sum = 0;
      for (const long double s : scores) sum += std::exp(s - top);
      const auto n = static_cast<double>(seen.size());
      // A score is off by at most (qk + 2) u times the sum of its absolute products, an exponential by that plus 2 u,
      // the sum over n by n u, its logarithm by u: absolute errors, as d log(sum) = sum p_i d s_i.
      const double score_error = (static_cast<double>(c.qk) + 2) * u * static_cast<double>(largest_abs);
      const double lse_bound = 2 * score_error + (n + 4) * u + 2 * u * static_cast<double>(std::fabs(top));
      EXPECT_NEAR(static_cast<double>(lse[at]), static_cast<double>(top + std::log(sum)), lse_bound);
      for (int64_t j = 0; j < c.v; ++j) {
        long double exact = 0, abs = 0;
        for (size_t i = 0; i < seen.size(); ++i) {
          const long double p = std::exp(scores[i] - top) / sum;
          const long double v = c.kv[static_cast<size_t>(seen[i] * c.width() + h / c.group * (c.qk + c.v) + c.qk + j)];
          exact += p * v;
          abs += p * std::fabs(v);
        }
        // Relative error of a probability: that of its exponential and of the sum, and one division.
        const double bound = (2 * (2 * score_error + (n + 4) * u) + (n + 2) * u) * static_cast<double>(abs);
        EXPECT_NEAR(static_cast<double>(out[at * static_cast<size_t>(c.v) + static_cast<size_t>(j)]),
                    static_cast<double>(exact), bound);
      }
    }
  }
}

template <class T>
class Attention : public ::testing::Test {};
using Types = ::testing::Types<float, double>;
TYPED_TEST_SUITE(Attention, Types);

// Odd widths that no vector fills, grouped heads, chunks behind earlier keys, windows smaller than the text.
TYPED_TEST(Attention, AgreesWithLongDoubleOverShapes) {
  struct Shape {
    int64_t rows, keys, heads, group, qk, v, first, window;
  };
  const Shape shapes[] = {{1, 1, 1, 1, 8, 8, 0, 0},    {5, 5, 2, 1, 16, 8, 0, 0},       {1, 37, 4, 4, 24, 16, 36, 0},
                          {3, 40, 4, 2, 17, 5, 37, 0}, {9, 9, 4, 1, 8, 33, 0, 4},       {1, 64, 8, 2, 64, 64, 63, 7},
                          {4, 12, 1, 1, 3, 1, 8, 1},   {2, 200, 2, 2, 96, 64, 198, 100}};
  uint32_t seed = 1;
  for (const Shape& s : shapes) {
    const auto c = MakeCase<TypeParam>(s.rows, s.keys, s.heads, s.group, s.qk, s.v, s.first, s.window, seed++);
    std::vector<TypeParam> out, lse;
    Run(c, {{c.kv.data(), c.keys, 0}}, &out, &lse);
    Check(c, out, lse);
  }
}

TYPED_TEST(Attention, KeysInManyRunsAreTheSameKeys) {
  const auto c = MakeCase<TypeParam>(4, 23, 2, 1, 16, 12, 19, 0, 11);
  std::vector<KvRun<TypeParam>> runs;
  for (int64_t p = 0; p < 23; p += 5) runs.push_back({c.kv.data() + p * c.width(), std::min<int64_t>(5, 23 - p), p});
  std::vector<TypeParam> out, lse;
  Run(c, runs, &out, &lse);
  Check(c, out, lse);
}

// An empty chunk has to leave zeros and -inf, or the merge reads what was there before.
TYPED_TEST(Attention, RowsThatSeeNoKeyAreWritten) {
  const auto c = MakeCase<TypeParam>(2, 4, 2, 1, 8, 8, 0, 0, 3);
  std::vector<TypeParam> out, lse;
  Run(c, {}, &out, &lse);
  for (const TypeParam v : out) EXPECT_EQ(v, TypeParam{0});
  for (const TypeParam v : lse) EXPECT_EQ(v, -std::numeric_limits<TypeParam>::infinity());
}

TYPED_TEST(Attention, NanInAKeyReachesTheRowsThatSeeIt) {
  auto c = MakeCase<TypeParam>(3, 3, 1, 1, 4, 4, 0, 0, 5);
  c.kv[static_cast<size_t>(2 * c.width())] = std::numeric_limits<TypeParam>::quiet_NaN();
  std::vector<TypeParam> out, lse;
  Run(c, {{c.kv.data(), 3, 0}}, &out, &lse);
  EXPECT_TRUE(std::isfinite(lse[0]) && std::isfinite(lse[1]));
  EXPECT_TRUE(std::isnan(lse[2]));
  EXPECT_TRUE(std::isnan(out[8]));
}

TYPED_TEST(Attention, MergedPartsEqualTheWhole) {
  const double u = std::numeric_limits<TypeParam>::epsilon() / 2;
  const auto c = MakeCase<TypeParam>(3, 30, 2, 1, 16, 8, 27, 0, 21);
  std::vector<TypeParam> whole, whole_lse;
  Run(c, {{c.kv.data(), 30, 0}}, &whole, &whole_lse);
  for (const int64_t chunk : {1, 7, 13, 30}) {
    std::vector<PartialResult<TypeParam>> parts;
    for (int64_t p = 0; p < 30; p += chunk) {
      PartialResult<TypeParam> part;
      Run(c, {{c.kv.data() + p * c.width(), std::min(chunk, 30 - p), p}}, &part.out, &part.lse);
      parts.push_back(std::move(part));
    }
    PartialResult<TypeParam> empty;  // no keys at all changes nothing
    Run(c, {}, &empty.out, &empty.lse);
    parts.push_back(std::move(empty));
    std::vector<const PartialResult<TypeParam>*> pointers;
    for (const auto& part : parts) pointers.push_back(&part);
    std::vector<TypeParam> out(whole.size()), lse(whole_lse.size());
    MergePartials<TypeParam>(pointers, 3, 2, 8, 8, out.data(), 16, lse.data());
    // Two evaluations of the same 30 probabilities over values below 5: 30 + 30 + 40 roundings, generously.
    for (size_t i = 0; i < out.size(); ++i) EXPECT_NEAR(out[i], whole[i], 100 * u * 5) << "chunk " << chunk;
    for (size_t i = 0; i < lse.size(); ++i) EXPECT_NEAR(lse[i], whole_lse[i], 100 * u * 5) << "chunk " << chunk;
  }
}

TYPED_TEST(Attention, MergeOfNothingIsEmpty) {
  PartialResult<TypeParam> empty;
  empty.out.assign(8, TypeParam{0});
  empty.lse.assign(2, -std::numeric_limits<TypeParam>::infinity());
  const PartialResult<TypeParam>* parts[] = {&empty, &empty};
  std::vector<TypeParam> out(8, TypeParam{3}), lse(2, TypeParam{3});
  MergePartials<TypeParam>(parts, 1, 2, 4, 4, out.data(), 8, lse.data());
  for (const TypeParam v : out) EXPECT_EQ(v, TypeParam{0});
  for (const TypeParam v : lse) EXPECT_EQ(v, -std::numeric_limits<TypeParam>::infinity());
}

}  // namespace
}  // namespace assay

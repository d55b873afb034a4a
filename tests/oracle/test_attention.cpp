#include <numeric>

#include "oracle/attention.h"
#include "oracle/linear.h"
#include "oracle/merge.h"
#include "oracle/oracle_testing.h"

namespace assay::oracle {
namespace {

// q [T, H, d], k [S, Hkv, d], v [S, Hkv, dv], sinks [H], slopes [H]; `in` points into its own object.
struct Inputs {
  Array q, k, v, sinks, slopes;
  std::vector<int64_t> q_at, k_at;
  AttentionInput in;
};

// The last t of s positions are queries.
Inputs Make(int64_t t, int64_t s, int64_t heads, int64_t kv_heads, int64_t d, int64_t dv, uint64_t seed = 1,
            double size = 1) {
  Inputs x;
  x.q = Random({t, heads, d}, seed, size);
  x.k = Random({s, kv_heads, d}, seed + 1);
  x.v = Random({s, kv_heads, dv}, seed + 2);
  x.sinks = Random({heads}, seed + 3);
  x.slopes = Random({heads}, seed + 4, 0.1);
  for (int64_t i = 0; i < t; ++i) x.q_at.push_back(s - t + i);
  for (int64_t i = 0; i < s; ++i) x.k_at.push_back(i);
  return x;
}

AttentionInput InputOf(const Inputs& x) {
  AttentionInput in;
  in.q = &x.q;
  in.k = &x.k;
  in.v = &x.v;
  in.query_positions = x.q_at;
  in.key_positions = x.k_at;
  return in;
}

// Two-pass softmax over the keys that a query sees, without blocks or rescaling: nothing is shared with the oracle.
// The definition, written down in T: long double for the truth, float for an engine.
template <class T>
struct Naive {
  Array out, lse, entropy;
};
template <class T>
Naive<T> NaiveAttention(const AttentionInput& in, const AttentionSpec& spec) {
  const int64_t t = in.q->shape[0], heads = in.q->shape[1], d = in.q->shape[2];
  const int64_t s = in.k->shape[0], kv_heads = in.k->shape[1];
  const int64_t dv = in.v ? in.v->shape[2] : in.value_dim;
  Naive<T> r{Array::Filled({t, heads, dv}), Array::Filled({t, heads}, -kInf), Array::Filled({t, heads})};
  for (int64_t i = 0; i < t; ++i) {
    for (int64_t h = 0; h < heads; ++h) {
      const int64_t kv = h / (heads / kv_heads);
      std::vector<T> score;
      std::vector<int64_t> at;
      for (int64_t j = 0; j < s; ++j) {
        const int64_t qp = in.query_positions[static_cast<size_t>(i)], kp = in.key_positions[static_cast<size_t>(j)];
        bool seen = !spec.causal || kp <= qp || kp < spec.prefix_len;
        if (spec.window > 0) seen = seen && kp > qp - spec.window;
        if (spec.chunk > 0) seen = seen && kp / spec.chunk == qp / spec.chunk;
        if (!in.ranges.empty()) {
          const KeyRange range = in.ranges[static_cast<size_t>(i)];
          seen = seen && range.begin <= kp && kp < range.end;
        }
        if (in.mask) seen = seen && (*in.mask)[i * s + j] != 0;
        if (!seen) continue;
        T dot = 0;
        for (int64_t c = 0; c < d; ++c) {
          dot +=
              static_cast<T>((*in.q)[(i * heads + h) * d + c]) * static_cast<T>((*in.k)[(j * kv_heads + kv) * d + c]);
        }
        dot *= static_cast<T>(spec.scale);
        if (spec.soft_cap != 0) dot = static_cast<T>(spec.soft_cap) * std::tanh(dot / static_cast<T>(spec.soft_cap));
        if (in.alibi_slopes) dot += static_cast<T>((*in.alibi_slopes)[h]) * static_cast<T>(kp - qp);
        score.push_back(dot);
        at.push_back(j);
      }
      std::vector<T> all = score;
      if (in.sinks) all.push_back(static_cast<T>((*in.sinks)[h]));
      if (all.empty()) continue;
      const T max = *std::max_element(all.begin(), all.end());
      T sum = 0;
      for (const T x : all) sum += std::exp(x - max);
      r.lse[i * heads + h] = static_cast<double>(max + std::log(sum));
      for (const T x : all) {
        const T p = std::exp(x - max) / sum;
        if (p > 0) r.entropy[i * heads + h] -= static_cast<double>(p * std::log(p));
      }
      for (int64_t c = 0; c < dv; ++c) {
        T out = 0;
        for (size_t j = 0; j < at.size(); ++j) {
          const double v = in.v ? (*in.v)[(at[j] * kv_heads + kv) * dv + c] : (*in.k)[(at[j] * kv_heads + kv) * d + c];
          out += std::exp(score[j] - max) / sum * static_cast<T>(v);
        }
        r.out[(i * heads + h) * dv + c] = static_cast<double>(out);
      }
    }
  }
  return r;
}

// The oracle against the truth, to rounding in double; a float engine against the oracle, within the bound that it
// states.
void ExpectRight(const AttentionInput& in, const AttentionSpec& spec, const char* what) {
  SCOPED_TRACE(what);
  const AttentionResult r = Attend(in, spec).value();
  const Naive<long double> exact = NaiveAttention<long double>(in, spec);
  const Naive<float> engine = NaiveAttention<float>(in, spec);
  ExpectWithin(exact.out, r.out, kF64);
  ExpectWithin(exact.lse, r.lse, kF64);
  ExpectWithin(engine.out, r.out, kF32);
  ExpectWithin(engine.lse, r.lse, kF32);
  for (int64_t i = 0; i < r.entropy.size(); ++i) EXPECT_NEAR(r.entropy[i], exact.entropy[i], 1e-12);
}

// Heads alone, grouped and one key head for all; one query, as many as there are keys, and many.
TEST(Attention, EveryVariantMeetsItsBound) {
  for (const auto& [heads, kv_heads] : {std::pair{1, 1}, {4, 4}, {6, 2}, {5, 1}}) {
    for (const auto& [t, s] : {std::pair{1, 1}, {1, 37}, {7, 7}, {9, 40}, {70, 75}}) {
      const Inputs x = Make(t, s, heads, kv_heads, 24, 10);
      AttentionInput in = InputOf(x);
      AttentionSpec spec;
      spec.scale = 0.2;
      ExpectRight(in, spec, "causal");
      AttentionSpec other = spec;
      other.causal = false;
      ExpectRight(in, other, "all keys");
      other = spec;
      other.window = 5;
      ExpectRight(in, other, "window");
      other = spec;
      other.chunk = 8;
      other.prefix_len = 3;
      ExpectRight(in, other, "chunk and prefix");
      other = spec;
      other.soft_cap = 2;
      ExpectRight(in, other, "soft cap");
      in.sinks = &x.sinks;
      ExpectRight(in, spec, "sinks");
      in.alibi_slopes = &x.slopes;
      ExpectRight(in, spec, "sinks and slopes");
    }
  }
}

// Scores near 0 make all keys equal, scores of thousands leave one: both ends of the softmax's condition.
TEST(Attention, SharpAndFlatScoresMeetTheirBound) {
  for (const double size : {1e-6, 1.0, 30.0, 1000.0}) {
    const Inputs x = Make(5, 60, 4, 2, 16, 8, 3, size);
    ExpectRight(InputOf(x), {0.25}, "size");
  }
}

TEST(Attention, ManyKeysAreAddedUpInBlocks) {
  const Inputs x = Make(3, 1301, 4, 1, 16, 12);
  ExpectRight(InputOf(x), {0.25}, "1301 keys");
  AttentionSpec spec{0.25};
  spec.window = 700;
  ExpectRight(InputOf(x), spec, "window over a block's edge");
}

// P rounded to bf16 before P V, the result stored in bf16: what flash kernels do.
TEST(Attention, BfloatKernelsMeetTheBoundAndAWrongScaleDoesNot) {
  Inputs x = Make(12, 40, 4, 2, 32, 16, 9, 2);
  for (Array* a : {&x.q, &x.k, &x.v}) {
    for (double& v : a->values) v = ToBf16(v);
  }
  const auto kernel = [&](double scale) {
    Array out = Array::Filled({12, 4, 16});
    for (int64_t i = 0; i < 12; ++i) {
      for (int64_t h = 0; h < 4; ++h) {
        std::vector<float> score;
        float max = -HUGE_VALF, sum = 0;
        for (int64_t j = 0; j <= 28 + i; ++j) {
          float dot = 0;
          for (int64_t c = 0; c < 32; ++c) {
            dot += static_cast<float>(x.q[(i * 4 + h) * 32 + c]) * static_cast<float>(x.k[(j * 2 + h / 2) * 32 + c]);
          }
          score.push_back(dot * static_cast<float>(scale));
          max = std::max(max, score.back());
        }
        for (float& v : score) sum += v = std::exp(v - max);
        for (int64_t c = 0; c < 16; ++c) {
          float total = 0;
          for (size_t j = 0; j < score.size(); ++j) {
            total += static_cast<float>(ToBf16(score[j])) *
                     static_cast<float>(x.v[(static_cast<int64_t>(j) * 2 + h / 2) * 16 + c]);
          }
          out[(i * 4 + h) * 16 + c] = ToBf16(total / sum);
        }
      }
    }
    return out;
  };
  const AttentionResult r = Attend(InputOf(x), {0.25}).value();
  ExpectWithin(kernel(0.25), r.out, kBf16);
  EXPECT_GT(Compare(kernel(0.25 * 1.1), r.out, kBf16)->over, 100);
}

// Positions say what a query sees, not the place in the array: 7 and 20 have no common factor, so each key moves once.
TEST(Attention, KeysInAnyOrderGiveTheSameRows) {
  Inputs x = Make(6, 20, 2, 1, 8, 4);
  const AttentionResult straight = Attend(InputOf(x), {0.3}).value();
  std::vector<int64_t> order(20);
  for (int64_t i = 0; i < 20; ++i) order[static_cast<size_t>(i)] = (i * 7) % 20;
  x.k = TakeRows(x.k, order).value();
  x.v = TakeRows(x.v, order).value();
  x.k_at = order;
  const AttentionResult shuffled = Attend(InputOf(x), {0.3}).value();
  ExpectWithin(shuffled.out.value, straight.out, kF64);
}

// `rows` only leaves rows out: those that are computed are the same.
TEST(Attention, ChosenRowsRangesAndMasksAreObeyed) {
  Inputs x = Make(8, 30, 4, 2, 8, 4);
  AttentionInput in = InputOf(x);
  std::vector<KeyRange> ranges;
  for (int64_t i = 0; i < 8; ++i) ranges.push_back({i, 10 + 2 * i});
  in.ranges = ranges;
  Array mask = Array::Filled({8, 30}, 1);
  for (int64_t i = 0; i < mask.size(); i += 3) mask[i] = 0;
  in.mask = &mask;
  ExpectRight(in, {0.3}, "ranges and mask");
  const AttentionResult all = Attend(in, {0.3}).value();
  const std::vector<int64_t> rows{6, 2};
  in.rows = rows;
  const AttentionResult some = Attend(in, {0.3}).value();
  EXPECT_EQ(some.out.value.shape, (std::vector<int64_t>{2, 4, 4}));
  for (int64_t i = 0; i < 16; ++i) {
    EXPECT_DOUBLE_EQ(some.out.value[i], all.out.value[6 * 16 + i]);
    EXPECT_DOUBLE_EQ(some.out.value[16 + i], all.out.value[2 * 16 + i]);
  }
}

// The middle query sees the range [5, 5). A sink takes all of its probability, so the output stays 0 and its lse is the
// sink.
TEST(Attention, ARowWithoutKeysIsZeroWithMinusInfinity) {
  const Inputs x = Make(3, 10, 2, 2, 4, 4);
  AttentionInput in = InputOf(x);
  const std::vector<KeyRange> ranges{{0, 100}, {5, 5}, {0, 100}};
  in.ranges = ranges;
  AttentionResult r = Attend(in, {}).value();
  for (int64_t h = 0; h < 2; ++h) {
    EXPECT_EQ(r.lse.value[2 + h], -kInf);
    EXPECT_EQ(r.max_score[2 + h], -kInf);
    EXPECT_EQ(r.keys_seen[2 + h], 0);
    for (int64_t j = 0; j < 4; ++j) EXPECT_EQ(r.out.value[(2 + h) * 4 + j], 0);
  }
  in.sinks = &x.sinks;
  r = Attend(in, {}).value();
  EXPECT_DOUBLE_EQ(r.lse.value[2], x.sinks[0]);
  EXPECT_EQ(r.lse_of_keys[2], -kInf);
  EXPECT_EQ(r.out.value[8], 0);
}

TEST(Attention, NoKeysAtAllIsAnEmptyRowToo) {
  Inputs x = Make(2, 2, 2, 1, 4, 4);
  x.k = Array::Filled({0, 1, 4});
  x.v = Array::Filled({0, 1, 4});
  x.k_at.clear();
  const AttentionResult r = Attend(InputOf(x), {}).value();
  EXPECT_EQ(r.lse.value[3], -kInf);
  EXPECT_EQ(r.out.value[3], 0);
}

// Uninitialised pages of a cache hold NaN: a mask must select, not multiply by 0.
TEST(Attention, UnseenKeysDoNotEnterEvenWhenTheyAreNaN) {
  Inputs x = Make(4, 12, 2, 1, 8, 4);
  const AttentionResult clean = Attend(InputOf(x), {0.5}).value();
  // The last key is seen by the last query alone.
  for (int64_t i = 0; i < 8; ++i) x.k[11 * 8 + i] = kNaN;
  for (int64_t i = 0; i < 4; ++i) x.v[11 * 4 + i] = kNaN;
  const AttentionResult r = Attend(InputOf(x), {0.5}).value();
  for (int64_t i = 0; i < 3 * 2 * 4; ++i) EXPECT_NEAR(r.out.value[i], clean.out.value[i], 1e-14);
  for (int64_t i = 3 * 2 * 4; i < 4 * 2 * 4; ++i) EXPECT_TRUE(std::isnan(r.out.value[i]));
  EXPECT_TRUE(std::isnan(r.lse.value[7]));
  EXPECT_TRUE(std::isnan(r.max_score[7]));
}

TEST(Attention, AnInfiniteValueReachesItsColumn) {
  Inputs x = Make(1, 6, 1, 1, 8, 3);
  x.v[2 * 3 + 1] = kInf;
  const AttentionResult r = Attend(InputOf(x), {0.5}).value();
  EXPECT_TRUE(std::isfinite(r.out.value[0]));
  EXPECT_EQ(r.out.value[1], kInf);
}

// Closed form: 16 equal scores s give lse = s + ln 16, entropy ln 16, and the mean of the values.
TEST(Attention, EqualKeysGiveTheMeanAndTheLogarithmOfTheirNumber) {
  Inputs x = Make(1, 16, 1, 1, 4, 2);
  x.k = Array::Filled({16, 1, 4}, 1.0);
  const AttentionResult r = Attend(InputOf(x), {0.5}).value();
  const double score = 0.5 * (x.q[0] + x.q[1] + x.q[2] + x.q[3]);
  EXPECT_NEAR(r.lse.value[0], score + std::log(16), 1e-14);
  EXPECT_NEAR(r.entropy[0], std::log(16), 1e-14);
  EXPECT_NEAR(r.max_score[0], score, 1e-14);
  double mean = 0;
  for (int64_t i = 0; i < 16; ++i) mean += x.v[i * 2] / 16;
  EXPECT_NEAR(r.out.value[0], mean, 1e-14);
}

// q_nope · (W_UK c) = (W_UKᵀ q_nope) · c, and W_UV leaves the sum over keys.
TEST(Attention, AbsorbedAndMaterialisedLatentsAgree) {
  const int64_t t = 5, s = 33, heads = 3, c = 32, dn = 12, dr = 8, dv = 10;
  const Array latent = Random({s, c}, 20), pe = Random({s, 1, dr}, 21), q_nope = Random({t, heads, dn}, 22),
              q_pe = Random({t, heads, dr}, 23), uk = Random({heads, dn, c}, 24, 0.2),
              uv = Random({heads, dv, c}, 25, 0.2);
  Array q_latent = Array::Filled({t, heads, c}), k_nope = Array::Filled({s, heads, dn}),
        v = Array::Filled({s, heads, dv}), pe_all = Array::Filled({s, heads, dr});
  for (int64_t h = 0; h < heads; ++h) {
    for (int64_t j = 0; j < c; ++j) {
      for (int64_t i = 0; i < dn; ++i) {
        for (int64_t r = 0; r < t; ++r) {
          q_latent[(r * heads + h) * c + j] += q_nope[(r * heads + h) * dn + i] * uk[(h * dn + i) * c + j];
        }
        for (int64_t r = 0; r < s; ++r)
          k_nope[(r * heads + h) * dn + i] += latent[r * c + j] * uk[(h * dn + i) * c + j];
      }
      for (int64_t i = 0; i < dv; ++i) {
        for (int64_t r = 0; r < s; ++r) v[(r * heads + h) * dv + i] += latent[r * c + j] * uv[(h * dv + i) * c + j];
      }
    }
    for (int64_t r = 0; r < s; ++r) {
      for (int64_t i = 0; i < dr; ++i) pe_all[(r * heads + h) * dr + i] = pe[r * dr + i];
    }
  }
  Inputs x = Make(t, s, heads, heads, dn + dr, dv);
  x.q = Concat(q_nope, q_pe).value();
  x.k = Concat(k_nope, pe_all).value();
  x.v = v;
  const AttentionSpec spec{0.22};
  const AttentionResult materialised = Attend(InputOf(x), spec).value();
  const Array q = Concat(q_latent, q_pe).value();
  const Array k = Concat(Reshape(latent, {s, 1, c}).value(), pe).value();
  AttentionInput in = InputOf(x);
  in.q = &q;
  in.k = &k;
  in.v = nullptr;
  in.value_dim = c;
  ExpectRight(in, spec, "absorbed");
  const AttentionResult absorbed = Attend(in, spec).value();
  for (int64_t i = 0; i < absorbed.lse.value.size(); ++i) {
    EXPECT_NEAR(absorbed.lse.value[i], materialised.lse.value[i], 1e-11);
  }
  for (int64_t r = 0; r < t * heads; ++r) {
    for (int64_t i = 0; i < dv; ++i) {
      double sum = 0;
      for (int64_t j = 0; j < c; ++j) sum += absorbed.out.value[r * c + j] * uv[(r % heads * dv + i) * c + j];
      EXPECT_NEAR(sum, materialised.out.value[r * dv + i], 1e-11);
    }
  }
}

TEST(Attention, WrongShapesAreRefused) {
  Inputs x = Make(2, 4, 4, 2, 8, 4);
  AttentionInput in = InputOf(x);
  in.v = nullptr;
  EXPECT_FALSE(Attend(in, {}).ok());
  in = InputOf(x);
  in.query_positions = {};
  EXPECT_FALSE(Attend(in, {}).ok());
  x.q = Random({2, 3, 8}, 1);
  EXPECT_FALSE(Attend(InputOf(x), {}).ok());
  EXPECT_FALSE(Attend({}, {}).ok());
}

// Each of the three queries sees the four keys of its window; their exponentials add up to exp(lse).
TEST(Scores, MaskedKeysAreMinusInfinityAndTheRestMeetsItsBound) {
  const Inputs x = Make(3, 9, 4, 2, 12, 4);
  AttentionInput in = InputOf(x);
  in.alibi_slopes = &x.slopes;
  AttentionSpec spec{0.3};
  spec.window = 4;
  const Computed c = Scores(in, spec).value();
  const Naive<long double> exact = NaiveAttention<long double>(in, spec);
  for (int64_t r = 0; r < 12; ++r) {
    double sum = 0;
    int64_t seen = 0;
    for (int64_t j = 0; j < 9; ++j) {
      sum += std::exp(c.value[r * 9 + j]);
      seen += c.value[r * 9 + j] > -kInf;
    }
    EXPECT_EQ(seen, 4);
    EXPECT_NEAR(std::log(sum), exact.lse[r], 1e-12);
  }
}

// A cut at 0 leaves the first chunk empty, one at 30 the second.
TEST(Merge, ChunksMergeToTheWhole) {
  for (const int64_t cut : {0, 1, 13, 30}) {
    const Inputs x = Make(6, 30, 4, 2, 16, 8);
    AttentionInput in = InputOf(x);
    const AttentionResult whole = Attend(in, {0.25}).value();
    std::vector<KeyRange> first(6, {0, cut}), second(6, {cut, 1000});
    in.ranges = first;
    const AttentionResult a = Attend(in, {0.25}).value();
    in.ranges = second;
    const AttentionResult b = Attend(in, {0.25}).value();
    const std::vector<Chunk> chunks{{&a.out.value, &a.lse.value}, {&b.out.value, &b.lse.value}};
    const MergeResult m = MergeChunks(chunks).value();
    ExpectWithin(whole.out.value, m.out, kF64);
    ExpectWithin(whole.lse.value, m.lse, kF64);
  }
}

// An empty chunk (lse of -inf) may hold garbage in its output; a NaN lse is a fault that must not be averaged away.
TEST(Merge, EmptyChunksAddNothingAndNaNStays) {
  Array out_a = Random({3, 1, 4}, 1), out_b = Random({3, 1, 4}, 2);
  const Array lse_a = MakeArray({3, 1}, {0.5, -kInf, -kInf}).value();
  Array lse_b = MakeArray({3, 1}, {-kInf, -kInf, kNaN}).value();
  for (int64_t i = 0; i < 4; ++i) out_b[i] = kNaN;  // of the empty chunk: not looked at
  const std::vector<Chunk> chunks{{&out_a, &lse_a}, {&out_b, &lse_b}};
  const MergeResult m = MergeChunks(chunks).value();
  for (int64_t i = 0; i < 4; ++i) {
    EXPECT_EQ(m.out.value[i], out_a[i]);
    EXPECT_EQ(m.out.value[4 + i], 0);
    EXPECT_TRUE(std::isnan(m.out.value[8 + i]));
  }
  EXPECT_EQ(m.lse.value[0], 0.5);
  EXPECT_EQ(m.lse.value[1], -kInf);
  EXPECT_TRUE(std::isnan(m.lse.value[2]));
  EXPECT_FALSE(MergeChunks({}).ok());
}

// At an lse of 3000 its own rounding is 1e-4: exp of the difference of two carries that error, and the bound must know.
TEST(Merge, FloatEnginesMeetTheBoundAtLargeLogSums) {
  for (const double size : {1.0, 50.0, 3000.0}) {
    const Array out_a = Random({8, 3, 5}, 4), out_b = Random({8, 3, 5}, 5);
    Array lse_a = Random({8, 3}, 6, size), lse_b = Random({8, 3}, 7, size);
    for (int64_t i = 0; i < 12; ++i) lse_b[i] = static_cast<float>(lse_a[i] + 0.1 * static_cast<double>(i));
    const std::vector<Chunk> chunks{{&out_a, &lse_a}, {&out_b, &lse_b}};
    const MergeResult m = MergeChunks(chunks).value();
    Array out = Array::Filled({8, 3, 5}), lse = Array::Filled({8, 3});
    for (int64_t r = 0; r < 24; ++r) {
      const float a = static_cast<float>(lse_a[r]), b = static_cast<float>(lse_b[r]), max = std::max(a, b);
      const float ea = std::exp(a - max), eb = std::exp(b - max), sum = ea + eb;
      lse[r] = max + std::log(sum);
      for (int64_t i = r * 5; i < r * 5 + 5; ++i) {
        out[i] = static_cast<float>(out_a[i]) * (ea / sum) + static_cast<float>(out_b[i]) * (eb / sum);
      }
    }
    ExpectWithin(out, m.out, kF32);
    ExpectWithin(lse, m.lse, kF32);
  }
}

}  // namespace
}  // namespace assay::oracle

// Every oracle against an engine in float32 that is written down here: the engine stays within the bound, and uses no
// less than a stated share of it somewhere, so that no bound is so wide that nothing could break it. Operands are
// random, or chosen so that all roundings fall to one side. docs/numerics.md has the shares.
#include <algorithm>
#include <bit>
#include <tuple>

#include "oracle/activation.h"
#include "oracle/attention.h"
#include "oracle/embedding.h"
#include "oracle/linear.h"
#include "oracle/linear_attention.h"
#include "oracle/merge.h"
#include "oracle/moe.h"
#include "oracle/norm.h"
#include "oracle/oracle_testing.h"
#include "oracle/rope.h"
#include "oracle/sampling.h"
#include "oracle/softmax.h"

namespace assay::oracle {
namespace {

float F(double x) { return static_cast<float>(x); }

// Largest error of an element over its bound; the elements must all be within it.
double Share(const Array& engine, const Computed& computed, const Precision& precision = kF32) {
  const Agreement a = Compare(engine, computed, precision).value();
  EXPECT_TRUE(a.ok()) << a.over << " of " << a.count << " over, worst " << a.worst << " at " << a.worst_at;
  return a.worst;
}
// The share is kept as a property of the test, so that --gtest_output=json: gives the figures of the page.
#define EXPECT_SHARE(least, name, ...)                 \
  do {                                                 \
    const double share = Share(__VA_ARGS__);           \
    RecordProperty(name, std::to_string(share));       \
    EXPECT_GE(share, least) << "the bound is vacuous"; \
  } while (false)

// 1, and n - 1 numbers that are each lost when they are added to it in float32, all on the same side.
Array LostToOne(int64_t n, double lost = 0x1.ffp-25) {
  Array a = Array::Filled({1, n}, lost);
  a[0] = 1;
  return a;
}

TEST(BoundShare, LinearIsReachedWhenAllRoundingsFallToOneSide) {
  const Array x = LostToOne(256), w = Array::Filled({1, 256}, 1);
  float sum = 0;
  for (const double v : x.values) sum += F(v);
  EXPECT_SHARE(0.9, "linear_one_sided", Vector({sum}), Linear(x, w, {}).value());
}

TEST(BoundShare, RandomLinear) {
  const Array x = Random({8, 256}, 1), w = Random({32, 256}, 2), bias = Random({32}, 3);
  const Computed c = Linear(x, w, bias).value();
  Array engine = c.value;
  for (int64_t i = 0; i < engine.size(); ++i) {
    float sum = 0;
    for (int64_t k = 0; k < 256; ++k) sum += F(x[i / 32 * 256 + k]) * F(w[i % 32 * 256 + k]);
    engine[i] = sum + F(bias[i % 32]);
  }
  EXPECT_SHARE(1.0 / 300, "linear", engine, c);
}

// The sum of the elements' bounds; a probe adds errors of both signs.
TEST(BoundShare, FreivaldsOfARightRow) {
  const Array x = Random({8, 64}, 4), w = Random({256, 64}, 5);
  Array y = Linear(x, w, {}).value().value;
  for (double& v : y.values) v = ToBf16(v);
  const std::vector<RowCheck> checks = CheckLinear(x, w, {}, y, kBf16, 6).value();
  double most = 0;
  for (const RowCheck& row : checks) {
    EXPECT_LE(row.largest, row.bound);
    most = std::max(most, row.largest / row.bound);
  }
  RecordProperty("freivalds", std::to_string(most));
  EXPECT_GE(most, 1.0 / 200);
}

TEST(BoundShare, LinearCombinationIsReachedWhenAllRoundingsFallToOneSide) {
  const Array one = Array::Filled({4}, 1), lost = Array::Filled({4}, 0x1.ffp-25);
  std::vector<Term> terms{{1, &one}};
  for (int i = 0; i < 7; ++i) terms.push_back({1, &lost});
  Array engine = one;
  for (size_t t = 1; t < terms.size(); ++t) {
    for (double& v : engine.values) v = F(v) + F(0x1.ffp-25);
  }
  EXPECT_SHARE(0.4, "sum_one_sided", engine, LinearCombination(terms).value());
}

TEST(BoundShare, LinearCombinationWithFactorsAndStores) {
  std::vector<Array> arrays;
  for (uint64_t i = 0; i < 5; ++i) arrays.push_back(Random({500}, 10 + i));
  const std::vector<double> factors{1, -2.5, 0.375, 1, 1.0 / 3};
  std::vector<Term> terms;
  for (size_t i = 0; i < arrays.size(); ++i) {
    for (double& v : arrays[i].values) v = ToBf16(v);
    terms.push_back({static_cast<double>(F(factors[i])), &arrays[i]});
  }
  Array engine = arrays[0], stored = arrays[0];
  for (int64_t i = 0; i < engine.size(); ++i) {
    float sum = F(arrays[0][i]);
    double kept = arrays[0][i];
    for (size_t t = 1; t < arrays.size(); ++t) {
      sum += F(factors[t]) * F(arrays[t][i]);
      kept = ToBf16(F(kept) + F(factors[t]) * F(arrays[t][i]));  // after each term
    }
    engine[i] = sum;
    stored[i] = kept;
  }
  const Computed c = LinearCombination(terms).value();
  EXPECT_SHARE(1.0 / 30, "sum", engine, c);
  EXPECT_SHARE(1.0 / 4, "sum_stored", stored, c, kBf16);
}

TEST(BoundShare, RmsNormIsReachedWhenAllRoundingsFallToOneSide) {
  const Array x = LostToOne(64, 0x1.ffp-13);  // squares are lost beside 1
  float sum = 0;
  for (const double v : x.values) sum += F(v) * F(v);
  const float factor = 1 / std::sqrt(sum / 64);
  Array engine = x;
  for (double& v : engine.values) v = F(v) * factor;
  EXPECT_SHARE(0.6, "rms_norm_one_sided", engine, RmsNorm(x, {}, 0).value());
}

TEST(BoundShare, LayerNorm) {
  for (const double mean : {0.0, 30.0}) {
    Array x = Random({8, 64}, 20);
    for (double& v : x.values) v = F(v + mean);
    const Array w = Random({64}, 21), b = Random({64}, 22);
    Array two = x, one = x;
    for (int64_t r = 0; r < 8; ++r) {
      float sum = 0, squares = 0, centred = 0;
      for (const double v : x.row(r)) sum += F(v);
      const float m = sum / 64;
      for (const double v : x.row(r)) {
        squares += F(v) * F(v);
        centred += (F(v) - m) * (F(v) - m);
      }
      const float f2 = 1 / std::sqrt(centred / 64 + 1e-5F), f1 = 1 / std::sqrt(squares / 64 - m * m + 1e-5F);
      for (int64_t i = r * 64; i < r * 64 + 64; ++i) {
        two[i] = (F(x[i]) - m) * f2 * F(w[i % 64]) + F(b[i % 64]);
        one[i] = (F(x[i]) - m) * f1 * F(w[i % 64]) + F(b[i % 64]);
      }
    }
    const Computed c = LayerNorm(x, w, b, static_cast<double>(1e-5F)).value();
    EXPECT_SHARE(1.0 / 100, "layer_norm_two_passes", two, c);
    EXPECT_SHARE(1.0 / 100, "layer_norm_one_pass", one, c);
  }
}

// Frequencies in float32 by a power and by products from pair to pair, blended as configurations ask for it.
std::vector<float> FloatFrequencies(const RopeSpec& spec, bool by_products) {
  const float theta = F(spec.theta), factor = F(spec.factor), two_pi = 6.2831853071795864F;
  const float step = std::pow(theta, -2.0F / static_cast<float>(spec.dim));
  std::vector<float> f;
  for (int64_t i = 0; i < spec.dim / 2; ++i) {
    f.push_back(by_products ? (i == 0 ? 1.0F : f.back() * step)
                            : 1 / std::pow(theta, static_cast<float>(2 * i) / static_cast<float>(spec.dim)));
  }
  const auto turning = [&](double turns) {
    return static_cast<float>(spec.dim) * std::log(F(spec.original_max_position) / (F(turns) * two_pi)) /
           (2 * std::log(theta));
  };
  float low = turning(spec.beta_fast), high = turning(spec.beta_slow);
  if (spec.truncate) {
    low = std::floor(low);
    high = std::ceil(high);
  }
  low = std::max(low, 0.0F);
  high = std::min(high, static_cast<float>(spec.dim - 1));
  for (size_t i = 0; i < f.size(); ++i) {
    if (spec.scaling == RopeScaling::kLinear) f[i] /= factor;
    if (spec.scaling == RopeScaling::kYarn) {
      const float keep = 1 - std::clamp((static_cast<float>(i) - low) / (high - low), 0.0F, 1.0F);
      f[i] = f[i] / factor * (1 - keep) + f[i] * keep;
    }
    if (spec.scaling == RopeScaling::kLlama3) {
      const float wave = two_pi / f[i];
      const float smooth = std::clamp((F(spec.original_max_position) / wave - F(spec.low_freq_factor)) /
                                          (F(spec.high_freq_factor) - F(spec.low_freq_factor)),
                                      0.0F, 1.0F);
      f[i] = (1 - smooth) * (f[i] / factor) + smooth * f[i];
    }
  }
  return f;
}

Array FloatRotate(const Array& x, double position, const std::vector<float>& f, double magnitude) {
  const int64_t half = static_cast<int64_t>(f.size());
  Array y = x;
  for (int64_t r = 0; r < x.rows(); ++r) {
    for (int64_t i = 0; i < half; ++i) {
      const float angle = F(position) * f[static_cast<size_t>(i)];
      const float c = std::cos(angle) * F(magnitude), s = std::sin(angle) * F(magnitude);
      const int64_t a = r * 2 * half + i, b = a + half;
      y[a] = F(x[a]) * c - F(x[b]) * s;
      y[b] = F(x[b]) * c + F(x[a]) * s;
    }
  }
  return y;
}

TEST(BoundShare, RotationsByEveryScalingBaseAndWayOfItsPowers) {
  double most = 0;
  for (const RopeScaling scaling :
       {RopeScaling::kDefault, RopeScaling::kLinear, RopeScaling::kLlama3, RopeScaling::kYarn}) {
    for (const auto& [theta, factor] : {std::pair{1e4, 4.0}, {5e5, 32.0}, {1e7, 40.0}}) {
      for (const bool truncate : {true, false}) {
        RopeSpec spec;
        spec.dim = 96;
        spec.scaling = scaling;
        spec.theta = theta;
        spec.factor = factor;
        spec.original_max_position = 8192;
        spec.truncate = truncate;
        const RopeFrequencies f = MakeFrequencies(spec).value();
        const Array x = Random({1, 4, 96}, 30);
        for (const double position : {1.0, 4001.0, 131071.0}) {
          const Computed c = Rotate(x, std::vector<double>{position}, f, {}).value();
          for (const bool by_products : {false, true}) {
            SCOPED_TRACE(testing::Message() << "scaling " << int(scaling) << " theta " << theta << " position "
                                            << position << (by_products ? " by products" : ""));
            most = std::max(most, Share(FloatRotate(x, position, FloatFrequencies(spec, by_products), f.magnitude), c));
          }
        }
      }
    }
  }
  RecordProperty("rope", std::to_string(most));
  EXPECT_GE(most, 1.0 / 5) << "the bound is vacuous";
}

TEST(BoundShare, SoftmaxAndItsLogarithm) {
  const Array x = Random({16, 64}, 40, 4);
  Array p = x, log_p = x;
  for (int64_t r = 0; r < 16; ++r) {
    float max = -HUGE_VALF, sum = 0;
    for (const double v : x.row(r)) max = std::max(max, F(v));
    for (const double v : x.row(r)) sum += std::exp(F(v) - max);
    for (int64_t i = r * 64; i < r * 64 + 64; ++i) {
      p[i] = std::exp(F(x[i]) - max) / sum;
      log_p[i] = F(x[i]) - (max + std::log(sum));
    }
  }
  EXPECT_SHARE(1.0 / 60, "softmax", p, Softmax(x).value());
  EXPECT_SHARE(1.0 / 200, "log_softmax", log_p, LogSoftmax(x).value());
}

// 64 queries of one head over all keys; the output, its log-sum-exp and the scores.
TEST(BoundShare, AttentionItsLogSumExpAndItsScores) {
  const int64_t t = 8, n = 64, d = 32, dv = 16;
  const Array q = Random({t, 1, d}, 50), k = Random({n, 1, d}, 51), v = Random({n, 1, dv}, 52);
  std::vector<int64_t> q_at(static_cast<size_t>(t), n), k_at;
  for (int64_t i = 0; i < n; ++i) k_at.push_back(i);
  AttentionInput in;
  in.q = &q;
  in.k = &k;
  in.v = &v;
  in.query_positions = q_at;
  in.key_positions = k_at;
  const AttentionSpec spec{0.25};
  const AttentionResult r = Attend(in, spec).value();
  Array out = r.out.value, lse = r.lse.value, scores = Array::Filled({t, 1, n});
  for (int64_t i = 0; i < t; ++i) {
    float max = -HUGE_VALF, sum = 0;
    std::vector<float> p;
    for (int64_t j = 0; j < n; ++j) {
      float dot = 0;
      for (int64_t c = 0; c < d; ++c) dot += F(q[i * d + c]) * F(k[j * d + c]);
      scores[i * n + j] = dot * 0.25F;
      p.push_back(dot * 0.25F);
      max = std::max(max, p.back());
    }
    for (float& x : p) sum += x = std::exp(x - max);
    lse[i] = max + std::log(sum);
    for (int64_t c = 0; c < dv; ++c) {
      float total = 0;
      for (int64_t j = 0; j < n; ++j) total += p[static_cast<size_t>(j)] * F(v[j * dv + c]);
      out[i * dv + c] = total / sum;
    }
  }
  EXPECT_SHARE(1.0 / 300, "attention", out, r.out);
  EXPECT_SHARE(1.0 / 250, "attention_lse", lse, r.lse);
  EXPECT_SHARE(1.0 / 40, "attention_scores", scores, Scores(in, spec).value());
}

// Chunk by chunk, as engines that loop over a context do: each step rounds what the next one starts from.
TEST(BoundShare, MergeOfFewAndManyChunksAndItsLogSumExp) {
  for (const auto& [n, size, least] : {std::tuple{3U, 3.0, 1.0 / 40}, {3U, 300.0, 1.0 / 400}, {40U, 3.0, 1.0 / 400}}) {
    std::vector<Array> outs, lses;
    for (uint64_t j = 0; j < n; ++j) {
      outs.push_back(Random({32, 2, 8}, 60 + j));
      lses.push_back(Random({32, 2}, 200 + j, 1));
      for (double& v : lses.back().values) v = F(v + size);
    }
    std::vector<Chunk> chunks;
    for (size_t j = 0; j < n; ++j) chunks.push_back({&outs[j], &lses[j]});
    const MergeResult m = MergeChunks(chunks).value();
    Array out = m.out.value, lse = m.lse.value;
    for (int64_t r = 0; r < lse.size(); ++r) {
      float running = F(lses[0][r]);
      std::vector<float> row;
      for (int64_t i = 0; i < 8; ++i) row.push_back(F(outs[0][r * 8 + i]));
      for (size_t j = 1; j < n; ++j) {
        const float other = F(lses[j][r]), max = std::max(running, other);
        const float a = std::exp(running - max), b = std::exp(other - max), sum = a + b;
        for (int64_t i = 0; i < 8; ++i) {
          float& x = row[static_cast<size_t>(i)];
          x = x * (a / sum) + F(outs[j][r * 8 + i]) * (b / sum);
        }
        running = max + std::log(sum);
      }
      lse[r] = running;
      for (int64_t i = 0; i < 8; ++i) out[r * 8 + i] = row[static_cast<size_t>(i)];
    }
    const std::string of = "_" + std::to_string(n) + "_at_" + std::to_string(static_cast<int>(size));
    EXPECT_SHARE(least, "merge" + of, out, m.out);
    EXPECT_SHARE(least, "merge_lse" + of, lse, m.lse);
  }
}

float FloatActivation(float x, Activation kind) {
  switch (kind) {
    case Activation::kSilu:
      return x / (1 + std::exp(-x));
    case Activation::kGelu:
      return x * 0.5F * (1 + std::erf(x * 0.70710678F));
    case Activation::kGeluTanh:
      return 0.5F * x * (1 + std::tanh(0.7978845608F * (x + 0.044715F * x * x * x)));
    case Activation::kQuickGelu:
      return x * (1 / (1 + std::exp(-1.702F * x)));
    case Activation::kSwigluOai:
      return std::min(x, 7.0F) * (1 / (1 + std::exp(-1.702F * std::min(x, 7.0F))));
    case Activation::kRelu:
      return std::max(x, 0.0F);
    case Activation::kRelu2:
      return std::max(x, 0.0F) * std::max(x, 0.0F);
    case Activation::kSigmoid:
      return 1 / (1 + std::exp(-x));
    case Activation::kTanh:
      return std::tanh(x);
    case Activation::kIdentity:
      return x;
  }
  return 0;
}

TEST(BoundShare, EveryActivation) {
  for (const Activation kind : AllActivations()) {
    SCOPED_TRACE(std::string(NameOf(kind)));
    const Array x = Random({4000}, 80, 3);
    Array engine = x;
    for (double& v : engine.values) v = FloatActivation(F(v), kind);
    const Computed c = Activate(x, {kind});
    if (kind == Activation::kRelu || kind == Activation::kIdentity) {
      EXPECT_EQ(engine.values, c.value.values);  // no rounding at all
    } else {
      EXPECT_SHARE(1.0 / 30, std::string(NameOf(kind)), engine, c);
    }
  }
}

// Gates where the exponential is steep: the argument's rounding to bf16 is what counts.
TEST(BoundShare, ComposedSigmoidsRoundTheirArgumentToo) {
  Array gate = Random({4000}, 81, 6), up = Random({4000}, 82);
  for (Array* a : {&gate, &up}) {
    for (double& v : a->values) v = ToBf16(v);
  }
  Array quick = gate, oai = gate, silu = gate;
  for (int64_t i = 0; i < gate.size(); ++i) {
    const auto swish = [&](double g) {
      return ToBf16(g * ToBf16(1 / (1 + std::exp(-static_cast<double>(F(ToBf16(F(1.702) * F(g))))))));
    };
    quick[i] = swish(gate[i]);
    oai[i] = ToBf16(ToBf16(std::clamp(up[i], -7.0, 7.0) + 1) * swish(std::min(gate[i], 7.0)));
    silu[i] = ToBf16(ToBf16(FloatActivation(F(gate[i]), Activation::kSilu)) * up[i]);
  }
  EXPECT_SHARE(1.0 / 2, "quick_gelu_composed", quick, Activate(gate, {Activation::kQuickGelu}), kBf16);
  EXPECT_SHARE(1.0 / 2, "swiglu_oai_composed", oai, Gate(gate, up, {Activation::kSwigluOai}).value(), kBf16);
  EXPECT_SHARE(1.0 / 2, "silu_gate_stored", silu, Gate(gate, up, {Activation::kSilu}).value(), kBf16);
}

// Every argument in bf16 from -12 to 12; scalars in bf16 too, as some frameworks have them.
TEST(BoundShare, ComposedTanhFormRoundsEachStep) {
  Array x = Array::Filled({0});
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const double v = std::bit_cast<float>(bits << 16);
    if (std::abs(v) < 12) x.values.push_back(v);
  }
  x.shape = {x.size()};
  const ActivationSpec spec = *ParseActivation("gelu_new");
  for (const bool scalars : {false, true}) {
    const double root = std::sqrt(2 / std::acos(-1.0)), cubic = 0.044715;
    Array engine = x;
    for (double& v : engine.values) {
      const double by = scalars ? ToBf16(cubic) : cubic, times = scalars ? ToBf16(root) : root;
      const double z = ToBf16(times * ToBf16(v + ToBf16(by * ToBf16(v * v * v))));
      v = ToBf16(ToBf16(0.5 * v) * ToBf16(1 + ToBf16(std::tanh(z))));
    }
    EXPECT_SHARE(1.0 / 3, scalars ? "gelu_new_scalars" : "gelu_new", engine, Activate(x, spec), kBf16);
    // More than a kernel that rounds once may be off by.
    EXPECT_FALSE(Compare(engine, Activate(x, {Activation::kGeluTanh}), kBf16)->ok());
  }
}

TEST(BoundShare, RouterScoresAndWeights) {
  for (const Scoring scoring : {Scoring::kSoftmax, Scoring::kSigmoid}) {
    for (const bool renormalise : {false, true}) {
      const Array logits = Random({64, 32}, 90, 3);
      RouterSpec spec;
      spec.scoring = scoring;
      spec.top_k = 4;
      spec.renormalise = renormalise;
      spec.scaling = 2.5;
      const Routing r = Route(logits, {}, spec).value();
      Array scores = r.scores.value, weights = r.weights.value;
      for (int64_t t = 0; t < 64; ++t) {
        float max = -HUGE_VALF, all = 0, sum = 0;
        for (const double z : logits.row(t)) max = std::max(max, F(z));
        for (const double z : logits.row(t)) all += std::exp(F(z) - max);
        for (int64_t e = t * 32; e < t * 32 + 32; ++e) {
          const float z = F(logits[e]);
          scores[e] = scoring == Scoring::kSigmoid ? 1 / (1 + std::exp(-z)) : std::exp(z - max) / all;
        }
        for (int64_t j = t * 4; j < t * 4 + 4; ++j) {
          weights[j] = scores[t * 32 + r.ids[static_cast<size_t>(j)]];
          sum += F(weights[j]);
        }
        for (int64_t j = t * 4; j < t * 4 + 4; ++j)
          weights[j] = (renormalise ? F(weights[j]) / sum : F(weights[j])) * 2.5F;
      }
      EXPECT_SHARE(1.0 / 40, scoring == Scoring::kSoftmax ? "scores_softmax" : "scores_sigmoid", scores, r.scores);
      EXPECT_SHARE(1.0 / 80, std::string(renormalise ? "weights_renormalised" : "weights"), weights, r.weights);
    }
  }
}

// Weighted rows added up in float32, and stored after each.
TEST(BoundShare, CombineInFloatAndWithStores) {
  const int64_t t = 16, k = 4, h = 32;
  Array experts = Random({t * k, h}, 100), weights = Random({t, k}, 101);
  for (Array* a : {&experts, &weights}) {
    for (double& v : a->values) v = ToBf16(v);
  }
  std::vector<int64_t> row_of;
  for (int64_t i = 0; i < t * k; ++i) row_of.push_back(i % 7 == 6 ? -1 : t * k - 1 - i);
  Array engine = Array::Filled({t, h}), stored = engine;
  for (int64_t i = 0; i < t * k; ++i) {
    const int64_t from = row_of[static_cast<size_t>(i)];
    for (int64_t j = 0; from >= 0 && j < h; ++j) {
      double& at = engine[i / k * h + j];
      at = F(at) + F(weights[i]) * F(experts[from * h + j]);
      double& kept = stored[i / k * h + j];
      kept = ToBf16(kept + ToBf16(weights[i] * experts[from * h + j]));
    }
  }
  const Computed c = Combine(experts, row_of, weights).value();
  EXPECT_SHARE(1.0 / 40, "combine", engine, c);
  EXPECT_SHARE(1.0 / 6, "combine_stored", stored, c, kBf16);
}

TEST(BoundShare, ScaledEmbedding) {
  Array table = Random({50, 48}, 110);
  for (double& v : table.values) v = ToBf16(v);
  std::vector<int64_t> tokens;
  for (int64_t i = 0; i < 50; ++i) tokens.push_back((i * 7) % 50);
  const double scale = std::sqrt(48.0);
  const Computed c = Embed(tokens, table, scale).value();
  Array engine = c.value, stored = c.value;
  for (int64_t i = 0; i < engine.size(); ++i) {
    const double row = table[tokens[static_cast<size_t>(i / 48)] * 48 + i % 48];
    engine[i] = F(row) * std::sqrt(48.0F);
    stored[i] = ToBf16(row * ToBf16(scale));  // the factor in the table's type
  }
  EXPECT_SHARE(1.0 / 5, "embedding_scaled", engine, c);
  EXPECT_SHARE(1.0 / 3, "embedding_stored", stored, c, kBf16);
}

TEST(BoundShare, CappedHead) {
  const Array x = Random({8, 64}, 120), w = Random({100, 64}, 121);
  const Computed c = Head(x, w, {}, 0.5, 6).value();
  Array engine = c.value;
  for (int64_t i = 0; i < engine.size(); ++i) {
    float sum = 0;
    for (int64_t k = 0; k < 64; ++k) sum += F(x[i / 100 * 64 + k]) * F(w[i % 100 * 64 + k]);
    engine[i] = 6 * std::tanh(sum * 0.5F / 6);
  }
  EXPECT_SHARE(1.0 / 100, "head_capped", engine, c);
}

// The state is stored after every token: in bf16 each of them rounds it once more.
TEST(BoundShare, StateOfALinearAttention) {
  const int64_t t = 12, h = 2, d = 8, dv = 4;
  const Array state = Random({h, d, dv}, 130), k = Random({t, h, d}, 131), v = Random({t, h, dv}, 132);
  const Computed c = UpdateState(state, k, v).value();
  Array engine = state, stored = state;
  for (double& s : stored.values) s = ToBf16(s);
  const Computed from_stored = UpdateState(stored, k, v).value();
  for (int64_t i = 0; i < t; ++i) {
    for (int64_t at = 0; at < h * d * dv; ++at) {
      const float term = F(k[(i * h + at / (d * dv)) * d + at / dv % d]) * F(v[(i * h + at / (d * dv)) * dv + at % dv]);
      engine[at] = F(engine[at]) + term;
      stored[at] = ToBf16(F(stored[at]) + term);
    }
  }
  EXPECT_SHARE(1.0 / 30, "state", engine, c);
  EXPECT_SHARE(1.0 / 15, "state_stored", stored, from_stored, kBf16);
}

// A probability has no bound of an engine, only its own error: (3 + max |l| / T + ln n + n) roundings of a double.
TEST(BoundShare, TokenProbabilityAgainstLongDouble) {
  const Array logits = Random({1000}, 140, 5);
  for (const double temperature : {0.3, 1.0, 2.5}) {
    long double sum = 0;
    double largest = 0;
    for (const double l : logits.values) {
      sum += std::exp(static_cast<long double>(l) / temperature);
      largest = std::max(largest, std::abs(l) / temperature);
    }
    const double bound = Gamma(3 + 2 * largest + std::log(1000.0) + 1000, 0x1p-53);
    double worst = 0;
    for (int64_t token = 0; token < 1000; token += 7) {
      const double exact = static_cast<double>(std::exp(static_cast<long double>(logits[token]) / temperature) / sum);
      const double p = TokenProbability(logits.values, token, {temperature, 0, 1, 0}).value();
      worst = std::max(worst, std::abs(p - exact) / exact / bound);
    }
    RecordProperty("token_probability", std::to_string(worst));
    EXPECT_LE(worst, 1);
    EXPECT_GE(worst, 1.0 / 200);
  }
}

}  // namespace
}  // namespace assay::oracle

// Time of the attention oracle on the shape that docs/numerics.md states: 64 query rows over 8,192 keys, 8 heads,
// absorbed MLA 512 + 64; and of a linear layer. Prints seconds, median of the runs. The baselines, in the same run, are
// the same operations in plain loops of double on one thread, for 4 of the 64 rows, times 16.
//   bench_oracle [--runs N] [--json FILE]
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "base/hash.h"
#include "base/parallel_for.h"
#include "oracle/attention.h"
#include "oracle/linear.h"

namespace {

using namespace assay;
using namespace assay::oracle;

Array Random(std::vector<int64_t> shape, uint64_t seed) {
  Array a = Array::Filled(std::move(shape));
  SplitMix64 random(seed);
  for (double& v : a.values) v = 2 * random.NextDouble() - 1;
  return a;
}

// Absorbed attention of `rows` query rows as it is written down, without bounds.
double PlainAttention(const Array& q, const Array& k, int64_t rows, int64_t value_dim, double scale) {
  const int64_t heads = q.shape[1], d = q.shape[2], keys = k.shape[0];
  double checksum = 0;
  std::vector<double> p(static_cast<size_t>(keys)), out(static_cast<size_t>(value_dim));
  for (int64_t v = 0; v < rows * heads; ++v) {
    double max = -HUGE_VAL, sum = 0;
    for (int64_t s = 0; s < keys; ++s) {
      double dot = 0;
      for (int64_t i = 0; i < d; ++i) dot += q[v * d + i] * k[s * d + i];
      p[static_cast<size_t>(s)] = dot * scale;
      max = std::max(max, dot * scale);
    }
    for (double& x : p) sum += x = std::exp(x - max);
    std::fill(out.begin(), out.end(), 0);
    for (int64_t s = 0; s < keys; ++s) {
      for (int64_t i = 0; i < value_dim; ++i) out[static_cast<size_t>(i)] += p[static_cast<size_t>(s)] * k[s * d + i];
    }
    for (const double x : out) checksum += x / sum;
  }
  return checksum;
}

double PlainLinear(const Array& x, const Array& w, int64_t rows) {
  double checksum = 0;
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t j = 0; j < w.shape[0]; ++j) {
      double dot = 0;
      for (int64_t i = 0; i < x.cols(); ++i) dot += x[r * x.cols() + i] * w[j * x.cols() + i];
      checksum += dot;
    }
  }
  return checksum;
}

template <class F>
double MedianSeconds(int runs, const F& f) {
  std::vector<double> seconds;
  for (int i = 0; i < runs; ++i) {
    const auto start = std::chrono::steady_clock::now();
    f();
    seconds.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }
  std::sort(seconds.begin(), seconds.end());
  return seconds[seconds.size() / 2];
}

}  // namespace

int main(int argc, char** argv) {
  int runs = 9;
  std::string json;
  for (int i = 1; i + 1 < argc; i += 2) {
    if (std::string(argv[i]) == "--runs") runs = std::max(1, std::atoi(argv[i + 1]));
    if (std::string(argv[i]) == "--json") json = argv[i + 1];
  }
  constexpr int64_t kRows = 64, kKeys = 8192, kHeads = 8, kLatent = 512, kRope = 64;
  const Array q = Random({kRows, kHeads, kLatent + kRope}, 1), k = Random({kKeys, 1, kLatent + kRope}, 2);
  std::vector<int64_t> q_at, k_at;
  for (int64_t i = 0; i < kRows; ++i) q_at.push_back(kKeys - kRows + i);
  for (int64_t i = 0; i < kKeys; ++i) k_at.push_back(i);
  AttentionInput in;
  in.q = &q;
  in.k = &k;
  in.value_dim = kLatent;
  in.query_positions = q_at;
  in.key_positions = k_at;
  bool ok = true;
  const double attention = MedianSeconds(runs, [&] { ok &= Attend(in, {1 / 24.0}).ok(); });
  volatile double sink = 0;
  const double plain_attention =
      16 * MedianSeconds((runs + 2) / 3, [&] { sink = PlainAttention(q, k, kRows / 16, kLatent, 1 / 24.0); });
  const Array x = Random({64, 1024}, 3), w = Random({4096, 1024}, 4);
  const double linear = MedianSeconds(runs, [&] { ok &= Linear(x, w, {}).ok(); });
  const double plain_linear = 16 * MedianSeconds((runs + 2) / 3, [&] { sink = PlainLinear(x, w, kRows / 16); });
  if (!ok || !std::isfinite(sink)) return 5;
  std::printf("attention oracle, 64 rows x 8192 keys x 8 heads, MLA 512+64: %.3f s on %d cores, plain loops %.3f s\n",
              attention, UsableCores(), plain_attention);
  std::printf("linear oracle, 64 x 1024 by 4096 with its scale:             %.3f s, plain loops %.3f s\n", linear,
              plain_linear);
  if (json.empty()) return 0;
  std::FILE* file = std::fopen(json.c_str(), "w");
  if (!file) return 4;
  std::fprintf(file,
               "{\"schema\": \"assay.bench/1\", \"results\": ["
               "{\"name\": \"oracle: attention, 64 rows, 8192 keys, 8 heads, MLA 512+64, %d cores, median of %d\", "
               "\"value\": %.6g, \"unit\": \"s\", \"baseline\": \"plain loops, one thread, no bounds\", "
               "\"baseline_value\": %.6g}, "
               "{\"name\": \"oracle: linear, 64 x 1024 by 4096, %d cores, median of %d\", \"value\": %.6g, "
               "\"unit\": \"s\", \"baseline\": \"plain loops, one thread, no bounds\", \"baseline_value\": %.6g}]}\n",
               UsableCores(), runs, attention, plain_attention, UsableCores(), runs, linear, plain_linear);
  return std::fclose(file) == 0 ? 0 : 4;
}

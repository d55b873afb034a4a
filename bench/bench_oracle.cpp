// Time of the attention oracle on the shape that docs/numerics.md states: 64 query rows over 8,192 keys, 8 heads,
// absorbed MLA 512 + 64; and of a linear layer. Prints seconds, median of the runs.
//   bench_oracle [--runs N] [--json FILE]
#include <algorithm>
#include <chrono>
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
  int runs = 5;
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
  const Array x = Random({64, 1024}, 3), w = Random({4096, 1024}, 4);
  const double linear = MedianSeconds(runs, [&] { ok &= Linear(x, w, {}).ok(); });
  if (!ok) return 5;
  std::printf("attention oracle, 64 rows x 8192 keys x 8 heads, MLA 512+64: %.3f s on %d cores\n", attention,
              UsableCores());
  std::printf("linear oracle, 64 x 1024 by 4096 with its scale:             %.3f s\n", linear);
  if (json.empty()) return 0;
  std::FILE* file = std::fopen(json.c_str(), "w");
  if (!file) return 4;
  std::fprintf(file,
               "{\"schema\": \"assay.bench/1\", \"results\": ["
               "{\"name\": \"oracle.attention.mla\", \"value\": %.6g, \"unit\": \"s\", \"baseline\": \"limit\", "
               "\"baseline_value\": 1.0}, "
               "{\"name\": \"oracle.linear\", \"value\": %.6g, \"unit\": \"s\", \"baseline\": null, "
               "\"baseline_value\": null}]}\n",
               attention, linear);
  return std::fclose(file) == 0 ? 0 : 4;
}

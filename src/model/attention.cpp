#include "model/attention.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "model/gemm.h"

// Compiled once for each instruction set where the compiler can choose at load time. Sanitizers' runtimes are not up
// yet when such a choice is made, so their builds take the plain version; results are the same in every version
// (element-wise products and sums, never contracted).
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(__SANITIZE_ADDRESS__) && \
    !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_UNDEFINED__)
#define ASSAY_MODEL_CLONES __attribute__((target_clones("arch=x86-64-v4", "avx2", "default")))
#else
#define ASSAY_MODEL_CLONES
#endif

namespace assay {
namespace {

// out[j] += sum_s p[s] v[s * ldv + j], four keys at a time so that out is loaded and stored a quarter as often.
template <class T>
inline __attribute__((always_inline)) void WeightedSumLoop(const T* p, const T* v, int64_t ldv, int64_t n, T* out,
                                                           int64_t v_dim) {
  int64_t s = 0;
  for (; s + 4 <= n; s += 4) {
    const T p0 = p[s], p1 = p[s + 1], p2 = p[s + 2], p3 = p[s + 3];
    const T *v0 = v + s * ldv, *v1 = v0 + ldv, *v2 = v1 + ldv, *v3 = v2 + ldv;
    for (int64_t j = 0; j < v_dim; ++j) out[j] += (p0 * v0[j] + p1 * v1[j]) + (p2 * v2[j] + p3 * v3[j]);
  }
  for (; s < n; ++s) {
    const T* row = v + s * ldv;
    for (int64_t j = 0; j < v_dim; ++j) out[j] += p[s] * row[j];
  }
}

ASSAY_MODEL_CLONES void WeightedSum(const float* p, const float* v, int64_t ldv, int64_t n, float* out, int64_t v_dim) {
  WeightedSumLoop(p, v, ldv, n, out, v_dim);
}
ASSAY_MODEL_CLONES void WeightedSum(const double* p, const double* v, int64_t ldv, int64_t n, double* out,
                                    int64_t v_dim) {
  WeightedSumLoop(p, v, ldv, n, out, v_dim);
}

// Online or not, softmax subtracts the largest score first, so that no exponential overflows and the sum is at least 1.
// Scales, applies softmax to scores[first, last) in place and gives the log-sum-exp; -infinity when the range is empty.
// A NaN among the scores makes the row NaN, as it should.
template <class T>
T Softmax(T* scores, int64_t first, int64_t last, T scale) {
  if (first >= last) return -std::numeric_limits<T>::infinity();
  T top = -std::numeric_limits<T>::infinity();
  for (int64_t s = first; s < last; ++s) {
    scores[s] *= scale;
    top = std::max(top, scores[s]);
  }
  T sum = 0;
  for (int64_t s = first; s < last; ++s) {
    scores[s] = std::exp(scores[s] - top);
    sum += scores[s];
  }
  const T inverse = T{1} / sum;
  for (int64_t s = first; s < last; ++s) scores[s] *= inverse;
  return top + std::log(sum);
}

}  // namespace

// Scores of one head at a time: m x keys numbers, 4 MB for 1024 rows over 1024 keys in float.
template <class T>
void Attend(const QueryView<T>& q, const KvView<T>& kv, const AttentionShape& shape, T* out, int64_t out_row, T* lse,
            std::vector<T>* scratch) {
  int64_t n_keys = 0;
  for (const KvRun<T>& run : kv.runs) n_keys += run.n;
  const int64_t first_key = kv.runs.empty() ? 0 : kv.runs.front().first_position;
  // One product handles m query rows that read the same kv head: all rows of one head, or, for a single row (decode),
  // all heads of one group.
  const bool by_group = q.n_rows == 1 && kv.group > 1 && kv.interleaved == 0;
  const int64_t products = by_group ? q.n_heads / kv.group : q.n_heads;
  const int64_t m = by_group ? kv.group : q.n_rows;
  const int64_t ldq = by_group ? q.head_stride : q.row_stride;
  scratch->resize(static_cast<size_t>(std::max<int64_t>(m * n_keys, 1)));
  T* scores = scratch->data();
  for (int64_t product = 0; product < products; ++product) {
    const int64_t head0 = by_group ? product * kv.group : product;
    const int64_t kv_head = kv.interleaved > 0 ? head0 % kv.interleaved : head0 / kv.group;
    int64_t done = 0;
    for (const KvRun<T>& run : kv.runs) {
      Linear(q.data + head0 * q.head_stride, ldq, run.rows + kv_head * kv.head_stride + kv.k_offset, kv.row_stride,
             scores + done, n_keys, m, run.n, shape.qk_dim);
      done += run.n;
    }
    for (int64_t i = 0; i < m; ++i) {
      const int64_t t = by_group ? 0 : i;
      const int64_t head = by_group ? head0 + i : head0;
      const int64_t position = q.first_position + t;
      // Keys come in ascending positions from first_key on, so the mask is a range [first, last) of indexes.
      const int64_t last = std::clamp<int64_t>(position + 1 + shape.causal_shift - first_key, 0, n_keys);
      const int64_t first =
          shape.window > 0 ? std::clamp<int64_t>(position + 1 - shape.window - first_key, 0, last) : 0;
      T* row = scores + i * n_keys;
      lse[t * q.n_heads + head] = Softmax(row, first, last, static_cast<T>(shape.scale));
      T* result = out + t * out_row + head * shape.v_dim;
      std::fill_n(result, shape.v_dim, T{0});
      int64_t begin = 0;  // of the run, as an index into row
      for (const KvRun<T>& run : kv.runs) {
        const int64_t a = std::max(first, begin), b = std::min(last, begin + run.n);
        if (a < b) {
          WeightedSum(row + a, run.rows + (a - begin) * kv.row_stride + kv_head * kv.head_stride + kv.v_offset,
                      kv.row_stride, b - a, result, shape.v_dim);
        }
        begin += run.n;
      }
    }
  }
}

// out = sum_j w_j out_j, w_j = exp(lse_j - lse), lse = log sum_j exp(lse_j): the rescaling of the online softmax
// (Milakov and Gimelshein, arXiv 1805.02867), as tiled and split-KV kernels use it (FlashAttention, arXiv 2205.14135,
// section 3.1). lse_j of an empty part is -infinity and its weight 0; when all are, so is the result.
template <class T>
void MergePartials(std::span<const PartialResult<T>* const> parts, int64_t rows, int64_t heads, int64_t v_dim,
                   int64_t last_head_stride, T* out, int64_t out_row, T* lse) {
  const T minus_infinity = -std::numeric_limits<T>::infinity();
  for (int64_t t = 0; t < rows; ++t) {
    for (int64_t h = 0; h < heads; ++h) {
      const int64_t at = t * heads + h;
      T top = minus_infinity;
      for (const PartialResult<T>* part : parts) top = std::max(top, part->lse[static_cast<size_t>(at)]);
      T* result = out + t * out_row + h * v_dim;
      std::fill_n(result, v_dim, T{0});
      lse[at] = minus_infinity;
      if (top == minus_infinity) continue;
      T sum = 0;
      for (const PartialResult<T>* part : parts) sum += std::exp(part->lse[static_cast<size_t>(at)] - top);
      for (const PartialResult<T>* part : parts) {
        const T weight = std::exp(part->lse[static_cast<size_t>(at)] - top) / sum;
        const int64_t stride = part == parts.back() ? last_head_stride : v_dim;
        const int64_t size = static_cast<int64_t>(part->out.size());
        const int64_t begin = t * heads * v_dim + h * stride;
        for (int64_t j = 0; j < v_dim; ++j) {
          // A part without keys has weight 0; its out must be a number all the same, as 0 times NaN is none.
          result[j] += weight * part->out[static_cast<size_t>((begin + j) % size)];
        }
      }
      lse[at] = top + std::log(sum);
    }
  }
}

template void Attend<float>(const QueryView<float>&, const KvView<float>&, const AttentionShape&, float*, int64_t,
                            float*, std::vector<float>*);
template void Attend<double>(const QueryView<double>&, const KvView<double>&, const AttentionShape&, double*, int64_t,
                             double*, std::vector<double>*);
template void MergePartials<float>(std::span<const PartialResult<float>* const>, int64_t, int64_t, int64_t, int64_t,
                                   float*, int64_t, float*);
template void MergePartials<double>(std::span<const PartialResult<double>* const>, int64_t, int64_t, int64_t, int64_t,
                                    double*, int64_t, double*);

}  // namespace assay

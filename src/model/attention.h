// Attention of one request over its keys, exact softmax with log-sum-exp, and the merge of partial results.
//
// One kernel serves MHA, GQA and both MLA paths: they differ only in where the key and the value of a head lie inside
// a row (KvView). Not a streaming kernel: the scores of one call are held whole, rows x keys.
// Rounding (float, n keys, d channels): a score is off by at most gamma(d) sum |q_i k_i|; the output by about
// (d + n + 8) u times the largest |v| when scores are of order one. tests/model/test_attention.cpp derives and checks.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "model/kv_cache.h"

namespace assay {

// Where the keys are. Head h of the query reads kv head h / group.
template <class T>
struct KvView {
  std::span<const KvRun<T>> runs;  // ascending positions
  int64_t row_stride = 0;          // elements between rows of one run
  int64_t head_stride = 0;         // between kv heads inside a row; 0: all heads read the same (absorbed MLA)
  // Of a head's key and value from the start of its part of a row.
  int64_t k_offset = 0, v_offset = 0;
  // Query heads that share one kv head: H / K.
  int64_t group = 1;
  int64_t interleaved = 0;  // > 0 (a fault): head h reads kv head h % interleaved
};

// One request's queries at consecutive positions.
template <class T>
struct QueryView {
  const T* data = nullptr;  // (t, h, i) at t * row_stride + h * head_stride + i
  int64_t row_stride = 0, head_stride = 0;
  int64_t n_rows = 0, n_heads = 0;
  int64_t first_position = 0;
};

// Head sizes of the products (absorbed MLA: c + dr and c), and the mask. Causal: position p sees keys 0 .. p.
struct AttentionShape {
  int64_t qk_dim = 0, v_dim = 0;  // channels of a key, of a value
  double scale = 1;               // of the products before the softmax
  int64_t window = 0;             // 0: none; otherwise position p sees keys p - window + 1 .. p
  int64_t causal_shift = 0;       // added to the last visible position: 0, unless a fault moves the bound
};

// out (t, h, j) at t * out_row + h * v_dim + j; lse (t, h) at t * n_heads + h, natural logarithm. A row that sees no
// key gets zeros and -infinity. scratch holds the scores.
template <class T>
void Attend(const QueryView<T>& q, const KvView<T>& kv, const AttentionShape& shape, T* out, int64_t out_row, T* lse,
            std::vector<T>* scratch);

// Merges n partial results over disjoint keys: out_j [rows, heads, v_dim], lse_j [rows, heads], each contiguous.
// lse of a row without keys is -infinity; its out counts for nothing then, but must be a number.
template <class T>
struct PartialResult {
  std::vector<T> out, lse;
  int64_t first_key = 0, last_key = 0;  // [first, last)
};
// last_head_stride: elements between heads in the last part's out; v_dim, unless a fault reads it with another stride
// (reads then stay inside the buffer by wrapping around).
template <class T>
void MergePartials(std::span<const PartialResult<T>* const> parts, int64_t rows, int64_t heads, int64_t v_dim,
                   int64_t last_head_stride, T* out, int64_t out_row, T* lse);

extern template void Attend<float>(const QueryView<float>&, const KvView<float>&, const AttentionShape&, float*,
                                   int64_t, float*, std::vector<float>*);
extern template void Attend<double>(const QueryView<double>&, const KvView<double>&, const AttentionShape&, double*,
                                    int64_t, double*, std::vector<double>*);
extern template void MergePartials<float>(std::span<const PartialResult<float>* const>, int64_t, int64_t, int64_t,
                                          int64_t, float*, int64_t, float*);
extern template void MergePartials<double>(std::span<const PartialResult<double>* const>, int64_t, int64_t, int64_t,
                                           int64_t, double*, int64_t, double*);

}  // namespace assay

#include "oracle/attention.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <numeric>

#include "base/parallel_for.h"
#include "oracle/gemm.h"

namespace assay::oracle {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr int64_t kVectorsAJob = 32;  // query vectors (row and head) that share one read of the keys
constexpr int64_t kKeysABlock = 512;  // of the sum over values: a block of the panel stays in the second-level cache

// Sizes and strides, checked.
// n_rows: of queries; group: query heads a key head; d and dv: sizes of key and value.
struct Geometry {
  int64_t n_rows, heads, kv_heads, group, keys, d, dv;
  const double* v;  // value of (key s, kv head g) at v + s * v_stride + g * v_head
  int64_t v_stride, v_head;
};

// One message with every shape: which of them is the wrong one, only the caller knows.
Status ShapeFault(const AttentionInput& in) {
  return Status::BadInput(
      "queries " + ShapeText(in.q->shape) + ", keys " + ShapeText(in.k->shape) +
      (in.v ? ", values " + ShapeText(in.v->shape) : ", value_dim " + std::to_string(in.value_dim)) + ", " +
      std::to_string(in.query_positions.size()) + " query positions and " + std::to_string(in.key_positions.size()) +
      " key positions do not fit together");
}

// Everything that could lead outside of an array, before anything is computed.
Result<Geometry> Check(const AttentionInput& in) {
  if (!in.q || !in.k) return Status::BadInput("attention needs queries and keys");
  if (in.q->rank() != 3 || in.k->rank() != 3 || in.q->cols() != in.k->cols()) return ShapeFault(in);
  Geometry g{};
  g.n_rows = in.q->shape[0];
  g.heads = in.q->shape[1];
  g.d = in.q->shape[2];
  g.keys = in.k->shape[0];
  g.kv_heads = in.k->shape[1];
  if (g.kv_heads == 0 || g.heads % g.kv_heads != 0) return ShapeFault(in);
  g.group = g.heads / g.kv_heads;
  if (in.v) {
    if (in.v->rank() != 3 || in.v->shape[0] != g.keys || in.v->shape[1] != g.kv_heads) return ShapeFault(in);
    g.dv = in.v->shape[2];
    g.v = in.v->values.data();
  } else {
    if (in.value_dim <= 0 || in.value_dim > g.d) return ShapeFault(in);
    g.dv = in.value_dim;
    g.v = in.k->values.data();
  }
  g.v_head = in.v ? g.dv : g.d;
  g.v_stride = g.kv_heads * g.v_head;
  if (static_cast<int64_t>(in.query_positions.size()) != g.n_rows ||
      static_cast<int64_t>(in.key_positions.size()) != g.keys) {
    return ShapeFault(in);
  }
  if (!in.ranges.empty() && static_cast<int64_t>(in.ranges.size()) != g.n_rows) {
    return Status::BadInput(std::to_string(in.ranges.size()) + " key ranges for " + std::to_string(g.n_rows) + " rows");
  }
  if (in.mask && in.mask->size() != g.n_rows * g.keys) {
    return Status::BadInput("a mask of shape " + ShapeText(in.mask->shape) + " for " + std::to_string(g.n_rows) +
                            " queries and " + std::to_string(g.keys) + " keys");
  }
  for (const Array* per_head : {in.sinks, in.alibi_slopes}) {
    if (per_head && per_head->size() != g.heads) {
      return Status::BadInput("sinks or slopes of shape " + ShapeText(per_head->shape) + " for " +
                              std::to_string(g.heads) + " heads");
    }
  }
  for (const int64_t row : in.rows) {
    if (row < 0 || row >= g.n_rows) return Status::BadInput("no query row " + std::to_string(row));
  }
  return g;
}

// The rows asked for, or all.
std::vector<int64_t> RowsOf(const AttentionInput& in, const Geometry& g) {
  std::vector<int64_t> rows(in.rows.begin(), in.rows.end());
  if (rows.empty()) {
    rows.resize(static_cast<size_t>(g.n_rows));
    std::iota(rows.begin(), rows.end(), 0);
  }
  return rows;
}

// Which keys a query row sees, and the first and last of them.
struct Visible {
  // [keys], 1: seen. Between begin and end there may be others that are not.
  std::vector<uint8_t> keys;
  int64_t begin = 0, end = 0, count = 0;
};

// Ranges, spec and mask all have to allow a key. begin == end == 0 or an empty stretch when none is seen.
Visible VisibleOf(const AttentionInput& in, const AttentionSpec& spec, const Geometry& g, int64_t row) {
  Visible v;
  v.keys.resize(static_cast<size_t>(g.keys));
  v.begin = g.keys;
  const int64_t q = in.query_positions[static_cast<size_t>(row)];
  const KeyRange range = in.ranges.empty() ? KeyRange{std::numeric_limits<int64_t>::min(), KeyRange{}.end}
                                           : in.ranges[static_cast<size_t>(row)];
  for (int64_t s = 0; s < g.keys; ++s) {
    const int64_t p = in.key_positions[static_cast<size_t>(s)];
    const bool seen =
        p >= range.begin && p < range.end && Sees(spec, q, p) && (!in.mask || (*in.mask)[row * g.keys + s] != 0);
    v.keys[static_cast<size_t>(s)] = seen;
    if (!seen) continue;
    v.begin = std::min(v.begin, s);
    v.end = s + 1;
    ++v.count;
  }
  v.begin = std::min(v.begin, v.end);
  return v;
}

// What turns q·k into a score, for one query row and head.
// slope 0 adds nothing, not even 0 times an infinite distance.
struct ScoreRule {
  double scale, soft_cap, slope;
  double query_position;

  double Bias(double key_position) const { return slope == 0 ? 0.0 : slope * (key_position - query_position); }
  double operator()(double dot, double key_position) const {
    double s = scale * dot;
    if (soft_cap != 0) s = soft_cap * std::tanh(s / soft_cap);
    return s + Bias(key_position);
  }
};

// row: number of the query in the input, not its position.
ScoreRule RuleOf(const AttentionInput& in, const AttentionSpec& spec, int64_t row, int64_t head) {
  return {spec.scale, spec.soft_cap, in.alibi_slopes ? (*in.alibi_slopes)[head] : 0,
          static_cast<double>(in.query_positions[static_cast<size_t>(row)])};
}

// Keys and values of one head in the order in which the products read them.
struct PackedHead {
  PackedMatrix k, v;
  std::vector<double> key_norm;   // [keys]
  std::vector<double> largest_v;  // [dv], largest magnitude of the column
  bool values_finite = true;
};

// The norms bound the error of a score by Cauchy-Schwarz: |q·k| summed in magnitudes is at most |q| |k|.
PackedHead Pack(const AttentionInput& in, const Geometry& g, int64_t kv_head) {
  PackedHead head;
  const double* k = in.k->values.data() + kv_head * g.d;
  const double* v = g.v + kv_head * g.v_head;
  const int64_t k_stride = g.kv_heads * g.d;
  head.k = PackedMatrix::FromColumns(k, k_stride, g.keys, g.d);
  head.v = PackedMatrix::FromRows(v, g.v_stride, g.keys, g.dv);
  head.largest_v.resize(static_cast<size_t>(g.dv));
  for (int64_t s = 0; s < g.keys; ++s) {
    double sum = 0;
    for (int64_t i = 0; i < g.d; ++i) sum += k[s * k_stride + i] * k[s * k_stride + i];
    head.key_norm.push_back(std::sqrt(sum));
    for (int64_t j = 0; j < g.dv; ++j) {
      const double magnitude = std::abs(v[s * g.v_stride + j]);
      head.values_finite &= std::isfinite(magnitude);
      double& largest = head.largest_v[static_cast<size_t>(j)];
      largest = std::max(largest, magnitude);
    }
  }
  return head;
}

// One block of query vectors that share a key head.
// Writes only its own vectors' part of the result, so blocks run in parallel.
class Block {
 public:
  Block(const AttentionInput& in, const AttentionSpec& spec, const Geometry& g, std::span<const int64_t> rows,
        AttentionResult* result)
      : in_(in), spec_(spec), g_(g), rows_(rows), result_(*result) {}

  // Vectors [first, last) of kv_head; vector m is head kv_head * group + m % group of rows[m / group].
  void Run(const PackedHead& packed, int64_t kv_head, int64_t first, int64_t last) {
    const int64_t n = last - first;
    std::vector<Visible> visible;
    int64_t begin = g_.keys, end = 0;
    for (int64_t r = first / g_.group; r <= (last - 1) / g_.group; ++r) {
      visible.push_back(VisibleOf(in_, spec_, g_, rows_[static_cast<size_t>(r)]));
      begin = std::min(begin, visible.back().begin);
      end = std::max(end, visible.back().end);
    }
    // Keys between the block's first and last: a window far from position 0 costs no more than one at it.
    // Whole panels of keys; what lies beyond `end` is computed and not used.
    const int64_t first_panel = std::min(begin, end) / PackedMatrix::kWidth;
    const int64_t last_panel = (end + PackedMatrix::kWidth - 1) / PackedMatrix::kWidth;
    begin = first_panel * PackedMatrix::kWidth;
    const int64_t stride = (last_panel - first_panel) * PackedMatrix::kWidth;
    std::vector<double> q(static_cast<size_t>(n * g_.d)), p(static_cast<size_t>(n * stride));
    for (int64_t m = 0; m < n; ++m) {
      const double* from = in_.q->values.data() + (RowOf(first + m) * g_.heads + HeadOf(kv_head, first + m)) * g_.d;
      std::copy(from, from + g_.d, q.begin() + m * g_.d);
    }
    Multiply(q.data(), g_.d, n, packed.k, 0, g_.d, first_panel, last_panel, p.data(), nullptr, stride);
    std::vector<double> out(static_cast<size_t>(n * g_.dv)), magnitude(out.size());
    std::vector<Growth> growth(static_cast<size_t>(n));
    for (int64_t m = 0; m < n; ++m) {
      const Visible& seen = visible[static_cast<size_t>((first + m) / g_.group - first / g_.group)];
      growth[static_cast<size_t>(m)] =
          Softmax(packed, kv_head, first + m, seen, begin, end, q.data() + m * g_.d, p.data() + m * stride);
      // A NaN or infinity among the values must reach those rows alone that see it; a product over all keys would
      // spread it.
      if (!packed.values_finite) {
        SumSeen(kv_head, seen, begin, p.data() + m * stride, out.data() + m * g_.dv, magnitude.data() + m * g_.dv);
      }
    }
    // Unseen keys have the probability 0 and their values are finite, so they add exact zeros.
    for (int64_t s = begin; packed.values_finite && s < end; s += kKeysABlock) {
      Multiply(p.data() + (s - begin), stride, n, packed.v, s, std::min(end, s + kKeysABlock), 0, packed.v.panels(),
               out.data(), magnitude.data(), g_.dv, true);
    }
    for (int64_t m = 0; m < n; ++m) {
      const Growth& grown = growth[static_cast<size_t>(m)];
      const int64_t at = ResultAt(kv_head, first + m) * g_.dv;
      for (int64_t j = 0; j < g_.dv; ++j) {
        const double value = out[static_cast<size_t>(m * g_.dv + j)], a = magnitude[static_cast<size_t>(m * g_.dv + j)];
        const double o = std::abs(value);
        result_.out.value[at + j] = value;
        result_.out.scale[at + j] = a;
        result_.out.inner[at + j] = grown.main * (a + o) + grown.tail * (packed.largest_v[static_cast<size_t>(j)] + o);
      }
    }
  }

 private:
  // Of a row's score errors: the largest among keys that matter, and the weighted rest.
  struct Growth {
    double main = 0, tail = 0;
  };

  int64_t RowOf(int64_t m) const { return rows_[static_cast<size_t>(m / g_.group)]; }
  int64_t HeadOf(int64_t kv_head, int64_t m) const { return kv_head * g_.group + m % g_.group; }
  int64_t ResultAt(int64_t kv_head, int64_t m) const { return m / g_.group * g_.heads + HeadOf(kv_head, m); }

  // Turns the dot products of keys [begin, end) into probabilities in place, 0 where a key is not seen, and writes
  // everything that has one value a head.
  Growth Softmax(const PackedHead& packed, int64_t kv_head, int64_t m, const Visible& seen, int64_t begin, int64_t end,
                 const double* q, double* p) {
    const int64_t at = ResultAt(kv_head, m), head = HeadOf(kv_head, m);
    const ScoreRule rule = RuleOf(in_, spec_, RowOf(m), head);
    const auto visible = [&](int64_t s) { return seen.keys[static_cast<size_t>(s)] != 0; };
    const auto position = [&](int64_t s) { return static_cast<double>(in_.key_positions[static_cast<size_t>(s)]); };
    // The largest score is taken off before the exponential, so that no term overflows and one term is 1 (the online
    // softmax of Milakov and Gimelshein, arXiv 1805.02867, gives the same sums).
    double max = -kInfinity;
    for (int64_t s = begin; s < end; ++s) {
      double& score = p[s - begin];
      score = visible(s) ? rule(score, position(s)) : 0;
      if (visible(s) && (score > max || std::isnan(score))) max = score;  // a NaN gets in and stays
    }
    result_.keys_seen[at] = static_cast<double>(seen.count);
    result_.max_score[at] = max;
    const double sink = in_.sinks ? (*in_.sinks)[head] : -kInfinity;
    // The sink counts as one more key: it takes part in the maximum and in the sum. Written so that a NaN sink wins.
    const double top = in_.sinks && !(sink <= max) ? sink : max;
    result_.lse.value[at] = result_.lse_of_keys[at] = -kInfinity;
    // No key and no sink: the row keeps its zeros, and an lse of -inf, as engines define it.
    if (top == -kInfinity && seen.count == 0) return {};
    double sum_of_keys = 0, drift = 0;
    for (int64_t s = begin; s < end; ++s) {
      if (!visible(s)) continue;
      const double below = top - p[s - begin];
      const double e = std::exp(-below);
      sum_of_keys += e;
      if (e != 0) drift += e * below;
      p[s - begin] = e;
    }
    double sum = sum_of_keys;
    if (in_.sinks) {
      const double e = std::exp(sink - top);
      sum += e;
      if (e != 0) drift += e * (top - sink);
    }
    result_.lse.value[at] = top + std::log(sum);
    result_.lse_of_keys[at] = sum_of_keys == 0 ? -kInfinity : top + std::log(sum_of_keys);
    // -Σ p ln p with ln p = score - top - ln sum; drift is Σ e (top - score).
    result_.entropy[at] = std::log(sum) + drift / sum;
    double q_norm = 0;
    for (int64_t i = 0; i < g_.d; ++i) q_norm += q[i] * q[i];
    q_norm = std::sqrt(q_norm) * std::abs(rule.scale);
    Growth growth;
    double mean = 0;
    // A key of less weight than this share of the average cannot move the result by more than its own tail term: with
    // it in the maximum, one far key with a large norm would widen the bound of the whole row.
    const double small = 0x1p-20 / static_cast<double>(std::max<int64_t>(seen.count, 1));
    for (int64_t s = begin; s < end; ++s) {
      if (!visible(s)) continue;
      double& weight = p[s - begin];
      weight /= sum;
      // What one unit of relative error in the dot product, the bias and the subtraction of the maximum can move the
      // score.
      const double error =
          q_norm * packed.key_norm[static_cast<size_t>(s)] + std::abs(rule.Bias(position(s))) + std::abs(top);
      mean += weight * error;
      if (weight >= small) {
        growth.main = std::max(growth.main, error);
      } else {
        growth.tail += weight * error;
      }
    }
    result_.lse.scale[at] = std::abs(result_.lse.value[at]);
    // Per roundoff: the weighted score errors, the final sum top + log, and the additions of the sum, whose count is
    // brought to the unit of k_inner = d + 8.
    result_.lse.inner[at] =
        mean + std::abs(top) + (static_cast<double>(seen.count) + 10) / static_cast<double>(g_.d + 8);
    return growth;
  }

  // Sum over the seen keys alone, so that what other rows hold cannot get in through 0 · NaN.
  void SumSeen(int64_t kv_head, const Visible& seen, int64_t begin, const double* p, double* out, double* magnitude) {
    for (int64_t s = seen.begin; s < seen.end; ++s) {
      if (!seen.keys[static_cast<size_t>(s)]) continue;
      const double* v = g_.v + s * g_.v_stride + kv_head * g_.v_head;
      for (int64_t j = 0; j < g_.dv; ++j) {
        out[j] += p[s - begin] * v[j];
        magnitude[j] += std::abs(p[s - begin] * v[j]);
      }
    }
  }

  const AttentionInput& in_;
  const AttentionSpec& spec_;
  const Geometry& g_;
  std::span<const int64_t> rows_;
  AttentionResult& result_;
};

}  // namespace

// The window counts the query itself; keys behind the query (not causal) are never cut by it. Chunks are those of Llama
// 4's chunked attention: positions are cut into equal pieces that do not see each other.
bool Sees(const AttentionSpec& spec, int64_t q, int64_t p) {
  if (spec.causal && p > q + spec.causal_shift && p >= spec.prefix_len) return false;
  if (spec.window > 0 && q - p >= spec.window) return false;
  if (spec.chunk > 0 && q / spec.chunk != p / spec.chunk) return false;
  return true;
}

Result<AttentionResult> Attend(const AttentionInput& in, const AttentionSpec& spec) {
  ASSAY_ASSIGN_OR_RETURN(const Geometry g, Check(in));
  const std::vector<int64_t> rows = RowsOf(in, g);
  const int64_t n = static_cast<int64_t>(rows.size());
  const std::vector<int64_t> wide{n, g.heads, g.dv}, narrow{n, g.heads};
  AttentionResult result;
  // P is rounded to the storing type before P V by most kernels.
  result.out = {Array::Filled(wide), Array::Filled(wide), Array::Filled(wide), 0, static_cast<double>(g.d + 8), 2};
  result.lse = {
      Array::Filled(narrow), Array::Filled(narrow), Array::Filled(narrow), 2, static_cast<double>(g.d + 8), 1};
  result.lse_of_keys = result.max_score = result.entropy = result.keys_seen = Array::Filled(narrow);
  const int64_t vectors = n * g.group;
  const int64_t jobs = (vectors + kVectorsAJob - 1) / kVectorsAJob;
  for (int64_t kv_head = 0; kv_head < g.kv_heads && jobs > 0; ++kv_head) {
    const PackedHead packed = Pack(in, g, kv_head);
    // So little work is not worth starting threads for.
    const bool small = vectors * g.keys * (g.d + g.dv) < 1 << 16;
    ParallelFor(jobs, small ? 1 : 0, [&](int64_t job) {
      Block(in, spec, g, rows, &result)
          .Run(packed, kv_head, job * kVectorsAJob, std::min(vectors, (job + 1) * kVectorsAJob));
    });
  }
  // One k for all rows: that of the row with the most keys. Sum of products, normalisation by a sum of as many terms.
  double most = 0;
  for (const double seen : result.keys_seen.values) most = std::max(most, seen);
  result.out.k = 2 * most + 16;
  return result;
}

// In plain loops: small inputs only, and an independent way to what Attend sums up.
Result<Computed> Scores(const AttentionInput& in, const AttentionSpec& spec) {
  ASSAY_ASSIGN_OR_RETURN(const Geometry g, Check(in));
  const std::vector<int64_t> rows = RowsOf(in, g);
  const std::vector<int64_t> shape{static_cast<int64_t>(rows.size()), g.heads, g.keys};
  Computed c{Array::Filled(shape, -kInfinity), Array::Filled(shape), {}, static_cast<double>(g.d + 12), 0, 2};
  for (size_t r = 0; r < rows.size(); ++r) {
    const Visible visible = VisibleOf(in, spec, g, rows[r]);
    for (int64_t h = 0; h < g.heads; ++h) {
      const ScoreRule rule = RuleOf(in, spec, rows[r], h);
      const double* q = in.q->values.data() + (rows[r] * g.heads + h) * g.d;
      for (int64_t s = 0; s < g.keys; ++s) {
        if (!visible.keys[static_cast<size_t>(s)]) continue;
        const double* k = in.k->values.data() + (s * g.kv_heads + h / g.group) * g.d;
        double dot = 0, magnitude = 0;
        for (int64_t i = 0; i < g.d; ++i) {
          dot += q[i] * k[i];
          magnitude += std::abs(q[i] * k[i]);
        }
        const double position = static_cast<double>(in.key_positions[static_cast<size_t>(s)]);
        const int64_t at = (static_cast<int64_t>(r) * g.heads + h) * g.keys + s;
        c.value[at] = rule(dot, position);
        c.scale[at] = std::abs(rule.scale) * magnitude + std::abs(rule.Bias(position));
      }
    }
  }
  return c;
}

}  // namespace assay::oracle

#include "model/variants.h"

#include <algorithm>
#include <cmath>

#include "model/kv_cache.h"

namespace assay {
namespace {

// Uniform in [-1, 1) from a seed; a plain linear congruential generator is enough for weights.
class Uniform {
 public:
  explicit Uniform(uint64_t seed) : state_(seed * 2862933555777941757u + 3037000493u) {}
  double next() {
    state_ = state_ * 6364136223846793005u + 1442695040888963407u;
    return static_cast<double>(state_ >> 11) * 0x1p-52 - 1.0;
  }

 private:
  uint64_t state_;
};

// Entries of variance 1 / cols, so that a unit-variance input keeps its size.
template <class T>
void FillRandom(int64_t rows, int64_t cols, uint64_t seed, Matrix<T>* m) {
  Uniform uniform(seed);
  m->rows = rows;
  m->cols = cols;
  m->data.resize(static_cast<size_t>(rows * cols));
  const double scale = std::sqrt(3.0 / static_cast<double>(cols));
  for (T& v : m->data) v = static_cast<T>(static_cast<float>(uniform.next() * scale));
}

// Seeded by the layer alone: the faulty run and its clean twin, and every rank, get the same weights.
template <class T>
void MakeGqa(const ModelConfig& config, int64_t layer, LayerWeights<T>* w) {
  const auto seed = static_cast<uint64_t>(layer) * 8;
  const int64_t h = config.hidden_size, d = config.head_dim;
  FillRandom(config.n_heads * d, h, seed + 1, &w->q);
  FillRandom(config.n_kv_heads * d, h, seed + 2, &w->k);
  FillRandom(config.n_kv_heads * d, h, seed + 3, &w->v);
  FillRandom(h, config.n_heads * d, seed + 4, &w->o);
  Uniform uniform(seed + 5);
  w->q_norm.resize(static_cast<size_t>(d));
  w->k_norm.resize(static_cast<size_t>(d));
  for (T& v : w->q_norm) v = static_cast<T>(1.0 + 0.25 * uniform.next());
  for (T& v : w->k_norm) v = static_cast<T>(1.0 + 0.25 * uniform.next());
  w->q_a = w->q_b = w->kv_a = w->kv_b = Matrix<T>();
  w->q_bias.clear();
  w->k_bias.clear();
  w->v_bias.clear();
  w->o_bias.clear();
}

// Quantises to e4m3 with one scale a block (amax / 448) and dequantises: right, with scales rounded up to powers of two
// for codes made with the exact ones, or with the grid of scales read transposed.
template <class T>
void QuantiseBlocks(Matrix<T>* m, bool pow2, bool transposed) {
  constexpr int64_t kBlock = 128;
  const int64_t rows = (m->rows + kBlock - 1) / kBlock, cols = (m->cols + kBlock - 1) / kBlock;
  std::vector<double> scales(static_cast<size_t>(rows * cols), 0.0);
  const auto block_of = [&](int64_t r, int64_t c) { return static_cast<size_t>(r / kBlock * cols + c / kBlock); };
  for (int64_t r = 0; r < m->rows; ++r) {
    for (int64_t c = 0; c < m->cols; ++c) {
      double& s = scales[block_of(r, c)];
      s = std::max(s, std::fabs(static_cast<double>(m->row(r)[c])) / 448.0);
    }
  }
  for (int64_t r = 0; r < m->rows; ++r) {
    for (int64_t c = 0; c < m->cols; ++c) {
      T& v = m->row(r)[c];
      const double s = scales[block_of(r, c)];
      if (!(s > 0)) continue;
      const float code = DecodeE4M3(EncodeE4M3(static_cast<float>(static_cast<double>(v) / s)));
      double read = s;
      if (pow2) read = std::exp2(std::ceil(std::log2(s)));
      if (transposed) {
        // [rows, cols] stored, read as if it were [cols, rows] and then transposed: the element count is the same.
        read = scales[static_cast<size_t>(c / kBlock * rows + r / kBlock)];
      }
      v = static_cast<T>(static_cast<double>(code) * read);
    }
  }
}

// int4, unsigned codes 0..15 with zero point 8, one scale for `group` neighbouring inputs; read with `zero`.
// The scale is amax / 7: codes 1 to 15 stand for -7 to 7, so that zero is exact and +-amax are too.
template <class T>
void QuantiseInt4(Matrix<T>* m, int64_t group, int zero) {
  for (int64_t r = 0; r < m->rows; ++r) {
    for (int64_t begin = 0; begin < m->cols; begin += group) {
      const int64_t end = std::min(begin + group, m->cols);
      double top = 0;
      for (int64_t c = begin; c < end; ++c) top = std::max(top, std::fabs(static_cast<double>(m->row(r)[c])));
      if (!(top > 0)) continue;
      const double scale = top / 7.0;
      for (int64_t c = begin; c < end; ++c) {
        T& v = m->row(r)[c];
        const double code = std::clamp(std::nearbyint(static_cast<double>(v) / scale) + 8.0, 0.0, 15.0);
        v = static_cast<T>((code - zero) * scale);
      }
    }
  }
}

}  // namespace

// In place, on the layer's float weights: they are never stored in the quantised form, only rounded through it.
template <class T>
void ApplyVariant(const ModelConfig& config, const FaultPlan& plan, int64_t layer, LayerWeights<T>* w) {
  switch (plan.def->needs.variant) {
    case Variant::kNone:
      return;
    // 2^16 is exact in every float format: the function stays the same bit for bit, while v leaves the range of f16.
    case Variant::kLargeValues:
      for (int64_t head = 0; head < config.n_heads; ++head) {
        T* uv = w->kv_b.row(head * (config.qk_nope_head_dim + config.v_head_dim) + config.qk_nope_head_dim);
        for (int64_t i = 0; i < config.v_head_dim * config.kv_lora_rank; ++i) uv[i] *= T{65536};
      }
      for (T& v : w->o.data) v /= T{65536};
      return;
    case Variant::kGqa:
      if (!w->kv_b.empty()) MakeGqa(config, layer, w);
      return;
    case Variant::kFp8Blocks:
      QuantiseBlocks(&w->kv_b, plan.at(FaultId::kQuantScalePow2, layer),
                     plan.at(FaultId::kQuantScaleTransposed, layer));
      return;
    case Variant::kInt4Groups:
      QuantiseInt4(&w->o, 32, plan.at(FaultId::kQuantZeroPoint, layer) ? 9 : 8);
      return;
  }
}

template void ApplyVariant<float>(const ModelConfig&, const FaultPlan&, int64_t, LayerWeights<float>*);
template void ApplyVariant<double>(const ModelConfig&, const FaultPlan&, int64_t, LayerWeights<double>*);

}  // namespace assay

#include "model/kv_cache.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>

#include "model/numerics.h"
#include "tensor/decode.h"

namespace assay {

int32_t BlockPool::Allocate() {
  if (!free_.empty()) {
    const int32_t block = free_.back();
    free_.pop_back();
    refs_[static_cast<size_t>(block)] = 1;
    return block;
  }
  refs_.push_back(1);
  return static_cast<int32_t>(refs_.size()) - 1;
}

// The newest free block goes first: stale rows are then of the latest owner, as in engines with a free list.
void BlockPool::Release(int32_t block) {
  if (--refs_[static_cast<size_t>(block)] == 0) free_.push_back(block);
}

// Keyed by tokens themselves and the block before: no hash that could collide.
int32_t BlockPool::FindPrefix(int32_t parent, std::span<const int64_t> tokens) const {
  const auto it = prefix_.find({parent, std::vector<int64_t>(tokens.begin(), tokens.end())});
  return it == prefix_.end() ? -1 : it->second;
}

void BlockPool::RegisterPrefix(int32_t parent, std::span<const int64_t> tokens, int32_t block) {
  const auto [it, fresh] = prefix_.try_emplace({parent, std::vector<int64_t>(tokens.begin(), tokens.end())}, block);
  if (fresh) Retain(it->second);  // the index's own reference: the block is never handed out again
}

// nearbyint rounds to even in the default mode, which nothing here changes.
uint8_t EncodeE4M3(float x) {
  const uint8_t sign = std::signbit(x) ? 0x80 : 0;
  if (std::isnan(x)) return 0x7f;
  const double magnitude = std::min(std::fabs(static_cast<double>(x)), 448.0);
  if (magnitude == 0) return sign;
  // Quantum of the binade: 2^(e - 3), e not below the smallest normal exponent -6.
  const int exponent = std::max(std::ilogb(magnitude), -6);
  const int steps = static_cast<int>(std::nearbyint(std::ldexp(magnitude, 3 - exponent)));  // 0..16, ties to even
  if (steps < 8) return static_cast<uint8_t>(sign | steps);                                 // subnormal
  return static_cast<uint8_t>(sign | (((exponent + 7) << 3) + (steps - 8)));  // steps 16 carries into the exponent
}

float DecodeE4M3(uint8_t code) {
  static const std::array<float, 256> table = [] {
    std::array<float, 256> t{};
    for (uint32_t c = 0; c < 256; ++c) t[c] = static_cast<float>(DecodeBits(c, DType::kF8E4M3FN));
    return t;
  }();
  return table[code];
}

template <class T>
void KvLayer<T>::Configure(DType dtype, int64_t row_width, int64_t block_size) {
  dtype_ = dtype;
  row_width_ = row_width;
  block_size_ = block_size;
  element_bytes_ = BitsOf(dtype) / 8;
  bytes_.clear();
}

// At least doubled, so that growing row by row stays linear. Resizing a vector moves it: pointers from Gather do not
// outlive the next call.
template <class T>
void KvLayer<T>::Grow(int64_t blocks) {
  const size_t size = static_cast<size_t>(blocks * block_size_ * row_width_ * element_bytes_);
  if (size > bytes_.size()) bytes_.resize(std::max(size, 2 * bytes_.size()));
}

template <class T>
void KvLayer<T>::Write(int64_t slot, const T* row) {
  std::byte* out = bytes_.data() + slot * row_width_ * element_bytes_;
  for (int64_t i = 0; i < row_width_; ++i) {
    switch (dtype_) {
      case DType::kF64: {
        const double v = static_cast<double>(row[i]);
        std::memcpy(out + i * 8, &v, 8);
        break;
      }
      case DType::kBF16: {
        const auto bits = static_cast<uint16_t>(std::bit_cast<uint32_t>(RoundToBf16(static_cast<float>(row[i]))) >> 16);
        std::memcpy(out + i * 2, &bits, 2);
        break;
      }
      case DType::kF8E4M3FN:
        out[i] = static_cast<std::byte>(EncodeE4M3(static_cast<float>(static_cast<double>(row[i]) / scale_)));
        break;
      default: {
        const float v = static_cast<float>(row[i]);
        std::memcpy(out + i * 4, &v, 4);
      }
    }
  }
}

template <class T>
void KvLayer<T>::Read(int64_t slot, T* row, double scale) const {
  const std::byte* in = bytes_.data() + slot * row_width_ * element_bytes_;
  for (int64_t i = 0; i < row_width_; ++i) {
    switch (dtype_) {
      case DType::kF64: {
        double v;
        std::memcpy(&v, in + i * 8, 8);
        row[i] = static_cast<T>(v);
        break;
      }
      case DType::kBF16: {
        uint16_t bits;
        std::memcpy(&bits, in + i * 2, 2);
        row[i] = static_cast<T>(std::bit_cast<float>(static_cast<uint32_t>(bits) << 16));
        break;
      }
      case DType::kF8E4M3FN:
        row[i] = static_cast<T>(static_cast<double>(DecodeE4M3(static_cast<uint8_t>(in[i]))) * scale);
        break;
      default: {
        float v;
        std::memcpy(&v, in + i * 4, 4);
        row[i] = static_cast<T>(v);
      }
    }
  }
}

// Direct when the stored type is the computed one: then nothing is copied, and blocks that lie side by side are one
// run.
template <class T>
void KvLayer<T>::Gather(std::span<const int32_t> table, int64_t begin, int64_t end, double scale,
                        std::vector<T>* scratch, std::vector<KvRun<T>>* runs) const {
  runs->clear();
  if (begin >= end) return;
  const bool direct = dtype_ == (sizeof(T) == 4 ? DType::kF32 : DType::kF64);
  if (!direct) {
    scratch->resize(static_cast<size_t>((end - begin) * row_width_));
    for (int64_t p = begin; p < end; ++p) {
      const int64_t slot = table[static_cast<size_t>(p / block_size_)] * block_size_ + p % block_size_;
      Read(slot, scratch->data() + (p - begin) * row_width_, scale);
    }
    runs->push_back({scratch->data(), end - begin, begin});
    return;
  }
  const T* base = reinterpret_cast<const T*>(bytes_.data());
  for (int64_t p = begin; p < end;) {
    const int64_t slot = table[static_cast<size_t>(p / block_size_)] * block_size_ + p % block_size_;
    // Up to the end of the block; the next block may lie anywhere.
    const int64_t n = std::min(block_size_ - p % block_size_, end - p);
    const T* rows = base + slot * row_width_;
    if (!runs->empty() && runs->back().rows + runs->back().n * row_width_ == rows) {
      runs->back().n += n;
    } else {
      runs->push_back({rows, n, p});
    }
    p += n;
  }
}

template class KvLayer<float>;
template class KvLayer<double>;

}  // namespace assay

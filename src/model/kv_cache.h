// The paged key-value cache: block ids that requests own (BlockPool) and the rows behind them (KvLayer).
//
// A block holds block_size consecutive positions of one request. Position p of a request lies in slot
// table[p / block_size] * block_size + p % block_size of every layer and rank. One row holds everything that a
// position needs: the latent and the rotated k_pe side by side (MLA), or for each kv head its key and its value
// (MHA, GQA). Freed blocks keep their bytes, as in any engine: whoever reads a slot it does not own reads stale rows.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <utility>
#include <vector>

#include "tensor/dtype.h"

namespace assay {

// Block ids with reference counts, and the prefix index. Ids are handed out in ascending order first, then the most
// recently freed one again. Not thread-safe.
class BlockPool {
 public:
  // A block that nobody owns, with one reference.
  int32_t Allocate();
  void Retain(int32_t block) { ++refs_[static_cast<size_t>(block)]; }
  // Gives one reference back; at none the block is free and its bytes stay as they are.
  void Release(int32_t block);
  int64_t capacity() const { return static_cast<int64_t>(refs_.size()); }  // ids ever given out

  // The prefix index knows a full block by its predecessor (-1 for the first) and its tokens, so a hit means that the
  // whole prefix is equal; nothing is hashed. Registered blocks stay for the pool's life.
  int32_t FindPrefix(int32_t parent, std::span<const int64_t> tokens) const;  // -1: unknown
  void RegisterPrefix(int32_t parent, std::span<const int64_t> tokens, int32_t block);

 private:
  std::vector<int32_t> refs_;  // owners of each block
  std::vector<int32_t> free_;  // the one freed last is at the end
  std::map<std::pair<int32_t, std::vector<int64_t>>, int32_t> prefix_;
};

// The e4m3fn code nearest to x (ties to even); beyond +-448 it saturates, NaN is 0x7f. And back.
uint8_t EncodeE4M3(float x);
float DecodeE4M3(uint8_t code);

// n rows of equal width at consecutive positions, kv_row elements apart.
template <class T>
struct KvRun {
  const T* rows = nullptr;
  int64_t n = 0;
  int64_t first_position = 0;
};

// The part [begin, end) of runs in ascending positions.
template <class T>
void SliceRuns(const std::vector<KvRun<T>>& all, int64_t row_stride, int64_t begin, int64_t end,
               std::vector<KvRun<T>>* out) {
  out->clear();
  for (const KvRun<T>& run : all) {
    const int64_t a = std::max(begin, run.first_position), b = std::min(end, run.first_position + run.n);
    if (a < b) out->push_back({run.rows + (a - run.first_position) * row_stride, b - a, a});
  }
}

// The rows of one layer on one rank. T is the compute type; dtype the stored type: kF64, kF32, kBF16 or kF8E4M3FN.
template <class T>
class KvLayer {
 public:
  // row_width in elements, block_size in rows. Empties the layer.
  void Configure(DType dtype, int64_t row_width, int64_t block_size);
  void Grow(int64_t blocks);  // keeps what is there; new blocks are zero
  // fp8: stored code = row / scale, read back as code * scale.
  void set_scale(double scale) { scale_ = scale; }
  double scale() const { return scale_; }
  DType dtype() const { return dtype_; }
  int64_t row_width() const { return row_width_; }
  int64_t block_size() const { return block_size_; }

  // One row of row_width elements, rounded to the stored type. REQUIRES: Grow has made room for the slot's block.
  void Write(int64_t slot, const T* row);
  void Read(int64_t slot, T* row, double scale) const;
  void Read(int64_t slot, T* row) const { Read(slot, row, scale_); }

  // Rows of positions [begin, end) through a block table, in ascending order. Stored as T: pointers into the cache
  // (one run for physically consecutive blocks, row stride row_width); otherwise dequantised into *scratch.
  void Gather(std::span<const int32_t> table, int64_t begin, int64_t end, double scale, std::vector<T>* scratch,
              std::vector<KvRun<T>>* runs) const;

 private:
  DType dtype_ = DType::kF32;
  int64_t row_width_ = 0, block_size_ = 16, element_bytes_ = 4;
  double scale_ = 1.0;
  std::vector<std::byte> bytes_;  // [slots, row_width] of the stored type
};

extern template class KvLayer<float>;
extern template class KvLayer<double>;

}  // namespace assay

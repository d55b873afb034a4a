// Kernel in plain C++, in double: the reference of the vector kernels, and their way out for non-finite or huge values.
#include <bit>
#include <cstring>

#include "stats/kernel.h"
#include "tensor/decode.h"
#include "tensor/dispatch.h"

namespace assay {
namespace {

enum class Kind : uint8_t { kNormal, kZero, kSubnormal, kNan, kPosInf, kNegInf };  // from kNan on: not finite

// Bits of the significand field of a float format; -1: the type has no subnormals (integers, bool, e8m0).
constexpr int MantissaBits(DType dtype) {
  switch (dtype) {
    case DType::kF64:
      return 52;
    case DType::kF32:
      return 23;
    case DType::kF16:
      return 10;
    case DType::kBF16:
      return 7;
    case DType::kF8E4M3FN:
    case DType::kF8E4M3FNUZ:
      return 3;
    case DType::kF8E5M2:
    case DType::kF8E5M2FNUZ:
      return 2;
    case DType::kF4E2M1:
      return 1;
    default:
      return -1;
  }
}

// What the counts say of an element. Only the types with a significand field have subnormals.
template <DType kType>
Kind Classify(uint64_t bits, double value) {
  if (value == 0) return Kind::kZero;
  if (!(value - value == 0)) return value != value ? Kind::kNan : value > 0 ? Kind::kPosInf : Kind::kNegInf;
  if constexpr (MantissaBits(kType) >= 0) {
    constexpr uint64_t kMagnitude = (uint64_t{1} << (BitsOf(kType) - 1)) - 1;
    if ((bits & kMagnitude) >> MantissaBits(kType) == 0) return Kind::kSubnormal;
  }
  return Kind::kNormal;
}

// A finite element's value and local column. The row-major number costs a division, and few elements need it.
inline void TakeExtreme(const RowPiece& piece, double value, uint64_t column, Accumulator* acc) {
  const double magnitude = __builtin_fabs(value);
  acc->Between(value, value);
  if (magnitude >= acc->abs_max) acc->Largest(magnitude, piece.index.At(column));
}

// Bucket and sign of lane j of group `offset` of the piece.
struct Place {
  uint32_t bucket;
  bool minus;
};

// One element at a time: for heads that do not begin with a group. Everything else walks whole groups.
Place PlaceOf(const RowPiece& piece, uint32_t offset, int j) {
  const uint32_t group = piece.group + offset;
  const uint32_t slot = (group & 0xff) ^ SlotRotation(group, piece.salt);
  const bool minus = (kSketchTable.minus[slot] >> j & 1) != GroupHash(group, piece.salt.group) >> 31;
  return {kSketchTable.bucket[slot][j], minus};
}

// The digest's share of one group: sum of products of word pairs, modulo 2^64. present has a bit for each word that
// holds an element; a pair without any adds nothing.
uint64_t DigestOf(const uint32_t* words, int n_words, uint32_t present, uint32_t g) {
  uint64_t digest = 0;
  for (int w = 0; w < n_words; w += 2) {
    if ((present >> w & 3) == 0) continue;
    const uint32_t even = words[w] + g + kDigestKeys.word[w];
    const uint32_t odd = words[w + 1] + g + kDigestKeys.word[w + 1];
    digest += uint64_t{even} * odd;
  }
  return digest;
}

template <DType kType>
constexpr int kGroupBytes = BitsOf(kType);  // eight elements: as many bytes as an element has bits

// Sums of a stretch of groups, apart from acc so that they can live in registers.
struct Totals {
  double sum = 0;
  double sum_sq = 0;
  double residues[kHeadSketchSize] = {};  // by bucket & 15, for cells
  uint64_t digest = 0;
  uint64_t row_digest = 0;
  uint32_t nonfinite = 0;
};

// value with its sign flipped if minus is 1. No branch: the signs are random.
inline double WithSign(double value, uint32_t minus) {
  return std::bit_cast<double>(std::bit_cast<uint64_t>(value) ^ uint64_t{minus} << 63);
}

// One group: words is the group's image, zero where a lane is absent. Only lanes [lane, lane + n) are counted.
template <DType kType, bool kCells>
inline void AddGroup(const RowPiece& piece, uint32_t offset, const uint32_t* words, int lane, int n, uint64_t column,
                     Totals* totals, Accumulator* acc) {
  constexpr int kBits = BitsOf(kType);
  constexpr int kWords = kGroupBytes<kType> <= 4 ? 2 : kGroupBytes<kType> / 4;  // e2m1: the second word is zero
  const uint32_t group = piece.group + offset;
  const uint32_t g = GroupHash(group, piece.salt.group);
  uint32_t present = (1u << kWords) - 1;
  if (n != kLanes) {
    present = 0;
    for (int j = lane; j < lane + n; ++j) {
      for (int w = j * kBits / 32; w <= (j * kBits + kBits - 1) / 32; ++w) present |= 1u << w;
    }
  }
  if (piece.sketch) {
    totals->digest += DigestOf(words, kWords, present, g);
    if (kCells) {
      totals->row_digest += DigestOf(words, kWords, present, GroupHash(piece.row_group + offset, piece.row_salt));
    }
  }
  const uint32_t slot = (group & 0xff) ^ SlotRotation(group, piece.salt);
  const uint32_t minus = kSketchTable.minus[slot] ^ (g >> 31 ? 0xffu : 0u);
  for (int j = lane; j < lane + n; ++j) {
    const uint64_t bits = LoadBits(words, j, kType);
    const double value = DecodeElement<kType>(bits);
    const Kind kind = Classify<kType>(bits, value);
    if (kind >= Kind::kNan) {
      ++(kind == Kind::kNan ? acc->nan : kind == Kind::kPosInf ? acc->pos_inf : acc->neg_inf);
      ++totals->nonfinite;
      continue;
    }
    acc->zero += kind == Kind::kZero;
    acc->subnormal += kind == Kind::kSubnormal;
    TakeExtreme(piece, value + 0.0, column + static_cast<uint64_t>(j - lane), acc);  // -0 becomes +0
    totals->sum += value;
    totals->sum_sq += value * value;
    if (!piece.sketch) continue;
    const uint32_t bucket = kSketchTable.bucket[slot][j];
    const double term = WithSign(value, minus >> j & 1);
    acc->sketch[bucket] += term;
    if (kCells) totals->residues[bucket & 15] += term;
  }
  acc->count += static_cast<uint64_t>(n);
}

// sketch false: moments and non-finite elements alone.
void AddToCell(const Totals& totals, bool sketch, CellSums* cell) {
  cell->sum_sq[0] += totals.sum_sq;
  cell->nonfinite += totals.nonfinite;
  for (int k = 0; sketch && k < kHeadSketchSize; ++k) cell->sketch[k] += totals.residues[k];
}

// Sums of a stretch go to the segment, and to the row's and the head's cell where there are any.
void AddTotals(const Totals& totals, bool sketch, CellSums* row, CellSums* head, Accumulator* acc) {
  acc->sum += totals.sum;
  acc->sum_sq += totals.sum_sq;
  acc->digest += totals.digest;
  if (row) {
    AddToCell(totals, sketch, row);
    row->digest[0] += totals.row_digest;
  }
  if (head) AddToCell(totals, sketch, head);
}

// Smallest normal magnitude; 0 where there are no subnormal numbers.
template <DType kType>
constexpr double kSmallestNormal = MantissaBits(kType) < 0
                                       ? 0
                                       : DecodeBits(uint64_t{1} << (MantissaBits(kType) < 0 ? 0 : MantissaBits(kType)),
                                                    kType);

// Sums and extremes of whole groups of finite elements, lane by lane, so that a compiler can keep them in vectors.
struct Lanes {
  double sum[kLanes] = {};
  double sum_sq[kLanes] = {};
  double min[kLanes];
  double max[kLanes];
  uint64_t zero[kLanes] = {};
  uint64_t small[kLanes] = {};  // zero or subnormal

  Lanes() {
    for (int j = 0; j < kLanes; ++j) min[j] = __builtin_inf(), max[j] = -__builtin_inf();
  }
  double LargestMagnitude() const {
    double largest = -1;
    for (int j = 0; j < kLanes; ++j) {
      if (max[j] > largest) largest = max[j];
      if (-min[j] > largest) largest = -min[j];
    }
    return largest;
  }
};

// Groups of one block; at most kBlockGroups. What is not finite goes through AddGroup, with its group.
template <DType kType, bool kCells>
void AddBlock(const RowPiece& piece, uint32_t first, uint32_t n, Totals* totals, Accumulator* acc) {
  constexpr int kWords = kGroupBytes<kType> <= 4 ? 2 : kGroupBytes<kType> / 4;
  const uint32_t rotation = SlotRotation(piece.group + first, piece.salt);
  Lanes lanes;
  uint64_t count = 0;
  for (uint32_t q = first; q < first + n; ++q) {
    const uint8_t* data = piece.data + uint64_t{q} * kGroupBytes<kType>;
    uint32_t words[kDigestWords] = {};
    std::memcpy(words, data, kGroupBytes<kType>);
    double values[kLanes];
    for (int j = 0; j < kLanes; ++j) values[j] = DecodeElement<kType>(LoadBits(data, j, kType));
    double nothing = 0;  // NaN if any of them is not finite
    for (int j = 0; j < kLanes; ++j) nothing += values[j] - values[j];
    if (nothing != 0) {
      AddGroup<kType, kCells>(piece, q, words, 0, kLanes, piece.column + uint64_t{q} * kLanes, totals, acc);
      continue;
    }
    count += kLanes;
    for (int j = 0; j < kLanes; ++j) {
      const double x = values[j] + 0.0;  // -0 becomes +0
      const double magnitude = __builtin_fabs(x);
      lanes.sum[j] += x;
      lanes.sum_sq[j] += x * x;
      lanes.min[j] = x < lanes.min[j] ? x : lanes.min[j];
      lanes.max[j] = x > lanes.max[j] ? x : lanes.max[j];
      lanes.zero[j] += magnitude == 0;
      lanes.small[j] += magnitude < kSmallestNormal<kType>;
    }
    if (!piece.sketch) continue;
    constexpr uint32_t kAllWords = (1u << kWords) - 1;
    const uint32_t g = GroupHash(piece.group + q, piece.salt.group);
    totals->digest += DigestOf(words, kWords, kAllWords, g);
    if (kCells) {
      totals->row_digest += DigestOf(words, kWords, kAllWords, GroupHash(piece.row_group + q, piece.row_salt));
    }
    const uint32_t slot = ((piece.group + q) & 0xff) ^ rotation;
    const uint32_t minus = kSketchTable.minus[slot] ^ (g >> 31 ? 0xffu : 0u);
    for (int j = 0; j < kLanes; ++j) {
      const uint32_t bucket = kSketchTable.bucket[slot][j];
      const double term = WithSign(values[j], minus >> j & 1);
      acc->sketch[bucket] += term;
      if (kCells) totals->residues[bucket & 15] += term;
    }
  }
  if (count == 0) return;
  acc->count += count;
  for (int j = 0; j < kLanes; ++j) {
    totals->sum += lanes.sum[j];
    totals->sum_sq += lanes.sum_sq[j];
    acc->Between(lanes.min[j], lanes.max[j]);
    acc->zero += lanes.zero[j];
    if (MantissaBits(kType) >= 0) acc->subnormal += lanes.small[j] - lanes.zero[j];
  }
  // The place of the largest one is looked for only if it may be news.
  const double largest = lanes.LargestMagnitude();
  if (largest < acc->abs_max) return;
  for (uint64_t e = uint64_t{first} * kLanes; e < (uint64_t{first} + n) * kLanes; ++e) {
    const double x = DecodeElement<kType>(LoadBits(piece.data, static_cast<int64_t>(e), kType));
    if (__builtin_fabs(x) != largest) continue;
    acc->Largest(largest, piece.index.At(piece.column + e));
    return;
  }
}

// Cut where a block ends: the slot rotation holds for one block.
template <DType kType, bool kCells>
void AddGroupsAs(const RowPiece& piece, uint32_t first, uint32_t n, Totals* totals, Accumulator* acc) {
  for (const uint32_t end = first + n; first < end;) {
    const uint32_t room = kBlockGroups - (piece.group + first) % kBlockGroups;
    const uint32_t part = end - first < room ? end - first : room;
    AddBlock<kType, kCells>(piece, first, part, totals, acc);
    first += part;
  }
}

template <DType kType>
void AddGroupsTo(const RowPiece& piece, uint32_t first, uint32_t n, CellSums* row, CellSums* head, Accumulator* acc) {
  Totals totals;
  if (row || head) {
    AddGroupsAs<kType, true>(piece, first, n, &totals, acc);
  } else {
    AddGroupsAs<kType, false>(piece, first, n, &totals, acc);
  }
  AddTotals(totals, piece.sketch, row, head, acc);
}

// The image of a cut group: what is absent stays zero, as the digest wants it.
template <DType kType>
void AddPartialAs(const RowPiece& piece, int lane, int n, Accumulator* acc) {
  uint32_t words[kDigestWords] = {};
  uint8_t* image = reinterpret_cast<uint8_t*>(words);
  if constexpr (kType == DType::kF4E2M1) {
    for (int k = 0; k < n; ++k) {
      const uint64_t nibble = LoadBits(piece.data, k, kType);
      image[(lane + k) >> 1] = static_cast<uint8_t>(image[(lane + k) >> 1] | nibble << ((lane + k) & 1) * 4);
    }
  } else {
    std::memcpy(image + lane * (BitsOf(kType) / 8), piece.data, static_cast<size_t>(n * (BitsOf(kType) / 8)));
  }
  Totals totals;
  AddGroup<kType, true>(piece, 0, words, lane, n, piece.column, &totals, acc);
  AddTotals(totals, piece.sketch, piece.row, nullptr, acc);
}

// inner: columns of a head, side by side.
template <DType kType>
void AddHeadsAs(const RowPiece& piece, int lane, uint64_t n, uint64_t inner) {
  for (uint64_t k = 0; k < n; ++k) {
    const uint64_t lanes = static_cast<uint64_t>(lane) + k;
    const double value = DecodeBits(LoadBits(piece.data, static_cast<int64_t>(k), kType), kType);
    CellSums& head = piece.heads[(piece.column + k) / inner % piece.n_heads];
    if (!(value - value == 0)) {
      ++head.nonfinite;
      continue;
    }
    head.sum_sq[0] += value * value;
    if (!piece.sketch) continue;
    const Place place = PlaceOf(piece, static_cast<uint32_t>(lanes / kLanes), static_cast<int>(lanes % kLanes));
    head.sketch[place.bucket & 15] += place.minus ? -value : value;
  }
}

using GroupsFunction = void (*)(const RowPiece&, uint32_t, uint32_t, CellSums*, CellSums*, Accumulator*);
using HeadsFunction = void (*)(const RowPiece&, int, uint64_t, uint64_t);
using PartialFunction = void (*)(const RowPiece&, int, int, Accumulator*);

// The three entry points of one element type.
struct Functions {
  GroupsFunction groups = nullptr;
  PartialFunction partial = nullptr;
  HeadsFunction heads = nullptr;
};

template <DType kType>
constexpr Functions FunctionsOf() {
  return {AddGroupsTo<kType>, AddPartialAs<kType>, AddHeadsAs<kType>};
}

// The one place where a dtype becomes code; kInvalid has none.
Functions Select(DType dtype) {
  return WithDType(dtype, []<DType kType>() {
    if constexpr (kType == DType::kInvalid) {
      return Functions{};
    } else {
      return FunctionsOf<kType>();
    }
  });
}

// Cut where one head's columns end, so that each stretch has one head cell.
void AddPortable(const RowPiece& piece, Accumulator* acc) {
  HeadCursor cursor(piece);
  for (uint32_t done = 0; done < piece.n_groups;) {
    const uint32_t n = cursor.left < piece.n_groups - done ? cursor.left : piece.n_groups - done;
    AddGroupsPortable(piece, done, n, piece.row, cursor.Current(), acc);
    done += n;
    cursor.Advance(n);
  }
}

// Everything is in acc already.
void FlushNothing(Accumulator*) {}

}  // namespace

double DecodeForKernel(uint64_t bits, DType dtype) { return DecodeBits(bits, dtype); }

void TakePatterns(uint32_t top, uint32_t bottom, uint32_t nearest, DType dtype, Accumulator* acc) {
  const uint32_t sign = 1u << (BitsOf(dtype) - 1);
  const bool any_positive = (top & sign) == 0;
  const bool any_negative = (bottom & sign) != 0;
  // All of one sign: the value nearest to zero is the other extreme. + 0.0 turns -0 into +0.
  const double high = DecodeBits(any_positive ? top : sign | nearest, dtype) + 0.0;
  const double low = DecodeBits(any_negative ? bottom : nearest, dtype) + 0.0;
  acc->Between(low, high);
}

void AddGroupsPortable(const RowPiece& piece, uint32_t first, uint32_t n, CellSums* row, CellSums* head,
                       Accumulator* acc) {
  Select(piece.dtype).groups(piece, first, n, row, head, acc);
}

void AddLarge(const RowPiece& piece, uint32_t first, uint32_t n, uint32_t limit, Accumulator* acc) {
  const uint64_t sign = uint64_t{1} << (BitsOf(piece.dtype) - 1);
  for (uint64_t e = uint64_t{first} * kLanes; e < (uint64_t{first} + n) * kLanes; ++e) {
    const uint64_t bits = LoadBits(piece.data, static_cast<int64_t>(e), piece.dtype);
    if ((bits & (sign - 1)) < limit) continue;
    const uint32_t q = static_cast<uint32_t>(e / kLanes);
    CellSums* head = nullptr;
    if (piece.heads) {
      const uint32_t gone = piece.head_groups - piece.head_left;  // groups of the first head that lie before the piece
      head = piece.heads + (piece.head + (q + uint64_t{gone}) / piece.head_groups) % piece.n_heads;
    }
    const double value = DecodeBits(bits, piece.dtype);
    if (!(value - value == 0)) {
      ++(value != value ? acc->nan : value > 0 ? acc->pos_inf : acc->neg_inf);
      if (piece.row) ++piece.row->nonfinite;
      if (head) ++head->nonfinite;
      continue;
    }
    TakeExtreme(piece, value, piece.column + e, acc);
    acc->sum += value;
    acc->sum_sq += value * value;
    const Place place = PlaceOf(piece, q, static_cast<int>(e % kLanes));
    const double term = place.minus ? -value : value;
    if (piece.sketch) acc->sketch[place.bucket] += term;
    for (CellSums* cell : {piece.row, head}) {
      if (cell == nullptr) continue;
      cell->sum_sq[0] += value * value;
      if (piece.sketch) cell->sketch[place.bucket & 15] += term;
    }
  }
}

void AddPartialGroup(const RowPiece& piece, int lane, int n, Accumulator* acc) {
  Select(piece.dtype).partial(piece, lane, n, acc);
}

void AddUnalignedHeads(const RowPiece& piece, int lane, uint64_t n, uint64_t inner) {
  Select(piece.dtype).heads(piece, lane, n, inner);
}

const Kernel kPortableKernel = {AddPortable, FlushNothing, CountFieldsPortable};

}  // namespace assay

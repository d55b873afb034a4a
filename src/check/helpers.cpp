#include "check/helpers.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <set>

#include "tensor/decode.h"

namespace assay::check {

Suspicion At(const EventInfo& info, std::string_view cls, int rank) {
  Suspicion s;
  s.event = info.id;
  s.rank = rank;
  s.bad.name = info.name;
  s.bad.cls = cls;
  s.bad.step = info.event.step;
  s.bad.ranks = {info.event.rank};
  return s;
}

void AddRows(const Tensor& tensor, const std::vector<bool>& bad, FirstBad* out) {
  const RowId* first = nullptr;
  std::set<uint64_t> others;
  uint64_t n = 0;
  for (size_t r = 0; r < bad.size() && r < tensor.rows.size(); ++r) {
    if (!bad[r]) continue;
    ++n;
    const RowId& row = tensor.rows[r];
    if (!row.real()) continue;
    if (first == nullptr) first = &row;
    if (row.request != first->request) {
      others.insert(row.request);
      // Neighbours join to a range [first, last], so that a bad chunk is one entry.
    } else if (!out->positions.empty() && out->positions.back().second + 1 == row.position) {
      out->positions.back().second = row.position;
    } else {
      out->positions.emplace_back(row.position, row.position);
    }
  }
  if (first != nullptr) out->request = first->request;
  std::string line = std::to_string(n) + " of " + std::to_string(bad.size()) + " rows";
  if (!others.empty()) line += ", of " + std::to_string(1 + others.size()) + " requests";
  if (!tensor.rows.empty()) out->evidence.push_back(std::move(line));
}

bool IsRealPhase(Phase phase, bool with_load) {
  if (phase == Phase::kLoad) return with_load;
  return phase != Phase::kWarmup && phase != Phase::kDummy && phase != Phase::kCapture;
}

std::vector<EventId> RealEvents(const Capture& capture, std::string_view name, bool with_load) {
  std::vector<EventId> out;
  for (const EventId id : capture.EventsOf(name)) {
    const EventView view = capture.trace().event(id);
    if (IsRealPhase(view.phase(), with_load) && view.meta("audit") != "before") out.push_back(id);
  }
  return out;
}

int64_t IntegerOf(double x) { return std::abs(x) <= 0x1p53 ? static_cast<int64_t>(x) : -1; }

uint64_t BitsAt(const Tensor& tensor, int64_t i) { return LoadBits(tensor.bytes.data(), i, tensor.info->event.dtype); }

bool SameBits(const Tensor& a, const Tensor& b) {
  return a.info->event.dtype == b.info->event.dtype && a.shape == b.shape && a.bytes.size() == b.bytes.size() &&
         (a.bytes.empty() || std::memcmp(a.bytes.data(), b.bytes.data(), a.bytes.size()) == 0);
}

bool KeysAreEqual(const Capture& capture, const EventInfo& out, uint64_t request) {
  // Newest first: the rows nearest to the query are the ones that it surely sees.
  constexpr size_t kMaxRows = 64;  // so many differing or equal rows tell
  for (const char* stem : {"attn.k_read", "attn.kv_read", "attn.k", "attn.kv_c_normed"}) {
    size_t n = 0;
    std::set<uint64_t> digests;
    const std::vector<EventId> ids = capture.Find(out.prefix + stem, {.rank = out.event.rank, .before = out.id});
    for (size_t i = ids.size(); i-- > 0 && n < kMaxRows;) {
      const EventView view = capture.trace().event(ids[i]);
      for (int32_t j = 0; j < view.n_segments(); ++j) {
        const SegmentSummary s = view.segment(j);
        if (s.padding || s.request != request) continue;
        for (int32_t r = 0; r < s.n_row_cells && n < kMaxRows; ++r, ++n) digests.insert(view.row_digest(j, r));
      }
    }
    if (n > 1) return digests.size() == 1;
  }
  return false;
}

// The largest finite magnitude of each format. The FNUZ variants move the bias by one, which halves the range; e5m2's
// takes the codes of the infinities for numbers, which doubles it again.
double LargestCode(DType dtype) {
  switch (dtype) {
    case DType::kF8E4M3FN:
      return 448;
    case DType::kF8E5M2:
      return 57344;
    case DType::kF8E4M3FNUZ:
      return 240;
    case DType::kF8E5M2FNUZ:
      return 57344;
    case DType::kF4E2M1:
      return 6;
    case DType::kI8:
      return 127;
    default:
      return 0;
  }
}

std::optional<DType> CacheDType(const Capture& capture, const EventInfo& info) {
  const auto text = capture.Text(info, "kv_cache_dtype");
  if (!text) return std::nullopt;
  const bool e4m3 = *text == "fp8" || *text == "fp8_e4m3", e2m1 = *text == "nvfp4" || *text == "mxfp4";
  const DType dtype = e4m3 ? DType::kF8E4M3FN : e2m1 ? DType::kF4E2M1 : ParseDType(*text);
  return dtype == DType::kInvalid ? std::nullopt : std::optional<DType>(dtype);
}

// Strides may be negative or zero: each axis widens the range on the side that it reaches to.
AddressRange MemoryOf(const Event& event) {
  if (event.base_address == 0 || event.shape.size() != event.strides.size()) return {};
  int64_t low = 0, high = 0;
  for (size_t i = 0; i < event.shape.size(); ++i) {
    if (event.shape[i] <= 0) return {};
    int64_t reach = 0;
    // Forged extents may overflow; then nothing is known.
    if (__builtin_mul_overflow(event.shape[i] - 1, event.strides[i], &reach)) return {};
    if (__builtin_add_overflow(reach > 0 ? high : low, reach, reach > 0 ? &high : &low)) return {};
  }
  int64_t first = 0, last = 0;
  if (__builtin_add_overflow(event.storage_offset, low, &first) ||
      __builtin_add_overflow(event.storage_offset, high, &last))
    return {};
  // 2^56 elements: beyond it the product with the bits of an element could overflow, and no machine has such memory.
  const int64_t bits = BitsOf(event.dtype);
  if (bits == 0 || last > (int64_t{1} << 56) || first < -(int64_t{1} << 56)) return {};
  return {event.base_address + static_cast<uint64_t>(first * bits / 8),
          event.base_address + static_cast<uint64_t>((last * bits + bits + 7) / 8)};
}

}  // namespace assay::check

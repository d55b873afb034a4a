// Audited buffers: filled before an operation and looked at behind it (audit=before, after), and at the time of use
// (audit=read). What still has the bits of the fill was not written; what changed between after and read was written by
// somebody else.
#include <algorithm>
#include <charconv>
#include <cmath>
#include <memory>

#include "check/checks.h"
#include "check/helpers.h"

namespace assay::check {
namespace {

// A cache keeps rows of earlier steps by design.
bool IsPool(std::string_view stem) { return stem.ends_with("_cache"); }

// Whether one pattern lay everywhere, and what was written does not look like it: it is no number, or beyond eight
// times all of that. A fill, then, although nobody said so; a least scale that many rows have is none.
bool LooksLikeAFill(const Tensor& before, const Tensor& after) {
  constexpr int64_t kFewest = 4;
  if (before.n() < kFewest || before.values.size() != after.values.size()) return false;
  double largest = 0;
  bool written = false;
  for (int64_t i = 0; i < before.n(); ++i) {
    if (BitsAt(before, i) != BitsAt(before, 0)) return false;
    if (BitsAt(before, i) == BitsAt(after, i)) continue;
    written = true;
    largest = std::max(largest, std::fabs(after.values[static_cast<size_t>(i)]));
  }
  return written && !(std::fabs(before.values[0]) <= 8 * largest);
}

// Which elements kept their bits. A pattern of 32 bits does not come back by chance; narrow elements, old values and
// zeros may, so there a whole innermost vector must be the same (and not all zero). untold: elements with the bits of
// before that this leaves open, as there is no vector to tell by.
std::vector<bool> Kept(const Tensor& before, const Tensor& after, bool declared, int64_t* untold) {
  const int64_t n = after.n();
  std::vector<bool> kept(static_cast<size_t>(n));
  for (int64_t i = 0; i < n; ++i) kept[static_cast<size_t>(i)] = BitsAt(before, i) == BitsAt(after, i);
  const bool wide = BitsOf(after.info->event.dtype) >= 32;
  const std::vector<int64_t>& shape = after.info->event.shape;
  const int64_t inner = shape.empty() ? 1 : std::max<int64_t>(shape.back(), 1);
  const bool poisoned = declared || (wide && inner == 1 && LooksLikeAFill(before, after));
  *untold = 0;
  for (int64_t start = 0; start < n; start += inner) {
    bool all = true, zero = true;
    for (int64_t i = start; i < start + inner; ++i) {
      all = all && kept[static_cast<size_t>(i)];
      zero = zero && BitsAt(after, i) == 0;
    }
    if (!zero && (all || (wide && poisoned)) && (poisoned || inner > 1)) continue;
    *untold += inner == 1 && all && !zero;
    for (int64_t i = start; i < start + inner; ++i) kept[static_cast<size_t>(i)] = false;
  }
  return kept;
}

// Row (first axis of Tensor) of each element as stored.
int64_t RowOf(const Tensor& t, int64_t i) {
  const Event& e = t.info->event;
  if (e.row_axis < 0) return 0;
  int64_t inner = 1;
  for (size_t a = static_cast<size_t>(e.row_axis) + 1; a < e.shape.size(); ++a) inner *= e.shape[a];
  return i / inner % std::max<int64_t>(e.shape[static_cast<size_t>(e.row_axis)], 1);
}

// Real rows that kept the fill's bits. Load: a weight that no shard wrote. A whole tail of rows is said as such, as it
// is what a wrong count of rows leaves.
void JudgeWrite(const EventInfo& info, const Tensor& before, const Tensor& after, CheckReport* report) {
  int64_t untold = 0;
  const std::vector<bool> kept = Kept(before, after, Capture::OwnText(*before.info, "poison").has_value(), &untold);
  std::vector<bool> rows(after.rows.size());
  int64_t n = 0, first = -1;
  for (int64_t i = 0; i < after.n(); ++i) {
    if (!kept[static_cast<size_t>(i)]) continue;
    const int64_t row = RowOf(after, i);
    if (!after.rows.empty()) {
      if (after.rows[static_cast<size_t>(row)].padding) continue;
      rows[static_cast<size_t>(row)] = true;
    }
    if (first < 0) first = i;
    ++n;
  }
  if (n == 0 && untold > 0) {
    return report->Missing(std::to_string(untold) + " of " + std::to_string(after.n()) + " elements of " + info.name +
                               " have the bits of before, one to a vector: old values may have come out again",
                           "fill the buffer with one pattern and name it (meta poison) on the look before");
  }
  if (n == 0) return report->Right(info.id);
  Suspicion s = At(info, fault_class::kUnwritten, 3);
  if (info.event.phase == Phase::kLoad) s.bad.cls = fault_class::kLoad;
  // A log-sum-exp alone that is not written in places was written at another stride.
  if (info.name.ends_with(".lse")) {
    s.bad.cls = fault_class::kLse;
    s.rank = 2;
  }
  AddRows(after, rows, &s.bad);
  if (s.bad.cls == fault_class::kUnwritten && !after.rows.empty()) {
    const auto begin = std::find(rows.begin(), rows.end(), true);
    if (begin != rows.begin() && std::all_of(begin, rows.end(), [](bool b) { return b; })) {
      s.bad.constant_value = static_cast<double>(begin - rows.begin());
      s.bad.constant = "first row that was not written; all behind it were not either";
    }
  }
  s.bad.measured = static_cast<double>(n) / static_cast<double>(after.n());
  s.bad.bound_basis = "share of elements with the bits that the buffer had before; none are allowed in real rows";
  s.bad.confidence = 0.99;
  char bits[24];
  std::snprintf(bits, sizeof bits, "0x%llx", static_cast<unsigned long long>(BitsAt(after, first)));
  s.bad.evidence.push_back(std::to_string(n) + " of " + std::to_string(after.n()) +
                           " elements have the bits of before the operation, the first " + bits);
  report->Found(std::move(s));
}

// Written right and read wrong: somebody wrote in between, named where its memory was recorded.
void JudgeRead(const Capture& capture, const EventInfo& after, const Tensor& written, const Tensor& read,
               CheckReport* report) {
  if (SameBits(written, read)) return report->Right(after.id);
  Suspicion s = At(after, fault_class::kKernel, 2);
  s.bad.confidence = 0.8;
  s.bad.evidence.push_back("the buffer changed between the operation and its use");
  const AddressRange mine = MemoryOf(after.event);
  for (const std::string& name : capture.Names()) {
    if (name == after.name || mine.first == mine.last) continue;
    for (const EventId id : capture.Find(name, {.step = after.event.step, .rank = after.event.rank})) {
      const auto other = capture.Info(id);
      if (!MemoryOf(other->event).overlaps(mine) || !capture.Earlier(after.id, id) ||
          !capture.Earlier(id, read.info->id)) {
        continue;
      }
      s.bad.evidence.push_back(name + " lies in the same memory and was written in between");
      s.bad.confidence = 0.99;
      s.rank = 3;
      break;
    }
  }
  const std::string_view stem = after.site.stem;
  if (stem.ends_with("_scale")) s.bad.cls = fault_class::kKvScale;
  if (capture.Flag(after, "compiled") || capture.Flag(after, "inplace")) s.bad.cls = fault_class::kCompile;
  report->Found(std::move(s));
}

// The event of the same site, step, rank (and repeat) with this audit that is nearest to `after` on the given side.
std::optional<EventId> Partner(const Capture& capture, const EventInfo& after, const char* audit, bool earlier) {
  EventFilter filter{.step = after.event.step, .rank = after.event.rank, .audit = audit};
  if (after.repeat >= 0) filter.repeat = after.repeat;
  std::optional<EventId> found;
  for (const EventId id : capture.Find(after.name, filter)) {
    if (capture.Earlier(id, after.id) != earlier) continue;
    found = id;
    if (!earlier) break;
  }
  return found;
}

// Rows of "0-2,5", or with "..." behind the first ones; "all"; false where the text is no such list.
bool ParseRows(std::string_view text, std::vector<bool>* rows) {
  if (text == "all") text = "";
  if (text.ends_with(",...")) text.remove_suffix(4);
  const char* at = text.data();
  const char* const end = at + text.size();
  while (at != end) {
    uint64_t first = 0, last = 0;
    auto r = std::from_chars(at, end, first);
    if (r.ec != std::errc()) return false;
    last = first;
    if (r.ptr != end && *r.ptr == '-') r = std::from_chars(r.ptr + 1, end, last);
    if (r.ec != std::errc() || last < first || last >= rows->size() || (r.ptr != end && *r.ptr != ',')) return false;
    std::fill(rows->begin() + static_cast<int64_t>(first), rows->begin() + static_cast<int64_t>(last) + 1, true);
    at = r.ptr == end ? end : r.ptr + 1;
  }
  return true;
}

// Without values the recorder's own count tells: `unwritten`, "24 of 96" elements or a count alone, in
// `unwritten_rows`.
void JudgeTold(const EventInfo& info, const std::string& unwritten, CheckReport* report) {
  Tensor tensor;
  tensor.info = std::make_shared<const EventInfo>(info);
  tensor.rows.resize(static_cast<size_t>(std::clamp<int64_t>(info.n_rows(), 0, 1 << 26)));
  for (const Segment& segment : info.event.segments) {
    for (int64_t i = 0; i < segment.n_rows; ++i) {
      const int64_t row = segment.first_row + i;
      if (row < 0 || row >= static_cast<int64_t>(tensor.rows.size())) continue;
      tensor.rows[static_cast<size_t>(row)] = {segment.request, segment.first_position + i, segment.padding, true};
    }
  }
  std::vector<bool> rows(tensor.rows.size());
  uint64_t n = 0;
  const std::string_view count = std::string_view(unwritten).substr(0, unwritten.find(' '));
  const auto parsed = std::from_chars(count.data(), count.data() + count.size(), n);
  if (parsed.ec != std::errc() || parsed.ptr != count.data() + count.size() ||
      (!rows.empty() && !ParseRows(Capture::OwnText(info, "unwritten_rows").value_or(""), &rows))) {
    return report->Missing(info.name + ": unwritten=" + unwritten + " is no count, or its rows are no rows of it",
                           Capture::RecordHint(info.name));
  }
  // Without rows (a scale, a vector) every element must be written.
  bool real = rows.empty() && n > 0;
  for (size_t r = 0; r < rows.size(); ++r) {
    rows[r] = rows[r] && !tensor.rows[r].padding;  // nobody has to write padding
    real = real || rows[r];
  }
  if (!real) return report->Right(info.id);
  Suspicion s = At(info, fault_class::kUnwritten, 3);
  AddRows(tensor, rows, &s.bad);
  int64_t size = 1;
  for (const int64_t extent : info.event.shape) size *= std::max<int64_t>(extent, 1);
  s.bad.measured = static_cast<double>(n) / static_cast<double>(size);
  s.bad.bound_basis = "share of elements that kept the pattern put there before; none are allowed in real rows";
  s.bad.confidence = 0.99;
  s.bad.evidence.push_back(std::to_string(n) + " of " + std::to_string(size) + " elements were not written by " +
                           Capture::OwnText(info, "audited").value_or("the operation"));
  if (const auto own = Capture::OwnText(info, "returned")) {
    s.bad.evidence.push_back("the call returned " + *own);
  }
  report->Found(std::move(s));
}

}  // namespace

// Each look behind an operation is held against both its partners: what was there before, and what was read later.
void CheckUnwritten(const Capture& capture, CheckReport* report) {
  for (const std::string& name : capture.Names()) {
    if (IsPool(ParseSiteName(name).stem)) continue;
    for (const EventId id : capture.Find(name, {.audit = "after"})) {
      const auto info = capture.Info(id);
      const auto told = Capture::OwnText(*info, "unwritten");
      if (told && info->event.payload.sha256.empty()) {
        JudgeTold(*info, *told, report);
        continue;
      }
      auto after = capture.Load(id);
      if (!after.ok()) {
        report->Missing(after.status().message(), Capture::RecordHint(name));
        continue;
      }
      for (const bool is_before : {true, false}) {
        const std::optional<EventId> partner = Partner(capture, *info, is_before ? "before" : "read", is_before);
        if (!partner) continue;
        auto other = capture.Load(*partner);
        if (!other.ok() || (*other)->shape != (*after)->shape || (*other)->info->event.dtype != info->event.dtype) {
          report->Missing(other.ok() ? name + " has another shape or dtype in its two looks" : other.status().message(),
                          Capture::RecordHint(name));
        } else if (is_before) {
          JudgeWrite(*info, **other, **after, report);
        } else {
          JudgeRead(capture, *info, **after, **other, report);
        }
      }
    }
  }
}

}  // namespace assay::check

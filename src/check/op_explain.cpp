#include "check/op_explain.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <map>
#include <set>

#include "base/rounding.h"
#include "check/op_coarse_operands.h"
#include "check/op_fitted.h"

namespace assay::op {
namespace {

// Where the declared operation itself is off by a few bounds alone, anything near it fits, what changes nothing among
// the rest.
bool FitsInPlaceOf(const Subject& subject, const Result<oracle::Computed>& declared,
                   const Result<oracle::Computed>& candidate) {
  return declared.ok() ? FitsBetter(subject, *declared, candidate) : Fits(subject, candidate);
}

// Larger inputs are not recomputed for every way of reading them.
constexpr int64_t kMaxReread = int64_t{1} << 24;

// Without the layer, as the finding says it already.
std::string Short(const std::string& name, const EventInfo& info) {
  return name.starts_with(info.prefix) ? name.substr(info.prefix.size()) : name;
}

bool FiniteRow(const Tensor& t, int64_t r) {
  for (double x : t.row(r)) {
    if (!std::isfinite(x)) return false;
  }
  return true;
}

// Pools and scale buffers of the layer that hold something that is not finite, which no request owns.
std::optional<std::string> NonFiniteMemory(const Subject& subject) {
  for (std::string_view stem : {"attn.k_cache", "attn.v_cache", "attn.kv_cache"}) {
    const TensorPtr pool = subject.Operand(subject.Sibling(stem));
    if (pool == nullptr) continue;
    for (double x : pool->values) {
      if (!std::isfinite(x)) return pool->info->name;
    }
  }
  return std::nullopt;
}

// The event's scales hold something that is not finite behind the rows of the tensor.
bool NonFiniteScales(const Subject& subject, const Tensor& input) {
  const TensorPtr scale = subject.Operand(input.info->name + ".q_scale");
  if (scale == nullptr) return false;
  return std::any_of(scale->values.begin(), scale->values.end(), [](double x) { return !std::isfinite(x); });
}

}  // namespace

std::vector<oracle::Array> Operation::arrays() const {
  std::vector<oracle::Array> out;
  for (const Input& input : inputs)
    out.push_back(input.tensor == nullptr ? oracle::Array{{0}, {}} : ToArray(*input.tensor));
  return out;
}

EventId BoundEvent(const Subject& subject, const std::string& name, EventId operand, bool* moved) {
  *moved = false;
  const auto text = Capture::OwnText(subject.info(), "bound." + name);
  if (!text) return kNoEvent;
  const uint64_t bound = std::strtoull(text->c_str(), nullptr, 0);
  const Capture& capture = subject.capture();
  if (operand == kNoEvent || bound == 0 || AddressOf(capture.Info(operand)->event) == bound) return kNoEvent;
  *moved = true;
  EventId found = kNoEvent;
  for (EventId id : capture.EventsOf(name)) {
    if (capture.Earlier(id, operand) && AddressOf(capture.Info(id)->event) == bound) found = id;
  }
  return found;
}

// Metadata bound.NAME is the address that a captured launch reads; the operand has moved since. The step whose values
// fit is named: first the event that lay at the address, then all earlier ones, as memory is reused.
std::optional<Explanation> ExplainGraph(const Subject& subject, const Operation& operation) {
  const auto declared = operation.run(operation.arrays());
  const Capture& capture = subject.capture();
  for (size_t i = 0; i < operation.inputs.size(); ++i) {
    const Input& input = operation.inputs[i];
    if (input.tensor == nullptr) continue;
    bool moved = false;
    const EventId bound = BoundEvent(subject, input.name, input.tensor->info->id, &moved);
    if (!moved) continue;
    std::vector<EventId> earlier;  // the one at the address first, then every other one
    if (bound != kNoEvent) earlier.push_back(bound);
    for (EventId id : capture.EventsOf(input.name)) {
      if (id != bound && capture.Earlier(id, input.tensor->info->id)) earlier.push_back(id);
    }
    for (EventId id : earlier) {
      auto old = capture.Load(id);
      if (!old.ok() || (*old)->shape != input.tensor->shape) continue;
      auto arrays = operation.arrays();
      // All operands that moved were captured together.
      for (size_t j = 0; j < operation.inputs.size(); ++j) {
        bool also = false;
        if (operation.inputs[j].tensor == nullptr) continue;
        BoundEvent(subject, operation.inputs[j].name, operation.inputs[j].tensor->info->id, &also);
        if (!also) continue;
        for (EventId other : capture.EventsOf(operation.inputs[j].name)) {
          const auto info = capture.Info(other);
          if (info->event.step != (*old)->info->event.step || info->event.rank != (*old)->info->event.rank) continue;
          if (auto t = capture.Load(other); t.ok() && (*t)->shape == operation.inputs[j].tensor->shape) {
            arrays[j] = ToArray(**t);
          }
        }
      }
      if (!FitsInPlaceOf(subject, declared, operation.run(arrays))) continue;
      return Explanation{fault_class::kGraph, "fits " + Short(input.name, subject.info()) + " of step " +
                                                  std::to_string((*old)->info->event.step) +
                                                  ": the launch is bound to an address that the "
                                                  "operand has left"};
    }
  }
  return std::nullopt;
}

TensorPtr StorageOf(const Subject& subject, const EventInfo& view) {
  EventFilter filter;
  filter.rank = view.event.rank;
  TensorPtr found;
  // Beside the view: of the same step, before or behind it; of an earlier step when it was recorded once.
  for (EventId id : subject.capture().Find(view.name + ".storage", filter)) {
    const int64_t step = subject.capture().Info(id)->event.step;
    if (step > view.event.step) continue;
    if (auto t = subject.capture().Load(id); t.ok()) found = *t;
  }
  return found;
}

namespace {

// Whether all places of a view lie in [0, n): forged strides may be anything, and those of a view that runs backwards
// are negative. REQUIRES: no extent is 0, 0 <= offset.
bool StaysInside(const std::vector<int64_t>& shape, const std::vector<int64_t>& strides, int64_t offset, int64_t n) {
  int64_t lowest = offset, highest = offset;
  for (size_t a = 0; a < shape.size(); ++a) {
    int64_t reach = 0;
    int64_t& end = strides[a] < 0 ? lowest : highest;
    if (__builtin_mul_overflow(shape[a] - 1, strides[a], &reach) || __builtin_add_overflow(end, reach, &end)) {
      return false;
    }
  }
  return lowest >= 0 && highest < n;
}

}  // namespace

oracle::Array Readings::Read(const Reading& by) const {
  oracle::Array read = oracle::Array::Filled(shape);
  std::vector<int64_t> at(shape.size(), 0);
  for (int64_t i = 0; i < read.size(); ++i) {
    int64_t place = by.from_beginning ? 0 : offset;
    for (size_t a = 0; a < shape.size(); ++a) place += at[a] * by.strides[a];
    read[i] = storage->values[static_cast<size_t>(place)];
    for (size_t a = shape.size(); a-- > 0;) {
      if (++at[a] < shape[a]) break;
      at[a] = 0;
    }
  }
  return read;
}

// Every mixture of the candidate strides that stays inside of the recorded storage. The view's own strides are left
// out; so are tensors with other axes before the rows, and those of which only some rows were stored.
Readings OtherReadings(const Subject& subject, const Tensor& view, std::span<const Input> siblings) {
  constexpr size_t kMaxReadings = 64;
  // Operands of many axes have more mixtures than can be tried; those of three axes and twenty strides an axis are in.
  constexpr int kMaxMixtures = 1 << 14;
  Readings out;
  const Event& event = view.info->event;
  const TensorPtr storage = StorageOf(subject, *view.info);
  if (storage == nullptr || event.row_axis > 0 || view.n() == 0 || view.n() > kMaxReread || view.shape != event.shape ||
      event.strides.size() != event.shape.size()) {
    return out;
  }
  const size_t rank = event.shape.size();
  // Strides that an axis may be stepped by: its own, those of siblings, those of a contiguous tensor in any axis order.
  std::vector<std::vector<int64_t>> steps(rank);
  for (size_t a = 0; a < rank; ++a) steps[a].push_back(event.strides[a]);
  for (const Input& s : siblings) {
    if (s.tensor == nullptr || s.tensor->info->event.strides.size() != rank) continue;
    for (size_t a = 0; a < rank; ++a) steps[a].push_back(s.tensor->info->event.strides[a]);
  }
  int64_t dense = 1;
  for (size_t a = rank; a-- > 0; dense *= event.shape[a]) steps[a].push_back(dense);
  if (rank == 3) {  // head by head
    steps[1].push_back(event.shape[0] * event.shape[2]);
    steps[0].push_back(event.shape[2]);
  }
  // A kernel that knows the widths alone: of its result, of an operand without rows (a norm's weight), of all views of
  // one fused row.
  if (rank >= 2) {
    int64_t fused = 0;
    for (const Input& s : siblings) {
      if (s.tensor == nullptr) continue;
      steps[0].push_back(s.tensor->rows.empty() ? s.tensor->n() : s.tensor->row_size());
      if (s.tensor->shape == view.shape) fused += s.tensor->row_size();
    }
    steps[0].push_back(fused > 0 ? fused : view.row_size());
    steps[0].push_back(std::max<int64_t>(subject.tensor()->row_size(), 1));
  }
  for (auto& s : steps) {
    std::sort(s.begin(), s.end());
    s.erase(std::unique(s.begin(), s.end()), s.end());
  }
  // Where the view begins in the storage, by their addresses; 0 when these say nothing.
  int64_t offset = 0;
  const uint64_t mine = AddressOf(event), base = AddressOf(storage->info->event);
  const auto size = static_cast<uint64_t>(BitsOf(event.dtype) / 8);
  if (mine > base && base > 0 && size > 0 && (mine - base) / size < static_cast<uint64_t>(storage->n())) {
    offset = static_cast<int64_t>((mine - base) / size);
  }
  out.storage = storage;
  out.shape = event.shape;
  out.offset = offset;
  std::set<Reading> tried{{event.strides}};
  const auto add = [&](const Reading& way) {
    if (StaysInside(event.shape, way.strides, way.from_beginning ? 0 : offset, storage->n()) &&
        tried.insert(way).second) {
      out.ways.push_back(way);
    }
  };
  const auto mix = [&](bool from_beginning, size_t most) {
    std::vector<size_t> pick(rank, 0);
    for (int i = 0; i < kMaxMixtures && out.ways.size() < most; ++i) {
      Reading way{std::vector<int64_t>(rank), from_beginning};
      for (size_t a = 0; a < rank; ++a) way.strides[a] = steps[a][pick[a]];
      add(way);
      size_t a = 0;
      while (a < rank && ++pick[a] == steps[a].size()) pick[a++] = 0;
      if (a == rank) break;
    }
  };
  mix(false, kMaxReadings);
  if (offset == 0) return out;
  add({event.strides, true});
  mix(true, 2 * kMaxReadings);
  return out;
}

std::optional<Explanation> ExplainStrides(const Subject& subject, const Operation& operation) {
  const auto arrays = operation.arrays();
  const auto declared = operation.run(arrays);
  std::vector<Readings> readings(operation.inputs.size());
  std::map<Reading, std::vector<size_t>> together;  // operands that may be read so
  for (size_t i = 0; i < operation.inputs.size(); ++i) {
    const Input& input = operation.inputs[i];
    if (input.tensor == nullptr) continue;
    readings[i] = OtherReadings(subject, *input.tensor, operation.inputs);
    for (const Reading& way : readings[i].ways) {
      auto changed = arrays;
      changed[i] = readings[i].Read(way);
      if (!FitsInPlaceOf(subject, declared, operation.run(changed))) {
        together[way].push_back(i);
        continue;
      }
      return Explanation{fault_class::kStride,
                         "fits " + Short(input.name, subject.info()) +
                             (way.from_beginning && way.strides == input.tensor->info->event.strides
                                  ? " read from the beginning of its storage, not from where the view begins"
                                  : " read from its storage with other strides than those of the view")};
    }
  }
  // One stride for all of several operands, as a kernel has that takes them for parts of one row.
  for (const auto& [way, operands] : together) {
    if (operands.size() < 2) continue;
    auto changed = arrays;
    std::string names;
    for (size_t i : operands) {
      changed[i] = readings[i].Read(way);
      names += (names.empty() ? "" : " and ") + Short(operation.inputs[i].name, subject.info());
    }
    if (!FitsInPlaceOf(subject, declared, operation.run(changed))) continue;
    return Explanation{fault_class::kStride, "fits " + names + " read from their storage with rows " +
                                                 std::to_string(way.strides[0]) + " elements apart"};
  }
  return std::nullopt;
}

// Only of results that say that they were compiled or computed in place: elsewhere the coincidence proves nothing.
std::optional<Explanation> ExplainOverwritten(const Subject& subject, const Operation& operation) {
  if (!subject.Flag("compiled", false) && !subject.Flag("inplace", false)) return std::nullopt;
  for (const Input& input : operation.inputs) {
    if (input.tensor == nullptr || input.tensor->n() != subject.actual().size()) continue;
    if (!DifferExactly(subject.actual(), ToArray(*input.tensor), subject.judged()).ok) continue;
    return Explanation{fault_class::kCompile, "the result of compiled code equals its operand " +
                                                  Short(input.name, subject.info()) +
                                                  ": the operation was left out or its result thrown away"};
  }
  // An operand that holds another tensor of the layer, written over it before the operation read it.
  const Capture& capture = subject.capture();
  const auto arrays = operation.arrays();
  const auto declared = operation.run(arrays);
  for (const std::string& name : capture.Names()) {
    if (!name.starts_with(subject.info().prefix) || name == subject.info().name) continue;
    const TensorPtr other = subject.Operand(name);
    if (other == nullptr || other->rows.empty()) continue;
    for (size_t i = 0; i < operation.inputs.size(); ++i) {
      const Input& input = operation.inputs[i];
      if (input.tensor == nullptr || input.name == name || input.tensor->n() != other->n() ||
          input.tensor->rows.empty()) {
        continue;
      }
      auto changed = arrays;
      changed[i].values = other->values;
      if (!FitsInPlaceOf(subject, declared, operation.run(changed))) continue;
      return Explanation{fault_class::kCompile, "fits " + Short(name, subject.info()) + " in place of " +
                                                    Short(input.name, subject.info()) +
                                                    ": the operand was written over before compiled code read it"};
    }
  }
  return std::nullopt;
}

std::optional<Explanation> ExplainNonFinite(const Subject& subject, const Operation& operation, const Difference& d,
                                            bool row_by_row) {
  if (!d.nonfinite) return std::nullopt;
  for (const Input& input : operation.inputs) {
    if (input.tensor == nullptr || input.tensor->rows.empty()) continue;
    bool padding_bad = false, real_bad = false;
    for (int64_t r = 0; r < input.tensor->n_rows(); ++r) {
      if (FiniteRow(*input.tensor, r)) continue;
      (input.tensor->rows[static_cast<size_t>(r)].real() ? real_bad : padding_bad) = true;
    }
    if (!padding_bad || real_bad) continue;
    Explanation why{fault_class::kPadRead, Short(input.name, subject.info()) +
                                               " is not finite in padding rows alone, and " +
                                               Short(subject.info().name, subject.info()) + " is not in real ones"};
    // Rows of such an operation do not meet: what joins them is a scale or a sum over the padded tensor.
    if (row_by_row) why.blamed = input.tensor->info->id;
    return why;
  }
  for (const Input& input : operation.inputs) {
    if (input.tensor == nullptr || !NonFiniteScales(subject, *input.tensor)) continue;
    return Explanation{fault_class::kPadRead, "scales of the rows are finite, those of the padding behind them in " +
                                                  input.name + ".q_scale are not"};
  }
  if (const auto pool = NonFiniteMemory(subject)) {
    return Explanation{fault_class::kPadRead,
                       "operands of the requests are finite, slots of " + *pool + " that no request owns are not"};
  }
  return Explanation{fault_class::kRange, "all operands are finite and the right result is, the recorded one is not"};
}

// Needs looks before and after the operation (metadata audit): an element whose bits did not change was not written.
std::optional<Explanation> ExplainUnwritten(const Subject& subject) {
  const EventInfo& info = subject.info();
  if (info.audit != "after") return std::nullopt;
  EventFilter filter;
  filter.step = info.event.step;
  filter.rank = info.event.rank;
  filter.audit = "before";
  filter.before = info.id;
  const auto before = subject.capture().Find(info.name, filter);
  if (before.empty()) return std::nullopt;
  auto old = subject.capture().Load(before.back());
  if (!old.ok() || (*old)->bytes.size() != subject.tensor()->bytes.size()) return std::nullopt;
  const int64_t width = BitsOf(info.event.dtype) / 8;
  if (width == 0 || info.event.row_axis > 0) return std::nullopt;
  int64_t kept = 0, first = -1;
  const int64_t row_size = std::max<int64_t>(subject.tensor()->row_size(), 1);
  for (int64_t i = 0; i < subject.tensor()->n(); ++i) {
    if (!subject.judged()[static_cast<size_t>(i / row_size)]) continue;
    const auto at = static_cast<size_t>(i * width);
    if (std::memcmp((*old)->bytes.data() + at, subject.tensor()->bytes.data() + at, static_cast<size_t>(width)) != 0)
      continue;
    ++kept;
    if (first < 0) first = i / row_size;
  }
  if (kept == 0) return std::nullopt;
  return Explanation{fault_class::kUnwritten,
                     std::to_string(kept) + " elements of real rows hold the bits that they held before the operation",
                     static_cast<double>(first), "first row not written", 3};
}

// All wrong rows, at least two distinct values in each (unless also_constant: then all rows of requests): by accident
// no row equals another.
bool HoldsRowsOf(const Subject& subject, const Difference& d, const Tensor& other, bool also_constant) {
  if (other.row_size() != subject.tensor()->row_size() || other.n_rows() != subject.tensor()->n_rows() ||
      other.row_size() < 4 || d.rows.empty()) {
    return false;
  }
  std::vector<int64_t> rows = d.rows;
  for (size_t r = 0; also_constant && r < subject.judged().size(); ++r) {
    if (subject.judged()[r]) rows.push_back(static_cast<int64_t>(r));
  }
  return std::all_of(rows.begin(), rows.end(), [&](int64_t r) {
    const auto have = subject.tensor()->row(r), kept = other.row(r);
    const bool varied = also_constant || std::any_of(have.begin(), have.end(), [&](double x) { return x != have[0]; });
    return varied && std::equal(have.begin(), have.end(), kept.begin(), kept.end());
  });
}

std::optional<Explanation> ExplainOtherBuffer(const Subject& subject, const Difference& d) {
  const EventInfo& info = subject.info();
  const Capture& capture = subject.capture();
  EventFilter filter;
  filter.step = info.event.step;
  filter.rank = info.event.rank;
  const auto equals = [&](const std::string& name, bool partial) {
    for (EventId id : capture.Find(name, filter)) {
      if (id == info.id || capture.Info(id)->audit == "before" || !capture.Earlier(id, info.id)) continue;
      const auto other = capture.Load(id);
      if (other.ok() && SameRows(**other, *subject.tensor()) && HoldsRowsOf(subject, d, **other, partial)) return true;
    }
    return false;
  };
  if (!info.site.partial && capture.HasSite(info.name + ".partial") && equals(info.name + ".partial", true))
    return Explanation{fault_class::kReduce, "the result is this rank's partial one: it was not reduced", kNone, "", 3};
  if (info.prefix.empty() || SearchedEnough(subject)) return std::nullopt;
  for (const std::string& name : capture.NamesOfStem(info.name.substr(info.prefix.size()))) {
    if (name == info.name || !equals(name, false)) continue;
    return Explanation{fault_class::kUnwritten,
                       "wrong rows hold bit for bit what " + name + " holds in this step: the buffer was not written"};
  }
  return std::nullopt;
}

// Every value fits in so many significant bits, and there are enough that do not fit by chance.
// unit_roundoff 2^-b: values of b significant bits. Fewer than eight values fit any grid by chance.
bool Representable(const oracle::Array& a, double unit_roundoff) {
  const int bits = static_cast<int>(-std::log2(unit_roundoff));
  int64_t nonzero = 0;
  for (double x : a.values) {
    if (x == 0 || !std::isfinite(x)) continue;
    ++nonzero;
    if (RoundToBits(x, bits) != x) return false;
  }
  return nonzero >= 8;
}

// Errors as roundings make them: small beside the values, not the value itself times something in nearly all that they
// amount to, and in more than a few of the rows.
bool LooksLikeRounding(const Subject& subject, const oracle::Computed& right) {
  const oracle::Array& have = subject.actual();
  const auto n_rows = static_cast<int64_t>(subject.judged().size());
  const int64_t width = have.size() / std::max<int64_t>(n_rows, 1);
  double errors = 0, values = 0, along = 0;
  int64_t rows = 0, off = 0;
  for (int64_t r = 0; r < n_rows; ++r) {
    if (!subject.judged()[static_cast<size_t>(r)]) continue;
    double e = 0, v = 0, cross = 0;
    for (int64_t i = r * width; i < (r + 1) * width; ++i) {
      const double error = have[i] - right.value[i];
      e += error * error;
      v += right.value[i] * right.value[i];
      cross += error * right.value[i];
    }
    ++rows;
    off += e > 0x1p-40 * v;
    errors += e;
    values += v;
    if (cross * cross > 0.9 * e * v) along += e;
  }
  // Errors below 30 % of the values; not proportional to their row in more than half of what they amount to; and in at
  // least a quarter of the rows.
  return errors <= 0.09 * values && along <= 0.5 * errors && 4 * off >= rows;
}

// Whether all errors together are no larger than roundings by accumulator and store of p usually are, about twice over.
// A sum of K terms whose partial sums wander is off by 0.4 u times its magnitudes (rms), one whose terms have one sign
// by √K / 3 u times its value.
bool Typical(const Subject& subject, const oracle::Computed& right, oracle::Precision p) {
  oracle::Computed usual = right;
  usual.k = 1;
  usual.k_inner = 2;
  p.walk = false;
  for (int64_t i = 0; i < usual.scale.size(); ++i) usual.scale[i] += std::sqrt(right.k) * std::abs(right.value[i]);
  const Difference d = Differ(subject.actual(), usual, p, subject.judged());
  return d.measured <= d.allowed;
}

// `divided`: attention's output, whose last operation is a division in the accumulator's type.
std::optional<Explanation> ExplainPrecision(const Subject& subject, const oracle::Computed& right, Difference* fit,
                                            const std::function<bool(DType)>& usual) {
  const oracle::Precision declared = subject.precision();
  const bool divided = subject.info().name.ends_with("out") && subject.info().name.find("attn.") != std::string::npos;
  constexpr DType kCoarse[] = {DType::kF16, DType::kBF16, DType::kF8E4M3FN};
  // Stored coarser: every value is representable, and the error is one of storing. A coarser store is told before a sum
  // in a finer type, for values of a coarse type are representable in finer ones too.
  for (DType coarse : kCoarse) {
    const double u = UnitRoundoff(coarse);
    if (!(u > declared.store) || !Representable(subject.actual(), u)) continue;
    oracle::Precision p = declared;
    p.store = u;
    const Difference stored = Differ(subject.actual(), right, p, subject.judged(), 2, subject.one_store);
    if (stored.ok) {
      if (fit != nullptr) *fit = stored;
      return Explanation{fault_class::kPrecision, "every value is representable in " + std::string(NameOf(coarse)) +
                                                      ", which is coarser than declared"};
    }
  }
  // Summed coarser: within the bound of such a sum and beyond that of the declared one. A running sum in that type is
  // representable in it, unless attention divides it in the end.
  for (DType coarse : {DType::kF16, DType::kBF16}) {
    const double u = UnitRoundoff(coarse);
    // Values of a type as coarse as this are representable in it whatever the sum was kept in: that says nothing.
    const bool representable = u > declared.store && Representable(subject.actual(), u);
    if (!(u > declared.accum)) continue;
    if (!representable && !((divided || Representable(subject.actual(), u)) && LooksLikeRounding(subject, right)))
      continue;
    oracle::Precision p = declared;
    p.accum = u;
    p.walk = true;
    const Difference walk = Differ(subject.actual(), right, p, subject.judged(), 1);
    // The bound allows much more than roundings amount to: all of them together must be of the size that they have in
    // the mean.
    if (!walk.ok || (!representable && !(usual ? usual(coarse) : Typical(subject, right, p)))) continue;
    if (fit != nullptr) *fit = walk;
    return Explanation{
        fault_class::kPrecision,
        "the error is beyond the bound of the declared sum and within that of a sum in " + std::string(NameOf(coarse))};
  }
  return std::nullopt;
}

// The order of causes: memory that was never written or is not finite explains everything else; then operands read
// elsewhere; then what the operation itself knows; a coarser precision only when no definite cause fits, since it
// allows much; last the general fit.
void JudgeOperation(const Subject& subject, const Operation& operation, const OwnExplanations& own) {
  const auto right = operation.Run();
  if (!right.ok()) {
    subject.report().Missing(subject.info().name + ": " + right.status().message(), "record operands of equal shape");
    return;
  }
  if (!IsComparable(subject, *right)) return;
  const Difference d = Differ(subject, *right);
  if (d.ok) {
    ReportRight(subject, d);
    return;
  }
  std::optional<Explanation> why = ExplainUnwritten(subject);
  if (!why) why = ExplainNonFinite(subject, operation, d, true);
  if (!why) why = ExplainGraph(subject, operation);
  if (!why) why = ExplainStrides(subject, operation);
  if (!why) why = ExplainOtherBuffer(subject, d);
  if (!why && own) why = own(d, *right);
  if (!why) why = ExplainOverwritten(subject, operation);
  if (!why) why = ExplainCoarseOperands(subject, operation, *right);
  if (!why) why = ExplainFlushed(subject, *right);
  if (!why) why = ExplainPrecision(subject, *right);
  if (!why && !operation.lacking.empty()) return Missing(subject, operation.lacking);
  if (!why) why = ExplainByFit(subject, *right, operation.inputs, operation.quantised);
  if (!why) {
    why = Explanation{fault_class::kKernel,
                      "the operation is wrong on the operands as recorded, and no other cause fits"};
    why->rank = 1;
  }
  ReportWrong(subject, d, WeighedFactor(subject, *right, *why));
}

}  // namespace assay::op

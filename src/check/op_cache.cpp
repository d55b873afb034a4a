// The cache: rows read back after the write, and rows that attention gathers.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <functional>
#include <map>
#include <set>

#include "check/helpers.h"
#include "check/op_cache_codes.h"
#include "check/op_cache_older.h"
#include "check/op_checks.h"
#include "check/op_explain.h"
#include "check/op_fitted.h"

namespace assay::check {
namespace {

using namespace op;
using oracle::Array;

// Values by which copies are told, with an order: NaN has none as a double, and is equal to itself in a copy.
std::vector<uint64_t> KeyOf(std::span<const double> values) {
  std::vector<uint64_t> key;
  key.reserve(values.size());
  for (double x : values) {
    if (x == 0) x = 0;  // either zero
    key.push_back(std::isnan(x) ? ~uint64_t{0} : std::bit_cast<uint64_t>(x));
  }
  return key;
}

// ---- write ---------------------------------------------------------------------------------------------------------

// What the rows written consist of, in order of columns within a head: key and value, or latent and k_pe.
std::vector<Input> Written(const Subject& s) {
  const TensorPtr latent = s.Operand(s.Sibling("attn.kv_c_normed")), pe = s.Operand(s.Sibling("attn.k_pe"));
  if (latent != nullptr && pe != nullptr && s.tensor()->row_size() == latent->row_size() + pe->row_size()) {
    return {{latent->info->name, latent}, {pe->info->name, pe}};
  }
  const TensorPtr k = s.Operand(s.Sibling("attn.k")), v = s.Operand(s.Sibling("attn.v"));
  std::vector<Input> out;
  if (k != nullptr) out.push_back({k->info->name, k});
  if (k != nullptr && v != nullptr && s.tensor()->row_size() > k->row_size()) out.push_back({v->info->name, v});
  return out;
}

// Of a part of the rows written: keys and values may have different numbers of them.
int64_t HeadsOf(const Array& part) { return part.rank() == 3 ? part.shape[1] : 1; }

// The rows of each head by `shift` heads on, in place. [rows, heads, d] with heads > shift.
void RollHeads(Array* a, int64_t shift) {
  const int64_t d = a->shape[2], row = a->shape[1] * d;
  for (int64_t r = 0; r < a->shape[0]; ++r) {
    const auto begin = a->values.begin() + r * row;
    std::rotate(begin, begin + shift * d, begin + row);
  }
}

// The row's own numbers in other places: its parts in the other order, or its heads (those of keys and values, or of
// one of them) some on.
std::optional<Explanation> ExplainPlaces(const Operation& write,
                                         const std::function<bool(const Result<oracle::Computed>&)>& fits) {
  if (write.inputs.size() != 2) return std::nullopt;
  const std::vector<Array> own = write.arrays();
  const bool latent = write.inputs[1].name.ends_with("_pe");
  if (fits(write.run(std::vector<Array>{own[1], own[0]})))
    return Explanation{fault_class::kKvIdent, latent
                                                  ? "latents lie where rotated keys are due, and these where those are"
                                                  : "keys lie where values are due, and values where keys are"};
  const int64_t heads = std::max(HeadsOf(own[0]), HeadsOf(own[1]));
  constexpr int64_t kMostHeads = 64;
  for (int64_t shift = 1; shift < std::min(heads, kMostHeads); ++shift) {
    for (const auto& [keys, values] : {std::pair{true, true}, std::pair{true, false}, std::pair{false, true}}) {
      if ((keys && shift >= HeadsOf(own[0])) || (values && shift >= HeadsOf(own[1]))) continue;
      std::vector<Array> moved = own;
      if (keys) RollHeads(&moved[0], shift);
      if (values) RollHeads(&moved[1], shift);
      if (!fits(write.run(moved))) continue;
      return Explanation{fault_class::kKvIdent, std::string(keys && values ? "heads"
                                                            : keys         ? "heads of keys"
                                                                           : "heads of values") +
                                                    " of the rows read back hold what belongs " +
                                                    std::to_string(shift) + " heads on"};
    }
  }
  return std::nullopt;
}

// Half of the smallest step between codes; 0: the cache holds plain floats.
double HalfStep(DType cache) {
  if (LargestCode(cache) == 0) return 0;
  return cache == DType::kI8 ? 0.5 : cache == DType::kF4E2M1 ? 0.25 : 0x1p-10;
}

// Scale of each element of a part of the rows written, [rows, heads, width] flat: as declared, else as recorded with a
// scale a head or a scale a group of each row, else 1. Codes of four bits have scales of their own in every row: where
// they were not recorded, the largest magnitude of what shares a scale says what none is beyond. NVFP4 has one for 16
// elements, rounded to e4m3: by a sixteenth and more, of the head. Others may have one for all heads of the row,
// rounded up to a power of two.
std::vector<double> ScalesOf(const Subject& s, DType cache, const Input& part, std::string_view letter, int64_t heads) {
  const auto n = static_cast<size_t>(part.tensor->n());
  const std::string key = std::string(letter) + "_scale";
  // Magnitudes: a range of codes has two sides, whatever the sign of its scale.
  const double declared = std::abs(s.Number(key, s.Number("kv_scale", 1)));
  if (declared != 1 || Capture::OwnText(s.info(), key) || Capture::OwnText(s.info(), "kv_scale"))
    return std::vector<double>(n, declared);
  const int64_t rows = part.tensor->n_rows(), width = part.tensor->n() / std::max<int64_t>(rows * heads, 1);
  std::vector<double> out(n, 1);
  if (width == 0 || rows * heads * width != part.tensor->n()) return out;
  const TensorPtr scale = s.Beside(s.Sibling("attn." + key));
  const int64_t groups = scale == nullptr ? 0 : scale->n() / std::max<int64_t>(rows * heads, 1);
  const bool grouped =
      groups > 0 && scale->n() == rows * heads * groups && width % groups == 0 && SameRows(*scale, *part.tensor);
  const bool of_heads = scale != nullptr && scale->rows.empty() && scale->n() == heads;
  const bool of_blocks = s.Text("kv_cache_dtype", "") == "nvfp4";
  const auto largest = [&](int64_t begin, int64_t n_elements) {
    double top = 0;
    for (int64_t i = begin; i < begin + n_elements; ++i)
      top = std::max(top, std::abs(part.tensor->values[static_cast<size_t>(i)]));
    return top;
  };
  for (int64_t r = 0; r < rows * heads; ++r) {
    const double beyond =
        of_blocks ? 1.125 * largest(r * width, width) : 2 * largest(r / heads * heads * width, heads * width);
    for (int64_t c = 0; c < width; ++c) {
      double& to = out[static_cast<size_t>(r * width + c)];
      if (grouped)
        to = std::abs(scale->values[static_cast<size_t>(r * groups + c / (width / groups))]);
      else if (of_heads)
        to = std::abs(scale->values[static_cast<size_t>(r % heads)]);
      else if (cache == DType::kF4E2M1)
        to = beyond / LargestCode(cache);
    }
  }
  return out;
}

// Rows that no cause explains: of somebody else, or the own ones changed in a way that is not known.
Explanation UnknownRows(const Subject& s, const Array& due, const std::string& how) {
  if (GoWithTheirOwn(s.actual(), due, s.judged())) {
    return {fault_class::kKernel, "rows " + how +
                                      " are the rows written with other numbers: the same signs, and no scale, code or "
                                      "order that is known"};
  }
  return {fault_class::kKvIdent, "rows " + how + " are not the rows that were written, nor anything made of them"};
}

// attn.kv_write as it came back against the rows that were given: a copy, but for one rounding to the cache's codes
// times their scale.
void JudgeWrite(Subject& s) {
  const std::vector<Input> parts = Written(s);
  if (parts.empty()) return Missing(s, s.Sibling("attn.k or attn.kv_c_normed"));
  const DType cache = CacheDType(s.capture(), s.info()).value_or(s.info().event.dtype);
  // 0 for caches that hold plain floats: nothing is cut, nothing scaled.
  const double top = LargestCode(cache);
  Operation write;
  write.inputs = parts;
  const int64_t rows = s.actual().shape.empty() ? 1 : s.actual().shape[0];
  const int64_t heads = s.actual().rank() == 3 ? s.actual().shape[1] : 1,
                cols = s.actual().size() / std::max<int64_t>(rows * heads, 1);
  Array code_scale = Array::Filled(s.actual().shape, 1);  // of each element read back
  if (top > 0) {
    int64_t begin = 0;
    for (const Input& part : parts) {
      const auto own = ScalesOf(s, cache, part, part.name.ends_with("attn.v") ? "v" : "k", heads);
      const int64_t width = part.tensor->n() / std::max<int64_t>(rows * heads, 1);
      for (int64_t i = 0; i < part.tensor->n() && begin + width <= cols && part.tensor->n() == rows * heads * width;
           ++i)
        code_scale[i / width * cols + begin + i % width] = own[static_cast<size_t>(i)];
      begin += width;
    }
  }
  double small_steps = 0;  // half of the smallest code's step, in roundoffs of the code
  write.run = [&](std::span<const Array> in) -> Result<oracle::Computed> {
    oracle::Computed y;
    y.value = y.scale = Array::Filled(s.actual().shape);
    int64_t begin = 0;
    for (size_t j = 0; j < in.size(); ++j) {
      const int64_t width = in[j].size() / std::max<int64_t>(rows * heads, 1);
      if (in[j].size() != rows * heads * width || begin + width > cols)
        return Status::BadInput(s.info().name + " has another shape than the rows written");
      for (int64_t r = 0; r < rows * heads; ++r) {
        for (int64_t c = 0; c < width; ++c) {
          const double x = in[j][r * width + c];
          y.value[r * cols + begin + c] = x;
          y.scale[r * cols + begin + c] = std::abs(x);
        }
      }
      begin += width;
    }
    if (begin != cols) return Status::BadInput(s.info().name + " holds more columns than the rows written");
    for (int64_t i = 0; small_steps > 0 && i < y.scale.size(); ++i) y.scale[i] += small_steps * code_scale[i];
    return y;
  };
  auto right = write.Run();
  if (!right.ok()) return s.report().Missing(right.status().message(), "record attn.k and attn.v of the same rows");
  if (!IsComparable(s, *right)) return;
  oracle::Precision p;
  // No sum is formed, so there is no accumulator: the store alone counts.
  p.accum = 0;
  const double u = top > 0 || IsFloat(cache) ? UnitRoundoff(cache == DType::kI8 ? DType::kF8E4M3FN : cache) : 0;
  p.store = u;
  p.floor = 0;
  // First without a floor: most rows have no element so small, and the bound stays sharp for them.
  Difference d = Differ(s.actual(), *right, p, s.judged());
  const double half_step = HalfStep(cache);
  if (!d.ok && top > 0) {  // small elements: half of the smallest code's step, times the scale of the code
    small_steps = half_step / u;
    right = write.Run();
    d = Differ(s.actual(), *right, p, s.judged());
  }
  if (d.ok) return ReportRight(s, d);
  // A scale that was taken from earlier rows cuts a few later elements: right while that costs no more than rounding to
  // these codes may, which with the rounding itself is at most twice as much.
  if (top > 0 && d.measured <= 2 * d.allowed) {
    oracle::Computed cut = *right;
    for (int64_t i = 0; i < cut.value.size(); ++i) {
      const double limit = top * code_scale[i];
      cut.value[i] = std::clamp(cut.value[i], -limit, limit);
    }
    if (const Difference c = Differ(s.actual(), cut, p, s.judged()); c.ok) return ReportRight(s, c);
  }

  // A slot that was never written goes before all arithmetic explanations: its bytes may look like anything.
  std::optional<Explanation> why = ExplainUnwritten(s);
  const auto fits = [&](const Result<oracle::Computed>& other) {
    return other.ok() && Differ(s.actual(), *other, p, s.judged(), 2).ok;
  };
  // A captured graph that copies from where the rows were.
  if (!why) {
    for (const Input& part : parts) {
      bool moved = false;
      BoundEvent(s, part.name, part.tensor->info->id, &moved);
      if (!moved || why) continue;
      for (EventId id : s.capture().EventsOf(part.name)) {
        auto old = s.capture().Load(id);
        if (!old.ok() || !s.capture().Earlier(id, part.tensor->info->id) || (*old)->shape != part.tensor->shape)
          continue;
        auto arrays = write.arrays();
        for (size_t j = 0; j < parts.size(); ++j) {
          EventFilter filter;
          filter.step = (*old)->info->event.step;
          filter.rank = s.info().event.rank;
          for (EventId other : s.capture().Find(parts[j].name, filter)) {
            if (auto t = s.capture().Load(other); t.ok() && (*t)->shape == parts[j].tensor->shape)
              arrays[j] = ToArray(**t);
          }
        }
        if (!fits(write.run(arrays))) continue;
        why = Explanation{fault_class::kGraph, "fits the rows of step " + std::to_string((*old)->info->event.step) +
                                                   ": the launch is bound to an address that they have left"};
        break;
      }
    }
  }
  if (!why) why = ExplainPlaces(write, fits);
  // Rows of keys and values taken at another pitch than that of their views.
  if (!why && top == 0) why = ExplainStrides(s, write);
  // The rows lie elsewhere in the memory behind the cache.
  if (!why) {
    if (const TensorPtr storage = StorageOf(s, s.info())) {
      const int64_t width = right->value.cols();
      std::set<std::vector<uint64_t>> stored;
      // Rows may begin at any multiple of the width.
      for (int64_t at = 0; at + width <= storage->n(); at += width)
        stored.insert(KeyOf(std::span(storage->values).subspan(static_cast<size_t>(at), static_cast<size_t>(width))));
      bool all = true;
      for (int64_t r = 0; r < right->value.rows() && all; ++r) {
        all = stored.contains(KeyOf(right->value.row(r)));
      }
      if (all)
        why = Explanation{fault_class::kStride,
                          "all rows written lie in the storage of the cache, at other places than the view leads to"};
    }
  }
  // Scales: everything one constant off, or cut at the largest code.
  if (!why) {
    const double ratio = ConstantRatio(s.actual(), right->value, s.judged(), std::max(2 * u, 1e-3));
    // The rows of a coarse code have a ratio near 1 whatever is wrong: it must be no rounding, or fit where 1 does not.
    oracle::Computed scaled = *right;
    for (double& x : scaled.value.values) x *= ratio;
    if (!std::isnan(ratio) && (std::abs(ratio - 1) > u / 2 || fits(scaled))) {
      why = Explanation{fault_class::kKvScale, "rows read back are one constant times the rows written", ratio,
                        "row read back / row written"};
    }
  }
  if (!why) why = ExplainOtherCodes(s.actual(), right->value, code_scale.values, cache, s.judged());
  if (!why && top > 0) {
    int64_t off = 0, beyond = 0;
    double cross = 0, square = 0, total = 0;
    for (int64_t i = 0; i < s.actual().size(); ++i) {
      const double limit = top * code_scale[i], x = s.actual()[i], want = right->value[i];
      // Elements at the largest code that should be larger were cut, and are right for what a cut does.
      const bool at_top = std::abs(std::abs(x) - limit) <= 1e-3 * limit;
      beyond += std::abs(want) > limit * (1 + u);
      if (std::abs(x - want) > 2 * u * std::abs(want) + 2 * half_step * code_scale[i] &&
          !(at_top && std::abs(want) > limit))
        ++off;
      cross += x * want;
      square += want * want;
      total += x * x;
    }
    if (off == 0 && beyond > 0) {
      why = Explanation{
          fault_class::kKvScale,
          std::to_string(beyond) + " elements are beyond the largest code times the scale and were cut there"};
    } else if (square > 0 && total > 0) {
      // The codes were cut as well: the ratio is that of the elements below the top.
      // Least squares over all elements, cut ones among them, so the constant is near and not exact.
      const double c = cross / square;
      double error = 0;
      for (int64_t i = 0; i < s.actual().size(); ++i)
        error += (s.actual()[i] - c * right->value[i]) * (s.actual()[i] - c * right->value[i]);
      if (std::abs(c - 1) > 0.05 && error < 0.01 * total)
        why = Explanation{fault_class::kKvScale, "rows read back are nearly one constant times the rows written", c,
                          "row read back / row written"};
    }
  }
  if (!why) {
    why = ExplainByFit(s, *right, write.inputs);
    if (why && (why->cls == fault_class::kScale || why->cls == fault_class::kRange)) {
      why->cls = fault_class::kKvScale;
      why->meaning = "row read back / row written";
    } else if (why && why->cls != fault_class::kPrecision && why->cls != fault_class::kStride) {
      why->cls = fault_class::kKvIdent;
    }
  }
  if (!why) why = UnknownRows(s, right->value, "read back");
  ReportWrong(s, d, *why);
}

// ---- read ----------------------------------------------------------------------------------------------------------

// The last row of (request, position) that the parts hold up to this event.
std::optional<std::vector<double>> LastRow(const Subject& s, std::span<const std::string> names, uint64_t request,
                                           int64_t position) {
  std::vector<double> out;
  for (const std::string& name : names) {
    auto rows = s.capture().RowsOf(name, request, s.info().id, s.info().event.rank);
    if (!rows.ok()) return std::nullopt;
    const auto row = rows->at(position);
    if (row.empty()) return std::nullopt;
    out.insert(out.end(), row.begin(), row.end());
  }
  return out;
}

// Each group of columns of the wrong rows times a number of its own, which a read under other scales leaves. A grid of
// scales that was written and read in two orders has the same numbers in other places, whose product is 1.
std::optional<Explanation> OtherScales(const Array& have, const Array& due, std::span<const int64_t> wrong) {
  const int64_t rows = have.shape[0], width = have.size() / std::max<int64_t>(rows, 1), cols = have.cols();
  for (int64_t group : {int64_t{128}, int64_t{64}, int64_t{32}, int64_t{16}, int64_t{8}}) {
    if (cols % group != 0) continue;
    double logarithms = 0, smallest = HUGE_VAL, largest = 0;  // of the factors that are not 1
    int64_t groups = 0, changed = 0, surplus = 0;
    bool fits = true;
    for (size_t i = 0; i < wrong.size() && fits; ++i) {
      for (int64_t begin = wrong[i] * width; begin < (wrong[i] + 1) * width && fits; begin += group) {
        double cross = 0, square = 0;
        int64_t nonzero = 0;
        for (int64_t j = begin; j < begin + group; ++j) {
          cross += have[j] * due[j];
          square += due[j] * due[j];
          nonzero += due[j] != 0;
        }
        if (square == 0) continue;
        const double factor = cross / square;
        for (int64_t j = begin; j < begin + group; ++j)
          fits = fits && std::abs(have[j] - factor * due[j]) <= 0x1p-7 * std::abs(factor * due[j]);
        fits = fits && factor > 0;
        logarithms += std::log(factor);
        ++groups;
        if (std::abs(factor - 1) > 1e-3) {
          ++changed;
          smallest = std::min(smallest, factor);
          largest = std::max(largest, factor);
        }
        surplus += nonzero - 1;
      }
    }
    // Each element beyond the first of its group agrees to 2^-7 by chance once in 2^6: 16 of them are no accident.
    if (!fits || changed < 2 || surplus < 16) continue;
    if (largest - smallest <= 1e-3 * largest) return std::nullopt;  // one constant, which the fit says
    const bool moved = std::abs(logarithms) < 1e-3 * static_cast<double>(groups);
    return Explanation{moved ? fault_class::kQLayout : fault_class::kKvScale,
                       "rows gathered are those that were written with another scale for each group of " +
                           std::to_string(group) + " columns" +
                           (moved ? ": the same scales in other places, as their product is 1" : "")};
  }
  return std::nullopt;
}

// Every head of the wrong rows is a head that was written, under another head or position: rows and heads of a page in
// the other order. Only the rows of `due` that are judged are known; heads of one value, a pool that nobody filled
// among them, say nothing of an order.
bool OtherHeadOrder(const Array& have, const Array& due, std::span<const char> judged, std::span<const int64_t> wrong) {
  if (have.rank() != 3 || have.shape[1] < 2 || have.shape[2] < 4) return false;
  const int64_t heads = have.shape[1], d = have.shape[2];
  const auto head = [&](const Array& a, int64_t i) {
    return KeyOf(std::span(a.values).subspan(static_cast<size_t>(i * d), static_cast<size_t>(d)));
  };
  std::set<std::vector<uint64_t>> written;
  for (int64_t i = 0; i < due.shape[0] * heads; ++i) {
    if (judged[static_cast<size_t>(i / heads)]) written.insert(head(due, i));
  }
  int64_t moved = 0;
  for (int64_t r : wrong) {
    for (int64_t h = 0; h < heads; ++h) {
      const std::vector<uint64_t> x = head(have, r * heads + h);
      if (!written.contains(x)) return false;
      const bool one_value = std::all_of(x.begin(), x.end(), [&](uint64_t v) { return v == x[0]; });
      moved += !one_value && x != head(due, r * heads + h);
    }
  }
  return moved >= 2;
}

// Rows that attention gathered, bit for bit those that were written for their request and position. Quantised caches
// are held against attn.kv_write, which has been through the codes already.
void JudgeRead(Subject& s) {
  const bool latent = s.info().name.ends_with("attn.kv_read");
  const bool value = s.info().name.ends_with("attn.v_read");
  std::vector<std::string> names;
  const bool quantised = s.capture().HasSite(s.Sibling("attn.kv_write"));
  if (quantised)
    names = {s.Sibling("attn.kv_write")};
  else if (latent)
    names = {s.Sibling("attn.kv_c_normed"), s.Sibling("attn.k_pe")};
  else
    names = {s.Sibling(value ? "attn.v" : "attn.k")};
  if (!s.capture().HasSite(names[0])) {
    return s.report().Missing(s.info().name + ": " + names[0] + " was not recorded", Capture::RecordHint(names[0]));
  }
  // Of a head of kv_write: its first columns are the key, the others the value.
  const int64_t heads = s.actual().rank() == 3 ? s.actual().shape[1] : 1;
  const int64_t cols = s.actual().size() / std::max<int64_t>(s.tensor()->n_rows() * heads, 1);
  const auto cut = [&](std::vector<double> row) {
    if (!quantised || latent || heads == 0) return row;
    const auto wide = static_cast<int64_t>(row.size()) / heads;
    if (wide <= cols) return row;
    std::vector<double> out;
    for (int64_t h = 0; h < heads; ++h) {
      const int64_t begin = h * wide + (value ? wide - cols : 0);
      out.insert(out.end(), row.begin() + begin, row.begin() + begin + cols);
    }
    return out;
  };
  std::vector<int64_t> wrong;
  int64_t judged = 0;
  std::string found;
  oracle::Computed due;  // the rows that should have been read
  due.value = due.scale = Array::Filled(s.actual().shape);
  const auto keys = s.capture().RequestKeys();
  for (int64_t r = 0; r < s.tensor()->n_rows(); ++r) {
    const RowId& id = s.tensor()->rows.empty() ? RowId{} : s.tensor()->rows[static_cast<size_t>(r)];
    if (!id.real()) {
      s.LeaveOut(r);
      continue;
    }
    const std::vector<uint64_t> have = KeyOf(s.tensor()->row(r));
    // A request that took blocks over reads what another one with the same first tokens wrote.
    bool known = false, right = false;
    // With token ids recorded, a row may also come from any request with the same tokens up to that position (shared
    // prefix).
    const RequestInfo* mine = s.capture().Request(id.request);
    std::vector<uint64_t> owners{id.request};
    for (uint64_t other : keys) {
      const RequestInfo* theirs = s.capture().Request(other);
      if (other == id.request || mine == nullptr || theirs == nullptr) continue;
      const auto n = static_cast<size_t>(id.position) + 1;
      if (mine->tokens.size() < n || theirs->tokens.size() < n) continue;
      if (std::equal(mine->tokens.begin(), mine->tokens.begin() + static_cast<int64_t>(n), theirs->tokens.begin()))
        owners.push_back(other);
    }
    for (uint64_t owner : owners) {
      auto want = LastRow(s, names, owner, id.position);
      if (!want) continue;
      const std::vector<double> own = cut(std::move(*want));
      right = right || KeyOf(own) == have;
      if (!known && own.size() == have.size())
        std::copy(own.begin(), own.end(), due.value.values.begin() + r * s.tensor()->row_size());
      known = true;
    }
    if (!known) {
      s.LeaveOut(r);
      continue;
    }
    ++judged;
    if (!right) wrong.push_back(r);
  }
  if (judged == 0) return Missing(s, names[0] + " of the rows read");
  if (wrong.empty()) return s.report().Right(s.info().id);
  if (auto why = ExplainOlderRows(s, names, wrong, cut))
    return ReportRule(s.capture(), s.report(), s.info(), *why, wrong);
  // Whose row is it?
  const std::vector<uint64_t> have = KeyOf(s.tensor()->row(wrong[0]));
  std::vector<uint64_t> everyone = keys;
  for (const RowId& id : s.tensor()->rows) everyone.push_back(id.request);
  for (uint64_t request : everyone) {
    auto rows = s.capture().RowsOf(names[0], request, s.info().id, s.info().event.rank);
    if (!rows.ok() || !found.empty()) continue;
    for (int64_t p : rows->positions) {
      auto row = LastRow(s, names, request, p);
      if (row && KeyOf(cut(std::move(*row))) == have) {
        char text[120];
        std::snprintf(text, sizeof text, "; the first one is the row of request %016llx at position %lld",
                      static_cast<unsigned long long>(request), static_cast<long long>(p));
        found = text;
        break;
      }
    }
  }
  // No row of anybody: the own one times a constant, say.
  for (int64_t i = 0; i < due.value.size(); ++i) due.scale[i] = std::abs(due.value[i]);
  if (found.empty()) {
    if (OtherHeadOrder(s.actual(), due.value, s.judged(), wrong)) {
      return ReportWrong(s, Differ(s, due),
                         {fault_class::kStride,
                          "every head gathered was written, for another head or position: rows and "
                          "heads of a page in the other order"});
    }
    if (const auto cache = CacheDType(s.capture(), s.info())) {
      const auto scale = ScalesOf(s, *cache, {s.info().name, s.tensor()}, value ? "v" : "k", heads);
      if (auto why = ExplainOtherCodes(s.actual(), due.value, scale, *cache, s.judged()))
        return ReportWrong(s, Differ(s, due), *why);
    }
    if (auto why = OtherScales(s.actual(), due.value, wrong)) return ReportWrong(s, Differ(s, due), *why);
    if (auto why = ExplainByFit(s, due, {})) {
      const bool scaled = why->cls == fault_class::kScale || why->cls == fault_class::kRange;
      if (scaled) {
        why->cls = fault_class::kKvScale;
        why->meaning = "row read / row written";
      }
      if (scaled || why->cls == fault_class::kPrecision || why->cls == fault_class::kStride ||
          why->cls == fault_class::kUnwritten)
        return ReportWrong(s, Differ(s, due), *why);
      found = "; " + why->text;
    }
    const Explanation unknown = UnknownRows(s, due.value, "gathered");
    if (unknown.cls != fault_class::kKvIdent) return ReportWrong(s, Differ(s, due), unknown);
  }
  ReportRule(s.capture(), s.report(), s.info(),
             {fault_class::kKvIdent,
              std::to_string(wrong.size()) +
                  " rows gathered are not those that were written for their request and position" + found},
             wrong);
}

}  // namespace

void JudgeCacheWrite(const Capture& capture, CheckReport* report) {
  constexpr std::string_view kWrite[] = {"attn.kv_write"};
  JudgeStems(capture, report, kWrite, JudgeWrite);
}
void JudgeCacheRead(const Capture& capture, CheckReport* report) {
  constexpr std::string_view kRead[] = {"attn.k_read", "attn.v_read", "attn.kv_read"};
  JudgeStems(capture, report, kRead, JudgeRead);
}

}  // namespace assay::check

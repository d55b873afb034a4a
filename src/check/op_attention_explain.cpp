// Causes of a wrong attention output: every candidate is the oracle with one thing changed. Of those that fit the one
// with the smallest residual is the cause, the earlier in the list where they are as good.
#include <algorithm>
#include <cmath>
#include <functional>
#include <map>

#include "check/helpers.h"
#include "check/op_attention.h"
#include "check/op_attention_trial.h"
#include "check/op_explain.h"
#include "check/op_fitted.h"

namespace assay::op {
namespace {

using oracle::Array;

// ---- other memory --------------------------------------------------------------------------------------------------

// Replaces the rows of every batch by those of `rows` (identities) with these values. part: 0 q, 1 k, 2 v.
void Replace(AttentionCall* call, int part, const Tensor& rows, const Array& values) {
  std::map<std::pair<uint64_t, int64_t>, int64_t> place;
  for (size_t r = 0; r < rows.rows.size(); ++r) {
    place[{rows.rows[r].request, rows.rows[r].position}] = static_cast<int64_t>(r);
  }
  const int64_t width = rows.row_size();
  for (AttentionBatch& b : call->batches) {
    Array& to = part == 0 ? b.q : part == 1 ? b.k : b.v;
    const auto& positions = part == 0 ? b.query_positions : b.key_positions;
    if (to.values.empty() || to.size() / std::max<int64_t>(to.shape[0], 1) != width) continue;
    for (size_t i = 0; i < positions.size(); ++i) {
      const auto at = place.find({b.request, positions[i]});
      if (at == place.end()) continue;
      std::copy_n(values.values.begin() + at->second * width, width,
                  to.values.begin() + static_cast<int64_t>(i) * width);
    }
  }
}

// q, k and v one after the other: one reading with another's strides is the fault, not two.
void TryStrides(const Subject& out, const AttentionCall& call, Trial* trial) {
  const std::string names[3] = {out.Sibling("attn.q"), call.key_names[0],
                                call.key_names.size() > 1 ? call.key_names[1] : std::string()};
  std::vector<Input> inputs;
  for (const std::string& name : names) inputs.push_back({name, name.empty() ? nullptr : out.Operand(name)});
  for (int part = 0; part < 3; ++part) {
    const TensorPtr& view = inputs[static_cast<size_t>(part)].tensor;
    if (view == nullptr) continue;
    const Readings readings = OtherReadings(out, *view, inputs);
    for (const Reading& way : readings.ways) {
      AttentionCall changed = call;
      Replace(&changed, part, *view, readings.Read(way));
      const bool moved = way.from_beginning && way.strides == view->info->event.strides;
      if (trial->Try(changed,
                     {fault_class::kStride, "fits " + names[part] + " read from " +
                                                (moved ? "the beginning of its storage, not from where the view begins"
                                                       : "its storage by other strides than its own")})) {
        return;
      }
    }
  }
}

// Every earlier value of what has moved; the trial keeps the one that fits.
void TryGraph(const Subject& out, const AttentionCall& call, Trial* trial) {
  const Capture& capture = out.capture();
  // Lengths: keys up to those of an earlier step.
  bool moved = false;
  const EventId now = capture.Operand(out.info(), "seq_lens").value_or(kNoEvent);
  BoundEvent(out, "seq_lens", now, &moved);
  if (moved) {
    for (EventId id : capture.EventsOf("seq_lens")) {
      auto old = capture.Load(id);
      if (!old.ok() || !capture.Earlier(id, now)) continue;
      AttentionCall changed = call;
      for (AttentionBatch& b : changed.batches) {
        for (size_t r = 0; r < (*old)->rows.size(); ++r) {
          if ((*old)->rows[r].request == b.request) b.range.end = static_cast<int64_t>((*old)->values[r]);
        }
      }
      trial->Try(changed, {fault_class::kGraph, "fits the lengths (seq_lens) of step " +
                                                    std::to_string((*old)->info->event.step) +
                                                    ": the launch is bound to an address that they have left"});
    }
  }
  const std::string names[3] = {out.Sibling("attn.q"), call.key_names[0],
                                call.key_names.size() > 1 ? call.key_names[1] : std::string()};
  for (int part = 0; part < 3; ++part) {
    if (names[part].empty()) continue;
    const EventId operand = capture.Operand(out.info(), names[part]).value_or(kNoEvent);
    BoundEvent(out, names[part], operand, &moved);
    if (!moved) continue;
    auto current = capture.Load(operand);
    for (EventId id : capture.EventsOf(names[part])) {
      auto old = capture.Load(id);
      if (!current.ok() || !old.ok() || !capture.Earlier(id, operand) || (*old)->shape != (*current)->shape) continue;
      AttentionCall changed = call;
      Replace(&changed, part, **current, ToArray(**old));
      trial->Try(changed,
                 {fault_class::kGraph, "fits " + names[part] + " of step " + std::to_string((*old)->info->event.step) +
                                           ": the launch is bound to an address that the operand has left"});
    }
  }
}

// ---- whose keys ----------------------------------------------------------------------------------------------------

// Keys that the pool holds, from key position `first` on; slot_of(position) is -1 where no slot is known.
// False when the pool does not have every position from `first` to the newest of the step. The mask is dropped, as it
// belongs to the keys that were recorded.
bool FromSlots(const Subject& out, const AttentionCall& call, AttentionBatch* b, int64_t first,
               const std::function<int64_t(int64_t)>& slot_of) {
  const Pool pool = PoolOf(out, call);
  if (pool.slots == 0 || !pool.holds_rows_of(*b) || first < 0) return false;
  AttentionBatch read = *b;
  const auto put = [&](const Tensor& from, int64_t slot, Array* to) {
    const auto values = from.row(slot);
    to->values.insert(to->values.end(), values.begin(), values.end());
  };
  read.key_positions.clear();
  read.k.values.clear();
  read.v.values.clear();
  for (int64_t p = first; p <= call.rows_of(*b).last; ++p) {
    const int64_t slot = slot_of(p);
    if (slot < 0 || slot >= pool.slots) return false;
    read.key_positions.push_back(p);
    put(*pool.k, slot, &read.k);
    if (pool.v != nullptr) put(*pool.v, slot, &read.v);
  }
  const auto n = static_cast<int64_t>(read.key_positions.size());
  read.k.shape[0] = n;
  if (pool.v != nullptr) read.v.shape[0] = n;
  if (!read.mask.values.empty()) read.mask = {};
  *b = std::move(read);
  return true;
}

// The slots that the block table leads to now.
bool FromPool(const Subject& out, const Tensor& table, int64_t block_size, const AttentionCall& call, AttentionBatch* b,
              int64_t first) {
  size_t row = 0;
  while (row < table.rows.size() && table.rows[row].request != b->request) ++row;
  if (row == table.rows.size() || block_size <= 0) return false;
  const auto entries = table.row(static_cast<int64_t>(row));
  return FromSlots(out, call, b, first, [&](int64_t p) -> int64_t {
    const int64_t block = p / block_size;
    if (block >= static_cast<int64_t>(entries.size())) return -1;
    const int64_t entry = check::IntegerOf(entries[static_cast<size_t>(block)]);
    // Neither the entry nor the size of a block is bounded by the file.
    int64_t slot = 0;
    if (entry < 0 || __builtin_mul_overflow(entry, block_size, &slot) ||
        __builtin_add_overflow(slot, p % block_size, &slot)) {
      return -1;
    }
    return slot;
  });
}

// One request's rows, with four allowances.
bool BatchFits(const Subject& out, const AttentionCall& call, size_t batch) {
  auto values = Recompute(call, static_cast<int>(batch));
  if (!values.ok()) return false;
  std::vector<char> rows(out.judged().size(), 0);
  for (int64_t r : call.batches[batch].rows) rows[static_cast<size_t>(r)] = 1;
  return Differ(out.actual(), values->out, out.precision(), rows, 4).ok;
}

// Every request read from slots that follow one another, as if the cache were not paged: from where the requests before
// it end, from a stride of the longest one, or all from the first slot on. Each wrong request must fit.
std::optional<Explanation> WithoutTable(const Subject& out, const AttentionCall& call, int64_t block_size) {
  const int64_t slots = PoolOf(out, call).slots;
  if (slots == 0) return std::nullopt;
  // Cut at the pool's end, behind which there is no slot: positions are bounded by nothing.
  const auto length = [&](const StepRows& rows) { return std::clamp<int64_t>(rows.last, -1, slots) + 1; };
  int64_t longest = 0;
  for (const StepRows& rows : call.step) longest = std::max(longest, length(rows));
  const int64_t block = std::clamp<int64_t>(block_size, 1, slots);
  const int64_t whole = (longest + block - 1) / block * block;
  struct Layout {
    const char* text;
    int64_t stride;  // of a request; -1: lengths of those before it, -2: their new rows
  };
  for (const Layout& layout :
       {Layout{"the lengths of the requests before", -1}, Layout{"the new rows before", -2},
        Layout{"the longest request times its number", longest},
        Layout{"whole blocks of the longest request times its number", whole}, Layout{"0 for every request", 0}}) {
    bool any = false, all = true;
    std::vector<int64_t> begin;  // first slot of each request of the step
    int64_t start = 0;
    for (const StepRows& rows : call.step) {
      begin.push_back(layout.stride >= 0 ? static_cast<int64_t>(begin.size()) * layout.stride : start);
      start += layout.stride == -2 ? rows.n_rows : length(rows);
    }
    for (size_t b = 0; b < call.batches.size() && all; ++b) {
      if (BatchFits(out, call, b)) continue;
      const int64_t first = begin[call.batches[b].number];
      AttentionCall changed = call;
      all = FromSlots(out, call, &changed.batches[b], 0, [&](int64_t p) { return first + p; }) &&
            BatchFits(out, changed, b);
      any = true;
    }
    if (any && all)
      return Explanation{fault_class::kKvIdent, std::string("fits slots of the pool that follow one another from ") +
                                                    layout.text + " on: the block table was not used"};
  }
  return std::nullopt;
}

// A kernel that takes whole blocks: all queries see what the pool holds behind the newest key, or the newest alone,
// whose causal bound ends with the block.
void TryPoolTails(const Subject& out, const AttentionCall& call, Trial* trial) {
  for (bool newest_alone : {false, true}) {
    AttentionCall changed = call;
    bool any = false;
    for (AttentionBatch& b : changed.batches) any = AddPoolTail(out, call, newest_alone, &b) || any;
    if (any && trial->Try(changed, {fault_class::kPadRead,
                                    "fits keys behind the newest one as the pool holds them, to the end of its block",
                                    kNone, "", 3})) {
      return;
    }
  }
}

// A query, key or value read by a head stride of 0: all heads are one.
void TryHeadStrides(const AttentionCall& call, Trial* trial) {
  for (int part = 0; part < 3; ++part) {
    AttentionCall changed = call;
    bool several = false;
    for (AttentionBatch& b : changed.batches) {
      Array& a = part == 0 ? b.q : part == 1 ? b.k : b.v;
      if (a.rank() != 3 || a.shape[1] < 2) continue;
      several = true;
      const int64_t d = a.shape[2], heads = a.shape[1];
      for (int64_t t = 0; t < a.shape[0]; ++t)
        for (int64_t h = 1; h < heads; ++h)
          std::copy_n(a.values.begin() + t * heads * d, d, a.values.begin() + (t * heads + h) * d);
    }
    constexpr const char* kNames[] = {"queries", "keys", "values"};
    if (several && trial->Try(changed, {fault_class::kStride, std::string("fits ") + kNames[part] +
                                                                  " of head 0 in every head: a head stride of 0"})) {
      return;
    }
  }
}

// Rows that hold, bit for bit, what the same output held in an earlier step.
// Rows of zeros repeat by right. Every wrong row must be found, or the cause is another one.
std::optional<Explanation> KeptRows(const Subject& out, const Difference& d) {
  int64_t step = 0;
  for (int64_t r : d.rows) {
    const auto row = out.tensor()->row(r);
    if (std::all_of(row.begin(), row.end(), [](double x) { return x == 0; })) return std::nullopt;
    bool found = false;
    for (EventId id : out.capture().EventsOf(out.info().name)) {
      const auto info = out.capture().Info(id);
      if (found || info->event.rank != out.info().event.rank || info->event.step >= out.info().event.step ||
          !out.capture().Earlier(id, out.info().id)) {
        continue;
      }
      auto earlier = out.capture().Load(id);
      if (!earlier.ok() || (*earlier)->row_size() != out.tensor()->row_size()) continue;
      for (int64_t other = 0; other < (*earlier)->n_rows() && !found; ++other) {
        const auto kept = (*earlier)->row(other);
        found = std::equal(kept.begin(), kept.end(), row.begin(), row.end());
      }
      if (found) step = info->event.step;
    }
    if (!found) return std::nullopt;
  }
  if (d.rows.empty()) return std::nullopt;
  return Explanation{fault_class::kUnwritten, "wrong rows hold bit for bit what the output held in step " +
                                                  std::to_string(step) + ": they were not written"};
}

// Rows that see no key are due to hold zeros: other numbers there are of another call. Every wrong row must be one.
std::optional<Explanation> RowsWithoutKeys(const AttentionCall& call, const AttentionValues& right,
                                           const Difference& d) {
  for (int64_t r : d.rows) {
    for (int64_t h = 0; h < call.heads; ++h) {
      if (right.lse.value[r * call.heads + h] != -HUGE_VAL) return std::nullopt;
    }
  }
  if (d.rows.empty()) return std::nullopt;
  return Explanation{fault_class::kUnwritten,
                     "rows that see no key hold other numbers than zeros: they were not written"};
}

// A row of this step in the slot of the request's first position too: a padding row of the batch went there, whose slot
// id, clamped, leads to it.
void TryPaddingWrites(const AttentionCall& call, Trial* trial) {
  AttentionCall changed = call;
  for (AttentionBatch& b : changed.batches) {
    if (call.rows_of(b).n_rows != 1 || b.key_positions.size() < 2) return;
    for (Array* a : {&b.k, &b.v}) {
      if (a->values.empty()) continue;
      const int64_t width = a->size() / a->shape[0];
      std::copy_n(a->values.end() - width, width, a->values.begin());
    }
  }
  trial->Try(changed, {fault_class::kPadRead,
                       "fits the step's own key and value at the first position too: a padding row went to its slot",
                       kNone, "", 3});
}

// Each request whose rows are wrong must be explained by rows that are not its own.
std::optional<Explanation> ForeignRows(const Subject& out, const AttentionCall& call) {
  const TensorPtr table = out.Operand("block_table");
  const int64_t block_size = table == nullptr ? 0 : out.capture().Integer(*table->info, "block_size").value_or(1);
  if (auto why = WithoutTable(out, call, block_size)) return why;
  std::string text;
  bool any = false;
  for (size_t b = 0; b < call.batches.size(); ++b) {
    if (BatchFits(out, call, b)) continue;
    const int64_t last = call.rows_of(call.batches[b]).last;
    bool found = false;
    if (table != nullptr) {
      const int64_t step = std::max<int64_t>(block_size, 1);
      for (int64_t block = 0; block < table->row_size() && block <= last / step && !found; ++block) {
        const int64_t first = block * step;
        AttentionCall changed = call;
        changed.spec.window = 0;
        found = FromPool(out, *table, block_size, call, &changed.batches[b], first) && BatchFits(out, changed, b);
        if (found)
          text = "fits the slots that the block table leads to from position " + std::to_string(first) +
                 " on, which hold rows of other requests by now";
      }
      if (!found) {
        AttentionCall changed = call;
        found = FromPool(out, *table, block_size, call, &changed.batches[b], 0) && BatchFits(out, changed, b);
        if (found) text = "fits what the pool holds at the slots of the block table, not what the request wrote";
      }
    }
    for (size_t other = 0; other < call.batches.size() && !found; ++other) {
      if (other == b) continue;
      const AttentionBatch& from = call.batches[other];
      // All rows, or one block of them, at the same positions of another request.
      std::vector<std::pair<int64_t, int64_t>> spans{{0, last + 1}};
      for (int64_t size : BlockSizes(out, block_size)) {
        for (int64_t p = 0, n = 0; p <= last && n < 64; p += size, ++n) spans.emplace_back(p, p + size);
      }
      // All keys of the other request at the same positions, then one block of them.
      for (auto [begin, end] : spans) {
        AttentionCall changed = call;
        AttentionBatch& to = changed.batches[b];
        bool all = true;
        for (size_t i = 0; i < to.key_positions.size(); ++i) {
          const int64_t p = to.key_positions[i];
          if (p < begin || p >= end) continue;
          const auto at = std::lower_bound(from.key_positions.begin(), from.key_positions.end(), p);
          if (at == from.key_positions.end() || *at != p) {
            all = false;
            continue;
          }
          const auto source = at - from.key_positions.begin();
          for (auto [x, y] : {std::pair{&from.k, &to.k}, std::pair{&from.v, &to.v}}) {
            if (x->values.empty()) continue;
            const int64_t width = x->size() / x->shape[0];
            std::copy_n(x->values.begin() + source * width, width, y->values.begin() + static_cast<int64_t>(i) * width);
          }
        }
        if (all && BatchFits(out, changed, b)) {
          found = true;
          text = "fits keys and values of another request at positions " + std::to_string(begin) + " to " +
                 std::to_string(end - 1);
          break;
        }
      }
    }
    if (!found) return std::nullopt;
    any = true;
  }
  if (!any) return std::nullopt;
  return Explanation{fault_class::kKvIdent, text};
}

// ---- which constant ------------------------------------------------------------------------------------------------

struct ScaleFit {
  double factor = 1;  // softmax scale used / declared
  double output = 1;  // output used / expected
  double residual = 0;
};

// The factor of the declared scale, and the factor of the output, at which the oracle comes closest. Sixteen rows that
// see the most keys are fitted; the verdict is taken on all of them.
// Factors from e^-6 to e^6, in steps so small because the residual has several minima, as a softmax saturates.
// free_output: a factor on the output is fitted too, in closed form.
ScaleFit FitScale(const Subject& out, const AttentionCall& call, bool free_output) {
  const AttentionCall few = FewQueries(call);
  const int64_t width = call.heads * call.value_dim;
  const auto miss = [&](double logarithm, double* output) {
    AttentionCall changed = few;
    changed.spec.scale = call.spec.scale * std::exp(logarithm);
    auto values = Recompute(changed);
    if (!values.ok()) return 1e300;
    double cross = 0, square = 0, total = 0;
    for (const AttentionBatch& b : few.batches) {
      for (int64_t r : b.rows) {
        for (int64_t i = r * width; i < (r + 1) * width; ++i) {
          const double x = out.actual()[i], y = values->out.value[i];
          if (!std::isfinite(x)) return 1e300;
          cross += x * y;
          square += y * y;
          total += x * x;
        }
      }
    }
    if (square == 0 || total == 0) return 1e300;
    const double a = free_output ? cross / square : 1;
    *output = a;
    return std::max(total - 2 * a * cross + a * a * square, 0.0) / total;
  };
  double output = 1;
  const double best = LeastAt([&](double x) { return miss(x, &output); }, 6, 0.1), least = miss(best, &output);
  return {std::exp(best), output, std::sqrt(least)};
}

// Without a factor on the output first; with one only if that does not fit. A factor near a declared scale of the
// cache, or its inverse, is that scale forgotten or taken twice.
void TryScales(const Subject& out, const AttentionCall& call, Trial* trial) {
  const double k_scale = out.Number("k_scale", out.Number("kv_scale", 1)),
               v_scale = out.Number("v_scale", out.Number("kv_scale", 1));
  const auto near = [](double a, double b) { return std::abs(a - b) <= 0.02 * std::abs(b); };
  for (bool free_output : {false, true}) {
    const ScaleFit fit = FitScale(out, call, free_output);
    AttentionCall changed = call;
    changed.spec.scale *= fit.factor;
    auto values = Recompute(changed);
    if (!values.ok()) continue;
    for (double& x : values->out.value.values) x *= fit.output;
    for (double& x : values->out.scale.values) x *= std::abs(fit.output);
    for (double& x : values->out.inner.values) x *= std::abs(fit.output);
    const bool output_off = std::abs(fit.output - 1) > 1e-2;
    const bool of_k = k_scale != 1 && (near(fit.factor, k_scale) || near(fit.factor, 1 / k_scale));
    const bool of_v = v_scale != 1 && (near(fit.output, v_scale) || near(fit.output, 1 / v_scale));
    Explanation why;
    why.text = "fits " + FactorText(fit.factor, 6) + " times the declared softmax scale and " + NumberText(fit.output) +
               " times the output";
    if (of_v || of_k) {
      why.cls = fault_class::kKvScale;
      why.constant = of_v ? fit.output : fit.factor;
      why.meaning = of_v ? "output used / expected, the value scale" : "logits used / expected, the key scale";
    } else if (output_off) {
      why.cls = fault_class::kScale;
      why.constant = fit.output;
      why.meaning = "output used / expected";
    } else {
      why.cls = fault_class::kScale;
      why.constant = fit.factor;
      why.meaning = "softmax scale used / declared";
    }
    if (trial->TryValues(values->out, why) && !free_output) break;
  }
}

// Dot products that run on into the next head: head sizes of two heads.
// The last head has no next one: zeros.
bool TwoHeadsWide(const AttentionCall& call, Trial* trial) {
  AttentionCall wide = call;
  const auto widen = [](Array* a) {
    if (a->rank() != 3) return false;
    const int64_t t = a->shape[0], h = a->shape[1], d = a->shape[2];
    Array out = Array::Filled({t, h, 2 * d});
    for (int64_t i = 0; i < t; ++i) {
      for (int64_t j = 0; j < h; ++j) {
        for (int64_t c = 0; c < 2 * d; ++c) {
          const int64_t flat = (i * h + j) * d + c;
          if (j == h - 1 && c >= d) continue;
          out[(i * h + j) * 2 * d + c] = (*a)[flat];
        }
      }
    }
    *a = std::move(out);
    return true;
  };
  for (AttentionBatch& b : wide.batches) {
    if (b.v.values.empty() || !widen(&b.q) || !widen(&b.k)) return false;
  }
  return trial->Try(wide, {fault_class::kKernel, "fits dot products over twice the head size, into the next head"});
}

}  // namespace

// From definite causes (memory, graph, strides) over single numbers (scales, masks) to whose keys they are, and to what
// costs most. After each group the best so far ends the search, so that a richer cause never replaces a simpler one.
std::optional<Explanation> ExplainAttention(const Subject& out, const AttentionCall& call, const AttentionValues& right,
                                            const Difference& d) {
  if (auto why = ExplainUnwritten(out)) return why;
  if (d.nonfinite) {
    Operation none;
    for (const std::string& name : call.key_names) none.inputs.push_back({name, out.Operand(name)});
    return ExplainNonFinite(out, none, d, false);
  }
  if (auto why = ExplainHeads(out, call, right)) return why;
  Trial trial(out, d);
  // A constant is said with how surely it is no accident.
  const auto best = [&] {
    auto why = trial.best();
    const bool weigh = why && !std::isnan(why->constant) && !SearchedEnough(out);
    return weigh ? Weighed(out, right.out, trial.values(), *why) : why;
  };
  TryGraph(out, call, &trial);
  TryStrides(out, call, &trial);
  if (auto why = best()) return why;
  if (auto why = KeptRows(out, d)) return why;
  if (auto why = RowsWithoutKeys(call, right, d)) return why;
  if (auto why = ExplainOtherBuffer(out, d)) return why;
  TryScales(out, call, &trial);
  TryOtherRanks(out, call, &trial);
  TryTerms(out, call, right, &trial);
  TryMasks(call, &trial);
  if (auto why = best()) return why;
  if (auto why = ForeignRows(out, call)) return why;
  TryHeadStrides(call, &trial);
  TryPoolTails(out, call, &trial);
  TryPaddingWrites(call, &trial);
  if (auto why = best()) return why;
  if (auto why = ExplainKeyHeads(out, call, right)) return why;
  if (TwoHeadsWide(call, &trial)) return best();
  if (auto why = LeavesRange(out, call)) return why;
  TryMissingKeys(call, &trial);
  if (auto why = best()) return why;
  if (auto why = ExplainPrecision(out, right.out, nullptr, [&](DType t) { return ErrsLike(out, call, right, t); }))
    return why;
  Operation operands;
  for (const std::string& name : call.key_names) operands.inputs.push_back({name, out.Operand(name)});
  return ExplainByFit(out, right.out, operands.inputs);
}

}  // namespace assay::op

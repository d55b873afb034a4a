// Weights in memory against the checkpoint: a quick comparison of everything, row by row, and for a tensor that differs
// the whole of it beside its codes and scales, for weights_explain.cpp.
#include <algorithm>
#include <cmath>

#include "check/weights_absorption.h"
#include "check/weights_pieces.h"
#include "check/weights_ranks.h"
#include "check/weights_slab.h"
#include "tensor/decode.h"

namespace assay {
namespace {

constexpr int64_t kMaxSlabElems = int64_t{1} << 24;  // explanations look at whole rows up to so many elements

// Names that engines and the native runtime record in phase load. Others (buffers, rotary tables) are nobody's weights.
bool IsWeightName(std::string_view name) {
  return name.ends_with(".weight") || name.ends_with(".bias") || name.ends_with("e_score_correction_bias") ||
         name.ends_with(".gate_up_proj") || name.ends_with(".down_proj") || name.ends_with(".gate_up_proj_bias") ||
         name.ends_with(".down_proj_bias") || name.ends_with("attn.W_UK_T") || name.ends_with("attn.W_UV") ||
         name.ends_with("attn.sinks");
}

// Row of the checkpoint's weight, of the whole and not of the shard.
int64_t SourceRow(const WeightPiece& p, int64_t i) {
  const bool permuted = p.rope_permuted > 0 && p.rows % (2 * p.rope_permuted) == 0;
  return p.first_row + (permuted ? SideBySide(i, p.rows, p.rope_permuted) : i);
}

// What one conversion to the type in memory costs, float32 at best.
double Roundoff(const MemoryTensor& t) {
  // The correction bias decides between experts that are close: whatever it was stored in, float32 is asked for.
  if (t.name.find("e_score_correction_bias") != std::string::npos) return UnitRoundoff(DType::kF32);
  const double own = IsFloat(t.event.dtype) ? UnitRoundoff(t.event.dtype) : 0;
  const double declared = IsFloat(t.event.compute_dtype) ? UnitRoundoff(t.event.compute_dtype) : 0;
  return std::max({own, declared, UnitRoundoff(DType::kF32)});
}

// Row i of the piece out of memory.
void MemoryRow(const MemoryTensor& t, const WeightPiece& p, int64_t i, double* out) {
  const int64_t start = t.rows() == 1 ? p.first : (p.first + i * p.step) * t.cols();
  DecodeTo(t.data, start, p.cols, t.event.dtype, out);
}

// Four roundings are allowed: a scale, a zero point, the product and the store may each round in another order.
bool RowsDiffer(const MemoryTensor& t, const WeightPiece& p, double roundoff) {
  const size_t cols = static_cast<size_t>(p.cols), all = static_cast<size_t>(p.weight->cols());
  std::vector<double> actual(cols), expect(all);
  for (int64_t i = 0; i < p.rows; ++i) {
    MemoryRow(t, p, i, actual.data());
    p.weight->Decode(SourceRow(p, i), 1, expect.data());
    const double* want = expect.data() + p.first_col;
    for (size_t c = 0; c < cols; ++c) {
      if (actual[c] == want[c] || (std::isnan(actual[c]) && std::isnan(want[c]))) continue;
      if (!(std::fabs(actual[c] - want[c]) <= 4 * roundoff * std::fabs(want[c]))) return true;
    }
  }
  return false;
}

// Everything about one piece side by side, element by element [rows, cols]: memory, expectation, code, zero, scale and
// the number of the scale's group, as weights_explain.cpp wants it.
WeightSlab MakeSlab(const WeightSource& source, const MemoryTensor& t, const WeightPiece& p, double roundoff) {
  WeightSlab s;
  s.name = p.name;
  s.cols = p.cols;
  s.rows = std::min(p.rows, std::max<int64_t>(1, kMaxSlabElems / std::max<int64_t>(p.cols, 1)));
  s.quantised = p.weight->quantised();
  s.roundoff = roundoff;
  s.rope_permuted = p.rope_permuted;
  s.head_dim = ConfigInt(source, "head_dim", 0);
  s.weight = p.weight;
  // compressed-tensors divides by weight_global_scale, others multiply by their second scale.
  if (const StoredPart* global = p.weight->part("global_scale")) {
    s.global_scale = DecodeBits(LoadBits(global->tensor->data, 0, global->tensor->dtype), global->tensor->dtype);
    s.global_divides = global->tensor->name.find("weight_global_scale") != std::string::npos;
  }
  const size_t n = static_cast<size_t>(s.size());
  for (std::vector<double>* v : {&s.actual, &s.expect, &s.code, &s.zero, &s.scale}) v->resize(n);
  s.group.resize(n);
  const int64_t block_rows = std::max<int64_t>(p.weight->block_rows(), 1);
  std::vector<double> row(static_cast<size_t>(p.weight->cols()));
  WeightParts parts;
  int32_t groups = 0;  // of one row of blocks
  int64_t bands = 0;
  int32_t low = INT32_MAX;
  std::vector<int64_t> band_of(static_cast<size_t>(s.rows));
  for (int64_t i = 0; i < s.rows; ++i) {
    const int64_t from = SourceRow(p, i), at = i * s.cols;
    MemoryRow(t, p, i, s.actual.data() + at);
    p.weight->Decode(from, 1, row.data());
    p.weight->Parts(from, &parts);
    for (int64_t c = 0; c < s.cols; ++c) {
      const size_t to = static_cast<size_t>(at + c), in = static_cast<size_t>(p.first_col + c);
      s.expect[to] = row[in];
      s.code[to] = parts.code[in];
      s.zero[to] = parts.zero[in];
      s.scale[to] = parts.scale[in];
      s.group[to] = parts.group[in];
      low = std::min(low, parts.group[in]);
      groups = std::max(groups, parts.group[in] + 1);
    }
    band_of[static_cast<size_t>(i)] = from / block_rows - p.first_row / block_rows;
    bands = std::max(bands, band_of[static_cast<size_t>(i)] + 1);
  }
  groups -= low;  // a shard of columns starts in the middle
  for (int64_t i = 0; i < s.size(); ++i) {
    int32_t& group = s.group[static_cast<size_t>(i)];
    group = static_cast<int32_t>(band_of[static_cast<size_t>(i / s.cols)]) * groups + group - low;
  }
  s.n_groups = static_cast<int32_t>(bands) * groups;
  // Only then do groups lie in a grid whose places mean something.
  const bool in_order = p.weight->part("g_idx") == nullptr && p.rope_permuted == 0;
  if (in_order) s.grid_rows = bands, s.grid_cols = groups;
  const int64_t block_cols = p.weight->block_cols();
  if (in_order && block_cols > 0 && p.first_row % block_rows == 0 && p.first_col % block_cols == 0)
    s.block_rows = block_rows, s.block_cols = block_cols;
  return s;
}

// A weight of the checkpoint, other than the right one, that memory holds instead.
// Same shape, every element as expected, and not a constant: a weight of ones equals another one and says nothing.
const Weight* FoundElsewhere(const WeightSource& source, const WeightSlab& s, const WeightPiece& p) {
  std::vector<double> row;
  for (const WeightPtr& other : source.weights()) {
    if (other.get() == p.weight || other->rows() != p.weight->rows() || other->cols() != p.weight->cols()) continue;
    row.resize(static_cast<size_t>(other->cols()));
    bool same = true, telling = false;
    for (int64_t i = 0; i < s.rows && same; ++i) {
      other->Decode(SourceRow(p, i), 1, row.data());
      for (int64_t c = 0; c < s.cols && same; ++c) {
        const double want = row[static_cast<size_t>(p.first_col + c)],
                     have = s.actual[static_cast<size_t>(i * s.cols + c)];
        same = NearlyEqual(have, want, s.roundoff);
        telling = telling || want != row[static_cast<size_t>(p.first_col)];
      }
    }
    if (same && telling) return other.get();
  }
  return nullptr;
}

// Rows of another rank: the piece equals the same weight at another row or column offset.
// Tried in steps of the shard's own size, as ranks cut a weight evenly.
MaybeExplained OtherShard(const WeightSlab& s, const WeightPiece& p) {
  const bool by_rows = p.rows < p.weight->rows(), by_cols = p.cols < p.weight->cols();
  if (!by_rows && !by_cols) return std::nullopt;
  const int64_t step = by_rows ? p.rows : p.cols, all = by_rows ? p.weight->rows() : p.weight->cols();
  std::vector<double> row(static_cast<size_t>(p.weight->cols()));
  for (int64_t start = 0; start + step <= all; start += step) {
    if (start == (by_rows ? p.first_row : p.first_col)) continue;
    WeightPiece other = p;
    (by_rows ? other.first_row : other.first_col) = start;
    bool same = true;
    for (int64_t i = 0; i < s.rows && same; ++i) {
      p.weight->Decode(SourceRow(other, i), 1, row.data());
      for (int64_t c = 0; c < s.cols && same; ++c) {
        same = NearlyEqual(s.actual[static_cast<size_t>(i * s.cols + c)], row[static_cast<size_t>(other.first_col + c)],
                           s.roundoff);
      }
    }
    if (same) {
      return Explained(fault_class::kTpShard, {},
                       {std::string("it holds ") + (by_rows ? "rows " : "columns ") + std::to_string(start) + " to " +
                        std::to_string(start + step - 1) + " of " + p.weight->name() + ", the shard of another rank"});
    }
  }
  return std::nullopt;
}

class MemoryChecker {
 public:
  MemoryChecker(const WeightSource& source, const Trace& trace, const WeightsOptions& options, WeightsResult* result,
                std::vector<WeightFinding>* found)
      : source_(source), trace_(trace), options_(options), result_(result), found_(found) {
    // Memory has engines' names, the checkpoint Hugging Face's: both are compared as canonical ones.
    for (const WeightPtr& weight : source.weights()) index_[CanonicalWeightName(weight->name())] = weight.get();
  }

  void Run() {
    std::vector<MemoryTensor> tensors = Collect();
    CheckRanks(tensors, found_);
    for (const MemoryTensor& t : tensors) Judge(t);
    if (tensors.empty()) {
      result_->notes.push_back("the trace holds no weights: record NAME.weight in phase load with ASSAY_LEVEL=payload");
    }
  }

 private:
  // All weights with payload; those without are listed with the reason instead.
  std::vector<MemoryTensor> Collect() {
    std::vector<MemoryTensor> tensors;
    std::map<std::pair<std::string, int32_t>, size_t> last;  // a tensor recorded twice counts as it was last
    for (uint64_t i = 0; i < trace_.event_count(); ++i) {
      const EventView view = trace_.event(i);
      if (view.phase() != Phase::kLoad) continue;
      const std::string& name = trace_.site_names()[view.global_site()];
      if (name.find(".weight.") != std::string::npos) {
        MemoryCheck part;
        part.name = name;
        part.rank = view.Decode().rank;
        part.note =
            "a part of a quantised weight; memory is compared as values: record NAME.weight as it is multiplied";
        result_->memory.push_back(std::move(part));
        continue;
      }
      if (!IsWeightName(name)) continue;
      MemoryTensor t;
      t.name = name;
      t.sequence = static_cast<int64_t>(i);
      t.event = view.Decode();
      if (t.Meta("audit") == "before") continue;
      for (const SiteInfo& site : trace_.processes()[view.file()].sites) {
        if (site.id == view.site()) t.axes = site.axes;
      }
      MemoryCheck check;
      check.name = name;
      check.rank = t.event.rank;
      if (!LoadPayload(&t, &check.note)) {
        result_->memory.push_back(std::move(check));
        continue;
      }
      const auto [at, fresh] = last.emplace(std::pair(name, t.event.rank), tensors.size());
      if (fresh) {
        tensors.push_back(std::move(t));
      } else {
        tensors[at->second] = std::move(t);
      }
    }
    return tensors;
  }

  // bits: of the whole tensor, 0 when an extent is forged or the product overflows.
  bool LoadPayload(MemoryTensor* t, std::string* note) const {
    const PayloadRef& ref = t->event.payload;
    uint64_t bits = static_cast<uint64_t>(BitsOf(t->event.dtype));
    for (const int64_t d : t->event.shape) {
      if (d <= 0 || __builtin_mul_overflow(bits, static_cast<uint64_t>(d), &bits)) bits = 0;
    }
    if (ref.sha256.empty() || !ref.rows.empty() || bits == 0) {
      *note = "no whole payload: record it with ASSAY_LEVEL=payload";
      return false;
    }
    const auto bytes = trace_.payload(ref);
    if (!bytes.ok() || bytes->size() != (bits + 7) / 8) {
      *note = bytes.ok() ? "payload and shape do not fit each other" : bytes.status().message();
      return false;
    }
    t->data = bytes->data();
    return true;
  }

  void Judge(const MemoryTensor& t) {
    MemoryCheck check;
    check.name = t.name;
    check.rank = t.event.rank;
    check.elements = static_cast<uint64_t>(t.rows() * t.cols());
    if (IsAbsorbed(t.name)) {
      CheckAbsorption(source_, index_, t, Roundoff(t), &check, found_);
    } else {
      for (const WeightPiece& piece : PiecesOf(source_, index_, t, &check.note)) {
        if (!options_.only.empty() && piece.weight->name() != options_.only) {
          // The glob is over checkpoint names; AuditWeights has chosen by it already.
          const bool chosen = std::any_of(result_->weights.begin(), result_->weights.end(),
                                          [&](const WeightAudit& a) { return a.weight == piece.weight; });
          if (!chosen) continue;
        }
        if (!check.checkpoint.empty()) check.checkpoint += " + ";
        check.checkpoint += piece.weight->name();
        JudgePiece(t, piece, &check);
      }
    }
    result_->memory.push_back(std::move(check));
  }

  // Cheap first: rows are compared as they are decoded; only a piece that differs is laid out as a slab and explained.
  void JudgePiece(const MemoryTensor& t, const WeightPiece& piece, MemoryCheck* check) {
    const double roundoff = Roundoff(t);
    if (!RowsDiffer(t, piece, roundoff)) return;
    const WeightSlab slab = MakeSlab(source_, t, piece, roundoff);
    const int64_t different = CountDifferent(slab);
    if (different == 0) return;  // a zero point subtracted behind the scale
    const bool first = check->different == 0;
    check->different += static_cast<uint64_t>(different);
    if (!first) return;  // one finding a tensor: its first wrong part
    WeightExplanation why;
    if (MaybeExplained shard = OtherShard(slab, piece)) {
      why = *std::move(shard);
    } else if (const Weight* other = FoundElsewhere(source_, slab, piece)) {
      why = Explained(fault_class::kLoad, {}, {"it holds " + other->name() + " instead"});
    } else {
      why = ExplainWeight(slab);
    }
    if (t.name == "lm_head.weight" && source_.find("lm_head.weight") == nullptr) {
      why.evidence.push_back("the checkpoint has no lm_head: the embedding stands for it" + Tie());
    }
    FirstBad bad =
        WeightBad(t.name, why.cls, "weights: memory against checkpoint", why.confidence, std::move(why.evidence));
    bad.constant = why.constant.meaning;
    bad.constant_value = why.constant.value;
    bad.ranks = {t.event.rank};
    Measure(slab, different, piece, &bad);
    found_->push_back({t.sequence, std::move(bad)});
  }

  std::string Tie() const {
    if (FindKey(source_.config(), "tie_word_embeddings") != nullptr) return "";
    return ConfigKey(source_, "tie_word_embeddings") != nullptr
               ? " (tie_word_embeddings stands in the inner configuration alone)"
               : "";
  }

  // measured: relative L2 of the difference; the first wrong element stands in the evidence with both values.
  static void Measure(const WeightSlab& s, int64_t different, const WeightPiece& piece, FirstBad* bad) {
    double error = 0, size = 0;
    int64_t first = -1;
    for (int64_t i = 0; i < s.size(); ++i) {
      const size_t at = static_cast<size_t>(i);
      const double distance = s.actual[at] - s.expect[at];
      error += distance * distance;
      size += s.expect[at] * s.expect[at];
      if (first < 0 && !(std::fabs(distance) <= s.Allowed(i))) first = i;
    }
    bad->measured = size > 0 ? std::sqrt(error / size) : std::sqrt(error);
    bad->bound = 4 * s.roundoff;
    bad->bound_basis =
        "four roundings of each element to the type in memory (unit roundoff " + NumberText(s.roundoff) + ")";
    const size_t at = static_cast<size_t>(first);
    bad->evidence.push_back(NumberText(different) + " of " + NumberText(s.size()) + " elements differ from " +
                            piece.weight->name() + " (" + piece.weight->format() + "); first at [" +
                            NumberText(piece.first_row + first / s.cols) + ", " +
                            NumberText(piece.first_col + first % s.cols) + "]: " + NumberText(s.actual[at], 9) +
                            " in memory, " + NumberText(s.expect[at], 9) + " in the checkpoint");
  }

  const WeightSource& source_;
  const Trace& trace_;
  const WeightsOptions& options_;
  WeightsResult* result_;
  std::vector<WeightFinding>* found_;
  WeightIndex index_;
};

}  // namespace

void CheckMemory(const WeightSource& source, const Trace& trace, const WeightsOptions& options, WeightsResult* result,
                 std::vector<WeightFinding>* found) {
  MemoryChecker(source, trace, options, result, found).Run();
}

}  // namespace assay

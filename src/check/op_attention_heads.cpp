// Heads of attention: results of another head, and query heads that read another key head than their own.
#include <algorithm>
#include <cmath>
#include <span>
#include <string>

#include "check/op_attention.h"
#include "check/op_attention_trial.h"
#include "check/op_fitted.h"

namespace assay::op {
namespace {

using oracle::Array;

// A recomputation of the whole call for each.
constexpr int64_t kMostKeyHeads = 64;

// The whole key (value) head j in the place of every one.
// a [rows, heads, d], in place.
void Repeat(Array* a, int64_t j) {
  const int64_t heads = a->shape[1], d = a->shape[2];
  for (int64_t t = 0; t < a->shape[0]; ++t) {
    for (int64_t h = 0; h < heads; ++h) {
      if (h == j) continue;
      std::copy_n(a->values.begin() + (t * heads + j) * d, d, a->values.begin() + (t * heads + h) * d);
    }
  }
}

// Whether head h of the result is that of `other`, within four bounds in every judged row.
bool HeadFits(const Subject& out, const oracle::Computed& other, int64_t h, int64_t heads) {
  const Array& have = out.actual();
  const int64_t width = have.cols();
  const oracle::Precision p = out.precision();
  for (int64_t t = 0; t < have.shape[0]; ++t) {
    if (!out.judged()[static_cast<size_t>(t)]) continue;
    for (int64_t c = 0; c < width; ++c) {
      const int64_t i = (t * heads + h) * width + c;
      if (!(std::abs(have[i] - other.value[i]) <= 4 * oracle::BoundAt(other, i, p))) return false;
    }
  }
  return true;
}

// What the key heads that were read have in common.
struct Rule {
  std::string text;
  std::string_view cls;
};
// read[h]: the key head that query head h read. A shift between ranks is a matter of who holds which heads, within one
// rank of the kernel.
Rule RuleOf(const std::vector<int64_t>& read, int64_t key_heads, bool ranks) {
  const auto n = static_cast<int64_t>(read.size()), group = n / key_heads;
  bool remainder = true, one = true, shifted = true, reversed = true;
  for (int64_t h = 0; h < n; ++h) {
    const int64_t j = read[static_cast<size_t>(h)];
    remainder = remainder && j == h % key_heads;
    one = one && j == read[0];
    shifted = shifted && j == (h / group + read[0]) % key_heads;
    reversed = reversed && j == key_heads - 1 - h / group;
  }
  if (one) return {"every query head reads head " + std::to_string(read[0]), fault_class::kStride};
  if (remainder)
    return {"query head h reads head h mod " + std::to_string(key_heads) + " (interleaved), h div " +
                std::to_string(group) + " is due (blocks)",
            fault_class::kKernel};
  if (shifted)
    return {"query heads read the head " + std::to_string(read[0]) + " further",
            ranks ? fault_class::kTpShard : fault_class::kKernel};
  if (reversed) return {"query heads read heads in reverse order", fault_class::kKernel};
  std::string text = "query heads read heads";
  for (int64_t j : read) text += " " + std::to_string(j);
  return {text, ranks ? fault_class::kTpShard : fault_class::kKernel};
}

}  // namespace

// Results in the place of other heads' results: the mapping of every head must be found, or there is no explanation.
std::optional<Explanation> ExplainHeads(const Subject& out, const AttentionCall& call, const AttentionValues& right) {
  const Array& have = out.actual();
  if (have.rank() != 3 || call.heads < 2 || have.size() != right.out.value.size()) return std::nullopt;
  const int64_t width = have.cols();
  std::vector<int64_t> source(static_cast<size_t>(call.heads), -1);
  const oracle::Precision p = out.precision();
  for (int64_t h = 0; h < call.heads; ++h) {
    for (int64_t step = 0; step < call.heads && source[static_cast<size_t>(h)] < 0; ++step) {
      // Its own head first: a head that is right keeps itself.
      const int64_t j = (h + step) % call.heads;
      bool same = true;
      for (int64_t t = 0; t < have.shape[0] && same; ++t) {
        if (!out.judged()[static_cast<size_t>(t)]) continue;
        for (int64_t c = 0; c < width && same; ++c) {
          const int64_t i = (t * call.heads + j) * width + c;
          same = std::abs(have[(t * call.heads + h) * width + c] - right.out.value[i]) <=
                 4 * oracle::BoundAt(right.out, i, p);
        }
      }
      if (same) source[static_cast<size_t>(h)] = j;
    }
    if (source[static_cast<size_t>(h)] < 0) return std::nullopt;
  }
  std::string text = "heads hold what belongs to heads";
  bool one = true, own = true;
  for (size_t h = 0; h < source.size(); ++h) {
    text += " " + std::to_string(source[h]);
    one = one && source[h] == source[0];
    own = own && source[h] == static_cast<int64_t>(h);
  }
  if (own) return std::nullopt;  // not right to the bound, and nearer to its own head than to any other
  if (one) return Explanation{fault_class::kStride, text + ": every head equals one"};
  return Explanation{fault_class::kTpShard, text};
}

// A rank that takes the keys and values of another rank's heads, its numbers a head, or the first ones of a whole
// vector, for those of its own.
void TryOtherRanks(const Subject& out, const AttentionCall& call, Trial* trial) {
  for (EventId id : out.capture().Find(out.info().name, {.step = out.info().event.step})) {
    const auto result = out.capture().Load(id);
    if (!result.ok() || (*result)->info->event.rank == out.info().event.rank) continue;
    const auto theirs = GatherAttention(Subject(out.capture(), *result, out.report()));
    if (!theirs.ok() || theirs->batches.size() != call.batches.size()) continue;
    AttentionCall changed = call;
    bool same = true, differs = false;
    for (size_t b = 0; b < call.batches.size() && same; ++b) {
      const AttentionBatch& from = theirs->batches[b];
      AttentionBatch& to = changed.batches[b];
      same = from.request == to.request && from.key_positions == to.key_positions && from.k.shape == to.k.shape &&
             from.v.shape == to.v.shape;
      differs = differs || (same && (from.k.values != to.k.values || from.v.values != to.v.values));
      to.k = from.k;
      to.v = from.v;
    }
    if (!same || !differs) continue;
    if (trial->Try(changed, {fault_class::kTpShard, "fits keys and values of the heads of rank " +
                                                        std::to_string((*result)->info->event.rank)}))
      return;
  }
  for (const bool sinks : {true, false}) {
    const Array& own = sinks ? call.sinks : call.slopes;
    if (own.values.empty()) continue;
    const std::string name = out.Sibling(sinks ? "attn.sinks" : "attn.alibi_slopes");
    const auto attempt = [&](std::span<const double> values, const std::string& whose) {
      AttentionCall changed = call;
      Array& to = sinks ? changed.sinks : changed.slopes;
      to.values.assign(values.begin(), values.end());
      if (to.values == own.values) return false;
      return trial->Try(changed, {fault_class::kTpShard, "fits " + name + " of " + whose});
    };
    for (EventId id : out.capture().EventsOf(name)) {
      const auto other = out.capture().Load(id);
      if (!other.ok()) continue;
      const int64_t n = (*other)->n(), rank = (*other)->info->event.rank;
      for (int64_t first = 0; first + call.heads <= n; first += call.heads) {
        const std::string whose = n == call.heads ? "rank " + std::to_string(rank)
                                                  : "heads " + std::to_string(first) + " to " +
                                                        std::to_string(first + call.heads - 1) + " of the whole";
        const auto at = static_cast<size_t>(first);
        if (attempt(std::span((*other)->values).subspan(at, static_cast<size_t>(call.heads)), whose)) return;
      }
    }
  }
}

// Keys, values or both of another head than query head h's own, found head by head.
std::optional<Explanation> ExplainKeyHeads(const Subject& out, const AttentionCall& call,
                                           const AttentionValues& right) {
  const Array& have = out.actual();
  if (have.rank() != 3 || call.batches.empty() || have.size() != right.out.value.size()) return std::nullopt;
  const Array& k = call.batches[0].k;
  const int64_t key_heads = k.rank() == 3 ? k.shape[1] : 1;
  if (key_heads < 2 || key_heads > kMostKeyHeads || call.heads % key_heads != 0) return std::nullopt;
  struct Part {
    const char* name;
    bool keys, values;
  };
  // Both together before each alone: a wrong mapping usually moves keys and values alike.
  for (const Part part :
       {Part{"keys and values", true, true}, Part{"values", false, true}, Part{"keys", true, false}}) {
    std::vector<int64_t> read(static_cast<size_t>(call.heads), -1);
    oracle::Computed joined = right.out;
    for (int64_t j = 0; j < key_heads; ++j) {
      AttentionCall changed = call;
      for (AttentionBatch& b : changed.batches) {
        if (b.k.rank() != 3 || b.v.rank() != 3 || b.v.shape[1] != key_heads) return std::nullopt;
        if (part.keys) Repeat(&b.k, j);
        if (part.values) Repeat(&b.v, j);
      }
      const auto values = Recompute(changed);
      if (!values.ok()) return std::nullopt;
      for (int64_t h = 0; h < call.heads; ++h) {
        if (read[static_cast<size_t>(h)] >= 0 || !HeadFits(out, values->out, h, call.heads)) continue;
        read[static_cast<size_t>(h)] = j;
        const int64_t width = have.cols();
        for (int64_t t = 0; t < have.shape[0]; ++t) {
          const int64_t at = (t * call.heads + h) * width;
          std::copy_n(values->out.value.values.begin() + at, width, joined.value.values.begin() + at);
          std::copy_n(values->out.scale.values.begin() + at, width, joined.scale.values.begin() + at);
        }
      }
    }
    if (std::find(read.begin(), read.end(), -1) != read.end()) continue;
    bool own = true;
    for (int64_t h = 0; h < call.heads; ++h) own = own && read[static_cast<size_t>(h)] == h / (call.heads / key_heads);
    if (own) return std::nullopt;  // not right to the bound, and nearer to its own head than to any other
    if (!FitsBetter(out, right.out, joined)) continue;
    const Rule rule = RuleOf(read, key_heads, out.capture().world_size() > 1);
    return Weighed(out, right.out, joined,
                   {rule.cls, std::string("fits ") + part.name + " of other heads: " + rule.text});
  }
  return std::nullopt;
}

}  // namespace assay::op

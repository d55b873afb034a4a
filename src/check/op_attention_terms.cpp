// What a softmax has beside its scores: ALiBi slopes, sinks, and keys that belong to no position of the request.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <string>

#include "check/op_attention_trial.h"

namespace assay::op {
namespace {

using oracle::Array;

// ---- slopes --------------------------------------------------------------------------------------------------------

// Slopes of n heads (ALiBi, Press et al. 2022, section 3, and its code): 2^(-8 (h+1) / n) for a power of two, else
// those of the power of two below and every other one of the power above. `simple`: the first formula for every n.
std::vector<double> SlopesOf(int64_t n, bool simple) {
  int64_t power = 1;
  while (power * 2 <= n) power *= 2;
  if (simple) power = n;
  std::vector<double> slopes;
  for (int64_t h = 0; h < power; ++h) slopes.push_back(std::exp2(-8.0 * static_cast<double>(h + 1) / double(power)));
  for (int64_t h = 0; h < n - power; ++h)
    slopes.push_back(std::exp2(-4.0 * static_cast<double>(2 * h + 1) / double(power)));
  return slopes;
}

void TrySlopes(const Subject& out, const AttentionCall& call, Trial* trial) {
  if (call.slopes.values.empty()) return;
  const auto attempt = [&](const std::vector<double>& slopes, std::string text, double constant = kNone,
                           std::string meaning = "") {
    AttentionCall changed = call;
    changed.slopes.values = slopes;
    if (slopes.empty()) changed.slopes = {};
    return slopes != call.slopes.values &&
           trial->Try(changed, {fault_class::kMask, std::move(text), constant, std::move(meaning)});
  };
  if (attempt({}, "fits without the ALiBi slopes")) return;
  const auto times = [&](double factor) {
    std::vector<double> slopes = call.slopes.values;
    for (double& s : slopes) s *= factor;
    return slopes;
  };
  if (attempt(times(-1), "fits the ALiBi slopes with the other sign")) return;
  // Of all heads or of this rank's alone, by either formula. The number of ranks is the file's word.
  constexpr int64_t kMostRanks = 1024;
  const Shard& shard = out.info().event.shard;
  const int64_t whole = call.heads * std::clamp<int64_t>(shard.count, 1, kMostRanks), first = call.heads * shard.index;
  for (const bool simple : {true, false}) {
    const std::vector<double> all = SlopesOf(whole, simple), own = SlopesOf(call.heads, simple);
    const std::string formula = simple ? "one geometric row" : "two geometric rows, as for a power of two and the rest";
    if (first >= 0 && first + call.heads <= whole &&
        attempt({all.begin() + first, all.begin() + first + call.heads}, "fits ALiBi slopes of " + formula))
      return;
    if (attempt(own, "fits ALiBi slopes of " + formula + ", counted in this rank's heads alone")) return;
  }
  const auto miss = [&](double logarithm) {
    AttentionCall changed = call;
    changed.slopes.values = times(std::exp(logarithm));
    return trial->Miss(changed);
  };
  const double factor = std::exp(LeastAt(miss, 4, 0.25));
  char text[64];
  std::snprintf(text, sizeof text, "fits the ALiBi slopes times %.6g", factor);
  attempt(times(factor), text, factor, "ALiBi slopes used / declared");
}

// ---- sinks ---------------------------------------------------------------------------------------------------------

// What stands in a softmax's sum beside the keys: e^sink. A sum too large by a term makes an output too small by one
// factor, so that the term follows from output and log-sum-exp of the keys; the least squares of all rows of a batch
// (negative: of every batch) and a head (negative: of every head), weighted by what an error of the output does to
// each.
double TermOf(const Subject& out, const AttentionCall& call, const AttentionValues& right, int64_t batch,
              int64_t head) {
  const int64_t width = call.value_dim;
  double top = 0, bottom = 0;
  for (size_t b = 0; b < call.batches.size(); ++b) {
    if (batch >= 0 && static_cast<size_t>(batch) != b) continue;
    for (int64_t r : call.batches[b].rows) {
      if (!out.judged()[static_cast<size_t>(r)]) continue;
      for (int64_t h = 0; h < call.heads; ++h) {
        if (head >= 0 && head != h) continue;
        double cross = 0, square = 0;
        for (int64_t i = (r * call.heads + h) * width; i < (r * call.heads + h + 1) * width; ++i) {
          cross += out.actual()[i] * right.out.value[i];
          square += right.out.value[i] * right.out.value[i];
        }
        const double keys = right.lse_of_keys[r * call.heads + h];
        const double declared = call.sinks.values.empty() ? 1 : 1 / (1 + std::exp(call.sinks[h] - keys));
        const double share = cross / square * declared;  // of the keys in the sum
        if (!(share > 0) || !std::isfinite(share) || !std::isfinite(keys)) continue;
        const double weight = square * std::pow(share, 4), x = std::exp(-keys);
        top += weight * x * (1 / share - 1);
        bottom += weight * x * x;
      }
    }
  }
  return bottom > 0 ? top / bottom : 0;
}

void TrySinks(const Subject& out, const AttentionCall& call, const AttentionValues& right, Trial* trial) {
  const bool declared = !call.sinks.values.empty();
  const auto attempt = [&](const std::vector<double>& sinks, std::string text, double constant = kNone,
                           std::string meaning = "") {
    AttentionCall changed = call;
    changed.sinks.shape = {static_cast<int64_t>(sinks.size())};
    changed.sinks.values = sinks;
    return trial->Try(changed, {fault_class::kMask, std::move(text), constant, std::move(meaning)});
  };
  if (declared && attempt({}, "fits without the sinks")) return;
  std::vector<double> used;
  for (int64_t h = 0; h < call.heads; ++h) used.push_back(std::log(TermOf(out, call, right, -1, h)));
  if (!std::all_of(used.begin(), used.end(), [](double s) { return std::isfinite(s); })) return;
  if (declared) {
    // One factor, or one number more.
    double cross = 0, square = 0, more = 0;
    for (size_t h = 0; h < used.size(); ++h) {
      const double s = call.sinks.values[h];
      cross += used[h] * s, square += s * s, more += (used[h] - s) / static_cast<double>(used.size());
    }
    char text[64];
    for (const bool times : {true, false}) {
      const double constant = times ? cross / square : more;
      if (!std::isfinite(constant)) continue;
      std::vector<double> sinks = call.sinks.values;
      for (double& s : sinks) s = times ? s * constant : s + constant;
      std::snprintf(text, sizeof text, times ? "fits the sinks times %.6g" : "fits the sinks plus %.6g", constant);
      if (attempt(sinks, text, constant, times ? "sinks used / declared" : "sinks used - declared")) return;
    }
  }
  // A number a head: of that many rows none has one of its own.
  constexpr int64_t kLeastRows = 3;
  if (std::count(out.judged().begin(), out.judged().end(), 1) < kLeastRows) return;
  std::string text =
      declared ? "fits other sinks than declared, by head:" : "fits sinks where none are declared, by head:";
  char number[32];
  for (double s : used) {
    std::snprintf(number, sizeof number, " %.4g", s);
    text += number;
  }
  attempt(used, text);
}

// ---- keys of no position -------------------------------------------------------------------------------------------

// n keys and values behind the batch's own, as every query of it sees them whatever its position; rows null: zeros.
// The mask is dropped, which says nothing of them.
void AddKeys(AttentionBatch* b, int64_t n, const std::function<void(int64_t, double* k, double* v)>& rows) {
  const auto extend = [&](Array* a) {
    if (a->values.empty()) return std::pair<double*, int64_t>{nullptr, 0};
    const int64_t width = a->size() / a->shape[0], old = a->size();
    a->shape[0] += n;
    a->values.resize(static_cast<size_t>(a->shape[0] * width), 0.0);
    return std::pair{a->values.data() + old, width};
  };
  const auto [k, k_width] = extend(&b->k);
  const auto [v, v_width] = extend(&b->v);
  for (int64_t i = 0; i < n; ++i) {
    b->key_positions.push_back(b->query_positions.front());
    if (rows) rows(i, k + i * k_width, v == nullptr ? nullptr : v + i * v_width);
  }
  b->mask = {};
}

// Slots behind the newest key that nobody wrote: keys of zeros have scores of 0, so that each adds 1 to the sum.
void TryZeroKeys(const Subject& out, const AttentionCall& call, const AttentionValues& right, Trial* trial) {
  constexpr double kMostKeys = 4096;
  AttentionCall changed = call;
  std::vector<int64_t> added;
  std::string counts;
  for (size_t b = 0; b < call.batches.size(); ++b) {
    const double n = std::round(TermOf(out, call, right, static_cast<int64_t>(b), -1));
    const bool some = n >= 1 && n <= kMostKeys && !call.batches[b].key_positions.empty();
    added.push_back(some ? static_cast<int64_t>(n) : 0);
    counts += (counts.empty() ? "" : ", ") + std::to_string(added.back());
    if (some) AddKeys(&changed.batches[b], added.back(), nullptr);
  }
  if (std::all_of(added.begin(), added.end(), [](int64_t n) { return n == 0; })) return;
  std::string text = "fits keys of zeros behind the newest one";
  for (int64_t block : BlockSizes(out, 0)) {
    bool all = true;
    for (size_t b = 0; b < added.size() && all; ++b) {
      const auto& keys = call.batches[b].key_positions;
      all = !keys.empty() && (keys.back() + added[b] + 1) % block == 0 && added[b] < block;
    }
    if (!all) continue;
    text += ", to the end of its block of " + std::to_string(block);
    break;
  }
  trial->Try(changed, {fault_class::kPadRead,
                       text + ": slots that nobody wrote (" + counts + " of them, request by request)", kNone, "", 3});
}

// Rows of keys and values that stand for no position, among the keys of a request: all of them, those before its first
// row of the step, or those behind its last one.
void TryPaddingKeys(const Subject& out, const AttentionCall& call, Trial* trial) {
  if (call.key_names.size() < 2 || call.absorbed) return;
  const TensorPtr k = out.Operand(call.key_names[0]), v = out.Operand(call.key_names[1]);
  if (k == nullptr || v == nullptr || k->rows.size() != v->rows.size()) return;
  const auto n = static_cast<int64_t>(k->rows.size());
  const auto padding = [&](int64_t r) { return !k->rows[static_cast<size_t>(r)].real(); };
  enum class Which { kBefore, kBehind, kAll };
  for (const Which which : {Which::kBefore, Which::kBehind, Which::kAll}) {
    AttentionCall changed = call;
    bool any = false;
    for (AttentionBatch& b : changed.batches) {
      if (b.k.values.empty() || b.v.values.empty() || b.k.size() / b.k.shape[0] != k->row_size() ||
          b.v.size() / b.v.shape[0] != v->row_size())
        return;
      std::vector<int64_t> rows;
      const auto of_request = [&](int64_t r) {
        return !padding(r) && k->rows[static_cast<size_t>(r)].request == b.request;
      };
      int64_t first = 0, last = n - 1;
      while (first < n && !of_request(first)) ++first;
      while (last >= 0 && !of_request(last)) --last;
      if (first > last) continue;
      if (which == Which::kAll) {
        for (int64_t r = 0; r < n; ++r)
          if (padding(r)) rows.push_back(r);
      } else if (which == Which::kBefore) {
        for (int64_t r = first - 1; r >= 0 && padding(r); --r) rows.push_back(r);
      } else {
        for (int64_t r = last + 1; r < n && padding(r); ++r) rows.push_back(r);
      }
      if (rows.empty()) continue;
      any = true;
      AddKeys(&b, static_cast<int64_t>(rows.size()), [&](int64_t i, double* to_k, double* to_v) {
        const auto from_k = k->row(rows[static_cast<size_t>(i)]), from_v = v->row(rows[static_cast<size_t>(i)]);
        std::copy(from_k.begin(), from_k.end(), to_k);
        std::copy(from_v.begin(), from_v.end(), to_v);
      });
    }
    constexpr const char* kText[] = {"before the request's own", "behind the request's own", "of the whole batch"};
    if (any && trial->Try(changed, {fault_class::kPadRead,
                                    std::string("fits the rows of padding ") + kText[static_cast<int>(which)] +
                                        " among the keys",
                                    kNone, "", 3}))
      return;
  }
}

}  // namespace

void TryTerms(const Subject& out, const AttentionCall& call, const AttentionValues& right, Trial* trial) {
  TrySlopes(out, call, trial);
  TryZeroKeys(out, call, right, trial);
  TrySinks(out, call, right, trial);
  TryPaddingKeys(out, call, trial);
}

}  // namespace assay::op

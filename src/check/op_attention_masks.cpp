// Which keys a query sees: windows, bounds, caps, chunks, prefixes and masks other than those declared.
#include <cmath>
#include <cstdio>
#include <string>

#include "check/op_attention_trial.h"

namespace assay::op {

using oracle::Array;

namespace {

// A soft cap of another value: the miss has one valley in the logarithm of the cap near the true one.
void TryCaps(const AttentionCall& call, Trial* trial) {
  const auto with = [&](double logarithm) {
    AttentionCall changed = call;
    changed.spec.soft_cap = call.spec.soft_cap * std::exp(logarithm);
    return changed;
  };
  const double best = LeastAt([&](double x) { return trial->Miss(with(x)); }, 3, 0.25);
  const AttentionCall found = with(best);
  char text[80];
  std::snprintf(text, sizeof text, "fits a soft cap of %.6g, %.6g declared", found.spec.soft_cap, call.spec.soft_cap);
  trial->Try(found, {fault_class::kMask, text, found.spec.soft_cap, "soft cap used"});
}

// The mask of a batch as values, all keys seen where it has none.
Array* MaskOf(AttentionBatch* b) {
  const auto queries = static_cast<int64_t>(b->query_positions.size()),
             keys = static_cast<int64_t>(b->key_positions.size());
  if (b->mask.values.empty()) b->mask = Array::Filled({queries, keys}, 1);
  return &b->mask;
}

// A causal bound that counts queries from the first one of the step and keys from the first one of the request: right
// for a whole prompt, off by the chunk's beginning for what follows.
void TryUpperLeft(const AttentionCall& call, Trial* trial) {
  if (!call.spec.causal) return;
  AttentionCall changed = call;
  double shift = kNone;
  bool one = true;
  for (AttentionBatch& b : changed.batches) {
    const int64_t first = call.rows_of(b).first;
    if (b.key_positions.empty() || first <= b.key_positions.front()) continue;
    const int64_t by = b.key_positions.front() - first;
    one = one && (std::isnan(shift) || shift == static_cast<double>(by));
    shift = static_cast<double>(by);
    Array& mask = *MaskOf(&b);
    for (size_t q = 0; q < b.query_positions.size(); ++q) {
      for (size_t j = 0; j < b.key_positions.size(); ++j) {
        if (b.key_positions[j] > b.query_positions[q] + by)
          mask[static_cast<int64_t>(q * b.key_positions.size() + j)] = 0;
      }
    }
  }
  if (std::isnan(shift)) return;
  trial->Try(changed, {fault_class::kMask,
                       "fits a causal bound that counts queries from the first one of the step: aligned to the first "
                       "key, not to the newest",
                       one ? shift : kNone, one ? "causal bound used - declared" : ""});
}

// A loop over keys by whole tiles that never comes to those behind the last one.
bool TryTails(const AttentionCall& call, Trial* trial) {
  for (size_t tile : {8, 16, 32, 64, 128, 256, 4, 2}) {
    AttentionCall changed = call;
    std::string counts;
    double missing = kNone;
    bool one = true;
    for (AttentionBatch& b : changed.batches) {
      const size_t keys = b.key_positions.size(), kept = keys / tile * tile;
      if (kept == 0 || kept == keys) continue;
      const auto lost = static_cast<double>(keys - kept);
      one = one && (std::isnan(missing) || missing == -lost);
      missing = -lost;
      counts += (counts.empty() ? "" : ", ") + std::to_string(keys - kept);
      Array& mask = *MaskOf(&b);
      for (size_t q = 0; q < b.query_positions.size(); ++q) {
        for (size_t j = kept; j < keys; ++j) mask[static_cast<int64_t>(q * keys + j)] = 0;
      }
    }
    if (counts.empty()) continue;
    if (trial->Try(changed, {fault_class::kMask,
                             "fits without the keys behind the last whole tile of " + std::to_string(tile) + ": " +
                                 counts + " of them, request by request",
                             one ? missing : kNone, one ? "keys seen beyond those due" : ""})) {
      return true;
    }
  }
  return false;
}

}  // namespace

// Every bound that a query's view has, taken away or moved by a little: declared bounds first, then bounds that nobody
// declared. The order is a preference, as a later fit must leave less than half of the residual to take the place of an
// earlier one.
void TryMasks(const AttentionCall& call, Trial* trial) {
  const auto with = [&](auto change, std::string text, double constant = kNone, std::string meaning = "") {
    AttentionCall changed = call;
    change(changed);
    return trial->Try(changed, {fault_class::kMask, std::move(text), constant, std::move(meaning)});
  };
  const int64_t window = call.spec.window;
  if (window > 0) {
    // By distance: the smallest change that fits is named.
    for (int64_t by : {1, -1, 2, -2, 3, -3}) {
      if (window + by < 1) continue;
      if (with([&](AttentionCall& c) { c.spec.window = window + by; },
               "fits a window of " + std::to_string(window + by) + ", " + std::to_string(window) + " declared",
               static_cast<double>(by), "keys seen beyond the declared window")) {
        break;
      }
    }
    with([](AttentionCall& c) { c.spec.window = 0; }, "fits without the window");
  }
  if (call.spec.soft_cap != 0) {
    if (!with([](AttentionCall& c) { c.spec.soft_cap = 0; }, "fits without the soft cap")) TryCaps(call, trial);
  }
  bool masked = false;
  for (const AttentionBatch& b : call.batches) masked = masked || !b.mask.values.empty();
  if (masked) {
    with(
        [](AttentionCall& c) {
          for (AttentionBatch& b : c.batches) b.mask = {};
        },
        "fits without the mask");
    with(
        [](AttentionCall& c) {
          for (AttentionBatch& b : c.batches)
            for (double& m : b.mask.values) m = m == 0;
        },
        "fits the mask inverted");
  }
  if (call.spec.chunk > 0) {
    with([](AttentionCall& c) { c.spec.chunk = 0; }, "fits without the attention chunks");
    for (int64_t by : {1, -1}) {
      with([&](AttentionCall& c) { c.spec.chunk += by; },
           "fits attention chunks of " + std::to_string(call.spec.chunk + by), static_cast<double>(by),
           "length of an attention chunk used - declared");
    }
    with(
        [&](AttentionCall& c) {
          c.spec.window = c.spec.chunk;
          c.spec.chunk = 0;
        },
        "fits a sliding window in place of attention chunks");
  }
  if (call.spec.prefix_len > 0) {
    with([](AttentionCall& c) { c.spec.prefix_len = 0; }, "fits without the prefix that all rows see");
    for (int64_t by : {1, -1}) {
      with([&](AttentionCall& c) { c.spec.prefix_len += by; },
           "fits a prefix of " + std::to_string(call.spec.prefix_len + by), static_cast<double>(by),
           "length of the prefix used - declared");
    }
  }
  with([](AttentionCall& c) { c.spec.causal = !c.spec.causal; },
       call.spec.causal ? "fits without the causal bound" : "fits with a causal bound where none is declared");
  if (call.spec.causal) {
    for (int64_t by : {1, -1}) {
      with([&](AttentionCall& c) { c.spec.causal_shift = by; },
           "fits a causal bound that is " + std::to_string(by) + " off", static_cast<double>(by),
           "causal bound used - declared");
    }
  }
  TryUpperLeft(call, trial);
  // A window where none is declared, or another one: powers of two, as configs have them.
  for (int64_t w : {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096}) {
    if (w != window) {
      AttentionCall changed = call;
      changed.spec.window = w;
      const int64_t last = call.batches.empty() ? 0 : call.batches[0].query_positions.back();
      if (w > last + 1) break;
      trial->Try(changed, {fault_class::kMask, "fits a window of " + std::to_string(w)});
    }
  }
}

// Keys of every query left out: the first ones, or the newest ones. A query that has no others keeps its own.
void TryMissingKeys(const AttentionCall& call, Trial* trial) {
  if (TryTails(call, trial)) return;
  // The first keys go when a window or an offset is wrong, the newest when lengths are taken before the step's own
  // rows.
  for (bool newest : {false, true}) {
    for (int64_t n : {1, 2, 4, 8, 16, 32, 64, 128}) {
      AttentionCall changed = call;
      bool any = false;
      for (AttentionBatch& b : changed.batches) {
        const auto queries = static_cast<int64_t>(b.query_positions.size()),
                   keys = static_cast<int64_t>(b.key_positions.size());
        Array& mask = *MaskOf(&b);
        for (int64_t q = 0; q < queries; ++q) {
          const int64_t at = b.query_positions[static_cast<size_t>(q)];
          if (at < n) continue;
          for (int64_t j = 0; j < keys; ++j) {
            const int64_t p = b.key_positions[static_cast<size_t>(j)];
            if (newest ? p > at - n && p <= at : p < n) mask[q * keys + j] = 0;
          }
          any = true;
        }
      }
      if (!any) break;
      if (trial->Try(changed, {fault_class::kMask,
                               "fits without the " + std::string(newest ? "newest" : "first") + " keys, " +
                                   std::to_string(n) + " of them",
                               static_cast<double>(-n), "keys seen beyond those due"}))
        return;
    }
  }
}

}  // namespace assay::op

// All checks, one line each, in the order in which the ledger prints those of one hypothesis.
#include <array>
#include <vector>

#include "check/checks.h"
#include "check/op_checks.h"

namespace assay {
namespace {

namespace h = hypothesis;

constexpr std::array kChecks = {
    CheckDef{"nonfinite", h::kRange, "values of real rows are finite", "statistics", nullptr, check::MakeNonfinite},
    CheckDef{"saturation", h::kRange, "values stay off the end of their dtype's range", "compute_dtype; kv_cache_dtype",
             nullptr, check::MakeSaturation},
    CheckDef{"stale_rows", h::kOutputBuffer, "rows differ where their inputs do",
             "row digests of a result and its input", nullptr, check::MakeStaleRows},
    CheckDef{"heads", h::kAttention, "no head is zero, nor are all equal", "head grid of attn.out", nullptr,
             check::MakeHeads},
    CheckDef{"token_loops", h::kSampling, "the output does not end in a loop", "next_token", nullptr,
             check::MakeTokenLoops},
    CheckDef{"replicas", h::kReductions, "replicas are equal, different shards are not", "every rank",
             check::CheckReplicas},
    CheckDef{"partial_sums", h::kReductions, "a reduction gives the sum of its parts",
             "NAME and NAME.partial, sketches", check::CheckPartialSums},
    CheckDef{"shapes", h::kShapes, "shapes and strides hold at the boundaries", "axes", check::CheckShapes},
    CheckDef{"graphs", h::kGraphs, "a replay reads where its operands are", "bound.SITE on results, events in_graph",
             check::CheckGraphs},
    CheckDef{"unwritten", h::kOutputBuffer, "audited buffers are written and stay so", "audit=before and after, values",
             check::CheckUnwritten},
    CheckDef{"pool", h::kCacheWrite, "only mapped slots of a cache change", "attn.*_cache with audit, slot_mapping",
             check::CheckPool},
    CheckDef{"ids", h::kCacheIds, "slots, blocks, lengths and positions are the rows' own",
             "slot_mapping, block_table, seq_lens, positions, with values", check::CheckIds},
    CheckDef{"kv_scale", h::kCacheWrite, "scales of the cache fit its dtype and tensor", "attn.*_scale, kv_cache_dtype",
             check::CheckKvScale},
    CheckDef{"moe_counts", h::kMoe, "experts are in range, counts are those of the choice",
             "moe.topk_ids, moe.expert_counts", check::CheckMoeCounts},
    CheckDef{"speculation", h::kSpeculation, "accepted tokens and the state agree", "spec.accepted, attn.state",
             check::CheckSpeculation},
    CheckDef{"repeats", h::kBackend, "equal operands give equal results", "events with repeat=0, 1, …",
             check::CheckRepeats},
    CheckDef{"softmax_sums", h::kAttention, "probabilities sum to 1", "attn.probs, logprobs", check::CheckSoftmaxSums},
    CheckDef{"lse_range", h::kAttention, "log-sum-exps lie where their scores can", "attn.lse, attn.q, attn.k",
             check::CheckLseRange},
    CheckDef{"entropy", h::kAttention, "attention is neither uniform nor collapsed", "attn.q, attn.k with values",
             check::CheckEntropy},
};

}  // namespace

std::span<const CheckDef> AllChecks() {
  static const std::vector<CheckDef> all = [] {
    std::vector<CheckDef> list(kChecks.begin(), kChecks.end());
    const auto operations = check::OperationChecks();
    list.insert(list.end(), operations.begin(), operations.end());
    return list;
  }();
  return all;
}

}  // namespace assay

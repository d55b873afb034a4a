#include "sites/beyond_table.h"

namespace assay {
namespace {

constexpr BeyondSite kBeyond[] = {
    {"attn.scores", "attn.q,attn.k,attn.k_read,attn.k_cache", ""},
    {"attn.probs", "attn.scores", ""},
    {"attn.k_read", "attn.k_cache", ""},
    {"attn.v_read", "attn.v_cache", ""},
    {"attn.kv_read", "attn.kv_cache", ""},
    {"attn.out_normed", "attn.out", ""},
    {"moe.dispatched", "post_norm,moe.topk_ids", "moe.topk_weights", SiteOp::kCopy, true},
    {"moe.expert_counts", "moe.topk_ids", "moe.topk_weights", SiteOp::kCopy, true},
    {"moe.gate_up", "moe.dispatched", "moe.topk_weights", SiteOp::kLinear, true},
    {"moe.act", "moe.gate_up", "moe.topk_weights", SiteOp::kActivation, true},
    {"moe.expert_out", "moe.act", "moe.topk_weights", SiteOp::kLinear, true},
    {"moe.routed", "moe.expert_out,moe.topk_weights", ""},
    {"attn.indexer.q", "attn.indexer.q_proj", ""},
    {"attn.indexer.k", "attn.indexer.k_proj", ""},
    {"attn.state", "attn.k,attn.v,attn.state_read", ""},
    {"logprobs", "logits", ""},
};

}  // namespace

const BeyondSite* FindBeyond(std::string_view stem) {
  for (const BeyondSite& site : kBeyond) {
    if (site.stem == stem) return &site;
  }
  return nullptr;
}

}  // namespace assay

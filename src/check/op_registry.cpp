// The checks of single operations, one line each.
#include <array>

#include "check/op_checks.h"

namespace assay::check {
namespace {

namespace h = hypothesis;

constexpr CheckDef Operation(std::string_view name, std::string_view rung, std::string_view what,
                             std::string_view needs, void (*run)(const Capture&, CheckReport*)) {
  return {name, rung, what, needs, run, nullptr};
}

constexpr std::array kOperations = {
    Operation("embedding", h::kLogits, "embedding rows are those of the tokens, logprobs those of the logits",
              "embed, embed_tokens.weight and tokens; logits and logprobs", JudgeHead),
    Operation("absorption", h::kAbsorption, "latents go through kv_b_proj, W_UK_T and W_UV as the weights say",
              "attn.kv_c_normed, attn.k_nope, attn.v or attn.q_nope, attn.q_latent; attn.kv_b_proj, W_UK_T, W_UV",
              JudgeAbsorption),
    Operation("quantised-inputs", h::kQuantised, "codes and scales of activations come back to them",
              "NAME, NAME.q and NAME.q_scale", JudgeQuantisedInputs),
    Operation("decoded-weights", h::kQuantised, "weights in use are what their codes and scales stand for",
              "NAME.weight, NAME.weight.codes and NAME.weight.scale in phase load", JudgeEffectiveWeights),
    Operation("joined-heads", h::kShapes, "attn.q and attn.k are their parts side by side",
              "attn.q_nope, attn.q_pe, attn.k_nope, attn.k_pe", JudgeBroadcast),
    Operation("values", h::kShapes, "values are what their projection gave", "attn.v_proj, attn.v", JudgeValues),
    Operation("rotation", h::kRope, "queries and keys are turned by their positions",
              "attn.q_proj, attn.q, attn.k_proj, attn.k with positions and rope.* keys", JudgeRope),
    Operation("attention", h::kAttention, "attention over the recorded keys gives the recorded output",
              "attn.q, attn.k, attn.v (or k_read, v_read) and attn.out with softmax_scale", JudgeAttention),
    Operation("cache-write", h::kCacheWrite, "rows read back from the cache are those that were written",
              "attn.kv_write with attn.k, attn.v or attn.kv_c_normed, attn.k_pe", JudgeCacheWrite),
    Operation("cache-read", h::kCacheRead, "rows gathered are those of their request and position",
              "attn.k_read, attn.v_read or attn.kv_read, with what was written", JudgeCacheRead),
    Operation("chunks", h::kChunks, "partial attention over chunks and its merge are right",
              "attn.chunk.J.out, attn.chunk.J.lse with keys, and attn.out", JudgeChunks),
    Operation("reductions", h::kReductions, "reduced results are the sums of their parts",
              "NAME.partial of every rank and NAME; moe.routed, moe.shared, moe.out", JudgeSums),
    Operation("router", h::kMoe, "experts and their weights follow from the router's logits",
              "moe.router_logits, moe.topk_ids, moe.topk_weights", JudgeRouter),
    Operation("experts", h::kMoe, "rows are sent, multiplied, activated and combined as the router chose",
              "moe.dispatched, moe.gate_up, moe.act, moe.expert_out, moe.routed, moe.shared and the experts' weights",
              JudgeExperts),
    Operation("norms", h::kNorm, "normed rows follow from the stream and the weights",
              "the residual stream, input_norm, post_norm, final_norm and the weights of the norms", JudgeNorms),
    Operation("linear", h::kLinear, "projections are the product of input and weight",
              "results, inputs and NAME.weight in phase load", JudgeLinear),
    Operation("residual", h::kResidual, "out is the stream, attention and FFN added",
              "out of the layer before, attn.o_proj, mlp.down or moe.out, out", JudgeResidual),
    Operation("tokens", h::kSampling, "tokens are what the logits allow", "logits and next_token", JudgeSampling),
    Operation("declared", h::kLinear, "operations that say what they are give what they should",
              "metadata op and inputs", JudgeDeclared),
};

}  // namespace

std::span<const CheckDef> OperationChecks() { return kOperations; }

}  // namespace assay::check

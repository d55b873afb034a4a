"""vLLM's AMX_MLA without an AMX unit: MLAAttention and AMXMLAImpl of vLLM itself, their four kernels replaced by PyTorch's
operations. A step of one decoded token (of a request with 6 tokens) and 3 tokens of a new prompt. Knows nothing of assay."""

import sys
import types

import torch
from chunks import BLOCK, HEADS, LATENT, NOPE, ROPE, VALUE, mla_layer
from vllm import _custom_ops
from vllm.v1.attention.backends.mla.amx_mla import AMXMLABackend

CONTEXT, NEW = 6, 3


def attend(q, rows, out, scale):
    """q [T, H, latent + rope], the last T of the cached rows [S, latent + rope]: causal, values are the latent."""
    scores = torch.einsum("thc,sc->ths", q.float(), rows.float()) * scale
    t, s = q.shape[0], rows.shape[0]
    scores.masked_fill_(torch.ones(t, s, dtype=torch.bool).triu(s - t + 1)[:, None], float("-inf"))
    out.copy_(torch.einsum("ths,sc->thc", scores.softmax(-1), rows[:, :LATENT].float()))


def bmm(out, a, b, is_vnni, scale=None):
    out.copy_(torch.bmm(a, b.transpose(1, 2)))


def write(kv_c, k_pe, cache, slots):
    cache.view(-1, LATENT + ROPE)[slots] = torch.cat([kv_c, k_pe], dim=-1)


def decode(q, k, v, out, key, value, loc, logits, places, pool, lengths, scale, *rest):
    for i, n in enumerate(lengths.tolist()):
        attend(q[i : i + 1], k[places[i, :n], 0], out[i : i + 1], scale)


def extend(q, k_new, v_new, out, k, v, places, pool, lengths, new, starts, longest, scale, *rest):
    for i, n in enumerate(lengths.tolist()):
        part = slice(int(starts[i]), int(starts[i] + new[i]))
        attend(q[part], k[places[i, :n], 0], out[part], scale)


def main() -> None:
    torch.manual_seed(1)
    _custom_ops.bmm_cpu, _custom_ops.amx_mla_concat_and_cache = bmm, write
    _custom_ops.cpu_mla_decode, _custom_ops.cpu_mla_extend = decode, extend
    _, layer, kv_b = mla_layer(sys.argv[1], attn_backend=AMXMLABackend)
    up = kv_b.weight.detach().view(HEADS, NOPE + VALUE, LATENT)
    layer.impl._w_uk_packed = up[:, :NOPE].transpose(1, 2).contiguous()  # [H, latent, nope], not packed
    layer.impl._w_uv_packed = up[:, NOPE:].contiguous()  # [H, value, latent]

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.bfloat16)

    cache = random(8, BLOCK, LATENT + ROPE)
    places = torch.arange(2 * BLOCK).view(2, BLOCK)  # request 0 in block 0, request 1 in block 1
    slots = torch.tensor([CONTEXT - 1, *range(BLOCK, BLOCK + NEW)])
    first = {"req_to_token": places[:1], "req_pool_indices": torch.tensor([0])}
    second = {"req_to_token": places[1:], "req_pool_indices": torch.tensor([0])}
    metadata = types.SimpleNamespace(
        num_actual_tokens=1 + NEW, num_decodes=1, num_prefills=1, num_decode_tokens=1,
        decode=types.SimpleNamespace(seq_lens_i64=torch.tensor([CONTEXT]), num_kv_splits=1, **first),
        prefill=types.SimpleNamespace(
            cpu_seq_lens=torch.tensor([NEW]), extend_seq_lens=torch.tensor([NEW]), extend_start_loc=torch.tensor([0]),
            max_len_extend=NEW, chunked_context=None, **second,
        ),
    )  # fmt: skip
    q, kv_c, k_pe = random(1 + NEW, HEADS, NOPE + ROPE), random(1 + NEW, LATENT), random(1 + NEW, 1, ROPE)
    output = torch.zeros(1 + NEW, HEADS * VALUE, dtype=torch.bfloat16)
    with torch.no_grad():
        layer.update_kv_cache(kv_c, k_pe, cache, slots, metadata, "auto", layer._k_scale)
        layer.forward_impl(q, kv_c, k_pe, cache, metadata, output=output)
    torch.save({"up": up, "cache": cache, "out": output}, sys.argv[2])


if __name__ == "__main__":
    main()

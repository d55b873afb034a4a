"""What the profile records at vLLM's attention, with classes of its names in vLLM's place."""

import sys
import types

import assay
import pytest
import torch
from assay import Run
from assay.attach.rows import Rows

NAME = "vllm.model_executor.layers.attention.mla_attention"


def module():
    """Two heads: 4 + 2 in q, 4 in v, a latent of 8. Rows up to metadata.num_decode_tokens go to forward_mqa."""

    class Prefill:
        def get_name(self):
            return "PREFILL"

        def run_prefill_new_tokens(self, q, k, v):
            return q[..., :4] + v

    class Impl:
        def forward_mqa(self, q, cache, metadata, layer):
            return q[..., :8], q[..., 8:].sum(-1)

        def forward_mha(self, q, kv_c_normed, k_pe, cache, metadata, k_scale, output):
            k = kv_c_normed.repeat(1, 2).view(-1, 2, 8)[..., :6]
            output.copy_(metadata.prefill.run_prefill_new_tokens(q, k, k[..., :4]).flatten(1))

    class MLAAttention:
        def __init__(self, name, prefill):
            self.layer_name, self.impl, self.prefill_backend = name, Impl(), prefill
            self.num_heads, self.kv_lora_rank, self.qk_nope_head_dim, self.v_head_dim = 2, 8, 4, 4
            self.attn_backend = types.SimpleNamespace(get_name=lambda: "MLA")

        def forward_impl(self, q, k_c_normed, k_pe, kv_cache, attn_metadata, output):
            n = attn_metadata.num_decode_tokens
            if n < len(q):
                self.impl.forward_mha(q[n:], k_c_normed[n:], k_pe[n:], kv_cache, attn_metadata, 1.0, output[n:])
            if n > 0:
                latent = torch.cat([q[:n], q[:n, :, :4]], dim=-1)
                output[:n] = self.impl.forward_mqa(latent, kv_cache, attn_metadata, self)[0][..., :4].flatten(1)
            return output

        def update_kv_cache(self, kv_c_normed, k_pe, kv_cache, slot_mapping):
            pass

    found = types.ModuleType(NAME)
    for kind in (Prefill, Impl, MLAAttention):
        kind.__module__, kind.__qualname__ = NAME, kind.__name__
        setattr(found, kind.__name__, kind)
    return found


@pytest.fixture
def attention(session, monkeypatch):
    from assay.attach.profiles.vllm_attention import Attention
    from assay.attach.profiles.vllm_steps import Recorder

    found = module()
    monkeypatch.setitem(sys.modules, NAME, found)
    return Attention(Recorder(session), lambda columns: {}), found


def run(session, layers, prefill, step, n, n_mqa, phase):
    session.rows = Rows([Run(7, 0, n, 10 * step)], step=step, phase=phase)
    session.show_rows()
    torch.manual_seed(step)
    for layer in layers:
        q, kv, pe, out = (torch.randn(n, *shape).bfloat16() for shape in ((2, 6), (8,), (1, 2), (8,)))
        metadata = types.SimpleNamespace(num_decode_tokens=n_mqa, prefill=prefill)
        layer.forward_impl(q, kv, pe, torch.empty(0), metadata, out)


def test_RowsThatGoTheWayOfAPromptInAStepOfDecodeAreRecorded(session, attention):
    """As with a draft model, or a request that is computed again. The step before has left shortcuts."""
    watch, found = attention
    prefill = found.Prefill()
    layers = [found.MLAAttention(f"model.layers.{i}.self_attn.attn", prefill) for i in range(2)]
    for step, (n_mqa, phase) in enumerate([(0, "prefill"), (3, "decode"), (3, "decode"), (0, "decode"), (3, "decode")]):
        run(session, layers, prefill, step, 3, n_mqa, phase)
    assert len(found.MLAAttention.forward_impl._assay_site.shortcuts._by_owner) == 2 and watch._mla is None
    assert not session._failures
    session.finish()
    by_step = {}
    for event in assay.open(session.folder):
        by_step.setdefault(event.step, []).append(event.site)
    both = ["q_nope", "q_pe", "q", "kv_c_normed", "k_pe"]
    prompt, decode = [*both, "k", "k_nope", "v", "out"], [*both, "q_latent", "latent_out", "lse", "out"]
    for step, sites in enumerate([prompt, decode, decode, prompt, decode]):
        assert by_step[step] == [f"layers.{layer}.attn.{site}" for layer in range(2) for site in sites], step

"""LLM.generate on the unmodified vLLM: bit-identical results, clean pairs, coverage, facts, compile caches."""

import pytest

from conftest import diff

VISIBLE = {  # below a layer, in the default mode
    "input_norm", "post_norm", "attn.q_a", "attn.q_a_normed", "attn.q_proj", "attn.kv_a", "attn.kv_c_normed", "attn.k_pe",
    "attn.q", "attn.q_nope", "attn.q_pe", "attn.k", "attn.k_nope", "attn.v", "attn.kv_write", "attn.q_latent",
    "attn.latent_out", "attn.out", "attn.o_proj",
}  # fmt: skip


def below(sites, layer):
    return {s.removeprefix(f"layers.{layer}.") for s in sites if s.startswith(f"layers.{layer}.")}


def test_CompiledResultsAreBitIdenticalWithAndWithoutProbes(compiled_off, compiled_on):
    assert len(compiled_on.answers) == 100
    assert compiled_on.answers == compiled_off.answers  # tokens and the 20 largest log probabilities of each step


def test_EagerResultsAreBitIdenticalWithAndWithoutProbes(eager_off, eager_on):
    assert eager_on.events().processes and len(eager_off.answers) == 100
    assert eager_on.answers == eager_off.answers


def test_CompiledRunShowsTheSitesThatLeaveItsBitsAlone(compiled_on):
    sites = {e.site for e in compiled_on.events()}
    assert VISIBLE <= below(sites, 0)
    assert {"mlp.gate", "mlp.up", "mlp.act", "mlp.down"} <= below(sites, 1)
    moe = {"moe.router_logits", "moe.topk_ids", "moe.topk_ids.margin", "moe.topk_weights", "moe.routed", "moe.shared"}
    assert moe <= below(sites, 3)
    assert {"final_norm", "logits", "next_token", "next_token.margin", "positions", "seq_lens", "slot_mapping"} <= sites
    notes = compiled_on.notes()
    for hidden in ("layers.*.out", "layers.*.moe.out", "embed"):
        assert "not visible in compiled mode" in notes[hidden, "absent on this path"]
    assert "layers.0.out" not in sites


def test_CompiledBf16IsNoiseAgainstTheF32Reference(bench, compiled_on):
    result = diff(bench.reference(compiled_on), compiled_on.trace)
    assert result["verdict"] == "noise", result["findings"][:1]
    assert result["coverage"]["share"] >= 0.9 and result["coverage"]["sites_common"] >= 90


@pytest.mark.parametrize("run", ["mla", "chunked"])
def test_TransformersAgrees(transformers, run, request):
    result = diff(transformers, request.getfixturevalue(run).trace)
    assert result["verdict"] == "noise", result["findings"][:1]
    coverage = result["coverage"]
    assert coverage["share"] >= 0.9 and coverage["sites_common"] >= 0.9 * coverage["sites_a"]


def test_UnchunkedMlaAgreesWithChunkedMha(mla, chunked):
    assert [a["tokens"] for a in mla.answers] == [a["tokens"] for a in chunked.answers]
    result = diff(mla.trace, chunked.trace)
    assert result["verdict"] == "noise", result["findings"][:1]
    assert result["coverage"]["share"] >= 0.9


def test_ChunksAndPrefixCacheKeepTheIdentityOfRows(bench, chunked):
    import assay

    events = [e for e in chunked.events() if e.site == "layers.0.attn.q" and e.step is not None]
    assert max(e.shape[0] for e in events if e.phase in ("prefill", "mixed")) <= 64
    prompt = len(chunked.answers[-1]["prompt"])
    last = [s for e in events for s in e.segments if s.request == assay.request_key(chunked.answers[-1]["prompt"])]
    assert 0 < min(s.first_position for s in last) < prompt, "the cached prefix is not computed again"
    result = diff(bench.reference(chunked), chunked.trace)
    assert result["verdict"] == "noise", result["findings"][:1]


@pytest.mark.parametrize("key, value", [("mla", "1"), ("attention.pad_v", "0"), ("compile.mode", "DYNAMO_TRACE_ONCE")])
def test_FactsSayHowItRan(compiled_on, key, value):
    meta = compiled_on.events().processes[0].meta
    assert meta[key] == value
    assert meta["attention.backend"] in ("CPU_MLA", "AMX_MLA")
    assert meta["linear.model.layers.0.self_attn.o_proj"] == "RowParallelLinear:UnquantizedLinearMethod"
    assert meta["model.softmax_scale"] == "0.0625" and meta["engine"] == "vllm"


def test_ReleasedWeightsAreSaidToBePacked(compiled_on):
    notes = compiled_on.notes()
    assert "released, packed in" in notes["layers.0.attn.o_proj.weight", "absent on this path"]
    loaded = [e for e in compiled_on.events() if e.site == "layers.0.attn.o_proj.weight"]
    assert [e.meta["weights"] for e in loaded] == ["loaded"] and loaded[0].phase == "load"


def test_WhatAPathDoesNotHaveIsAbsentAndNotMissing(compiled_on, chunked):
    mla, mha = compiled_on.notes(), chunked.notes()
    assert "layers.*.attn.kv_write" not in {site for site, _ in mla}
    for site in ("kv_write", "lse", "q_latent", "latent_out"):
        assert "CPU_ATTN" in mha[f"layers.*.attn.{site}", "absent on this path"]
        assert not any(e.site.endswith(f".attn.{site}") for e in chunked.events())
    # Neither the decode kernel nor prefill without context gives one.
    assert ("layers.*.attn.lse", "absent on this path") in mla
    assert not any(e.site.endswith(".attn.lse") for e in compiled_on.events())


def test_ValueOfMhaComesPadded(chunked):
    """kjv-mla-10m has values as wide as keys: nothing to pad."""
    assert chunked.events().processes[0].meta["attention.pad_v"] == "0"


def test_GraphsOfObservedRunsAreKeptApart(bench, compiled_off, compiled_on, compiled_off_again):
    """Both directions: the observed run fired although the cache had graphs without probes, and a run without assay
    behind it goes to those, not to the ones with probes."""
    assert any(e.site == "layers.0.attn.q_a" for e in compiled_on.events())
    folders = [p.name for p in bench.cache.iterdir()]
    assert any(name.startswith("assay-") for name in folders) and "torch_compile_cache" in folders
    log = compiled_off_again.log
    assert compiled_off_again.answers == compiled_off.answers
    assert f"{bench.cache}/torch_compile_cache/" in log and "/assay-" not in log
    assert f"{bench.cache}/assay-" in compiled_on.log and f"{bench.cache}/torch_compile_cache/" not in compiled_on.log

"""Tensor parallel 2: both ranks' traces, heads put together, replicas, the reduction behind o_proj."""

import json
import re

from conftest import assay_program, diff


def test_BothRanksRecord(parallel):
    processes = parallel.events().processes
    assert sorted((p.rank, p.world_size) for p in processes) == [(0, 2), (1, 2)]


def test_HeadsAreHalvesOfTheWhole(parallel):
    shards = {(e.rank, e.shard_index, e.shard_count, e.shape[1]) for e in parallel.events() if e.site == "layers.1.attn.q"}
    assert shards == {(0, 0, 2, 2), (1, 1, 2, 2)}


def test_StitchedHeadsAndSumsAgreeWithTheReference(bench, parallel):
    result = diff(bench.reference(parallel), parallel.trace)
    assert result["verdict"] == "noise", result["findings"][:1]
    sites = {s["name"] for s in result["sites"]}
    assert {"layers.0.attn.q", "layers.0.attn.o_proj", "layers.0.mlp.down", "layers.3.moe.out", "embed"} <= sites


def test_ReductionBehindOProjIsTheSumOfItsParts(parallel):
    """From sketches alone: sketch(o_proj) = sketch(rank 0's part) + sketch(rank 1's), to bf16's rounding."""
    code, out, err = assay_program("check", parallel.trace, "--json")
    assert code == 0, out[:3000] + err
    (entry,) = [h for h in json.loads(out)["ruled_out"] if h["hypothesis"] == "reductions and shards"]
    evidence = entry["evidence"] if isinstance(entry["evidence"], str) else "; ".join(entry["evidence"])
    judged = int(re.search(r"partial_sums: (\d+) judged, all right", evidence)[1])
    # Each segment of o_proj, on both ranks, and of the other reductions: embed, mlp.down, moe.out.
    o_proj = [e for e in parallel.events() if e.site.endswith("attn.o_proj") and e.phase in ("prefill", "decode", "mixed")]
    assert judged >= sum(len([s for s in e.segments if not s.padding]) for e in o_proj) > 0
    partial = [e for e in parallel.events() if e.site == "layers.2.attn.o_proj.partial"]
    assert {e.rank for e in partial} == {0, 1}


def test_PartsRecordedTwiceAreReplicas(parallel):
    """o_proj is whole on both ranks: the same bits."""
    digests = {}
    for e in parallel.events():
        if e.site == "layers.2.attn.o_proj" and e.phase == "decode":
            digests.setdefault(e.step, {})[e.rank] = [(s.request, s.first_position, s.digest) for s in e.segments]
    assert digests and all(set(found) == {0, 1} and found[0] == found[1] for found in digests.values())

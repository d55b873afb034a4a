"""vLLM's chunked-context code and merge_attn_states, called on the CPU: each chunk is recorded with the keys it attended,
and the output is their merge by log-sum-exp."""

import subprocess

import numpy as np

from ahead import ahead
from conftest import BUILD, HERE, PYTHON, environment


@ahead()
def chunks(bench, cores):
    folder = bench.folder / "chunks"
    folder.mkdir()
    done = subprocess.run(
        [BUILD / "assay", "run", "--level", "payload", "--dir", folder / "trace", "--", PYTHON, HERE / "chunks.py", folder / "init"],
        env=environment(bench.cache, cores),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    import assay

    return {e.site.removeprefix("layers.1.attn."): e for e in assay.open(folder / "trace") if e.site.startswith("layers.1.")}


def test_EachChunkSaysWhatItAttended(chunks):
    assert {f"chunk.{j}.{what}" for j in range(3) for what in ("out", "lse")} <= set(chunks)
    assert [chunks[f"chunk.{j}.out"].meta.get("keys") for j in (0, 1)] == ["0:32", "32:40"]
    assert [chunks[f"chunk.{j}.out"].meta["causal"] for j in range(3)] == ["0", "0", "1"]


def test_OutputIsTheMergeOfItsChunks(chunks):
    lse = np.stack([chunks[f"chunk.{j}.lse"].numpy().astype(np.float64) for j in range(3)])  # chunk, T, H
    out = np.stack([chunks[f"chunk.{j}.out"].numpy().astype(np.float64) for j in range(3)])  # chunk, T, H, dv
    share = np.exp(lse - np.logaddexp.reduce(lse, axis=0))
    merged = (share[..., None] * out).sum(axis=0)
    got = chunks["out"].numpy().astype(np.float64)
    # bf16 results of three chunks, merged twice with a rounding each: 3 half units of 2^-8, relative to the row
    scale = np.linalg.norm(merged, axis=-1).max()
    assert np.linalg.norm(got - merged, axis=-1).max() <= 3 * 2**-9 * scale


def test_KeysAreMaterialisedForTheNewTokensAlone(chunks):
    assert chunks["k"].shape == (5, 4, 256) and chunks["v"].shape == (5, 4, 256)

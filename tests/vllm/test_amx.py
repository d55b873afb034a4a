"""AMX_MLA, which works in the latent space: vLLM's own classes, whose kernels PyTorch stands in for (amx.py). What they
are given and give is recorded; what this path does not have is said to be absent."""

import subprocess

import numpy as np

from ahead import ahead
from conftest import BUILD, HERE, PYTHON, environment


@ahead()
def amx(bench, cores):
    """(events of the layer in order, coverage notes, what the program worked with)."""
    folder = bench.folder / "amx"
    folder.mkdir()
    program = [PYTHON, HERE / "amx.py", folder / "init", folder / "values.pt"]
    done = subprocess.run(
        [BUILD / "assay", "run", "--level", "payload", "--dir", folder / "trace", "--", *program],
        env=environment(bench.cache, cores),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    import assay
    import torch

    events = assay.open(folder / "trace")
    notes = {(c.site, c.reason): c.detail for p in events.processes for c in p.coverage}
    meta = events.processes[0].meta
    found = [e for e in events if e.site.startswith("layers.1.attn.")]
    return found, notes, meta, torch.load(folder / "values.pt")


def rows(found, site):
    """All events of a site, one below the other: decoded rows are recorded before those of a prompt, or behind them."""
    return [e.numpy().astype(np.float64) for e in found if e.site == f"layers.1.attn.{site}"]


def test_BothKindsOfRowsAreSeenInTheLatentSpace(amx):
    found, _, meta, values = amx
    assert meta["attention.backend"] == "AMX_MLA" and meta["attention.impl"].endswith("amx_mla:AMXMLAImpl")
    up = values["up"].double().numpy()
    (q_nope,) = rows(found, "q_nope")
    latent = {len(part): part for part in rows(found, "q_latent")}
    assert {n: part.shape for n, part in latent.items()} == {1: (1, 4, 512), 3: (3, 4, 512)}
    want = np.einsum("thp,hpl->thl", q_nope, up[:, :192])
    # One product of 192 terms, rounded to bf16.
    for part, expected in ((latent[1], want[:1]), (latent[3], want[1:])):
        assert np.linalg.norm(part - expected) <= 2**-8 * np.linalg.norm(expected)
    given = {len(part): part for part in rows(found, "latent_out")}
    (out,) = rows(found, "out")
    for part, expected in ((given[1], out[:1]), (given[3], out[1:])):
        expanded = np.einsum("thl,hvl->thv", part, up[:, 192:])
        assert np.linalg.norm(expanded - expected) <= 2**-8 * np.linalg.norm(expected)
    assert np.array_equal(out.reshape(4, -1), values["out"].double().numpy())


def test_CacheRowsAreReadBackWhereTheyWereWritten(amx):
    found, _, _, values = amx
    (written,) = rows(found, "kv_write")
    flat = values["cache"].double().numpy().reshape(-1, 576)
    assert np.array_equal(written, flat[[5, 16, 17, 18]])


def test_WhatTheLatentSpaceDoesNotHaveIsAbsentAndNotMissing(amx):
    found, notes, _, _ = amx
    for site, why in {"k": "latent space", "k_nope": "latent space", "v": "latent space", "lse": "returns none"}.items():
        assert why in notes[f"layers.*.attn.{site}", "absent on this path"]
        assert not [e for e in found if e.site == f"layers.1.attn.{site}"]
    assert not [key for key in notes if key[1] == "failed"], notes

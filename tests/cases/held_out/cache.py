"""Cache rows and output buffers."""

from __future__ import annotations

import numpy as np

from cases.generators import numerics as nx

from .fault import fault, two_requests


@fault("scale of an int8 cache not applied when read", "layers.4.attn.kv_write", "KV-SCALE", 1 / 0.03,
       hypothesis="cache write")  # fmt: skip
def _(rec, rng, bad):
    rows = two_requests(rec, rng)
    k, v = (nx.f32(rng.standard_normal((18, 2, 8))) for _ in range(2))
    both = np.concatenate([k, v], -1)
    codes = np.clip(np.round(both / 0.03), -127, 127)
    rec.record("layers.4.attn.k", k, "T Hkv d", rows)
    rec.record("layers.4.attn.v", v, "T Hkv d", rows)
    rec.record("layers.4.attn.kv_write", nx.f32(codes * (1 if bad else 0.03)), "T Hkv d", rows,
               meta={"kv_cache_dtype": "i8", "k_scale": 0.03, "v_scale": 0.03})  # fmt: skip


@fault("rows gathered one position late", "layers.4.attn.k_read", "KV-IDENT", hypothesis="cache read")
def _(rec, rng, bad):
    rows = two_requests(rec, rng)
    k = nx.f32(rng.standard_normal((18, 2, 8)))
    rec.record("layers.4.attn.k", k, "T Hkv d", rows)
    read = k.copy()
    if bad:
        read[4:8] = k[5:9]
    rec.record("layers.4.attn.k_read", read, "T Hkv d", rows, step=1)


@fault("output buffer that the kernel did not write", "layers.4.attn.out", "UNWRITTEN", hypothesis="output buffer")
def _(rec, rng, bad):
    rows = two_requests(rec, rng)
    poison = np.full((18, 2, 8), np.float32(-7.25e11))
    written = nx.f32(rng.standard_normal((18, 2, 8)))
    if bad:
        written[9:13] = poison[9:13]
    where = {"poison": hex(int(poison.view(np.uint32)[0, 0, 0]))}
    rec.record("layers.4.attn.out", poison, "T H dv", rows, meta=where | {"audit": "before"})
    rec.record("layers.4.attn.out", written, "T H dv", rows, meta={"audit": "after"})

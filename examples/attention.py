"""One attention call, recorded so that `assay diagnose` can judge it: python examples/attention.py TRACE [FACTOR].

FACTOR is the fault: the kernel multiplies the softmax scale by it. The metadata says what the model asks for.
"""

import sys

import numpy as np

import assay

factor = float(sys.argv[2]) if len(sys.argv) > 2 else 1.0
prompt, heads, d = [5, 17, 204, 9, 3, 11], 2, 16
positions = np.arange(len(prompt))
scale = d**-0.5

# The kernel: causal attention of one request.
rng = np.random.default_rng(0)
q, k, v = (rng.standard_normal((len(prompt), heads, d), dtype=np.float32) for _ in range(3))
scores = np.einsum("thd,shd->hts", q, k) * np.float32(scale * factor)
scores[:, positions[:, None] < positions] = -np.inf
probs = np.exp(scores - scores.max(-1, keepdims=True))
out = np.einsum("hts,shd->thd", probs / probs.sum(-1, keepdims=True), v)

with assay.trace(sys.argv[1], level="payload") as t:
    request = t.request(prompt)
    for name, tensor in (("attn.q", q), ("attn.k", k), ("attn.v", v), ("attn.out", out)):
        meta = {"softmax_scale": str(scale)} if name == "attn.out" else {}
        t.record(name, tensor, layer=0, step=0, phase="prefill", axes="T H d", meta=meta,
                 row_requests=request, row_positions=positions)  # fmt: skip

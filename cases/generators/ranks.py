"""TP-SHARD and REDUCE: ranks that hold the wrong part, and sums over ranks that are missing or repeated."""

from __future__ import annotations

import numpy as np

from . import mini_tf, numerics as nx
from .mini_tf import Run
from .recording import Recording, Shard
from .registry import Variant, case


def _rows(rec: Recording, v: Variant) -> tuple[tuple[Run, ...], int]:
    rows, tokens = mini_tf.prompts(rec, v, (9, 6))
    return rows, len(tokens)


@case("B052")
def every_rank_loads_shard_zero(rec: Recording, v: Variant, faulty: bool) -> None:
    """Two ranks. Fused weights (q, k, v; gate, up) come from the shard of rank 0 on both, plain ones do not."""
    rec.world_size, rng = 2, v.rng(5)
    parts = {"q_proj": 32, "k_proj": 16, "v_proj": 16, "gate_proj": 48, "up_proj": 48}
    for i in range(2):
        full = {p: nx.bf16(rng.standard_normal((n, 32)) / 6) for p, n in parts.items()}
        o, down = nx.bf16(rng.standard_normal((32, 32)) / 6), nx.bf16(rng.standard_normal((32, 48)) / 7)
        for rank in range(2):
            loaded = 0 if faulty and i >= v.fault_layer else rank

            def put(name: str, x: np.ndarray, axis: int, fused: tuple[str, ...] = ()) -> None:
                meta = {"shard_axis": axis}
                if fused:
                    meta["parts"] = ",".join(f"{p}:{parts[p] // 2}" for p in fused)
                rec.record(
                    v.layer(i) + name + ".weight",
                    x,
                    "out in",
                    rank=rank,
                    step=-1,
                    phase="load",
                    meta=meta,
                    shard=Shard(rank, 2, 0 if axis == 0 else rank * x.shape[1], x.shape[1] * (1 + axis)),
                )

            for name, fused in (
                ("attn.qkv_proj", ("q_proj", "k_proj", "v_proj")),
                ("mlp.gate_up_proj", ("gate_proj", "up_proj")),
            ):
                put(name, np.concatenate([np.split(full[p], 2)[loaded] for p in fused]), 0, fused)
            put("attn.o_proj", np.split(o, 2, 1)[rank], 1)
            put("mlp.down_proj", np.split(down, 2, 1)[rank], 1)


@case("B053")
def norm_split_where_keys_are_replicated(rec: Recording, v: Variant, faulty: bool) -> None:
    """Two key heads of 8 on four ranks; the weight of the key norm is cut in four, from which odd ranks read on."""
    rec.world_size, rng = 4, v.rng(5)
    rows, n = _rows(rec, v)
    at, d = mini_tf.positions_of(rows), 8
    for i in range(2):
        name = v.layer(i) + "attn."
        weight = nx.bf16(1 + 0.3 * rng.standard_normal(2 * d))
        k_proj = nx.f32(rng.standard_normal((n, 2, d)))
        for rank in range(4):
            head = rank // 2
            start = rank * 4 if faulty and i >= v.fault_layer else head * d
            own = np.resize(np.roll(weight, -start), d)
            where = Shard(head, 2, head * d, 2 * d)
            rec.record(name + "k_norm.weight", own, "d", rank=rank, step=-1, phase="load", shard=where)
        for rank in range(4):
            head = rank // 2
            start = rank * 4 if faulty and i >= v.fault_layer else head * d
            own, where = np.resize(np.roll(weight, -start), d), Shard(head, 2, head * d, 2 * d)
            mine = k_proj[:, head : head + 1]
            rec.record(name + "k_proj", mine, "T H d", rows, rank=rank, shard=where)
            k = nx.rope(nx.rms_norm(mine, own), at, nx.inverse_frequencies(d))
            rec.record(
                name + "k",
                nx.f32(k),
                "T H d",
                rows,
                rank=rank,
                shard=where,
                meta={"eps": 1e-6, "rope.type": "default", "rope.theta": 10000.0, "rope.pairing": "half"},
            )


@case("B056")
def padded_heads_unpadded_by_stride(rec: Recording, v: Variant, faulty: bool) -> None:
    """Six heads a rank, a kernel for eight: heads are repeated to fill it, and taken back without the stride."""
    rec.world_size, rng = 2, v.rng(5)
    rows, n = _rows(rec, v)
    for i in range(2):
        for rank in range(2):
            name, where = v.layer(i) + "attn.", Shard(rank, 2, rank * 48, 96)
            q, k, val = (nx.f32(rng.standard_normal((n, h, 8))) for h in (6, 1, 1))
            rec.record(name + "q", q, "T H d", rows, rank=rank, shard=where)
            for part, x in (("k", k), ("v", val)):
                rec.record(name + part, x, "T H d", rows, rank=rank, shard=Shard(rank, 2, rank * 8, 16))
            heads = np.repeat(np.arange(6), 2)[:8][:6] if faulty and i >= v.fault_layer else np.arange(6)
            out, _ = mini_tf.self_attention(rows, q[:, heads], k, val, 8**-0.5)
            rec.record(
                name + "out",
                nx.f32(out),
                "T H dv",
                rows,
                rank=rank,
                shard=where,
                meta={"softmax_scale": 8**-0.5, "causal": 1, "heads_padded": 8},
            )


class Sums:
    """Routed and shared experts of a layer: partial sums of each rank and their totals. Random results stand in for
    the experts; what is judged is the adding."""

    def __init__(self, rec: Recording, v: Variant, ranks: int) -> None:
        rec.world_size = ranks
        self.rec, self.v, self.ranks = rec, v, ranks
        self.rows, self.n = _rows(rec, v)
        self.rng = v.rng(5)

    def layers(self):
        for i in (1, 2):
            yield i, self.draw(), self.draw()

    def draw(self) -> np.ndarray:
        return nx.f32(self.rng.standard_normal((self.ranks, self.n, 16)))

    def put(self, i: int, name: str, rank: int, x: np.ndarray) -> np.ndarray:
        x = nx.f32(x)
        self.rec.record(f"{self.v.layer(i)}moe.{name}", x, "T h", self.rows, rank=rank, meta={"world_size": self.ranks})
        return x

    def all(self, i: int, name: str, x: np.ndarray) -> np.ndarray:
        """The same tensor on every rank."""
        for rank in range(self.ranks):
            self.put(i, name, rank, x)
        return nx.f32(x)


def _wrong(v: Variant, i: int, faulty: bool) -> bool:
    return faulty and i >= 1 + v.fault_layer


@case("B057")
def shared_added_before_the_sum(rec: Recording, v: Variant, faulty: bool) -> None:
    sums = Sums(rec, v, 4)
    for i, parts, shared in sums.layers():
        routed = sums.all(i, "routed", parts.astype(np.float64).sum(0))
        once = sums.all(i, "shared", shared[0])
        sums.all(i, "out", routed + (4.0 if _wrong(v, i, faulty) else 1.0) * once.astype(np.float64))


@case("B058")
def shared_reduced_twice(rec: Recording, v: Variant, faulty: bool) -> None:
    sums = Sums(rec, v, 2)
    for i, parts, shared in sums.layers():
        for rank in range(2):
            sums.put(i, "routed.partial", rank, parts[rank])
        for rank in range(2):
            sums.put(i, "shared.partial", rank, shared[rank])
        routed = sums.all(i, "routed", parts.astype(np.float64).sum(0))
        total = sums.all(i, "shared", shared.astype(np.float64).sum(0)).astype(np.float64)
        sums.all(i, "out", routed + (2 if _wrong(v, i, faulty) else 1) * total)


@case("B059")
def shared_not_reduced(rec: Recording, v: Variant, faulty: bool) -> None:
    sums = Sums(rec, v, 4)
    for i, parts, shared in sums.layers():
        routed = sums.all(i, "routed", parts.astype(np.float64).sum(0))
        for rank in range(4):
            sums.put(i, "shared.partial", rank, shared[rank])
        total = shared.astype(np.float64).sum(0)
        held = [sums.put(i, "shared", r, shared[r] if _wrong(v, i, faulty) else total) for r in range(4)]
        for rank in range(4):
            sums.put(i, "out", rank, routed.astype(np.float64) + held[rank])


@case("B061")
def replicated_shared_in_partial_sums(rec: Recording, v: Variant, faulty: bool) -> None:
    sums = Sums(rec, v, 8)
    for i, parts, shared in sums.layers():
        for rank in range(8):
            sums.put(i, "routed.partial", rank, parts[rank])
        routed = sums.all(i, "routed", parts.astype(np.float64).sum(0))
        once = sums.all(i, "shared", shared[0]).astype(np.float64)
        sums.all(i, "out", routed + (8 if _wrong(v, i, faulty) else 1) * once)


@case("B062")
def mean_square_of_the_shard(rec: Recording, v: Variant, faulty: bool) -> None:
    """A norm over all heads of both ranks; nine tenths of the energy of each row lie on rank 0."""
    rec.world_size, rng = 2, v.rng(5)
    rows, n = _rows(rec, v)
    for i in range(2):
        name = v.layer(i) + "attn."
        x = rng.standard_normal((n, 2, 16))
        x *= np.sqrt(np.array([0.9, 0.1]) * 32)[:, None] / np.linalg.norm(x, axis=-1, keepdims=True)
        x, weight = nx.f32(x), nx.bf16(1 + 0.1 * rng.standard_normal(32))
        right = nx.rms_norm(x.reshape(n, 32), weight).reshape(n, 2, 16)
        for rank in range(2):
            rec.record(
                name + "out_norm.weight",
                weight[rank * 16 : rank * 16 + 16],
                "d",
                rank=rank,
                step=-1,
                phase="load",
                shard=Shard(rank, 2, rank * 16, 32),
            )
        for rank in range(2):
            where = Shard(rank, 2, rank * 16, 32)
            rec.record(name + "out", x[:, rank].reshape(n, 2, 8), "T H dv", rows, rank=rank, shard=where)
        for rank in range(2):
            where = Shard(rank, 2, rank * 16, 32)
            y = right[:, rank]
            if faulty and i >= v.fault_layer:
                y = nx.rms_norm(x[:, rank], weight[rank * 16 : rank * 16 + 16])
            rec.record(
                name + "out_normed",
                nx.f32(y).reshape(n, 2, 8),
                "T H dv",
                rows,
                rank=rank,
                shard=where,
                meta={"op": "rmsnorm", "eps": 1e-6},
            )

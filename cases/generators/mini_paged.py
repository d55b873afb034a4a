"""Attention over a paged cache. The layers are independent of each other: keys and values are a function of the layer
and the tokens up to the row, so that equal prefixes have equal rows, as in a model."""

from __future__ import annotations

from typing import Any, Callable, Iterable

import numpy as np

from . import numerics as nx
from .mini_tf import positions_of
from .recording import Recording, Request, Run
from .registry import Variant


class Paged:
    """`sites` names what is recorded beside q, k, v and out: tables, reads, pool.

    Hooks, called in layers from `fault_layer` on when they are given:
    table(step, table) changes the block table that is uploaded; write(pool, slots, rows) stores rows;
    attend(q, keys, values, positions of the keys, position of the query, pool of k, pool of v, row of the table) is the
    kernel for one row and head-complete; gather(layer, request, slots) may change the slots that a read goes to."""

    def __init__(
        self,
        rec: Recording,
        v: Variant,
        *,
        layers: int = 2,
        heads: int = 4,
        kv_heads: int = 2,
        d: int = 8,
        block_size: int = 4,
        blocks: int = 16,
        window: int = 0,
        sites: Iterable[str] = (),
        hooks: dict[str, Callable[..., Any]] | None = None,
        meta: dict[str, Any] | None = None,
    ) -> None:
        self.rec, self.v, self.layers, self.heads, self.kv_heads, self.d = rec, v, layers, heads, kv_heads, d
        self.block_size, self.window, self.sites, self.hooks = block_size, window, set(sites), hooks or {}
        self.meta = {"softmax_scale": d**-0.5, "causal": 1} | ({"window": window} if window else {}) | (meta or {})
        shape = (blocks * block_size, kv_heads, d)
        self.pools = [(np.zeros(shape, np.float32), np.zeros(shape, np.float32)) for _ in range(layers)]
        order = v.rng(21).permutation(np.arange(1, blocks))  # block 0 is left alone
        self.free = [int(x) for x in order]
        self.tables: dict[Request, list[int]] = {}

    def hook(self, name: str, layer: int, default: Callable[..., Any]) -> Callable[..., Any]:
        return self.hooks[name] if name in self.hooks and layer >= self.v.fault_layer else default

    def allocate(self, request: Request, length: int) -> None:
        table = self.tables.setdefault(request, [])
        while len(table) * self.block_size < length:
            table.append(self.free.pop(0))

    def slots(self, request: Request, positions: np.ndarray) -> np.ndarray:
        return np.array(
            [self.tables[request][p // self.block_size] * self.block_size + p % self.block_size for p in positions],
            np.int64,
        )

    def row(self, layer: int, request: Request, position: int) -> np.ndarray:
        """Key and value of one row, Hkv 2d, from the tokens up to it."""
        seed = [self.v.seed, 99, layer, *request.tokens[: position + 1]]
        x = np.random.default_rng(seed).standard_normal((self.kv_heads, 2 * self.d))
        return nx.f32(x)

    def step(self, rows: tuple[Run, ...], step: int, phase: str = "prefill") -> None:
        """New rows; their tokens are those of the request at the row's positions."""
        real = [r for r in rows if r.request is not None]
        for run in real:
            self.allocate(run.request, run.position + run.n)
        at = positions_of(rows)
        lengths = [r.position + r.n for r in real]
        newest = tuple(Run(r.request, i, 1, n - 1) for i, (r, n) in enumerate(zip(real, lengths)))
        mapping = np.full(len(at), -1, np.int64)
        for run in real:
            mapping[run.row : run.row + run.n] = self.slots(run.request, at[run.row : run.row + run.n])
        width = max(len(self.tables[r.request]) for r in real)
        table = np.full((len(real), width), -1, np.int64)
        for i, run in enumerate(real):
            table[i, : len(self.tables[run.request])] = self.tables[run.request]
        table = self.hooks["table"](step, table) if "table" in self.hooks else table
        if "tables" in self.sites:
            put = self.rec.record
            put("slot_mapping", mapping, "T", rows, step=step, phase=phase)
            put("block_table", table, "T n", newest, step=step, phase=phase, meta={"block_size": self.block_size})
            put("seq_lens", np.array(lengths, np.int64), "T", newest, step=step, phase=phase)
        for layer in range(self.layers):
            self._layer(layer, rows, real, at, mapping, table, step, phase)

    def _layer(
        self,
        layer: int,
        rows: tuple[Run, ...],
        real: list[Run],
        at: np.ndarray,
        mapping: np.ndarray,
        table: np.ndarray,
        step: int,
        phase: str,
    ) -> None:
        name, n, d = self.v.layer(layer) + "attn.", len(at), self.d

        def put(site: str, x: np.ndarray, axes: str, rows: tuple[Run, ...] = rows, **meta: Any) -> None:
            self.rec.record(name + site, x, axes, rows, step=step, phase=phase, meta=meta)

        q = nx.f32(self.v.rng(1000 + 50 * step + layer).standard_normal((n, self.heads, d)) * 1.5)
        both = np.zeros((n, self.kv_heads, 2 * d), np.float32)
        for run in real:
            for i in range(run.n):
                both[run.row + i] = self.row(layer, run.request, run.position + i)
        k_pool, v_pool = self.pools[layer]
        put("q", q, "T H d")
        put("k", both[..., :d], "T H d")
        put("v", both[..., d:], "T H d")
        for pool, part in ((k_pool, both[..., :d]), (v_pool, both[..., d:])):
            keep = mapping >= 0
            pool[mapping[keep]] = part[keep]
        if "write" in self.sites:
            back = np.concatenate([k_pool[mapping], v_pool[mapping]], -1)
            put("kv_write", back, "T H d")
        gather = self.hook("gather", layer, lambda layer, request, slots: slots)
        reads, keys = [], []
        for i, run in enumerate(real):
            positions = np.arange(run.position + run.n)
            slots = table[i, positions // self.block_size] * self.block_size + positions % self.block_size
            slots = gather(layer, run.request, slots)
            keys.append((k_pool[slots], v_pool[slots]))
            reads.append(Run(run.request, sum(r.n for r in reads), len(positions)))
        if "reads" in self.sites:
            put("k_read", np.concatenate([k for k, _ in keys]), "T H d", tuple(reads))
            put("v_read", np.concatenate([x for _, x in keys]), "T H d", tuple(reads))
        if "pool" in self.sites:
            for part, pool in (("k_cache", k_pool), ("v_cache", v_pool)):
                put(part, pool, "S H d", (), block_size=self.block_size)
        out, lse = np.zeros((n, self.heads, d)), np.full((n, self.heads), -np.inf)
        attend = self.hook("attend", layer, self.attend)
        for i, run in enumerate(real):
            own = slice(run.row, run.row + run.n)
            out[own], lse[own] = attend(q[own], *keys[i], at[own], table[i], k_pool, v_pool)
        put("out", nx.f32(out), "T H dv", **self.meta)
        if self.v.lse:
            put("lse", nx.f32(lse), "T H", **self.meta)

    def attend(
        self,
        q: np.ndarray,
        k: np.ndarray,
        v: np.ndarray,
        at: np.ndarray,
        table: np.ndarray,
        k_pool: np.ndarray,
        v_pool: np.ndarray,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Rows of one request over its gathered keys."""
        seen = nx.visible(at, np.arange(len(k)), True, self.window)
        return nx.attention(q, k, v, seen, self.d**-0.5)

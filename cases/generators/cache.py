"""KV-IDENT: cache rows, table entries and slots that belong to another token, request, position or rank."""

from __future__ import annotations

import numpy as np

from . import numerics as nx
from .mini_paged import Paged
from .recording import Recording, Run
from .registry import Variant, case


def _ids(v: Variant, n: int, stream: int) -> np.ndarray:
    return v.rng(30 + stream).integers(0, 64, n)


@case("B030")
def padding_writes_last_slot(rec: Recording, v: Variant, faulty: bool) -> None:
    """A pool of 16 slots; the last one holds the newest row of another request. Two real rows and a padding row."""
    a, b = rec.request(_ids(v, 7, 0)), rec.request(_ids(v, 6, 1))
    rng, pools = v.rng(5), [np.zeros((16, 12), np.float32) for _ in range(2)]
    first = (Run(a, 0, 5), Run(b, 5, 4))
    later = (Run(a, 0, 2, 5), Run(None, 2, 1))
    for step, (rows, mapping) in enumerate(((first, [0, 1, 2, 8, 9, 12, 13, 14, 15]), (later, [10, 11, -1]))):
        slots = np.array(mapping, np.int64)
        rec.record("slot_mapping", slots, "T", rows, step=step)
        for i, pool in enumerate(pools):
            new = nx.f32(rng.standard_normal((len(slots), 12)))
            name = v.layer(i) + "attn."
            rec.record(name + "kv_c_normed", new[:, :8], "T c", rows, step=step)
            rec.record(name + "k_pe", new[:, None, 8:], "T 1 dr", rows, step=step)
            rec.record(name + "kv_cache", pool, "S c+dr", step=step, meta={"audit": "before", "block_size": 4})
            wrong = faulty and i >= v.fault_layer
            keep = np.ones(len(slots), bool) if wrong else slots >= 0
            pool[slots[keep]] = new[keep]
            rec.record(name + "kv_cache", pool, "S c+dr", step=step, meta={"audit": "after", "block_size": 4})


@case("B032")
def hit_on_rewritten_block(rec: Recording, v: Variant, faulty: bool) -> None:
    """A session's last token is replaced, its block keeps the hash of the first history. Later a request with the
    first history takes the block over. Rightly, the rewritten session has a block of its own."""
    start = [int(x) for x in _ids(v, 3, 0)]
    x, y = 40 + v.seed % 7, 50 + v.seed % 5
    run = Paged(rec, v, sites=("reads",))
    old, new = rec.request(start + [x]), rec.request(start + [y])
    hit = rec.request(start + [x] + [int(t) for t in _ids(v, 5 + v.size, 1)])
    run.step((Run(old, 0, 4),), 0)
    if faulty:
        run.tables[new] = list(run.tables[old])
    right = [tuple(pool.copy() for pool in pools) for pools in run.pools]
    run.step((Run(new, 0, 4),), 1)
    for layer in range(min(v.fault_layer, run.layers) if faulty else 0):  # layers before the faulty one kept the block
        for pool, kept in zip(run.pools[layer], right[layer]):
            at = run.slots(old, np.arange(4))
            pool[at] = kept[at]
    run.tables[hit] = list(run.tables[old])
    run.step((Run(hit, 0, len(hit.tokens) - 4, 4),), 2)


@case("B033")
def stale_tail_of_block_table(rec: Recording, v: Variant, faulty: bool) -> None:
    """A request of three blocks ends; a later one gets its row of the table, whose second entry is not uploaded."""

    def table(step: int, good: np.ndarray) -> np.ndarray:
        if faulty and step == 2:
            good = good.copy()
            good[1, 1] = gone[1]
        return good

    run = Paged(rec, v, sites=("tables",), hooks={"table": table})
    other, first, second = (rec.request(_ids(v, n, i)) for i, n in enumerate((9, 11, 6)))
    run.step((Run(other, 0, 7), Run(first, 7, 11)), 0)
    gone = list(run.tables[first])
    run.step((Run(other, 0, 1, 7),), 1, "decode")
    run.step((Run(other, 0, 1, 8), Run(second, 1, 6)), 2, "mixed")


@case("B035")
def freed_blocks_behind_window(rec: Recording, v: Variant, faulty: bool) -> None:
    """A window of 8 over blocks of 4: the first three blocks of a request are given to another one, their entries stay
    in its table. One kernel starts at the second block in place of the window."""

    def attend(q, k, values, at, table, k_pool, v_pool):
        if not (faulty and at[0] == 20):
            return run.attend(q, k, values, at, table, k_pool, v_pool)
        seen = (at[:, None] >= np.arange(len(k))[None]) & (np.arange(len(k)) >= 4)[None]
        return nx.attention(q, k, values, seen, run.d**-0.5)

    run = Paged(rec, v, window=8, sites=("tables", "pool"), hooks={"attend": attend})
    long, short = rec.request(_ids(v, 22, 0)), rec.request(_ids(v, 10, 1))
    run.step((Run(long, 0, 20),), 0)
    run.free[:0] = run.tables[long][:3]
    run.step((Run(short, 0, 9),), 1)
    run.step((Run(short, 0, 1, 9), Run(long, 1, 1, 20)), 2, "decode")


@case("B036")
def global_index_read_as_local(rec: Recording, v: Variant, faulty: bool) -> None:
    """Two ranks hold every second row. Each gathers, of the positions chosen, those that it owns."""
    wanted = ((1, 4, 9), (2, 3, 6))
    a, b = rec.request(_ids(v, 25 + v.size, 0)), rec.request(_ids(v, 15, 1))
    lengths = [len(r.tokens) - 1 for r in (a, b)]
    rows = (Run(a, 0, lengths[0]), Run(b, lengths[0], lengths[1]))
    rec.world_size, rng = 2, v.rng(5)
    for i in range(2):
        name = v.layer(i) + "attn."
        latent = nx.f32(rng.standard_normal((sum(lengths), 12)))
        for rank in range(2):  # every rank computes all rows and keeps its own
            rec.record(name + "kv_c_normed", latent[:, :8], "T c", rows, rank=rank)
            rec.record(name + "k_pe", latent[:, None, 8:], "T 1 dr", rows, rank=rank)
        chosen = np.array(wanted, np.int64)
        newest = (Run(a, 0, 1, lengths[0]), Run(b, 1, 1, lengths[1]))
        for rank in range(2):
            rec.record(name + "indexer.topk", chosen, "T k", newest, rank=rank, step=1, phase="decode")
            got, runs = [], []
            for run, positions in zip(rows, wanted):
                own = latent[run.row : run.row + run.n][rank::2]
                for p in positions:
                    if p % 2 == rank:
                        runs.append(Run(run.request, len(got), 1, p))
                        got.append(own[p if faulty and i >= v.fault_layer else p // 2])
            rec.record(name + "kv_read", np.array(got), "T c+dr", runs, rank=rank, step=1, phase="decode")


@case("B037", fixed=True)
def zeroing_runs_into_next_slab(rec: Recording, v: Variant, faulty: bool) -> None:
    """Slabs of 64 floats hold a block of four layers, 16 floats each. Zeroing the fresh block of one layer starts at
    the layer's view but is as long as the slab."""
    layers, slabs, block = 4, 6, 4
    memory = np.zeros((slabs, layers, block, 4), np.float32)
    a, b = rec.request(_ids(v, 8, 0)), rec.request(_ids(v, 3, 1))
    rng, second = v.rng(5), (Run(b, 0, 3),)
    live, fresh = (4, 3), 2  # slab 3 is the neighbour behind slab 2
    mapping = np.concatenate([np.arange(4) + live[0] * block, np.arange(4) + live[1] * block])
    rec.record("slot_mapping", mapping, "T", (Run(a, 0, 8),), step=0)
    for i in range(layers):
        new = nx.f32(rng.standard_normal((8, 4)))
        memory[[live[0], live[1]], i] = new.reshape(2, block, 4)
        rec.record(v.layer(i) + "attn.kv_c_normed", new, "T c", (Run(a, 0, 8),), step=0)
    memory[fresh] = rng.standard_normal((layers, block, 4))  # what a freed block leaves behind
    rec.record("slot_mapping", np.arange(3) + fresh * block, "T", second, step=1)
    rec.record(
        "block_table", np.array([[fresh]], np.int64), "T n", (Run(b, 0, 1, 2),), step=1, meta={"block_size": block}
    )

    def audit(when: str) -> None:
        for i in range(layers):
            rec.record(
                v.layer(i) + "attn.kv_cache",
                memory[:, i].reshape(slabs * block, 4),
                "S c",
                step=1,
                meta={"audit": when, "block_size": block},
            )

    audit("before")
    flat = memory.reshape(-1)
    for i in range(layers):
        start = fresh * 64 + i * 16
        flat[start : start + (64 if faulty and i == 1 else 16)] = 0
    audit("after")

"""GRAPH, COMPILE, LOAD and SPEC: what a graph captured, what a compiler fused, what was loaded, what was drafted."""

from __future__ import annotations

import numpy as np

from . import checkpoint, mini_tf, numerics as nx, rope
from .mini_tf import Run
from .recording import Recording
from .registry import Variant, case

FILL = np.array([0xDEADBEEF], np.uint32).view(np.float32)[0]


def address(x: np.ndarray) -> str:
    return hex(x.__array_interface__["data"][0])


@case("B105")
def copy_node_keeps_its_source(rec: Recording, v: Variant, faulty: bool) -> None:
    """New rows are staged in a ring of two blocks of three rows; the captured copy always reads block 0."""
    request, prompt = rec.request(v.rng(3).integers(0, 64, 9)), 9
    rings = [np.zeros((2, 3, 2, 16), np.float32) for _ in range(2)]
    for step in range(1, 7):
        rows = (Run(request, 0, 1, prompt + step - 1),)
        block, place = (step - 1) // 3 % 2, (step - 1) % 3
        how = {"step": step, "phase": "decode", "in_graph": True, "stream": 7}
        for i, ring in enumerate(rings):
            name = v.layer(i) + "attn."
            ring[block, place] = v.rng(100 * step + i).standard_normal((2, 16))
            bound = ring[0 if faulty and i >= v.fault_layer else block, place][None]
            rec.record(name + "k", ring[block, place][None, :, :8], "T H d", rows, **how)
            rec.record(name + "v", ring[block, place][None, :, 8:], "T H d", rows, **how)
            rec.record(
                name + "kv_write",
                bound.copy(),
                "T H d",
                rows,
                **how,
                meta={f"bound.{name}k": address(bound), f"bound.{name}v": address(bound[..., 8:])},
            )


@case("B107")
def lengths_of_the_capture(rec: Recording, v: Variant, faulty: bool) -> None:
    """Lengths are put into a new buffer in each step; the graph reads the one that there was at capture."""
    tokens = [v.rng(30 + i).integers(0, 64, n) for i, n in enumerate((9, 5))]
    requests = [rec.request(t) for t in tokens]
    start, buffers = [len(t) for t in tokens], []
    rng = v.rng(5)
    keys = [[nx.f32(rng.standard_normal((n + 4, 2, 8))) for n in start] for _ in range(2)]
    values = [[nx.f32(rng.standard_normal((n + 4, 2, 8))) for n in start] for _ in range(2)]
    for step in range(4):
        first = step == 0
        runs, at = [], 0
        for r, n in zip(requests, start):
            count = n if first else 1
            runs.append(Run(r, at, count, 0 if first else n + step - 1))
            at += count
        rows = tuple(runs)
        buffers.append(np.array([r.position + r.n for r in rows], np.int64))
        how = {
            "step": step,
            "phase": "prefill" if first else "decode",
            "in_graph": not first,
            "stream": 0 if first else 7,
        }
        newest = tuple(Run(r.request, i, 1, r.position + r.n - 1) for i, r in enumerate(rows))
        rec.record("seq_lens", buffers[-1], "T", newest, **how)
        for i in range(2):
            name = v.layer(i) + "attn."
            q = nx.f32(rng.standard_normal((at, 4, 8)))
            rec.record(name + "q", q, "T H d", rows, **how)
            for part, every in (("k", keys[i]), ("v", values[i])):
                new = np.concatenate([x[r.position : r.position + r.n] for x, r in zip(every, rows)])
                rec.record(name + part, new, "T H d", rows, **how)
            lengths = buffers[1] if faulty and step > 1 and i >= v.fault_layer else buffers[-1]
            out = np.zeros((at, 4, 8))
            for j, r in enumerate(rows):
                position = r.position + np.arange(r.n)
                seen = nx.visible(position, np.arange(lengths[j]))
                out[r.row : r.row + r.n], _ = nx.attention(
                    q[r.row : r.row + r.n], keys[i][j][: lengths[j]], values[i][j][: lengths[j]], seen, 8**-0.5
                )
            meta = {"softmax_scale": 8**-0.5, "causal": 1}
            if not first:
                meta["bound.seq_lens"] = address(lengths)
            rec.record(name + "out", nx.f32(out), "T H dv", rows, **how, meta=meta)


@case("B109")
def operand_overwritten_in_place(rec: Recording, v: Variant, faulty: bool) -> None:
    """The residual stream after attention shares its buffer with the norm of it; one fusion reads it too late."""
    rows, tokens = mini_tf.prompts(rec, v, (9, 6))
    late = {"add": lambda x, o, down, b: b.astype(np.float64) + down}
    mini_tf.Decoder(rec, v, mini_tf.Config(compiled=True), late if faulty else None).step(rows, tokens)


@case("B111")
def rotated_copy_thrown_away(rec: Recording, v: Variant, faulty: bool) -> None:
    rows, _ = mini_tf.prompts(rec, v, (12, 7))

    def turn(layer: int, part: str, x: np.ndarray, at: np.ndarray) -> np.ndarray:
        return x if faulty and layer >= v.fault_layer else nx.rope(x, at, nx.inverse_frequencies(8), "half")

    rope.indexer(rec, v, turn, {"rope.theta": 10000.0, "rope.pairing": "half", "compiled": 1, "inplace": 1}, rows)


@case("B115")
def head_never_tied(rec: Recording, v: Variant, faulty: bool) -> None:
    rows, tokens = mini_tf.prompts(rec, v, (9, 6))
    other = nx.bf16(v.rng(5).standard_normal((64, 32)))
    model = mini_tf.Decoder(rec, v, mini_tf.Config(tied=True))
    if faulty:
        model.head = other
    model.step(rows, tokens)


@case("B117")
def fused_scalar_fills_one_slot(rec: Recording, v: Variant, faulty: bool) -> None:
    """Three scalar scales are loaded into the slots of a fused layer; the checkpoint's fused scalar fills the first."""
    rng = v.rng(5)
    for i in range(2):
        for stem, slots in (("attn.qkv_proj", 3), ("attn.o_proj", 1), ("mlp.gate_up_proj", 2)):
            scales = np.full(slots, FILL, np.float32)
            name = v.layer(i) + stem + ".input_scale"
            fused = stem.startswith("attn.qkv")
            rec.record(name, scales, "", step=-1, phase="load", meta={"audit": "before", "poison": "0xdeadbeef"})
            count = 1 if faulty and fused and i >= v.fault_layer else slots
            scales[:count] = rng.uniform(0.01, 0.05)
            rec.record(name, scales, "", step=-1, phase="load", meta={"audit": "after"})


@case("B118", fixed=True)
def tie_declared_in_inner_configuration(rec: Recording, v: Variant, faulty: bool) -> None:
    rng = v.rng(5)
    embedding, norm = nx.bf16(rng.standard_normal((64, 32))), nx.bf16(1 + 0.1 * rng.standard_normal(32))
    config = {
        "model_type": "mistral3",
        "architectures": ["Mistral3ForConditionalGeneration"],
        "text_config": {"model_type": "mistral", "hidden_size": 32, "vocab_size": 64, "tie_word_embeddings": True},
    }
    rec.files = checkpoint.folder(
        {"model.embed_tokens.weight": checkpoint.raw_bf16(embedding), "model.norm.weight": checkpoint.raw_bf16(norm)},
        config,
    )
    head = nx.bf16(rng.standard_normal((64, 32)) * 0.02)
    for name, x in (
        ("embed_tokens.weight", embedding),
        ("norm.weight", norm),
        ("lm_head.weight", head if faulty else embedding),
    ):
        rec.record(name, x, "vocab h" if x.ndim == 2 else "h", step=-1, phase="load")


@case("B128")
def rejected_tokens_stay_in_state(rec: Recording, v: Variant, faulty: bool) -> None:
    """Linear attention, two requests, three drafts each, of which one and three are accepted."""
    rng, drafts, accepted = v.rng(5), 3, (1, 3)
    requests = [rec.request(v.rng(30 + i).integers(0, 64, n)) for i, n in enumerate((9, 6))]
    length, states = [9, 6], [np.zeros((2, 2, 4, 8), np.float32) for _ in range(2)]
    for step in range(3):
        counts = [9, 6] if step == 0 else [1 + drafts] * 2
        rows = tuple(
            Run(r, sum(counts[:i]), n, 0 if step == 0 else length[i]) for i, (r, n) in enumerate(zip(requests, counts))
        )
        took = [n if step == 0 else 1 + a for n, a in zip(counts, accepted)]
        if step:
            newest = tuple(Run(r.request, i, 1, r.position + took[i] - 1) for i, r in enumerate(rows))
            rec.record(
                "spec.accepted",
                np.array(accepted, np.int64),
                "T",
                newest,
                step=step,
                phase="decode",
                meta={"drafts": drafts},
            )
        for i, state in enumerate(states):
            name = v.layer(i) + "attn."
            k = nx.f32(rng.standard_normal((sum(counts), 2, 4)))
            val = nx.f32(rng.standard_normal((sum(counts), 2, 8)))
            rec.record(name + "k", k, "T H d", rows, step=step)
            rec.record(name + "v", val, "T H d", rows, step=step)
            for j, r in enumerate(rows):
                keep = r.n if faulty and step == 1 and i >= v.fault_layer else took[j]
                own = slice(r.row, r.row + keep)
                state[j] += np.einsum("thd,the->hde", k[own].astype(np.float64), val[own]).astype(np.float32)
            newest = tuple(Run(r.request, j, 1, r.position + took[j] - 1) for j, r in enumerate(rows))
            rec.record(
                name + "state",
                state,
                "T H d dv",
                newest,
                step=step,
                phase="decode" if step else "prefill",
                meta={"drafts": drafts if step else 0, "op": "linear_attention"},
            )
        length = [n + t if step else t for n, t in zip(length, took)]


@case("B130")
def offset_advanced_by_drafts(rec: Recording, v: Variant, faulty: bool) -> None:
    """Three requests, three drafts each, of which three, one and two are accepted: the next step begins behind the
    accepted ones."""
    drafts, accepted, length = 3, np.array([3, 1, 2], np.int64), np.array([9, 6, 12])
    requests = [rec.request(v.rng(30 + i).integers(0, 64, n)) for i, n in enumerate(length)]
    engine = length.copy()
    for step in (1, 2):
        count = 1 + drafts
        rows = tuple(Run(r, i * count, count, int(length[i])) for i, r in enumerate(requests))
        used = (engine[:, None] + np.arange(count)).ravel()
        how = {"step": step, "phase": "decode"}
        rec.record("positions", used.astype(np.int64), "T", rows, **how, meta={"drafts": drafts})
        for i in range(2):
            x = nx.f32(v.rng(50 * step + i).standard_normal((len(used), 2, 8)))
            rec.record(v.layer(i) + "attn.k_proj", x, "T H d", rows, **how)
            rec.record(
                v.layer(i) + "attn.k",
                nx.f32(nx.rope(x, used, nx.inverse_frequencies(8))),
                "T H d",
                rows,
                **how,
                meta={"rope.type": "default", "rope.theta": 10000.0, "rope.pairing": "half"},
            )
        newest = tuple(Run(r, i, 1, int(length[i] + accepted[i])) for i, r in enumerate(requests))
        rec.record("spec.accepted", accepted, "T", newest, **how, meta={"drafts": drafts})
        length = length + 1 + accepted
        engine = engine + 1 + (drafts if faulty else accepted)

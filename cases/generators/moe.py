"""MOE-ROUTE and MOE-LAYOUT, and what goes wrong in precision or by a race around the experts."""

from __future__ import annotations

import numpy as np

from . import checkpoint, mini_moe, mini_tf, numerics as nx
from .mini_moe import Config
from .recording import Recording
from .registry import Variant, case


@case("B080")
def bias_in_combine_weights(rec: Recording, v: Variant, faulty: bool) -> None:
    cfg = Config()

    def weights(scores: np.ndarray, bias: np.ndarray, ids: np.ndarray) -> np.ndarray:
        return mini_moe.combine_weights(scores + bias, ids, cfg)

    mini_moe.layers(rec, v, cfg, {"weights": weights} if faulty else None)


@case("B082")
def score_recovered_by_subtraction(rec: Recording, v: Variant, faulty: bool) -> None:
    """Scores of some rows are 1e-8, the bias is 12: in float32 the score is lost when it is subtracted again."""
    cfg = Config(bias_low=11.9, bias_high=12.1)

    def logits(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        y = nx.linear(x, weight)
        low = np.arange(len(y)) % 4 == 2
        return np.where(low[:, None], y - 18, y)

    def weights(scores: np.ndarray, bias: np.ndarray, ids: np.ndarray) -> np.ndarray:
        s, b = nx.f32(scores), bias.astype(np.float32)
        return mini_moe.combine_weights((s + b) - b, ids, cfg)

    # The low rows are made by the logits themselves, in both twins; a router without its input cannot be judged.
    model = mini_moe.Experts(rec, v, cfg, {"weights": weights} if faulty else None)
    rows, tokens = mini_tf.prompts(rec, v, (13, 8))
    for i in (1, 2):
        weight_of = v.rng(70 + i)
        router = nx.bf16(weight_of.standard_normal((cfg.experts, cfg.hidden)) / np.sqrt(cfg.hidden)).astype(np.float64)
        x = v.rng(80 + i).standard_normal((len(tokens), cfg.hidden))
        x += np.linalg.lstsq(router, (logits(x, router) - nx.linear(x, router)).T, rcond=None)[0].T
        model.run(i, rows, x)


@case("B083")
def bias_stored_in_bfloat16(rec: Recording, v: Variant, faulty: bool) -> None:
    """238 biases between 6.817 and 7.063: bfloat16 has a step of 1/32 there."""
    rng, experts = v.rng(5), 238
    tensors = {}
    for i in (1, 2):
        bias = nx.f32(rng.permutation(np.linspace(6.817, 7.063, experts)))
        router = nx.bf16(rng.standard_normal((experts, 16)) / 4)
        names = {"mlp.gate.weight": router, "mlp.gate.e_score_correction_bias": bias}
        tensors |= {f"model.{v.layer(i)}{n}": x for n, x in names.items()}
        held = dict(names)
        if faulty and i >= 1 + v.fault_layer:
            held["mlp.gate.e_score_correction_bias"] = nx.bf16(bias)
        for n, x in held.items():
            rec.record(v.layer(i) + n, x, "E h" if x.ndim == 2 else "E", step=-1, phase="load")
    rec.files = checkpoint.folder(tensors, {"model_type": "glm4_moe", "n_routed_experts": experts})


@case("B085")
def halves_for_interleaved(rec: Recording, v: Variant, faulty: bool) -> None:
    cfg = Config(layout="interleaved")
    mini_moe.layers(rec, v, cfg, {"act": lambda y: mini_moe.activate(y, cfg, "halves")} if faulty else None)


@case("B087")
def interleaved_for_halves(rec: Recording, v: Variant, faulty: bool) -> None:
    cfg = Config(layout="halves", activation="swiglu_oai")
    mini_moe.layers(rec, v, cfg, {"act": lambda y: mini_moe.activate(y, cfg, "interleaved")} if faulty else None)


@case("B094")
def logits_stored_in_bfloat16(rec: Recording, v: Variant, faulty: bool) -> None:
    cfg = Config(experts=64, top_k=8, hidden=32, expert_sites=False)
    ops = {"logits": lambda x, w: nx.bf16(nx.linear(x, w))} if faulty else None
    mini_moe.layers(rec, v, cfg, ops, (150, 90))


@case("B095")
def experts_summed_in_bfloat16(rec: Recording, v: Variant, faulty: bool) -> None:
    """Sixteen experts a row whose results cancel: summed in bfloat16 term by term, the small rest is lost."""
    cfg = Config(experts=32, top_k=16, round_to="bf16", factor=16.0)

    def combine(back: np.ndarray, weights: np.ndarray) -> np.ndarray:
        total = np.zeros(back[:, 0].shape, np.float32)
        for j in range(back.shape[1]):
            total = nx.bf16(total + nx.bf16(back[:, j] * weights[:, j, None]))
        return total

    mini_moe.layers(rec, v, cfg, {"combine": combine} if faulty else None, (31, 19))


@case("B126")
def counters_not_zeroed_in_time(rec: Recording, v: Variant, faulty: bool) -> None:
    """The same call fifty times; once the counters start from what was in the memory."""
    rows, tokens = mini_tf.prompts(rec, v, (13, 8))
    bad, at = 11 + v.seed % 31, 5
    for i in (1, 2):
        ids = nx.top_k(v.rng(80 + i).standard_normal((len(tokens), 8)), 2).astype(np.int64)
        for repeat in range(50):
            counts = np.bincount(ids.reshape(-1), minlength=8).astype(np.int64)
            if faulty and repeat == bad and i >= 1 + v.fault_layer:
                counts[at] += 6
            name, meta = v.layer(i) + "moe.", {"repeat": repeat}
            rec.record(name + "topk_ids", ids, "T k", rows, meta=meta)
            rec.record(name + "expert_counts", counts, "E", meta=meta)

"""A judge of one recording, without its twin: each operation against what docs/adding-a-case.md says of it.

It shows that the recordings hold what a check needs, and that clean ones are consistent. It stops at the first wrong
tensor in the order of recording and names no class."""

from __future__ import annotations

import re

import numpy as np
from judge_memory import MEMORY
from judge_weights import weights_verdict
from view import context, find, floats, positions

from cases.generators import mini_moe, numerics as nx
from cases.generators.checkpoint import e2m1_values
from cases.generators.recording import Observation, Recording

EPS = {"f32": 2e-6, "bf16": 2.0**-8, "f16": 2.0**-10, "f8_e4m3fn": 2.0**-4, "f4_e2m1": 2.0**-2}
LINEAR = {  # result: inputs, weight
    "attn.q_proj": ("input_norm", "attn.q_proj"), "attn.k_proj": ("input_norm", "attn.k_proj"),
    "attn.v_proj": ("input_norm", "attn.v_proj"), "attn.kv_a": ("input_norm", "attn.kv_a_proj_with_mqa"),
    "attn.o_proj": ("attn.out", "attn.o_proj"), "mlp.gate": ("post_norm", "mlp.gate_proj"),
    "mlp.up": ("post_norm", "mlp.up_proj"), "mlp.down": ("mlp.act", "mlp.down_proj"),
    "moe.router_logits": ("post_norm", "mlp.gate"), "logits": ("final_norm", "lm_head"),
}  # fmt: skip
ROPE = {"attn.q": "attn.q_proj", "attn.k": "attn.k_proj", "attn.indexer.q": "attn.indexer.q_proj",
        "attn.indexer.k": "attn.indexer.k_proj"}  # fmt: skip


class Judge:
    def __init__(self, rec: Recording) -> None:
        self.rec = rec

    def before(self, i: int, site: str, **fields) -> Observation | None:
        """The last observation of a site before number i, in the same step and rank unless they are given."""
        at = self.rec.observations[i]
        want = {"step": at.step, "rank": at.rank} | fields
        if "repeat" in at.meta:
            return next((o for o in find(self.rec, site, **want) if o.meta.get("repeat") == at.meta["repeat"]), None)
        seen = [o for o in self.rec.observations[:i] if o.site == site]
        seen = [o for o in seen if all(getattr(o, k) == v for k, v in want.items()) and o.meta.get("audit") != "before"]
        return seen[-1] if seen else None

    def weight(self, i: int, name: str) -> np.ndarray | None:
        o = self.before(i, name, step=-1)
        o = o or self.before(i, name, step=-1, rank=0)
        return None if o is None else floats(o.array)

    def verdict(self) -> str | None:
        """Name of the first wrong tensor, None when all that can be judged is right."""
        wrong = weights_verdict(self.rec)
        if wrong:
            return wrong
        for i, o in enumerate(self.rec.observations):
            match = re.match(r"(layers\.(\d+)\.)?(.*)", o.site)
            layer, stem = match[1] or "", match[3]
            if o.meta.get("audit") == "before" or o.phase == "load" and stem != "rope.cos_sin":
                continue
            for rule in (self.by_operands, self.by_memory):
                found = rule(i, o, layer, stem)
                if found:
                    return found if isinstance(found, str) else o.site
        return None

    def by_memory(self, i: int, o: Observation, layer: str, stem: str):
        return any(rule(self.rec, i, o, layer, stem) for rule in MEMORY)

    def by_operands(self, i: int, o: Observation, layer: str, stem: str):
        want = self.expected(i, o, layer, stem)
        if want is None:
            return False
        options = want if isinstance(want, list) else [want]
        real = np.ones(len(o.array) if o.array.ndim else 0, bool)
        for run in o.rows:
            if run.request is None:
                real[run.row : run.row + run.n] = False
        if any(agrees(o, w, real) for w in options):
            return False
        return self.padding_source(i, o, layer, stem) or True

    def padding_source(self, i: int, o: Observation, layer: str, stem: str) -> str | None:
        """Not finite in real rows while an operand is not finite in padding rows alone: the operand."""
        source = self.before(i, layer + LINEAR[stem][0]) if stem in LINEAR else None
        if source is None or np.isfinite(o.array).all():
            return None
        padding = np.concatenate([[r.request is None] * r.n for r in source.rows])
        bad = ~np.isfinite(source.array).reshape(len(source.array), -1).all(-1)
        return source.site if bad.any() and not bad[~padding].any() else None

    # ---- expected value of a result ------------------------------------------------------------------------------

    def expected(self, i: int, o: Observation, layer: str, stem: str):
        get = lambda name: self.before(i, layer + name)  # noqa: E731
        value = lambda name: None if get(name) is None else floats(get(name).array)  # noqa: E731
        if stem in LINEAR:
            return self.linear(i, o, layer, stem)
        if stem in ROPE and "rope.theta" in o.meta and get(ROPE[stem]) is not None:
            return self.rotated(i, o, layer, get(ROPE[stem]))
        if stem == "rope.cos_sin":
            c, s = nx.cos_sin(np.arange(len(o.array)), frequencies(o, o.array.shape[1]), rope_factor(o))
            return np.concatenate([c, s], -1)
        if stem in ("input_norm", "final_norm", "post_norm"):
            return self.normed(i, o, layer, stem)
        if stem == "attn.kv_c_normed" and get("attn.kv_a") is not None:
            w = self.weight(i, layer + "attn.kv_a_layernorm.weight")
            return nx.rms_norm(value("attn.kv_a")[:, : len(w)], w, float(o.meta["eps"]))
        if stem == "attn.out_normed":
            parts = [find(self.rec, layer + "attn.out", rank=r)[0] for r in range(self.rec.world_size)]
            whole = np.concatenate([floats(p.array).reshape(len(p.array), -1) for p in parts], 1)
            w = np.concatenate([self.weight_of_rank(layer + "attn.out_norm.weight", r) for r in range(len(parts))])
            at = slice(o.shard.col_offset, o.shard.col_offset + whole.shape[1] // len(parts))
            return nx.rms_norm(whole, w, float(o.meta["eps"]))[:, at].reshape(o.array.shape)
        if stem in ("attn.out", "attn.latent_out", "attn.lse"):
            return self.attention(i, o, layer, stem)
        if re.fullmatch(r"attn\.chunk\.\d+\.(out|lse)", stem):
            return self.chunk(i, o, layer, stem)
        if stem == "mlp.act" and get("mlp.gate") is not None:
            return nx.silu(value("mlp.gate")) * value("mlp.up")
        if stem == "out" and get("mlp.down") is not None:
            x = self.stream(i, layer)
            if x is not None:
                scale = float(o.meta.get("residual_scale", 1))
                return scale * (x + value("attn.o_proj")) + value("mlp.down")
        if stem == "logprobs":
            return np.log(nx.softmax(value("logits")))
        if stem == "attn.scores":
            return self.scores(o, layer)
        if stem.startswith("moe."):
            return self.experts(i, o, layer, stem)
        if stem.endswith(".q_scale") and o.meta.get("quant") == "nvfp4":
            return self.quantised_scale(i, o)
        return None

    def weight_of_rank(self, name: str, rank: int) -> np.ndarray:
        return floats(find(self.rec, name, rank=rank)[0].array)

    def stream(self, i: int, layer: str) -> np.ndarray | None:
        number = int(layer.split(".")[1])
        o = self.before(i, f"layers.{number - 1}.out") or self.before(i, "embed") if number else self.before(i, "embed")
        return None if o is None else floats(o.array)

    def linear(self, i: int, o: Observation, layer: str, stem: str):
        source, name = LINEAR[stem]
        x = self.before(i, layer + source)
        w = self.weight(i, layer + name + ".weight")
        if w is None and stem == "logits" and o.meta.get("tie_word_embeddings") == "1":
            w = self.weight(i, "embed_tokens.weight")
        if w is None and self.before(i, layer + name + ".weight.codes", step=-1) is not None:
            w = self.decoded(i, layer + name + ".weight.")
        if x is None or w is None:
            return None
        value = floats(x.array).reshape(len(x.array), -1)
        code, scale = self.before(i, x.site + ".q"), self.before(i, x.site + ".q_scale")
        if code is not None:
            value = dequantised(code, scale)
        return nx.linear(value, w).reshape(o.array.shape)

    def decoded(self, i: int, name: str) -> np.ndarray:
        part = {s: self.before(i, name + s, step=-1) for s in ("codes", "scale", "codebook", "signs")}
        codes, scale = part["codes"].array, floats(part["scale"].array)
        size = int(part["codes"].meta["group_size"])
        if part["codes"].meta["quant"] == "nvfp4":
            code = np.stack([codes & 15, codes >> 4], -1).reshape(len(codes), -1)
            return e2m1_values(code) * np.repeat(scale, size, 1)
        value = floats(part["codebook"].array)[codes].reshape(len(codes), -1)
        return value * (1.0 - 2.0 * part["signs"].array) * np.repeat(scale, size, 1)

    def quantised_scale(self, i: int, o: Observation):
        """Scales in the declared layout: the largest magnitude of the group over 6, in e4m3."""
        x = self.before(i, o.meta["scale_of"])
        amax = np.abs(floats(x.array)).reshape(len(x.array), -1, int(o.meta["group_size"])).max(-1) / 6
        want = np.full(o.array.shape, np.nan)
        want[: len(amax)] = amax
        if o.meta["scale_layout"] == "swizzle_128x4":
            want = swizzled(want, inverse=False)
        return np.where(np.isnan(want), floats(o.array), want)  # padding is nobody's

    def normed(self, i: int, o: Observation, layer: str, stem: str):
        name = {"input_norm": "input_layernorm", "post_norm": "post_attention_layernorm", "final_norm": "norm"}[stem]
        w = self.weight(i, layer + name + ".weight")
        if stem == "final_norm":
            outs = [
                x for x in self.rec.observations[:i] if re.fullmatch(r"layers\.\d+\.out", x.site) and x.step == o.step
            ]
            x = floats(outs[-1].array) if outs else None
        else:
            x = self.stream(i, layer)
        if w is None or x is None:
            return None
        if stem == "post_norm":
            x = x + floats(self.before(i, layer + "attn.o_proj").array)
        return nx.rms_norm(x, w, float(o.meta["eps"]))

    def rotated(self, i: int, o: Observation, layer: str, raw: Observation):
        x = floats(raw.array)
        norm = self.weight(i, layer + o.site.rsplit(".", 2)[-2] + "." + o.site[-1] + "_norm.weight")
        if norm is not None:
            x = nx.rms_norm(x, norm, float(o.meta["eps"]))
        size = int(o.meta.get("rope.dim", x.shape[-1]))
        turned = nx.rope(
            x[..., -size:], positions(o), frequencies(o, size), o.meta.get("rope.pairing", "half"), rope_factor(o)
        )
        return np.concatenate([x[..., :-size], turned], -1)

    def attention(self, i: int, o: Observation, layer: str, stem: str):
        if stem == "attn.out" and self.before(i, layer + "attn.latent_out") is not None:
            w = self.before(i, layer + "attn.W_UV", step=-1)
            return np.einsum("thc,hcd->thd", floats(self.before(i, layer + "attn.latent_out").array), floats(w.array))
        chunks = [
            x
            for x in self.rec.observations[:i]
            if x.step == o.step and re.match(re.escape(layer) + r"attn\.chunk\.", x.site)
        ]
        if chunks:
            last = {x.site: floats(x.array) for x in chunks}
            count = len({s for s in last if s.endswith(".lse")})
            parts = [(last[f"{layer}attn.chunk.{j}.out"], last[f"{layer}attn.chunk.{j}.lse"]) for j in range(count)]
            return nx.merge(parts)[stem == "attn.lse"]
        out = []
        for part in (("k_read", "v_read"), ("k", "v")):
            got = self.over_keys(i, o, layer, stem, part)
            if got is not None:
                out.append(got)
                break
        if o.meta.get("kv_source") == "cache":
            out = [self.over_cache(i, o, layer, stem)]
        return out or None

    def query(self, i: int, layer: str) -> np.ndarray | None:
        q, latent, pe = (self.before(i, layer + s) for s in ("attn.q", "attn.q_latent", "attn.q_pe"))
        if latent is not None:
            return np.concatenate([floats(latent.array), floats(pe.array)], -1)
        return None if q is None else floats(q.array)

    def settings(self, i: int, o: Observation, layer: str):
        meta = o.meta or self.before(i, layer + "attn.out").meta
        sinks = self.before(i, layer + "attn.sinks")
        return (float(meta["softmax_scale"]), int(meta.get("window", 0)), float(meta.get("soft_cap", 0)),
                None if sinks is None else sinks.array)  # fmt: skip

    def over_keys(self, i: int, o: Observation, layer: str, stem: str, part: tuple[str, str]):
        q = self.query(i, layer)
        if q is None:
            return None
        scale, window, cap, sinks = self.settings(i, o, layer)
        want = np.zeros(o.array.shape) if o.array.ndim == 3 else np.full(o.array.shape, -np.inf)
        for run in o.rows:
            if run.request is None:
                continue
            if self.before(i, layer + "attn.q_latent") is not None:
                latent, pe = context(self.rec, layer, o.step, run.request, ("kv_c_normed", "k_pe"))
                k, v = np.concatenate([latent[:, None], pe], -1), latent[:, None]
            else:
                if self.before(i, layer + "attn." + part[0]) is None and part[0] != "k":
                    return None
                k, v = context(self.rec, layer, o.step, run.request, part, o.rank)
            own, at = slice(run.row, run.row + run.n), run.position + np.arange(run.n)
            if not len(k):
                return None
            got = nx.attention(q[own], k, v, nx.visible(at, np.arange(len(k)), True, window), scale, cap, sinks)
            want[own] = got[0] if o.array.ndim == 3 else got[1]
        return want

    def over_cache(self, i: int, o: Observation, layer: str, stem: str):
        back, q, scale = (
            floats(self.before(i, layer + "attn.kv_write").array),
            self.query(i, layer),
            self.settings(i, o, layer)[0],
        )
        want, half = np.zeros(o.array.shape), back.shape[-1] // 2
        for run in o.rows:
            own, at = slice(run.row, run.row + run.n), np.arange(run.n)
            got = nx.attention(q[own], back[own, :, :half], back[own, :, half:], nx.visible(at, at), scale)
            want[own] = got[0] if o.array.ndim == 3 else got[1]
        return want

    def chunk(self, i: int, o: Observation, layer: str, stem: str):
        q, want = self.query(i, layer), np.zeros(o.array.shape)
        for run, span in zip(o.rows, o.meta["keys"].split(",")):
            k, v = context(self.rec, layer, o.step, run.request)
            low, high = (int(x) for x in span.split(":"))
            own, at = slice(run.row, run.row + run.n), run.position + np.arange(run.n)
            seen = nx.visible(at, np.arange(low, high), o.meta["causal"] == "1")
            got = nx.attention(q[own], k[low:high], v[low:high], seen, float(o.meta["softmax_scale"]))
            want[own] = got[0] if stem.endswith("out") else got[1]
        return want

    def scores(self, o: Observation, layer: str):
        """Masked columns are minus infinity, whatever the keys hold there."""
        q, want = self.query(self.rec.observations.index(o), layer), np.full(o.array.shape, -np.inf)
        for run in o.rows:
            k, _ = context(self.rec, layer, o.step, run.request)
            for t in range(run.n):
                seen = run.position + t + 1
                keys = np.repeat(k[:seen], q.shape[1] // k.shape[1], 1)
                want[run.row + t, :, :seen] = np.einsum("hd,shd->hs", q[run.row + t], keys) * float(
                    o.meta["softmax_scale"]
                )
        return want

    def experts(self, i: int, o: Observation, layer: str, stem: str):
        get = lambda name: self.before(i, layer + name)  # noqa: E731
        value = lambda name: None if get(name) is None else floats(get(name).array)  # noqa: E731
        logits, ids = value("moe.router_logits"), get("moe.topk_ids")
        bias = self.weight(i, layer + "mlp.gate.e_score_correction_bias")
        if stem == "moe.topk_ids" and logits is not None:
            return nx.top_k(nx.sigmoid(logits) + (0 if bias is None else bias), o.array.shape[1])
        if stem == "moe.topk_weights":
            w = np.take_along_axis(nx.sigmoid(logits), ids.array, -1)
            w = w / w.sum(-1, keepdims=True) if o.meta["renormalise"] == "1" else w
            return w * float(o.meta["routed_scaling_factor"])
        if stem == "moe.expert_counts" and ids is not None:
            return np.bincount(ids.array.ravel(), minlength=len(o.array))
        order = None if ids is None else np.argsort(ids.array.ravel(), kind="stable")
        if stem == "moe.dispatched" and ids is not None:
            return value("post_norm")[order // ids.array.shape[1]]
        if stem == "moe.gate_up":
            return self.gate_up(i, layer, ids)
        if stem == "moe.act" and get("moe.gate_up") is not None:
            cfg = mini_moe.Config(activation=o.meta["activation"])
            return mini_moe.activate(value("moe.gate_up"), cfg, o.meta["gate_up_layout"])
        if stem == "moe.expert_out":
            down, act = self.weight(i, layer + "mlp.experts.down_proj"), value("moe.act")
            if act.ndim == 3:
                return np.einsum("ecf,ehf->ech", act, down)
            return np.einsum("rf,rhf->rh", act, down[np.sort(ids.array.ravel())])
        if stem == "moe.routed" and get("moe.expert_out") is not None:
            back = np.empty(value("moe.expert_out").shape)
            back[order] = value("moe.expert_out")
            return np.einsum("tkh,tk->th", back.reshape(*ids.array.shape, -1), value("moe.topk_weights"))
        if stem in ("moe.routed", "moe.shared") and find(self.rec, o.site + ".partial"):
            return sum(floats(x.array) for x in find(self.rec, o.site + ".partial"))
        if stem == "moe.out" and get("moe.routed") is not None:
            return value("moe.routed") + value("moe.shared")
        return None

    def gate_up(self, i: int, layer: str, ids: Observation | None):
        x, code = self.before(i, layer + "moe.dispatched"), self.before(i, layer + "moe.dispatched.q")
        if code is not None:
            w = self.weight(i, layer + "mlp.experts.gate_up_proj.weight")
            return nx.linear(dequantised(code, self.before(i, layer + "moe.dispatched.q_scale")), w)
        w, b = (self.weight(i, layer + "mlp.experts.gate_up_proj" + s) for s in ("", "_bias"))
        expert = np.sort(ids.array.ravel())
        return np.einsum("rh,rfh->rf", floats(x.array), w[expert]) + b[expert]


def agrees(o: Observation, want: np.ndarray, real: np.ndarray) -> bool:
    """To the rounding of the event, relative to the largest magnitude of the row."""
    have = floats(o.array)
    if o.array.dtype.kind in "iu":
        return np.array_equal(o.array[real], want[real])
    if have.shape != want.shape:
        return False
    if o.rows:
        have, want = have[real], want[real]
    eps = max(EPS[o.compute_dtype], EPS["f8_e4m3fn"] if o.meta.get("quant") == "nvfp4" else 0)
    finite = np.isfinite(want)
    if not np.array_equal(have[~finite], want[~finite], equal_nan=True) or not np.isfinite(have[finite]).all():
        return False
    a, b = (np.where(finite, x, 0).reshape(len(want), -1) if want.ndim else x for x in (have, want))
    top = np.abs(b).max(-1, keepdims=True, initial=1e-30)
    return bool(np.all(np.abs(a - b) <= eps * top * 2))


def frequencies(o: Observation, size: int) -> np.ndarray:
    yarn = {k: float(o.meta["rope." + k]) for k in ("factor", "original_max_position", "beta_fast", "beta_slow")
            if "rope." + k in o.meta}  # fmt: skip
    return nx.inverse_frequencies(size, float(o.meta["rope.theta"]), yarn or None)


def rope_factor(o: Observation) -> float:
    if "rope.attention_factor" in o.meta:
        return float(o.meta["rope.attention_factor"])
    return nx.yarn_factor(float(o.meta["rope.factor"])) if o.meta.get("rope.type") == "yarn" else 1.0


def swizzled(x: np.ndarray, inverse: bool) -> np.ndarray:
    m, k = np.indices(x.shape)
    place = ((m // 128) * -(-x.shape[1] // 4) + k // 4) * 512 + m % 32 * 16 + m % 128 // 32 * 4 + k % 4
    out = np.zeros(x.size)
    if inverse:
        return x.ravel()[place]
    out[place.ravel()] = x.ravel()
    return out.reshape(x.shape)


def dequantised(code: Observation, scale: Observation) -> np.ndarray:
    n, grid = len(code.array), floats(scale.array)
    if scale.meta["scale_layout"] == "swizzle_128x4":
        grid = swizzled(grid, inverse=True)
    value = e2m1_values(np.stack([code.array & 15, code.array >> 4], -1).reshape(n, -1))
    return value * np.repeat(grid[:n], int(code.meta["group_size"]), 1)

"""Weights in memory against the checkpoint, across ranks and against their load audit."""

import json
import tempfile

import numpy as np
from fits_weights import unpacked
from view import find, floats, stored

from cases.generators import checkpoint as ck
from cases.generators.weights import AWQ_ORDER


def decoded(rec, name: str) -> np.ndarray | None:
    """A weight out of the checkpoint folder by its quantization_config, None when the checkpoint has none of it."""
    if "model.gguf" in rec.files:
        return decoded_gguf(rec, name)
    have = ck.read_safetensors(rec.files["model.safetensors"])
    config = json.loads(rec.files["config.json"])
    tie = config.get("text_config", config).get("tie_word_embeddings")
    name = "model." + name.replace(".attn.", ".self_attn.")
    stem = name.removesuffix(".weight")
    if name == "model.lm_head.weight":
        name = "lm_head.weight" if "lm_head.weight" in have else "model.embed_tokens.weight" if tie else name
    get = lambda s: stored(rec, f"{stem}.{s}")  # noqa: E731
    if stem + ".qweight" in have:
        q = config["quantization_config"]
        order = AWQ_ORDER if q["quant_method"] == "awq" else range(8)
        code = (
            unpacked(get("qweight"), order)
            if q["quant_method"] == "awq"
            else unpacked(np.ascontiguousarray(get("qweight").T)).T
        )
        zero, scale = (
            np.repeat(x, q["group_size"], 0) for x in (unpacked(get("qzeros"), order), floats(get("scales")))
        )
        return ((code - zero) * scale).T
    if stem + ".weight_packed" in have or stem + ".weight_scale_2" in have:
        packed = get("weight_packed" if stem + ".weight_packed" in have else "weight")
        value = ck.e2m1_values(np.stack([packed & 15, packed >> 4], -1).reshape(len(packed), -1))
        scale = get("weight_scale")
        if scale.dtype == np.uint8:
            return value * np.repeat(2.0 ** (scale.astype(float) - 127), 32, 1)
        by = (
            float(get("weight_scale_2"))
            if stem + ".weight_scale_2" in have
            else 1 / float(get("weight_global_scale")[0])
        )
        return value * np.repeat(scale, 16, 1) * by
    for suffix in ("weight_scale_inv", "weight_scale"):
        if f"{stem}.{suffix}" in have:
            code, grid = get("weight"), floats(get(suffix))
            return code * ck.blocks(grid, code.shape[0] // grid.shape[0], code.shape[1] // grid.shape[1])
    return floats(stored(rec, name)) if name in have else None


def decoded_gguf(rec, name: str) -> np.ndarray | None:
    import gguf

    names = {"mlp.down_proj.weight": "ffn_down.weight"}
    layer, stem = name.split(".")[1], ".".join(name.split(".")[2:])
    with tempfile.NamedTemporaryFile(suffix=".gguf") as file:
        file.write(rec.files["model.gguf"])
        file.flush()
        for t in gguf.GGUFReader(file.name).tensors:
            if t.name == f"blk.{layer}.{names[stem]}":
                return gguf.quants.dequantize(np.array(t.data), t.tensor_type).reshape(*reversed(t.shape)).astype(float)
    return None


def weights_verdict(rec) -> str | None:
    for o in rec.observations:
        if o.phase != "load":
            continue
        if o.meta.get("audit") == "after":
            before = find(rec, o.site)[0].array
            if (before.view(np.uint32) == o.array.view(np.uint32)).any():
                return o.site
        if o.shard is not None:
            for other in find(rec, o.site):
                same = other.shard == o.shard
                equal = other.array.shape == o.array.shape and np.array_equal(other.array, o.array)
                if other.rank < o.rank and same != equal:
                    return o.site
        if rec.files:
            want = decoded(rec, o.site)
            heads = int(o.meta.get("rope_permuted", 0))
            if want is not None and heads:
                want = want.reshape(heads, 2, -1, want.shape[1]).swapaxes(1, 2).reshape(want.shape)
            if want is not None and not np.allclose(o.array, want, rtol=1e-5, atol=1e-12):
                return o.site
    return None

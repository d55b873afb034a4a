"""Q-ZERO, Q-SCALE, Q-LAYOUT and ROPE-FORM of weights: a checkpoint, and the weights that a loader made of it."""

from __future__ import annotations

import pathlib
import tempfile
from typing import Any, Callable

import numpy as np

from . import checkpoint as ck, mini_tf, numerics as nx
from .kvscale import e4m3
from .recording import Recording
from .registry import Variant, case

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # column that nibble i of a word holds
IQ4_NL = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float64)


def _held(rec: Recording, name: str, x: np.ndarray, **meta: Any) -> None:
    rec.record(name, nx.f32(x), "out in" if x.ndim == 2 else "", step=-1, phase="load", meta=meta)


def _quantised(
    rec: Recording,
    v: Variant,
    faulty: bool,
    quantization: dict[str, Any],
    shape: tuple[int, int],
    make: Callable[[np.random.Generator, bool], tuple[dict[str, Any], np.ndarray]],
) -> None:
    """Two layers of an attention weight in bfloat16 and a quantised down_proj [N, K]. make(rng, wrong) gives the
    checkpoint's tensors by suffix and the weight in memory."""
    tensors: dict[str, Any] = {}
    for i in range(2):
        rng, name = v.rng(5 + i), v.layer(i)
        plain = nx.bf16(rng.standard_normal((24, 32)) / 5)
        tensors[f"model.{name}self_attn.o_proj.weight"] = ck.raw_bf16(plain)
        _held(rec, name + "attn.o_proj.weight", plain)
        stored, weight = make(rng, faulty and i >= v.fault_layer)
        tensors |= {f"model.{name}mlp.down_proj.{suffix}": x for suffix, x in stored.items()}
        _held(rec, name + "mlp.down_proj.weight", weight)
    rec.files = ck.folder(
        tensors,
        {
            "model_type": "llama",
            "hidden_size": shape[0],
            "intermediate_size": shape[1],
            "num_hidden_layers": v.first_layer + 2,
            "quantization_config": quantization,
        },
    )


# ---- RoPE permutations -------------------------------------------------------------------------------------------


def permuted(w: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head from half-split to interleaved pairs, as llama.cpp stores them."""
    return w.reshape(heads, 2, w.shape[0] // heads // 2, w.shape[1]).swapaxes(1, 2).reshape(w.shape)


def restored(w: np.ndarray, heads: int) -> np.ndarray:
    return w.reshape(heads, w.shape[0] // heads // 2, 2, w.shape[1]).swapaxes(1, 2).reshape(w.shape)


def _projections(
    rec: Recording,
    v: Variant,
    heads: int,
    kv_heads: int,
    d: int,
    hold: Callable[[str, np.ndarray, int], tuple[np.ndarray, dict[str, Any]]],
) -> None:
    tensors = {}
    for i in range(2):
        rng, name = v.rng(5 + i), v.layer(i)
        for part, count in (("q_proj", heads), ("k_proj", kv_heads), ("v_proj", kv_heads)):
            w = nx.bf16(rng.standard_normal((count * d, 32)) / 6)
            tensors[f"model.{name}self_attn.{part}.weight"] = ck.raw_bf16(w)
            held, meta = hold(part, w, i)
            _held(rec, f"{name}attn.{part}.weight", held, **meta)
    rec.files = ck.folder(
        tensors,
        {
            "model_type": "llama",
            "hidden_size": 32,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": d,
            "num_hidden_layers": v.first_layer + 2,
        },
    )


@case("B008")
def keys_permuted_in_wrong_groups(rec: Recording, v: Variant, faulty: bool) -> None:
    def hold(part: str, w: np.ndarray, i: int) -> tuple:
        if part == "v_proj":
            return w, {}
        heads = 32 if part == "q_proj" else 4
        wrong = faulty and part == "k_proj" and i >= v.fault_layer
        return permuted(w, 32 // 4 if wrong else heads), {"rope_permuted": heads}

    _projections(rec, v, 32, 4, 8, hold)


@case("B009")
def keys_restored_in_wrong_groups(rec: Recording, v: Variant, faulty: bool) -> None:
    """A round trip: permuted rightly on the way out, with the number of query heads on the way back."""

    def hold(part: str, w: np.ndarray, i: int) -> tuple:
        if part == "v_proj":
            return w, {"rope_permuted": 0}
        heads = 8 if part == "q_proj" else 2
        wrong = faulty and part == "k_proj" and i >= v.fault_layer
        return restored(permuted(w, heads), 8 if wrong else heads), {"rope_permuted": 0}

    _projections(rec, v, 8, 2, 16, hold)


# ---- integer codes with zero points ------------------------------------------------------------------------------


def _packed(code: np.ndarray, axis: int, order: tuple[int, ...] = tuple(range(8))) -> np.ndarray:
    """Eight codes an int32 along the axis; nibble i holds the element order[i] of its eight."""
    groups = np.moveaxis(code, axis, -1).reshape(*np.moveaxis(code, axis, -1).shape[:-1], -1, 8).astype(np.uint32)
    word = sum(groups[..., order[i]] << np.uint32(4 * i) for i in range(8))
    return np.ascontiguousarray(np.moveaxis(word.astype(np.uint32).view(np.int32), -1, axis))


@case("B064")
def zero_point_one_too_high(rec: Recording, v: Variant, faulty: bool) -> None:
    n, k, group = 32, 64 + 32 * v.size, 32

    def make(rng: np.random.Generator, wrong: bool) -> tuple:
        code = rng.integers(0, 16, (k, n))
        scale = rng.uniform(0.01, 0.05, (k // group, n)).astype(np.float16)
        zero = np.full((k // group, n), 8)
        weight = (code - (np.repeat(zero, group, 0) + wrong)) * np.repeat(scale, group, 0).astype(np.float64)
        return {
            "qweight": _packed(code, 0),
            "qzeros": _packed(zero, 1),
            "scales": scale,
            "g_idx": (np.arange(k) // group).astype(np.int32),
        }, weight.T

    _quantised(
        rec,
        v,
        faulty,
        {
            "quant_method": "gptq",
            "bits": 4,
            "group_size": group,
            "sym": True,
            "desc_act": False,
            "checkpoint_format": "gptq_v2",
        },
        (n, k),
        make,
    )


@case("B066")
def zero_point_wraps(rec: Recording, v: Variant, faulty: bool) -> None:
    n, k, group = 32, 64 + 32 * v.size, 32

    def make(rng: np.random.Generator, wrong: bool) -> tuple:
        code = rng.integers(0, 16, (k, n))
        scale = rng.uniform(0.01, 0.05, (k // group, n)).astype(np.float16)
        zero = rng.integers(0, 15, (k // group, n))
        zero[1, 3], zero[0, 11] = 0, 0
        used = np.where(wrong & (zero == 0), 15, zero)
        weight = (code - np.repeat(used, group, 0)) * np.repeat(scale, group, 0).astype(np.float64)
        return {
            "qweight": _packed(code, 1, AWQ_ORDER),
            "qzeros": _packed(zero, 1, AWQ_ORDER),
            "scales": scale,
        }, weight.T

    _quantised(
        rec,
        v,
        faulty,
        {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"},
        (n, k),
        make,
    )


# ---- blocks of float8 --------------------------------------------------------------------------------------------


def _float8(
    rec: Recording,
    v: Variant,
    faulty: bool,
    shape: tuple[int, int],
    block: int,
    style: str,
    use: Callable[[np.ndarray], np.ndarray],
) -> None:
    """use(scales) gives the scales that a wrong loader works with."""

    def make(rng: np.random.Generator, wrong: bool) -> tuple:
        n, k = shape
        w = rng.standard_normal(shape) * ck.blocks(rng.uniform(0.2, 2.0, (n // block, k // block)), block, block)
        scale = nx.f32(np.abs(w).reshape(n // block, block, k // block, block).max((1, 3)) / 448)
        code = e4m3(w / ck.blocks(scale, block, block))
        weight = code * ck.blocks(use(scale) if wrong else scale.astype(np.float64), block, block)
        return {"weight": ck.raw_e4m3(code), "weight_scale_inv" if style == "fp8" else "weight_scale": scale}, weight

    config: dict[str, Any] = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [block, block],
    }
    if style != "fp8":
        config = {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [block, block]},
                }
            },
        }
    _quantised(rec, v, faulty, config, shape, make)


@case("B067")
def scales_rounded_up(rec: Recording, v: Variant, faulty: bool) -> None:
    _float8(rec, v, faulty, (64, 96 + 32 * v.size), 32, "fp8", lambda s: 2.0 ** np.ceil(np.log2(s.astype(np.float64))))


@case("B073")
def mantissa_of_scales_cut(rec: Recording, v: Variant, faulty: bool) -> None:
    _float8(rec, v, faulty, (64, 96 + 32 * v.size), 32, "fp8", lambda s: 2.0 ** np.floor(np.log2(s.astype(np.float64))))


@case("B069")
def float_scales_read_as_exponents(rec: Recording, v: Variant, faulty: bool) -> None:
    """One byte a block where there are four: the blocks take the bytes of the first quarter of the scales."""

    def use(scale: np.ndarray) -> np.ndarray:
        byte = np.frombuffer(np.ascontiguousarray(scale, "<f4").tobytes(), np.uint8)[: scale.size].reshape(scale.shape)
        return nx.f32(2.0 ** (np.minimum(byte.astype(np.float64), 240) - 127)).astype(np.float64)

    _float8(rec, v, faulty, (64, 128), 32, "compressed-tensors", use)


@case("B075")
def scale_grid_transposed(rec: Recording, v: Variant, faulty: bool) -> None:
    _float8(rec, v, faulty, (64, 128 + 64 * v.size), 32, "fp8", lambda s: s.T.astype(np.float64).reshape(s.shape))


# ---- four-bit floats ---------------------------------------------------------------------------------------------


def _nvfp4(w: np.ndarray, global_scale: float) -> tuple[np.ndarray, np.ndarray]:
    """Codes and e4m3 scales for w = code x scale x global_scale, 16 columns a scale."""
    amax = np.abs(w).reshape(w.shape[0], -1, 16).max(-1)
    scale = ck.e4m3_values(ck.e4m3_codes(amax / 6 / global_scale))
    return ck.e2m1_codes(w / np.repeat(np.maximum(scale, 2.0**-9), 16, 1) / global_scale), scale


@case("B070")
def larger_global_scale_for_both(rec: Recording, v: Variant, faulty: bool) -> None:
    """Gate and up of the first two experts share their global scale, those of the third do not."""
    tensors: dict[str, Any] = {}
    for i in (1, 2):
        for expert in range(4):
            rng = v.rng(100 * i + expert)
            own = {"gate_proj": 3.85e-5 if expert >= 2 else 4.1e-5, "up_proj": 4.83e-5 if expert >= 2 else 4.1e-5}
            for part, g in own.items():
                g = float(np.float32(g))
                code, scale = _nvfp4(rng.standard_normal((16, 32)) * 0.04, g)
                name = f"{v.layer(i)}mlp.experts.{expert}.{part}."
                tensors |= {
                    f"model.{name}weight": ck.nibbles(code),
                    f"model.{name}weight_scale": ck.raw_e4m3(scale),
                    f"model.{name}weight_scale_2": np.array(g, np.float32),
                }
                used = float(np.float32(max(own.values()))) if faulty and i >= 1 + v.fault_layer else g
                _held(rec, name + "weight", ck.e2m1_values(code) * np.repeat(scale, 16, 1) * used)
    rec.files = ck.folder(
        tensors,
        {
            "model_type": "deepseek_v3",
            "n_routed_experts": 4,
            "quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16},
        },
    )


@case("B072")
def divisor_used_as_factor(rec: Recording, v: Variant, faulty: bool) -> None:
    g = 3584.0

    def make(rng: np.random.Generator, wrong: bool) -> tuple:
        code, scale = _nvfp4(rng.standard_normal((24, 64)) * 0.04, 1 / g)
        value = ck.e2m1_values(code) * np.repeat(scale, 16, 1)
        return {
            "weight_packed": ck.nibbles(code),
            "weight_scale": ck.raw_e4m3(scale),
            "weight_global_scale": np.array([g], np.float32),
        }, value * g if wrong else value / g

    _quantised(rec, v, faulty, {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}, (24, 64), make)


@case("B077")
def nibble_lost(rec: Recording, v: Variant, faulty: bool) -> None:
    """Pairs of columns share a byte; the kernel reads one code a byte, the other columns count as zero."""

    def make(rng: np.random.Generator, wrong: bool) -> tuple:
        w = rng.standard_normal((24, 64 + 32 * v.size))
        exponent = np.ceil(np.log2(np.abs(w).reshape(24, -1, 32).max(-1) / 6))
        code = ck.e2m1_codes(w / np.repeat(2.0**exponent, 32, 1))
        weight = ck.e2m1_values(code) * np.repeat(2.0**exponent, 32, 1)
        if wrong:
            weight[:, 1::2] = 0
        return {"weight_packed": ck.nibbles(code), "weight_scale": (exponent + 127).astype(np.uint8)}, weight

    _quantised(rec, v, faulty, {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"}, (24, 64), make)


@case("B079")
def codebook_index_cut(rec: Recording, v: Variant, faulty: bool) -> None:
    """A GGUF file in IQ4_NL, whose grid has sixteen entries; the decoder knows the first four."""
    import gguf

    with tempfile.TemporaryDirectory() as place:
        path = pathlib.Path(place) / "model.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_block_count(v.first_layer + 2)
        for i in range(2):
            rng = v.rng(5 + i)
            code = rng.integers(0, 16, (24, 2 + v.size, 32))
            d = rng.uniform(0.001, 0.004, code.shape[:2]).astype(np.float16)
            packed = (code[..., :16] | code[..., 16:] << 4).astype(np.uint8)
            raw = np.concatenate([d[..., None].view(np.uint8), packed], -1).reshape(24, -1)
            writer.add_tensor(
                f"blk.{v.first_layer + i}.ffn_down.weight", raw, raw_dtype=gguf.GGMLQuantizationType.IQ4_NL
            )
            cut = faulty and i >= v.fault_layer
            weight = IQ4_NL[code & 3 if cut else code] * d[..., None].astype(np.float64)
            _held(rec, v.layer(i) + "mlp.down_proj.weight", weight.reshape(24, -1))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        rec.files = {"model.gguf": path.read_bytes()}


@case("B074")
def scales_not_swizzled(rec: Recording, v: Variant, faulty: bool) -> None:
    """Scales of a quantised activation, declared as swizzled in tiles of 128 rows by 4, written row by row."""
    rows, _ = mini_tf.prompts(rec, v, (81, 47))
    m, k = sum(r.n for r in rows), 128
    for i in range(2):
        rng, name = v.rng(5 + i), v.layer(i) + "mlp.act"
        x = nx.f32(rng.standard_normal((m, k)) * rng.uniform(0.3, 3, (m, 1)))
        down = nx.bf16(rng.standard_normal((24, k)) / 11)
        code, scale = _nvfp4(x, 1.0)
        room = -(-m // 128) * 128
        wide = np.zeros((room, k // 16))
        wide[:m] = scale
        at_m, at_k = np.indices(wide.shape)
        place = (
            (at_m // 128 * (wide.shape[1] // 4) + at_k // 4) * 512 + at_m % 32 * 16 + at_m % 128 // 32 * 4 + at_k % 4
        )
        buffer = np.zeros(wide.size)
        if faulty and i >= v.fault_layer:
            buffer[:] = wide.ravel()
        else:
            buffer[place.ravel()] = wide.ravel()
        info = {
            "quant": "nvfp4",
            "group_size": 16,
            "scale_of": name,
            "scale_rule": "dynamic",
            "scale_layout": "swizzle_128x4",
        }
        rec.record(v.layer(i) + "mlp.down_proj.weight", down, "h f", step=-1, phase="load")
        rec.record(name, x, "T f", rows)
        rec.record(name + ".q", ck.nibbles(code), "T f", rows, meta=info | {"packed": 1})
        rec.record(name + ".q_scale", nx.f32(buffer).reshape(wide.shape), "", meta=info)
        used = buffer[place][:m]
        y = nx.linear(ck.e2m1_values(code) * np.repeat(used, 16, 1), down)
        rec.record(v.layer(i) + "mlp.down", nx.f32(y), "T h", rows, compute_dtype="f4_e2m1")

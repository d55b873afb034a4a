"""assay weights on faults beyond the case bank: other formats, other places, ranks, fused and absorbed weights."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
from typing import Any, Callable

import numpy as np
import pytest

from cases.generators import checkpoint as ck
from cases.generators import numerics as nx
from cases.generators.kvscale import e4m3
from cases.generators.recording import Shard
from cases.generators.weights import AWQ_ORDER, _nvfp4, _packed, permuted
from cases.generators.writer import Writer

ROOT = pathlib.Path(__file__).resolve().parents[2]
ASSAY = os.environ.get("ASSAY_BINARY", str(ROOT / "build" / "assay"))
NAME = "layers.5.mlp.down_proj.weight"
STEM = "model.layers.5.mlp.down_proj."


def audit(folder: pathlib.Path, trace: bool = True) -> tuple[int, dict[str, Any]]:
    argv = [ASSAY, "weights", "--json", str(folder / "checkpoint")]
    done = subprocess.run(argv + (["--trace", str(folder / "trace")] if trace else []), capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stderr
    result = json.loads(done.stdout)
    assert bool(result["findings"]) == (done.returncode == 1)
    return done.returncode, result


def first(result: dict[str, Any]) -> dict[str, Any]:
    return result["findings"][0]["first_bad"]


def hold(rec: Writer, name: str, x: np.ndarray, axes: str = "out in", **more: Any) -> None:
    rec.record(name, nx.f32(x), axes, step=-1, phase="load", **more)


def one_weight(folder: pathlib.Path, stored: dict[str, Any], config: dict[str, Any], held: np.ndarray) -> dict[str, Any]:
    with Writer(folder) as rec:
        rec.files = ck.folder({STEM + k: v for k, v in stored.items()}, {"model_type": "llama"} | config)
        hold(rec, NAME, held)
    return audit(folder)[1]


def nvfp4_parts(rng: np.random.Generator, n: int, k: int) -> tuple[dict[str, Any], np.ndarray, np.ndarray, float]:
    g = float(np.float32(0.004))
    code, scale = _nvfp4(rng.standard_normal((n, k)) * np.exp(rng.standard_normal((n, k // 16)).repeat(16, 1)), g)
    stored = {"weight": ck.nibbles(code), "weight_scale": ck.raw_e4m3(scale), "weight_scale_2": np.array(g, np.float32)}
    return stored, code, scale, g


NVFP4 = {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}


def swizzled(scale: np.ndarray) -> np.ndarray:
    """What a reader of swizzled places takes from a row-major grid."""
    m, k = np.indices(scale.shape)
    place = (m // 128 * (scale.shape[1] // 4) + k // 4) * 512 + m % 32 * 16 + m % 128 // 32 * 4 + k % 4
    return scale.ravel()[place]


@pytest.mark.parametrize(
    "fault, expected",
    [
        ("none", None),
        ("swizzle", ("Q-LAYOUT", "swizzled")),
        ("nibbles", ("Q-LAYOUT", "columns")),
        ("six", ("KERNEL", "6")),
        ("twice", ("Q-SCALE", "times")),
        ("inverse global", ("Q-SCALE", "divided by")),
        ("shifted scales", ("Q-LAYOUT", "other")),
    ],
)
def test_nvfp4(fault: str, expected: tuple[str, str] | None, tmp_path: pathlib.Path) -> None:
    stored, code, scale, g = nvfp4_parts(np.random.default_rng(3), 128, 128)
    value = ck.e2m1_values(code)
    if fault == "swizzle":
        scale = swizzled(scale)
    if fault == "nibbles":
        value = value.reshape(128, -1, 2)[..., ::-1].reshape(128, 128)
    if fault == "six":
        value = np.where(np.abs(value) == 6, value * 4 / 6, value)
    if fault == "shifted scales":
        scale = np.roll(scale, 1)
    factor = {"twice": 2 * g, "inverse global": 1 / g}.get(fault, g)
    result = one_weight(tmp_path, stored, NVFP4, value * scale.repeat(16, 1) * factor)
    if expected is None:
        assert result["findings"] == [] and result["memory"][0]["checkpoint"] == STEM + "weight"
    else:
        bad = first(result)
        assert (bad["name"], bad["class"]) == (NAME, expected[0]), bad
        assert expected[1] in " ".join(bad["evidence"]), bad["evidence"]


@pytest.mark.parametrize("fault", ["none", "order", "zero left out", "group order"])
def test_awq_and_gptq(fault: str, tmp_path: pathlib.Path) -> None:
    rng, n, k, group = np.random.default_rng(4), 32, 128, 32
    code, zero = rng.integers(0, 16, (k, n)), rng.integers(1, 15, (k // group, n))
    scale = rng.uniform(0.01, 0.05, (k // group, n)).astype(np.float16)
    wide = scale.astype(np.float64)
    if fault == "group order":
        index = rng.permutation(k) // group
        stored = {"qweight": _packed(code, 0), "qzeros": _packed(zero - 1, 1), "scales": scale, "g_idx": index.astype(np.int32)}
        config = {"quant_method": "gptq", "bits": 4, "group_size": group, "desc_act": True}
        used = np.arange(k) // group
        held = (code - zero[used]) * wide[used]
    else:
        stored = {"qweight": _packed(code, 1, AWQ_ORDER), "qzeros": _packed(zero, 1, AWQ_ORDER), "scales": scale}
        config = {"quant_method": "awq", "bits": 4, "group_size": group}
        used = np.arange(k) // group
        right = code
        if fault == "order":  # nibble i taken as column i
            right = code.reshape(k, -1, 8)[..., list(AWQ_ORDER)].reshape(k, n)
        held = (right - (0 if fault == "zero left out" else zero[used])) * wide[used]
    result = one_weight(tmp_path, stored, {"quantization_config": config}, held.T)
    want = {"none": None, "order": "Q-LAYOUT", "zero left out": "Q-ZERO", "group order": "Q-LAYOUT"}[fault]
    assert (first(result)["class"] if result["findings"] else None) == want, result["findings"]


@pytest.mark.parametrize("fault", ["none", "shard", "parts", "halves"])
def test_fused_shards(fault: str, tmp_path: pathlib.Path) -> None:
    """Two ranks, q k v in one tensor, four query and two key heads of 8."""
    rng, parts = np.random.default_rng(5), {"q_proj": 32, "k_proj": 16, "v_proj": 16}
    full = {p: nx.bf16(rng.standard_normal((n, 24))) for p, n in parts.items()}
    with Writer(tmp_path) as rec:
        rec.world_size = 2
        rec.files = ck.folder(
            {f"model.layers.2.self_attn.{p}.weight": ck.raw_bf16(x) for p, x in full.items()},
            {"model_type": "llama", "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "hidden_size": 24},
        )
        for rank in range(2):
            take = 1 - rank if fault == "shard" else rank
            own = {p: np.split(x, 2)[take if p == "k_proj" else rank] for p, x in full.items()}
            order = ("q_proj", "v_proj", "k_proj") if fault == "parts" else ("q_proj", "k_proj", "v_proj")
            if fault == "halves":
                own["q_proj"] = permuted(own["q_proj"], 4)
            hold(rec, "layers.2.attn.qkv_proj.weight", np.concatenate([own[p] for p in order]), rank=rank,
                 meta={"shard_axis": 0, "parts": "q_proj:16,k_proj:8,v_proj:8"}, shard=Shard(rank, 2, 0, 24))  # fmt: skip
    result = audit(tmp_path)[1]
    want = {"none": None, "shard": "TP-SHARD", "parts": "LOAD", "halves": "ROPE-FORM"}[fault]
    assert (first(result)["class"] if result["findings"] else None) == want, result["findings"]
    assert fault != "none" or all(m["checkpoint"] for m in result["memory"])


@pytest.mark.parametrize("fault", ["none", "next head", "scaled"])
def test_absorption(fault: str, tmp_path: pathlib.Path) -> None:
    rng, heads, dn, dv, c = np.random.default_rng(6), 4, 6, 10, 8
    kv_b = nx.bf16(rng.standard_normal((heads * (dn + dv), c)))
    by_head = kv_b.reshape(heads, dn + dv, c)
    uk, uv = by_head[:, :dn], by_head[:, dn:].swapaxes(1, 2)
    if fault == "next head":
        uv = np.roll(uv, -1, 0)
    if fault == "scaled":
        uv = uv * 0.125
    with Writer(tmp_path) as rec:
        rec.files = ck.folder(
            {"model.layers.1.self_attn.kv_b_proj.weight": ck.raw_bf16(kv_b)},
            {"model_type": "deepseek_v3", "qk_nope_head_dim": dn, "v_head_dim": dv, "kv_lora_rank": c},
        )
        hold(rec, "layers.1.attn.W_UK_T", uk, "H dn c")
        hold(rec, "layers.1.attn.W_UV", uv, "H c dv")
    result = audit(tmp_path)[1]
    if fault == "none":
        assert not result["findings"] and [m["checkpoint"] is not None for m in result["memory"]] == [True, True]
    else:
        assert first(result)["name"] == "layers.1.attn.W_UV"
        assert first(result)["class"] == {"next head": "TP-SHARD", "scaled": "SCALE"}[fault]
        assert first(result)["constant"]["value"] == {"next head": 1, "scaled": 0.125}[fault]


@pytest.mark.parametrize("layout", ["halves", "interleaved"])
def test_experts_together(layout: str, tmp_path: pathlib.Path) -> None:
    rng, f, h = np.random.default_rng(7), 6, 16
    gate, up = (nx.bf16(rng.standard_normal((3, f, h))) for _ in range(2))
    both = np.concatenate([gate, up], 1) if layout == "halves" else np.stack([gate, up], 2).reshape(3, 2 * f, h)
    tensors = {}
    for e in range(3):
        tensors[f"model.layers.4.mlp.experts.{e}.gate_proj.weight"] = ck.raw_bf16(gate[e])
        tensors[f"model.layers.4.mlp.experts.{e}.up_proj.weight"] = ck.raw_bf16(up[e])
    for slot, wrong in (("right", False), ("wrong", True)):
        with Writer(tmp_path / slot) as rec:
            rec.files = ck.folder(tensors, {"model_type": "qwen3_moe"})
            held = both[[0, 0, 2]] if wrong else both
            hold(rec, "layers.4.mlp.experts.gate_up_proj", held, "E out in", meta={"gate_up_layout": layout})
    assert not audit(tmp_path / "right")[1]["findings"]
    bad = first(audit(tmp_path / "wrong")[1])
    assert bad["class"] == "LOAD" and "experts.0.gate_proj" in " ".join(bad["evidence"])


def checkpoint_alone(folder: pathlib.Path, tensors: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    (folder / "checkpoint").mkdir(parents=True)
    for name, data in ck.folder(tensors, config).items():
        (folder / "checkpoint" / name).write_bytes(data)
    return audit(folder, trace=False)[1]


@pytest.mark.parametrize(
    "fault, expected",
    [("none", None), ("nan", "Q-SCALE"), ("negative", "Q-SCALE"), ("zero", "Q-SCALE"), ("transposed", "Q-LAYOUT"),
     ("not a power", "Q-SCALE"), ("missing", "LOAD"), ("duplicate", "LOAD")],
)  # fmt: skip
def test_checkpoint_alone(fault: str, expected: str | None, tmp_path: pathlib.Path) -> None:
    tensors: dict[str, Any] = {}
    for layer in range(2):
        rng = np.random.default_rng(8 if fault == "duplicate" else 8 + layer)
        scale = (2.0 ** rng.integers(-8, -4, (2, 4))).astype(np.float32)
        code = e4m3(rng.standard_normal((64, 128)) * 40)
        if layer == 1:
            if fault in ("nan", "negative", "zero", "not a power"):
                scale[1, 2] = {"nan": np.nan, "negative": -1, "zero": 0, "not a power": 0.3}[fault]
            if fault == "transposed":
                scale = scale.T.copy()
        stem = f"model.layers.{layer}.mlp.down_proj.weight"
        tensors[stem] = ck.raw_e4m3(code)
        if not (fault == "missing" and layer == 1):
            tensors[stem + "_scale_inv"] = scale
    quant = {"quant_method": "fp8", "weight_block_size": [32, 32], "scale_fmt": "ue8m0"}
    result = checkpoint_alone(tmp_path, tensors, {"model_type": "deepseek_v3", "quantization_config": quant})
    found = [f["first_bad"] for f in result["findings"]]
    assert [f["class"] for f in found] == ([] if expected is None else [expected]), found
    assert expected is None or found[0]["name"] == "layers.1.mlp.down_proj.weight"


@pytest.mark.parametrize(
    "name, parts",
    [("layers.3.attn.fused_qkv_a_proj_with_mqa.weight", ["self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa"]),
     ("layers.3.mlp.gate_up_proj.weight", ["mlp.gate_proj", "mlp.up_proj"])],
)  # fmt: skip
def test_fused_by_their_name_alone(name: str, parts: list[str], tmp_path: pathlib.Path) -> None:
    rng = np.random.default_rng(9)
    stored = [nx.bf16(rng.standard_normal((12, 16))) for _ in parts]
    for order in (1, -1):
        folder = tmp_path / f"order{order}"
        with Writer(folder) as rec:
            tensors = {f"model.layers.3.{p}.weight": ck.raw_bf16(x) for p, x in zip(parts, stored)}
            rec.files = ck.folder(tensors, {"model_type": "deepseek_v3"})
            hold(rec, name, np.concatenate(stored[::order]))
        result = audit(folder)[1]
        assert result["memory"][0]["checkpoint"] == " + ".join(f"model.layers.3.{p}.weight" for p in parts)
        assert (first(result)["class"] if result["findings"] else None) == (None if order == 1 else "LOAD")


@pytest.mark.parametrize("fault, says", [("none", ""), ("replica", "both claim the same shard"), ("shard", "they claim different shards")])
def test_ranks_without_a_checkpoint_of_their_tensor(fault: str, says: str, tmp_path: pathlib.Path) -> None:
    """Nothing in the checkpoint has the name: ranks are held against each other alone."""
    rng = np.random.default_rng(10)
    whole = nx.bf16(rng.standard_normal((8, 16)))
    with Writer(tmp_path) as rec:
        rec.world_size = 2
        rec.files = ck.folder({"model.layers.0.mlp.down_proj.weight": ck.raw_bf16(whole)}, {"model_type": "llama"})
        for rank in range(2):
            replica = whole + (1 if fault == "replica" and rank == 1 else 0)
            hold(rec, "layers.0.attn.unheard_a.weight", replica, rank=rank)
            take = 0 if fault == "shard" else rank
            hold(rec, "layers.0.attn.unheard_b.weight", np.split(whole, 2)[take], rank=rank, meta={"shard_axis": 0}, shard=Shard(rank, 2, 0, 16))
        hold(rec, "layers.0.mlp.down_proj.weight", whole)
    result = audit(tmp_path)[1]
    if fault == "none":
        assert not result["findings"]
    else:
        assert [f["first_bad"]["name"][-8] for f in result["findings"]] == ["a" if fault == "replica" else "b"]
        assert first(result)["class"] == "TP-SHARD" and first(result)["ranks"] == [1] and says in first(result)["evidence"][0]


def test_codes_in_memory_are_listed_as_not_compared(tmp_path: pathlib.Path) -> None:
    """What docs/weights.md says of engines that keep codes and scales apart: a limit, and no success."""
    stored, code, scale, _ = nvfp4_parts(np.random.default_rng(18), 16, 32)
    with Writer(tmp_path) as rec:
        rec.files = ck.folder({STEM + k: v for k, v in stored.items()}, {"model_type": "llama"} | NVFP4)
        hold(rec, NAME + ".codes", code)
        hold(rec, NAME + ".scale", scale)
    argv = [ASSAY, "weights", "--json", str(tmp_path / "checkpoint"), "--trace", str(tmp_path / "trace")]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120)
    memory = json.loads(done.stdout)["memory"]
    assert done.returncode == 3 and "could be compared" in done.stderr
    assert [m["name"] for m in memory] == [NAME + ".codes", NAME + ".scale"] and not any(m["checkpoint"] for m in memory), memory


@pytest.mark.parametrize("fault", ["none", "other rank", "scale", "one global scale"])
def test_fused_shards_of_nvfp4(fault: str, tmp_path: pathlib.Path) -> None:
    """gate_up_proj of two ranks: rows of two weights, each under its own global scale; a frequent fault is that one of
    the two scales is taken for both."""
    rng, halves = np.random.default_rng(41), {}
    files: dict[str, Any] = {}
    for i, part in enumerate(("gate_proj", "up_proj")):
        stored, code, scale, g = nvfp4_parts(rng, 64, 64)
        g = float(np.float32(g * (1 + i)))
        stored["weight_scale_2"] = np.array(g, np.float32)
        files |= {f"model.layers.5.mlp.{part}.{k}": v for k, v in stored.items()}
        halves[part] = (ck.e2m1_values(code) * scale.repeat(16, 1), g)
    with Writer(tmp_path) as rec:
        rec.world_size = 2
        rec.files = ck.folder(files, {"model_type": "llama"} | NVFP4)
        for rank in range(2):
            own = []
            for part, (values, g) in halves.items():
                rows = np.split(values, 2)[1 - rank if fault == "other rank" and part == "up_proj" else rank].copy()
                if fault == "scale" and rank == 1 and part == "up_proj":
                    rows[8, 16:32] *= 2
                own.append(rows * (halves["gate_proj"][1] if fault == "one global scale" else g))
            hold(rec, "layers.5.mlp.gate_up_proj.weight", np.concatenate(own), rank=rank,
                 meta={"shard_axis": 0, "parts": "gate_proj:32,up_proj:32"}, shard=Shard(rank, 2, 0, 64))  # fmt: skip
    result = audit(tmp_path)[1]
    want = {"none": None, "other rank": "TP-SHARD", "scale": "Q-SCALE", "one global scale": "Q-SCALE"}[fault]
    assert (first(result)["class"] if result["findings"] else None) == want, result["findings"]
    if fault == "one global scale":
        assert first(result)["constant"]["value"] == pytest.approx(0.5, rel=1e-6)
    if fault == "scale":  # one group of 128: that another group has this scale is chance
        assert first(result)["ranks"] == [1] and first(result)["constant"]["value"] == pytest.approx(2, rel=1e-6)


@pytest.mark.parametrize("fault", ["none", "other rank", "scale"])
def test_column_shards_of_float8_blocks(fault: str, tmp_path: pathlib.Path) -> None:
    """down_proj of three ranks, cut within blocks of 32 x 32: each rank's first block is the end of one."""
    rng = np.random.default_rng(42)
    code, scale = e4m3(rng.standard_normal((64, 144)) * 40), rng.uniform(0.01, 0.03, (2, 5)).astype(np.float32)
    values = code * scale.astype(np.float64).repeat(32, 0).repeat(32, 1)[:, :144]
    if fault == "scale":
        values[32:, 96:128] *= 3
    with Writer(tmp_path) as rec:
        rec.world_size = 3
        config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [32, 32]}}
        rec.files = ck.folder({STEM + "weight": ck.raw_e4m3(code), STEM + "weight_scale_inv": scale}, {"model_type": "llama"} | config)
        for rank in range(3):
            take = (rank + 1) % 3 if fault == "other rank" else rank
            hold(rec, NAME, values[:, 48 * take : 48 * take + 48], rank=rank, meta={"shard_axis": 1}, shard=Shard(rank, 3, 48 * rank, 144))
    result = audit(tmp_path)[1]
    want = {"none": None, "other rank": "TP-SHARD", "scale": "Q-SCALE"}[fault]
    assert (first(result)["class"] if result["findings"] else None) == want, result["findings"]
    assert fault != "scale" or (first(result)["ranks"] == [2] and first(result)["constant"]["value"] == pytest.approx(3, rel=1e-6))
    assert fault != "none" or [m["checkpoint"] for m in result["memory"]] == [STEM + "weight"] * 3

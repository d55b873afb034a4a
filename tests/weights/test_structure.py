"""assay weights: what a checkpoint lacks, has too much of, or has in another shape than its configuration asks for."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
from typing import Any

import numpy as np
import pytest

from cases.generators import checkpoint as ck
from cases.generators.kvscale import e4m3

ROOT = pathlib.Path(__file__).resolve().parents[2]
ASSAY = os.environ.get("ASSAY_BINARY", str(ROOT / "build" / "assay"))

H, VOCAB, LATENT, QUERY, EXPERTS = 16, 24, 8, 12, 4
CONFIG = {
    "model_type": "deepseek_v3", "vocab_size": VOCAB, "hidden_size": H, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 2, "kv_lora_rank": LATENT, "q_lora_rank": QUERY, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4,
    "v_head_dim": 6, "n_routed_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": 10, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1, "num_nextn_predict_layers": 0, "tie_word_embeddings": False,
}  # fmt: skip


def model() -> dict[str, np.ndarray]:
    """All tensors of CONFIG: a dense layer and one of experts."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, H), "model.norm.weight": (H,), "lm_head.weight": (VOCAB, H)}

    def mlp(prefix: str, f: int) -> None:
        shapes.update({prefix + "gate_proj.weight": (f, H), prefix + "up_proj.weight": (f, H), prefix + "down_proj.weight": (H, f)})

    for layer in range(2):
        stem = f"model.layers.{layer}."
        for name, shape in {"input_layernorm": (H,), "post_attention_layernorm": (H,), "self_attn.q_a_proj": (QUERY, H),
                            "self_attn.q_a_layernorm": (QUERY,), "self_attn.q_b_proj": (16, QUERY),
                            "self_attn.kv_a_proj_with_mqa": (LATENT + 4, H), "self_attn.kv_a_layernorm": (LATENT,),
                            "self_attn.kv_b_proj": (20, LATENT), "self_attn.o_proj": (H, 12)}.items():  # fmt: skip
            shapes[stem + name + ".weight"] = shape
    mlp("model.layers.0.mlp.", 24)
    mlp("model.layers.1.mlp.shared_experts.", 10)
    for expert in range(EXPERTS):
        mlp(f"model.layers.1.mlp.experts.{expert}.", 10)
    shapes |= {"model.layers.1.mlp.gate.weight": (EXPERTS, H), "model.layers.1.mlp.gate.e_score_correction_bias": (EXPERTS,)}
    rng = np.random.default_rng(11)
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def audit(folder: pathlib.Path, tensors: dict[str, Any], config: dict[str, Any], *more: str) -> tuple[list[dict[str, Any]], list[str]]:
    """Findings and notes."""
    folder.mkdir(exist_ok=True)
    for name, data in ck.folder(tensors, config).items():
        (folder / name).write_bytes(data)
    done = subprocess.run([ASSAY, "weights", "--json", str(folder), *more], capture_output=True, text=True, timeout=120)
    assert done.returncode in (0, 1), done.stderr
    result = json.loads(done.stdout)
    assert bool(result["findings"]) == (done.returncode == 1)
    return [f["first_bad"] for f in result["findings"]], result["notes"]


MLP = "model.layers.0.mlp."
EXPERT = "model.layers.1.mlp.experts.3."


@pytest.mark.parametrize(
    "drop, add, cls, names, says",
    [
        ([], {}, None, [], ""),
        (["model.layers.1.mlp.shared_experts.down_proj.weight"], {}, "LOAD", ["layers.1.mlp.shared_experts.down_proj.weight"], "is missing"),
        (["model.layers.1.self_attn.kv_a_layernorm.weight"], {}, "LOAD", ["layers.1.attn.kv_a_layernorm.weight"], "is missing"),
        ([EXPERT + p + ".weight" for p in ("gate_proj", "up_proj", "down_proj")], {}, "LOAD",
         [f"layers.1.mlp.experts.3.{p}.weight" for p in ("gate_proj", "up_proj", "down_proj")], "is missing"),
        ([], {MLP + "foo_proj.weight": (H, H)}, "LOAD", ["layers.0.mlp.foo_proj.weight"], "has no place"),
        ([], {"model.extra": (H,)}, "LOAD", ["extra"], "has no place"),
        ([], {"model.layers.0.self_attn.q_a_proj.bias": (QUERY,)}, "LOAD", ["layers.0.attn.q_a_proj.bias"], "has no place"),
        ([], {MLP + "down_proj.weight": (24, H)}, "Q-LAYOUT", ["layers.0.mlp.down_proj.weight"], "stored transposed"),
        ([], {MLP + "down_proj.weight": (H, 20)}, "LOAD", ["layers.0.mlp.down_proj.weight"], "[16, 20], the config asks for [16, 24]"),
        (["lm_head.weight"], {}, "LOAD", ["lm_head.weight"], "is missing"),
        ([name for name in model() if ".layers.1." in name], {}, "LOAD", ["layers.1.input_layernorm.weight"], "nothing of layer 1"),
    ],
    ids=["right", "shared", "norm", "expert", "projection", "extra", "bias", "transposed", "cut", "head", "layer"],
)  # fmt: skip
def test_held_against_config(drop: list[str], add: dict[str, Any], cls: str | None, names: list[str], says: str, tmp_path: pathlib.Path) -> None:
    tensors = {name: x for name, x in model().items() if name not in drop}
    rng = np.random.default_rng(12)
    tensors |= {name: rng.standard_normal(shape).astype(np.float32) for name, shape in add.items()}
    found, notes = audit(tmp_path, tensors, CONFIG)
    assert [(f["name"], f["class"]) for f in found] == [(name, cls) for name in names]
    assert all(says in f["evidence"][0] for f in found), found
    assert not any("held against the configuration" in note for note in notes)


def test_all_that_is_wrong_is_said_and_a_pattern_chooses(tmp_path: pathlib.Path) -> None:
    tensors = model()
    del tensors["model.layers.0.self_attn.o_proj.weight"]
    tensors[MLP + "up_proj.weight"] = tensors[MLP + "up_proj.weight"].T.copy()
    assert [f["name"] for f in audit(tmp_path, tensors, CONFIG)[0]] == ["layers.0.attn.o_proj.weight", "layers.0.mlp.up_proj.weight"]
    assert [f["name"] for f in audit(tmp_path, tensors, CONFIG, "--only", "*up_proj*")[0]] == ["layers.0.mlp.up_proj.weight"]


def test_a_part_of_a_model_lacks_nothing_but_its_shapes_are_held(tmp_path: pathlib.Path) -> None:
    tensors = {name: x for name, x in model().items() if ".layers.0.mlp." in name}
    assert audit(tmp_path, tensors, CONFIG)[0] == []
    tensors[MLP + "gate_proj.weight"] = tensors[MLP + "gate_proj.weight"].T.copy()
    assert [f["class"] for f in audit(tmp_path, tensors, CONFIG)[0]] == ["Q-LAYOUT"]


def test_a_configuration_of_an_unknown_family_is_said(tmp_path: pathlib.Path) -> None:
    found, notes = audit(tmp_path, model(), CONFIG | {"model_type": "unheard_of"})
    assert found == [] and any("not held against the configuration" in note for note in notes)


def float8(scale: np.ndarray, code: np.ndarray | None = None) -> dict[str, Any]:
    """64 x 128 codes in blocks of 32 x 32."""
    code = e4m3(np.random.default_rng(13).standard_normal((64, 128)) * 40) if code is None else code
    stem = "model.layers.0.mlp.down_proj.weight"
    return {stem: ck.raw_e4m3(code), stem + "_scale_inv": scale.astype(np.float32)}


FLOAT8 = {"model_type": "deepseek_v3", "quantization_config": {"quant_method": "fp8", "weight_block_size": [32, 32]}}


@pytest.mark.parametrize("factor, finds", [(1.0, False), (100.0, False), (1e4, True), (1e-6, False)])
def test_scale_far_above_the_others_of_its_weight(factor: float, finds: bool, tmp_path: pathlib.Path) -> None:
    scale = np.random.default_rng(14).uniform(0.01, 0.03, (2, 4))
    scale[1, 2] *= factor
    found, _ = audit(tmp_path, float8(scale), FLOAT8)
    assert [(f["name"], f["class"]) for f in found] == ([("layers.0.mlp.down_proj.weight", "Q-SCALE")] if finds else [])
    if finds:
        assert "row 32, column 64" in found[0]["evidence"][0]
        assert found[0]["constant"]["value"] == pytest.approx(np.float32(scale[1, 2]) / np.sort(scale.ravel())[4], rel=1e-5)


def test_scale_of_a_block_of_zeros_may_be_anything(tmp_path: pathlib.Path) -> None:
    scale = np.full((2, 4), 1e-4)
    scale[0, 1] = 1.0
    code = e4m3(np.random.default_rng(15).standard_normal((64, 128)) * 40)
    code[:32, 32:64] = 0
    assert audit(tmp_path, float8(scale, code), FLOAT8)[0] == []


@pytest.mark.parametrize("value", [0.0, -1.0, np.inf])
def test_global_scale_that_is_not_positive(value: float, tmp_path: pathlib.Path) -> None:
    rng, stem = np.random.default_rng(16), "model.layers.0.mlp.down_proj."
    tensors = {
        stem + "weight": rng.integers(0, 256, (8, 16), np.uint8),
        stem + "weight_scale": ck.raw_e4m3(np.ones((8, 2))),
        stem + "weight_scale_2": np.array(value, np.float32),
    }
    found, _ = audit(tmp_path, tensors, {"model_type": "llama", "quantization_config": {"quant_method": "modelopt"}})
    assert found[0]["class"] == "Q-SCALE" and "the global scale is" in found[0]["evidence"][0]


def test_elements_that_are_not_finite(tmp_path: pathlib.Path) -> None:
    tensors = model()
    tensors[MLP + "up_proj.weight"][3, 5] = np.nan
    tensors["model.layers.1.self_attn.o_proj.weight"][0, 0] = np.inf
    found, _ = audit(tmp_path, tensors, CONFIG)
    assert [(f["name"], f["class"]) for f in found] == [("layers.0.mlp.up_proj.weight", "LOAD"), ("layers.1.attn.o_proj.weight", "LOAD")]
    assert all("1 of " in f["evidence"][0] for f in found)


@pytest.mark.parametrize("factor, finds", [(1e3, False), (1e5, True), (1e-5, True)])
def test_size_unlike_that_of_its_kind(factor: float, finds: bool, tmp_path: pathlib.Path) -> None:
    tensors = model()
    tensors[EXPERT + "up_proj.weight"] *= np.float32(factor)
    found, _ = audit(tmp_path, tensors, CONFIG)
    assert [f["name"] for f in found] == (["layers.1.mlp.experts.3.up_proj.weight"] if finds else [])
    assert not finds or found[0]["constant"]["value"] == pytest.approx(factor, rel=0.5)


@pytest.mark.parametrize("head", ["absent", "equal", "different"])
def test_head_that_is_tied(head: str, tmp_path: pathlib.Path) -> None:
    tensors = model()
    if head == "absent":
        del tensors["lm_head.weight"]
    if head == "equal":
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    found, _ = audit(tmp_path, tensors, CONFIG | {"tie_word_embeddings": True})
    assert [(f["name"], f["class"]) for f in found] == ([("lm_head.weight", "LOAD")] if head == "different" else [])


@pytest.mark.parametrize("drop, name", [(".layers.1.", "layers.1.input_layernorm.weight"), ("lm_head", "lm_head.weight")])
def test_whole_layer_or_head_is_missed_in_unknown_families_too(drop: str, name: str, tmp_path: pathlib.Path) -> None:
    tensors = {n: x for n, x in model().items() if drop not in n}
    found, _ = audit(tmp_path, tensors, CONFIG | {"model_type": "unheard_of"})
    assert [(f["name"], f["class"]) for f in found] == [(name, "LOAD")]


FLOAT8_LLAMA = {"model_type": "llama", "quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8"}}
ATTENTION = "model.layers.0.self_attn."


@pytest.mark.parametrize("name", [MLP + "down_proj.input_scale", ATTENTION + "k_proj.k_scale", ATTENTION + "attn.v_scale"])
@pytest.mark.parametrize("value", [0.5, 0.0, -1.0, np.nan, np.inf])
def test_scale_of_an_activation_or_cache(name: str, value: float, tmp_path: pathlib.Path) -> None:
    tensors = float8(np.array(0.01)) | {name: np.array(value, np.float32)}
    tensors[MLP + "down_proj.weight_scale"] = tensors.pop(MLP + "down_proj.weight_scale_inv")
    found, _ = audit(tmp_path, tensors, FLOAT8_LLAMA)
    ours = name.replace("model.", "").replace("self_attn", "attn")
    assert [(f["name"], f["class"]) for f in found] == ([] if value == 0.5 else [(ours, "Q-SCALE")])



@pytest.mark.parametrize(
    "config, drop",
    [
        ({"quant_method": "gptq", "bits": 4, "sym": False, "desc_act": True}, "qzeros"),
        ({"quant_method": "gptq", "bits": 4, "sym": False, "desc_act": True}, "g_idx"),
        ({"quant_method": "gptq", "bits": 4, "sym": False, "desc_act": True}, "scales"),
        ({"quant_method": "awq", "bits": 4, "zero_point": True}, "qzeros"),
        ({"quant_method": "awq", "bits": 4, "zero_point": True}, ""),
        ({"quant_method": "gptq", "bits": 4, "sym": False, "desc_act": True}, ""),
        ({"quant_method": "gptq", "bits": 4, "sym": True, "desc_act": False}, "g_idx"),
        ({"quant_method": "auto-round", "bits": 4, "packing_format": "auto_round:auto_awq"}, ""),
    ],
)  # fmt: skip
def test_companions_of_packed_integers(config: dict[str, Any], drop: str, tmp_path: pathlib.Path) -> None:
    """64 x 64 in groups of 32; AWQ packs along the outputs, which the shapes tell where the method does not."""
    rng, awq = np.random.default_rng(17), config["quant_method"] != "gptq"
    shapes = {"qweight": (64, 8) if awq else (8, 64), "qzeros": (2, 8), **({} if awq else {"g_idx": (64,)})}
    tensors: dict[str, Any] = {MLP + "down_proj." + n: rng.integers(0, 2**31, s).astype(np.int32) for n, s in shapes.items()}
    if not awq:
        tensors[MLP + "down_proj.g_idx"] = rng.integers(0, 2, 64).astype(np.int32)
    tensors[MLP + "down_proj.scales"] = rng.uniform(0.01, 0.02, (2, 64)).astype(np.float16)
    tensors.pop(MLP + "down_proj." + drop, None)
    found, _ = audit(tmp_path, tensors, {"model_type": "llama", "quantization_config": config})
    wrong = bool(drop) and (drop != "g_idx" or config["desc_act"])
    assert [(f["name"], f["class"]) for f in found] == ([("layers.0.mlp.down_proj.weight", "LOAD")] if wrong else [])
    assert not wrong or drop.rstrip("s") in found[0]["evidence"][0]


def nvfp4() -> dict[str, Any]:
    rng = np.random.default_rng(18)
    return {MLP + "down_proj.weight": rng.integers(0, 256, (8, 16), np.uint8), MLP + "down_proj.weight_scale": ck.raw_e4m3(np.ones((8, 2))),
            MLP + "down_proj.weight_scale_2": np.array(0.5, np.float32)}  # fmt: skip


def test_parts_of_a_weight_that_are_missing(tmp_path: pathlib.Path) -> None:
    config = {"model_type": "llama", "quantization_config": {"quant_method": "modelopt"}}
    assert audit(tmp_path, nvfp4(), config)[0] == []
    for part, says in (("weight_scale_2", "global scale"), ("weight_scale", "scale"), ("weight", "what it scales")):
        tensors = nvfp4()
        del tensors[MLP + "down_proj." + part]
        if part == "weight_scale":
            del tensors[MLP + "down_proj.weight_scale_2"]
            tensors[MLP + "down_proj.weight"] = ck.raw_e4m3(np.ones((8, 16)))
        if part == "weight":
            tensors["model.norm.weight"] = np.ones(4, np.float32)
        found, _ = audit(tmp_path, tensors, config)
        assert [(f["name"], f["class"]) for f in found] == [("layers.0.mlp.down_proj.weight", "LOAD")], part
        assert says in found[0]["evidence"][0] and "missing" in found[0]["evidence"][0]


def test_class_does_not_follow_from_words_in_names(tmp_path: pathlib.Path) -> None:
    """Names of tensors and folders stand in the messages, and may hold any word."""
    stem = "model.layers.0.missing_bias.weight"
    tensors = {stem: ck.raw_e4m3(np.ones((8, 16))), stem + "_scale": np.ones((3, 5), np.float32), "model.norm.weight": np.ones(4, np.float32)}
    config = {"model_type": "llama", "quantization_config": {"quant_method": "fp8", "weight_block_size": [4, 4]}}
    found, _ = audit(tmp_path / "missing", tensors, config)
    assert [(f["name"], f["class"]) for f in found] == [("layers.0.missing_bias.weight", "Q-LAYOUT")]


@pytest.mark.parametrize("name", ["*.weight", "model.layers.?.self_attn.[a-z]_proj.weight"])
def test_name_of_a_tensor_is_no_pattern(name: str, tmp_path: pathlib.Path) -> None:
    """A tensor of a form that is not decoded says nothing of others that are not there."""
    tensors = model() | {name: np.zeros((128, 1), np.uint8)}
    del tensors["model.layers.0.self_attn.o_proj.weight"]
    found, notes = audit(tmp_path, tensors, CONFIG | {"quantization_config": {"quant_method": "bitsandbytes"}})
    assert any("is not decoded" in note for note in notes)
    assert ("layers.0.attn.o_proj.weight", "LOAD") in [(f["name"], f["class"]) for f in found]


def test_four_bits_under_exponents_beside_their_codes(tmp_path: pathlib.Path) -> None:
    """What Quark writes: MXFP4 codes and scales under the names of a one-byte weight."""
    rng = np.random.default_rng(19)
    tensors = {MLP + "down_proj.weight": rng.integers(0, 256, (8, 32), np.uint8), MLP + "down_proj.weight_scale": rng.integers(118, 124, (8, 2), np.uint8)}
    found, _ = audit(tmp_path, tensors, {"model_type": "llama", "quantization_config": {"quant_method": "quark"}})
    assert found == []


def test_form_of_codes_that_is_not_known_is_no_finding(tmp_path: pathlib.Path) -> None:
    """bitsandbytes: codes in one column beside tables of their own."""
    stem = MLP + "down_proj.weight"
    codes = {stem: np.zeros((128, 1), np.uint8), stem + ".absmax": np.ones(4, np.float32), stem + ".quant_map": np.ones(16, np.float32)}
    config = CONFIG | {"quantization_config": {"quant_method": "bitsandbytes"}}
    found, notes = audit(tmp_path, model() | codes, config)
    assert found == [] and any('quant_method "bitsandbytes" is not decoded' in note for note in notes)

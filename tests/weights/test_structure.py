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

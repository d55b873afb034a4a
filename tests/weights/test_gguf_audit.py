"""assay weights on GGUF files that hold what they should not, or lack what they should have."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
from typing import Any, Callable

import numpy as np
import pytest

gguf = pytest.importorskip("gguf")

ROOT = pathlib.Path(__file__).resolve().parents[2]
ASSAY = os.environ.get("ASSAY_BINARY", str(ROOT / "build" / "assay"))
RNG = np.random.default_rng(21)


def write(path: pathlib.Path, arch: str, tensors: dict[str, Any], more: Callable[[Any], None] = lambda _: None) -> pathlib.Path:
    """tensors: arrays, or pairs of raw bytes and a ggml type."""
    writer = gguf.GGUFWriter(path, arch)
    more(writer)
    for name, x in tensors.items():
        if isinstance(x, tuple):
            writer.add_tensor(name, x[0], raw_dtype=x[1])
        else:
            writer.add_tensor(name, x)
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    return path


def weights(path: pathlib.Path, *more: str) -> tuple[int, dict[str, Any], str]:
    done = subprocess.run([ASSAY, "weights", "--json", str(path), *more], capture_output=True, text=True, timeout=120)
    return done.returncode, json.loads(done.stdout) if done.stdout else {}, done.stderr


def found(result: dict[str, Any]) -> list[tuple[str, str]]:
    return [(f["first_bad"]["name"], f["first_bad"]["class"]) for f in result["findings"]]


def random(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def llama(writer: Any) -> None:
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(16)
    writer.add_feed_forward_length(24)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)


def llama_tensors() -> dict[str, np.ndarray]:
    return {
        "token_embd.weight": random(20, 16), "output_norm.weight": random(16), "output.weight": random(20, 16),
        "blk.0.attn_norm.weight": random(16), "blk.0.ffn_norm.weight": random(16), "blk.0.attn_q.weight": random(16, 16),
        "blk.0.attn_k.weight": random(8, 16), "blk.0.attn_v.weight": random(8, 16), "blk.0.attn_output.weight": random(16, 16),
        "blk.0.ffn_gate.weight": random(24, 16), "blk.0.ffn_up.weight": random(24, 16), "blk.0.ffn_down.weight": random(16, 24),
    }  # fmt: skip


def test_a_whole_model_has_no_findings_with_rope_factors_either(tmp_path: pathlib.Path) -> None:
    tensors = llama_tensors() | {"rope_freqs.weight": random(2)}
    code, result, _ = weights(write(tmp_path / "m.gguf", "llama", tensors, llama))
    assert code == 0 and not any("not held against" in note for note in result["notes"]), result


@pytest.mark.parametrize("name", ["blk.0.foo.weight", "foo.weight"])
@pytest.mark.parametrize("arch", ["llama", "unheard_of"])
def test_tensor_of_unknown_name_is_measured_and_has_no_place(name: str, arch: str, tmp_path: pathlib.Path) -> None:
    ours = name.replace("blk.0.", "layers.0.")
    tensors = llama_tensors() | {name: np.full((4, 16), np.nan, np.float32)}
    code, result, _ = weights(write(tmp_path / "m.gguf", arch, tensors, llama))
    says = [f["first_bad"]["evidence"][0] for f in result["findings"]]
    assert code == 1 and set(found(result)) == {(ours, "LOAD")}
    assert any("64 of 64 elements are NaN" in e for e in says)
    assert any("has no place" in e for e in says) == (arch == "llama")


def test_missing_half_of_kv_b_proj_is_found(tmp_path: pathlib.Path) -> None:
    tensors = {"blk.0.attn_k_b.weight": random(2, 8, 4)}
    code, result, _ = weights(write(tmp_path / "m.gguf", "deepseek2", tensors))
    assert code == 1 and found(result) == [("layers.0.attn.kv_b_proj.weight", "LOAD")]
    assert "attn_v_b.weight" in result["findings"][0]["first_bad"]["evidence"][0]


def test_two_tensors_for_one_weight_are_found(tmp_path: pathlib.Path) -> None:
    tensors = {"blk.0.exp_probs_b.bias": random(4), "blk.0.exp_probs_b": random(4)}
    code, result, _ = weights(write(tmp_path / "m.gguf", "deepseek2", tensors))
    assert code == 1 and found(result) == [("layers.0.mlp.gate.e_score_correction_bias", "LOAD")]
    assert "blk.0.exp_probs_b" in result["findings"][0]["first_bad"]["evidence"][0]


@pytest.mark.parametrize("arch, ours", [("glm4moe", "post_attention_layernorm"), ("gemma2", "post_attention_norm")])
def test_norm_behind_the_attention_is_no_norm_before_the_mlp(arch: str, ours: str, tmp_path: pathlib.Path) -> None:
    tensors = {"blk.0.post_attention_norm.weight": random(8)} | ({"blk.0.ffn_norm.weight": random(8)} if arch == "gemma2" else {})
    _, result, _ = weights(write(tmp_path / "m.gguf", arch, tensors))
    names = {w["name"] for w in result["weights"]}
    assert f"model.layers.0.{ours}.weight" in names and len(names) == len(tensors)
    assert not any("as \"" in f["first_bad"]["evidence"][0] for f in result["findings"])


def test_nothing_is_no_success(tmp_path: pathlib.Path) -> None:
    code, _, error = weights(write(tmp_path / "m.gguf", "llama", {}))
    assert code == 3 and "holds no weights" in error
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    code, _, error = weights(tmp_path / "empty")
    assert code == 3 and "holds no weights" in error


@pytest.mark.parametrize("alone", [True, False])
def test_type_that_is_not_decoded_is_no_finding(alone: bool, tmp_path: pathlib.Path) -> None:
    kind = gguf.GGMLQuantizationType.IQ2_XXS
    elems, size = gguf.GGML_QUANT_SIZES[kind]
    tensors: dict[str, Any] = {"blk.0.ffn_down.weight": (np.zeros((4, size), np.uint8), kind)}
    if not alone:
        tensors["blk.0.ffn_up.weight"] = random(4, elems)
    code, result, error = weights(write(tmp_path / "m.gguf", "qwen2", tensors))
    if alone:
        assert code == 3 and "iq2_xxs is not decoded" in error
    else:
        assert code == 0 and any("iq2_xxs is not decoded" in note for note in result["notes"])


def test_nan_scale_of_a_block_is_a_fault_of_scales(tmp_path: pathlib.Path) -> None:
    kind = gguf.GGMLQuantizationType.Q8_0
    raw = gguf.quantize(random(4, 64), kind)
    raw[2, 34:36] = np.frombuffer(np.float16(np.nan).tobytes(), np.uint8)
    code, result, _ = weights(write(tmp_path / "m.gguf", "qwen2", {"blk.0.ffn_down.weight": (raw, kind)}))
    assert code == 1 and found(result) == [("layers.0.mlp.down_proj.weight", "Q-SCALE")]
    assert "32 of 256" in result["findings"][0]["first_bad"]["evidence"][0]


def test_llama_without_heads_is_damaged(tmp_path: pathlib.Path) -> None:
    code, _, error = weights(write(tmp_path / "m.gguf", "llama", {"blk.0.attn_q.weight": random(16, 16)}))
    assert code == 3 and "attention.head_count" in error


def split(folder: pathlib.Path, count: int, files: int, numbers: list[int]) -> pathlib.Path:
    for i in range(files):
        def keys(writer: Any, number: int = numbers[i]) -> None:
            writer.add_uint16("split.no", number)
            writer.add_uint16("split.count", count)

        write(folder / f"m-{i + 1:05d}-of-{files:05d}.gguf", "qwen2", {f"blk.{i}.ffn_down.weight": random(4, 8)}, keys)
    return folder / f"m-00001-of-{files:05d}.gguf"


def test_split_model_is_held_to_its_metadata(tmp_path: pathlib.Path) -> None:
    for name in ("right", "fewer", "order", "alone"):
        (tmp_path / name).mkdir()
    assert weights(split(tmp_path / "right", 2, 2, [0, 1]))[0] == 0
    code, _, error = weights(split(tmp_path / "fewer", 3, 2, [0, 1]))
    assert code == 3 and "split.count says that the model has 3 files" in error
    code, _, error = weights(split(tmp_path / "order", 2, 2, [0, 0]))
    assert code == 3 and "split.no" in error
    first = split(tmp_path / "alone", 2, 2, [0, 1]).rename(tmp_path / "alone" / "m.gguf")
    assert weights(first)[0] == 3


def test_decoded_file_above_the_limit_is_refused_and_leaves_nothing(tmp_path: pathlib.Path) -> None:
    model = write(tmp_path / "m.gguf", "qwen2", {"blk.0.ffn_down.weight": random(64, 64)})
    out = tmp_path / "out"
    out.mkdir()
    argv = f"ulimit -f 8; exec '{ASSAY}' weights '{model}' --decode '{out}/decoded.safetensors'"
    done = subprocess.run(["bash", "-c", argv], capture_output=True, text=True, timeout=120)
    assert done.returncode == 4 and "limit of a file's size" in done.stderr, done.stderr
    assert list(out.iterdir()) == []


def test_prompt_without_a_tokenizer_is_told_of_ids(tmp_path: pathlib.Path) -> None:
    model = write(tmp_path / "m.gguf", "llama", llama_tensors(), llama)
    done = subprocess.run([ASSAY, "reference", str(model), "--prompt", "a"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 3 and "no tokenizer.json beside it" in done.stderr and "--tokens" in done.stderr

"""The shipped model as a GGUF file that the gguf package wrote, run beside the safetensors that it was made of."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
from typing import Any

import numpy as np
import pytest

gguf = pytest.importorskip("gguf")
torch = pytest.importorskip("torch")
from safetensors.torch import load_file, save_file  # noqa: E402

import assay  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parents[2]
ASSAY = os.environ.get("ASSAY_BINARY", str(ROOT / "build" / "assay"))
SHIPPED = ROOT / "models" / "kjv-mla-10m"
CONFIG = json.loads((SHIPPED / "config.json").read_text())
TOKENS = "0,17,204,33,5,911,64,2000,1,77"
Kind = gguf.GGMLQuantizationType


def shipped() -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for shard in sorted(SHIPPED.glob("*.safetensors")):
        tensors |= load_file(shard)
    return tensors


def together(tensors: dict[str, torch.Tensor], halves: bool) -> dict[str, torch.Tensor]:
    """As llama.cpp's converter lays them out: experts in one tensor, kv_b_proj cut into what absorbs and what is left."""
    out, experts = {}, {}
    heads, nope, value = (CONFIG[k] for k in ("num_attention_heads", "qk_nope_head_dim", "v_head_dim"))
    for name, w in tensors.items():
        if ".mlp.experts." in name:
            stem, _, rest = name.partition(".mlp.experts.")
            number, _, part = rest.partition(".")
            experts.setdefault(f"{stem}.mlp.experts.{part}", {})[int(number)] = w
        elif name.endswith("kv_b_proj.weight") and halves:
            by_head = w.reshape(heads, nope + value, -1)
            out[name.replace("kv_b", "k_b")] = by_head[:, :nope].swapaxes(1, 2).contiguous()
            out[name.replace("kv_b", "v_b")] = by_head[:, nope:].contiguous()
        else:
            out[name] = w
    return out | {name: torch.stack([parts[i] for i in range(len(parts))]) for name, parts in experts.items()}


def write(path: pathlib.Path, tensors: dict[str, torch.Tensor], halves: bool, kind: Any) -> None:
    """Matrices of layers in `kind`, everything else in float32, as the package quantises and names them."""
    names = gguf.TensorNameMap(gguf.MODEL_ARCH.DEEPSEEK2, CONFIG["num_hidden_layers"])
    writer = gguf.GGUFWriter(path, "deepseek2")
    writer.add_block_count(CONFIG["num_hidden_layers"])
    writer.add_context_length(CONFIG["max_position_embeddings"])
    writer.add_embedding_length(CONFIG["hidden_size"])
    writer.add_feed_forward_length(CONFIG["intermediate_size"])
    writer.add_head_count(CONFIG["num_attention_heads"])
    writer.add_head_count_kv(1 if halves else CONFIG["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(CONFIG["rms_norm_eps"])
    writer.add_vocab_size(CONFIG["vocab_size"])
    writer.add_leading_dense_block_count(CONFIG["first_k_dense_replace"])
    writer.add_q_lora_rank(CONFIG["q_lora_rank"])
    writer.add_kv_lora_rank(CONFIG["kv_lora_rank"])
    if halves:
        writer.add_key_length(CONFIG["kv_lora_rank"] + CONFIG["qk_rope_head_dim"])
        writer.add_value_length(CONFIG["kv_lora_rank"])
        writer.add_key_length_mla(CONFIG["qk_head_dim"])
        writer.add_value_length_mla(CONFIG["v_head_dim"])
    else:
        writer.add_key_length(CONFIG["qk_head_dim"])
        writer.add_value_length(CONFIG["v_head_dim"])
    writer.add_rope_dimension_count(CONFIG["qk_rope_head_dim"])
    writer.add_rope_freq_base(CONFIG["rope_parameters"]["rope_theta"])
    writer.add_expert_count(CONFIG["n_routed_experts"])
    writer.add_expert_used_count(CONFIG["num_experts_per_tok"])
    writer.add_expert_shared_count(CONFIG["n_shared_experts"])
    writer.add_expert_feed_forward_length(CONFIG["moe_intermediate_size"])
    writer.add_expert_weights_scale(CONFIG["routed_scaling_factor"])
    writer.add_expert_weights_norm(CONFIG["norm_topk_prob"])
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    for name, w in together(tensors, halves).items():
        theirs = names.get_name(name.replace("e_score_correction_bias", "e_score_correction.bias"), try_suffixes=(".weight", ".bias"))
        assert theirs is not None, name
        x = w.float().numpy()
        if is_quantised(name, w):
            writer.add_tensor(theirs, gguf.quantize(x, kind), raw_dtype=kind)
        else:
            writer.add_tensor(theirs, x)
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()


def is_quantised(name: str, w: torch.Tensor) -> bool:
    return w.dim() >= 2 and ".layers." in name and not name.endswith("mlp.gate.weight")


def logits(model: pathlib.Path, trace: pathlib.Path, *more: str) -> np.ndarray:
    argv = [ASSAY, "reference", str(model), "--tokens", TOKENS, "--max-tokens", "1", "--all-logits", "--ignore-eos",
            "--trace", str(trace), "--level", "payload", *more]  # fmt: skip
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (event,) = [e for e in assay.open(trace) if e.site == "logits"]
    return event.numpy()


@pytest.mark.parametrize("halves", [False, True], ids=["kv_b", "k_b and v_b"])
def test_values_that_the_file_keeps_give_the_same_logits(halves: bool, tmp_path: pathlib.Path) -> None:
    """bfloat16 loses nothing: the same weights through the same arithmetic, so that the bound is 0."""
    write(tmp_path / "m.gguf", shipped(), halves, Kind.BF16)
    for path in ("materialised", "absorbed"):
        want = logits(SHIPPED, tmp_path / f"{path}.plain", "--path", path)
        got = logits(tmp_path / "m.gguf", tmp_path / f"{path}.gguf", "--path", path)
        assert want.shape == (10, CONFIG["vocab_size"]) and np.isfinite(want).all()
        np.testing.assert_array_equal(got, want)


def test_quantised_file_gives_the_logits_of_its_dequantised_twin(tmp_path: pathlib.Path) -> None:
    """q8_0 is a half-precision scale (11 bits) times an integer of 8: exact in float32, the bound is 0 again. What the
    quantisation itself changes is far above that, or the two would prove nothing."""
    tensors = shipped()
    write(tmp_path / "m.gguf", tensors, False, Kind.Q8_0)
    twin = tmp_path / "twin"
    twin.mkdir()
    for name, w in tensors.items():
        x = w.float().numpy()
        if is_quantised(name, w):
            x = gguf.dequantize(gguf.quantize(x, Kind.Q8_0), Kind.Q8_0)
        tensors[name] = torch.from_numpy(np.ascontiguousarray(x))
    save_file(tensors, twin / "model.safetensors")
    (twin / "config.json").write_text(json.dumps(CONFIG))
    got, want = logits(tmp_path / "m.gguf", tmp_path / "a"), logits(twin, tmp_path / "b")
    np.testing.assert_array_equal(got, want)
    assert 1e-4 < np.abs(got - logits(SHIPPED, tmp_path / "c")).max() < 1

"""assay weights --decode against the packages that write the formats: gguf, torch, transformers (test_compressed_tensors.py has
compressed-tensors)."""

from __future__ import annotations

import pathlib
import subprocess

import numpy as np
import pytest

gguf = pytest.importorskip("gguf")
torch = pytest.importorskip("torch")
from decoded import ASSAY, audit, decode, folder  # noqa: E402

from cases.generators.weights import AWQ_ORDER, _packed  # noqa: E402

QUANTISED = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4", "NVFP4"]


def finite_blocks(rng: np.random.Generator, kind: gguf.GGMLQuantizationType, rows: int, blocks: int) -> np.ndarray:
    """Random bytes with every half-precision field a small finite number, so that all codes and scales occur."""
    elems, size = gguf.GGML_QUANT_SIZES[kind]
    raw = rng.integers(0, 256, (rows, blocks, size), np.uint8)
    halves = {"Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q2_K": [80, 82], "Q3_K": [108],
              "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208], "IQ4_NL": [0], "IQ4_XS": [0]}.get(kind.name, [])  # fmt: skip
    for at in halves:
        values = (rng.standard_normal((rows, blocks, 1)) * 0.01).astype(np.float16)
        raw[..., at : at + 2] = values.view(np.uint8).reshape(rows, blocks, 2)
    if kind.name == "MXFP4":
        raw[..., 0] = rng.integers(0, 140, (rows, blocks))  # e8m0; subnormal scales among them
    if kind.name == "NVFP4":
        raw[..., :4] = rng.integers(0, 0x7F, (rows, blocks, 4))
    return raw.reshape(rows, blocks * size)


@pytest.mark.parametrize("name", QUANTISED)
def test_ggml_type_equals_gguf_package(name: str, tmp_path: pathlib.Path) -> None:
    kind = gguf.GGMLQuantizationType[name]
    raw = finite_blocks(np.random.default_rng(7), kind, 5, 3)
    want = gguf.dequantize(raw, kind)
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_tensor("blk.0.ffn_down.weight", raw, raw_dtype=kind)
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    got = decode(path, tmp_path / "out.safetensors")["model.layers.0.mlp.down_proj.weight"]
    # Both round the exact value once or twice; products of a scale and a code are exact in float32 but for 25 bits.
    np.testing.assert_allclose(got, want, rtol=2.0**-23, atol=2.0**-23 * np.abs(want).max() * 2**-12)
    assert got.shape == want.shape


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("grid", ["tensor", "channel", "block"])
def test_float8_equals_torch(dtype: torch.dtype, grid: str, tmp_path: pathlib.Path) -> None:
    generator = torch.Generator().manual_seed(3)
    n, k = 300, 200
    code = (torch.randn(n, k, generator=generator) * 20).to(dtype)
    shape = {"tensor": (1,), "channel": (n, 1), "block": (3, 2)}[grid]
    scale = torch.rand(shape, generator=generator) + 0.01
    wide = {"tensor": scale, "channel": scale,
            "block": scale.repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k] if grid == "block" else scale}[grid]  # fmt: skip
    quantisation = {"quant_method": "fp8"} | ({"weight_block_size": [128, 128]} if grid == "block" else {})
    suffix = "weight_scale_inv" if grid == "block" else "weight_scale"
    stem = "model.layers.0.mlp.down_proj."
    path = folder(tmp_path, {stem + "weight": code, stem + suffix: scale}, {"model_type": "llama", "quantization_config": quantisation})
    got = decode(path, tmp_path / "out.safetensors")[stem + "weight"]
    np.testing.assert_array_equal(got, (code.float() * wide).numpy())


def test_exponent_scales_are_powers_of_two(tmp_path: pathlib.Path) -> None:
    code = torch.randn(128, 256, generator=torch.Generator().manual_seed(1)).to(torch.float8_e4m3fn)
    scale = torch.tensor([[120, 130]], dtype=torch.uint8)
    stem = "model.layers.0.mlp.down_proj."
    config = {"model_type": "llama", "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    path = folder(tmp_path, {stem + "weight": code, stem + "weight_scale_inv": scale.view(torch.float8_e8m0fnu)}, config)
    got = decode(path, tmp_path / "out.safetensors")[stem + "weight"]
    want = code.float().numpy() * np.repeat([2.0**-7, 2.0**3], 128).astype(np.float32)
    np.testing.assert_array_equal(got, want)


def test_gpt_oss_blocks_equal_transformers(tmp_path: pathlib.Path) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator = torch.Generator().manual_seed(11)
    blocks = torch.randint(0, 256, (2, 6, 3, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(110, 130, (2, 6, 3), generator=generator, dtype=torch.uint8)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    path = folder(tmp_path, {name + "_blocks": blocks, name + "_scales": scales}, {"model_type": "gpt_oss"})
    got = decode(path, tmp_path / "out.safetensors")[name]
    want = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).transpose(1, 2).numpy()
    np.testing.assert_array_equal(got, want)


def generated(path: pathlib.Path) -> list[int]:
    done = subprocess.run([ASSAY, "reference", str(path), "--tokens", "3,1,4,1,5", "--max-tokens", "12", "--ignore-eos", "--json"],
                          capture_output=True, text=True, timeout=120)  # fmt: skip
    assert done.returncode == 0, done.stderr
    import json

    return json.loads(done.stdout)["requests"][0]["tokens"]


LLAMA = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "vocab_size": 80, "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "tie_word_embeddings": False}  # fmt: skip


def llama_weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(12)
    shapes = {"model.embed_tokens.weight": (80, 64), "lm_head.weight": (80, 64), "model.norm.weight": (64,)}
    for layer in range(2):
        for name, shape in {"input_layernorm": (64,), "post_attention_layernorm": (64,), "self_attn.q_proj": (64, 64),
                            "self_attn.k_proj": (32, 64), "self_attn.v_proj": (32, 64), "self_attn.o_proj": (64, 64),
                            "mlp.gate_proj": (96, 64), "mlp.up_proj": (96, 64), "mlp.down_proj": (64, 96)}.items():  # fmt: skip
            shapes[f"model.layers.{layer}.{name}.weight"] = shape
    return {n: torch.randn(s, generator=generator) * (0.3 if len(s) == 2 else 0.1) + (len(s) == 1) for n, s in shapes.items()}


def test_reference_runs_gguf_like_safetensors(tmp_path: pathlib.Path) -> None:
    """A llama with permuted query and key rows, in float32: the same tokens as from the safetensors folder."""
    weights = llama_weights()
    plain = tmp_path / "plain"
    plain.mkdir()
    folder(plain, weights, LLAMA)
    llama_gguf(tmp_path / "m.gguf", weights)
    assert generated(tmp_path / "m.gguf") == generated(plain)


def llama_gguf(path: pathlib.Path, weights: dict[str, torch.Tensor], rope_factors: np.ndarray | None = None) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_context_length(128)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
    for name, w in weights.items():
        for part, heads in (("q_proj", 4), ("k_proj", 2)):
            if part in name:
                w = w.reshape(heads, 2, w.shape[0] // heads // 2, w.shape[1]).swapaxes(1, 2).reshape(w.shape)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), w.numpy())
    if rope_factors is not None:
        writer.add_tensor("rope_freqs.weight", rope_factors)
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()


def test_rope_factors_of_a_gguf_are_llama3_scaling(tmp_path: pathlib.Path) -> None:
    """The factors as llama.cpp's converter makes them. Unscaled, other tokens come out: the factors do something."""
    weights, scaling = llama_weights(), {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling["original_max_position_embeddings"] = 100
    wavelength = 2 * np.pi * 10000.0 ** (np.arange(8) / 8)
    smooth = (100 / wavelength - 1) / 3
    factors = np.where(smooth < 0, 8, np.where(smooth > 1, 1, 1 / ((1 - smooth) / 8 + smooth)))
    assert len(set(factors)) > 2
    for name, more in (("scaled", {"rope_scaling": scaling}), ("plain", {})):
        (tmp_path / name).mkdir()
        folder(tmp_path / name, weights, LLAMA | more)
    llama_gguf(tmp_path / "m.gguf", weights, factors.astype(np.float32))
    assert generated(tmp_path / "m.gguf") == generated(tmp_path / "scaled") != generated(tmp_path / "plain")
    # Factors that no Llama 3 has are refused by the runtime.
    llama_gguf(tmp_path / "odd.gguf", weights, factors[::-1].astype(np.float32).copy())
    done = subprocess.run([ASSAY, "reference", str(tmp_path / "odd.gguf"), "--tokens", "3"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 3 and "rope_freqs.weight" in done.stderr


MLA = {"vocab_size": 80, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
       "num_key_value_heads": 4, "kv_lora_rank": 32, "q_lora_rank": 24, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 16,
       "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 20, "n_group": 1, "topk_group": 1,
       "norm_topk_prob": True, "routed_scaling_factor": 2.5, "first_k_dense_replace": 1, "max_position_embeddings": 128,
       "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "rope_theta": 10000.0}  # fmt: skip


@pytest.mark.parametrize("arch, family", [("deepseek2", "deepseek_v3"), ("glm-dsa", "glm_moe_dsa")])
@pytest.mark.parametrize("halves", [False, True])
def test_reference_runs_mla_gguf_like_safetensors(arch: str, family: str, halves: bool, tmp_path: pathlib.Path) -> None:
    """Experts that lie together, kv_b_proj whole or in ggml's halves, the indexer of GLM-5 left out."""
    generator = torch.Generator().manual_seed(23)
    dense = {"ffn_gate": ("mlp.gate_proj", 96, 64), "ffn_up": ("mlp.up_proj", 96, 64), "ffn_down": ("mlp.down_proj", 64, 96)}
    shared = {"ffn_gate_shexp": ("mlp.shared_experts.gate_proj", 20, 64), "ffn_up_shexp": ("mlp.shared_experts.up_proj", 20, 64),
              "ffn_down_shexp": ("mlp.shared_experts.down_proj", 64, 20), "ffn_gate_inp": ("mlp.gate", 4, 64)}  # fmt: skip
    common = {"attn_norm": ("input_layernorm", 64), "ffn_norm": ("post_attention_layernorm", 64), "attn_q_a": ("self_attn.q_a_proj", 24, 64),
              "attn_q_a_norm": ("self_attn.q_a_layernorm", 24), "attn_q_b": ("self_attn.q_b_proj", 80, 24),
              "attn_kv_a_mqa": ("self_attn.kv_a_proj_with_mqa", 40, 64), "attn_kv_a_norm": ("self_attn.kv_a_layernorm", 32),
              "attn_output": ("self_attn.o_proj", 64, 64)}  # fmt: skip

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * (0.3 if len(shape) > 1 else 0.1) + (len(shape) == 1)

    ours = {"model.embed_tokens.weight": draw(80, 64), "lm_head.weight": draw(80, 64), "model.norm.weight": draw(64)}
    theirs = {"token_embd.weight": ours["model.embed_tokens.weight"], "output.weight": ours["lm_head.weight"],
              "output_norm.weight": ours["model.norm.weight"]}  # fmt: skip
    for layer in range(2):
        stem, block = f"model.layers.{layer}.", f"blk.{layer}."
        for name, (mine, *shape) in (common | (shared if layer else dense)).items():
            ours[f"{stem}{mine}.weight"] = theirs[f"{block}{name}.weight"] = draw(*shape)
        kv_b = ours[stem + "self_attn.kv_b_proj.weight"] = draw(4 * 28, 32)
        if halves:
            by_head = kv_b.reshape(4, 28, 32)
            theirs[block + "attn_k_b.weight"] = by_head[:, :12].swapaxes(1, 2).contiguous()
            theirs[block + "attn_v_b.weight"] = by_head[:, 12:].contiguous()
        else:
            theirs[block + "attn_kv_b.weight"] = kv_b
        if arch == "glm-dsa":
            theirs |= {block + "indexer.attn_k.weight": draw(8, 64), block + "indexer.k_norm.weight": draw(8)}
    theirs["blk.1.exp_probs_b.bias"] = ours["model.layers.1.mlp.gate.e_score_correction_bias"] = torch.randn(4, generator=generator)
    for name, mine, shape in (("gate", "gate_proj", (20, 64)), ("up", "up_proj", (20, 64)), ("down", "down_proj", (64, 20))):
        every = theirs[f"blk.1.ffn_{name}_exps.weight"] = draw(4, *shape)
        ours |= {f"model.layers.1.mlp.experts.{e}.{mine}.weight": every[e] for e in range(4)}
    plain = tmp_path / "plain"
    plain.mkdir()
    folder(plain, ours, MLA | {"model_type": family} | ({"mlp_layer_types": ["dense", "sparse"]} if arch == "glm-dsa" else {}))

    writer = gguf.GGUFWriter(tmp_path / "m.gguf", arch)
    for key, value in {"block_count": 2, "context_length": 128, "embedding_length": 64, "feed_forward_length": 96,
                       "attention.head_count": 4, "attention.head_count_kv": 1 if halves else 4, "attention.kv_lora_rank": 32,
                       "attention.q_lora_rank": 24, "rope.dimension_count": 8, "attention.key_length": 40 if halves else 20,
                       "attention.value_length": 32 if halves else 16, "attention.key_length_mla": 20, "attention.value_length_mla": 16,
                       "expert_count": 4, "expert_used_count": 2, "expert_shared_count": 1, "expert_feed_forward_length": 20,
                       "leading_dense_block_count": 1, "expert_gating_func": 2}.items():  # fmt: skip
        writer.add_uint32(f"{arch}.{key}", value)
    writer.add_float32(f"{arch}.attention.layer_norm_rms_epsilon", 1e-6)
    writer.add_float32(f"{arch}.expert_weights_scale", 2.5)
    writer.add_bool(f"{arch}.expert_weights_norm", True)
    for name, w in theirs.items():
        writer.add_tensor(name, w.numpy())
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    assert generated(tmp_path / "m.gguf") == generated(plain)
    done = subprocess.run([ASSAY, "weights", str(tmp_path / "m.gguf")], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "not held against" not in done.stdout, done.stdout


def test_reference_runs_float8_like_its_dequantised_twin(tmp_path: pathlib.Path) -> None:
    weights, plain, quantised = llama_weights(), {}, {}
    for name, w in weights.items():
        if w.dim() == 2 and ".layers." in name:
            scale = torch.ones((w.shape[0] + 31) // 32, (w.shape[1] + 31) // 32) * 0.004
            wide = scale.repeat_interleave(32, 0)[: w.shape[0]].repeat_interleave(32, 1)[:, : w.shape[1]]
            code = (w / wide).to(torch.float8_e4m3fn)
            quantised |= {name: code, name + "_scale_inv": scale}
            plain[name] = code.float() * wide
        else:
            plain[name] = quantised[name] = w
    for place, tensors, more in (("a", plain, {}), ("b", quantised, {"quantization_config": {"quant_method": "fp8", "weight_block_size": [32, 32]}})):  # fmt: skip
        (tmp_path / place).mkdir()
        folder(tmp_path / place, tensors, LLAMA | more)
    assert generated(tmp_path / "b") == generated(tmp_path / "a")


def in_format(fmt: str, w: torch.Tensor, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """A matrix [N, K] as a writer of the format stores it, rounded to the nearest code in each of its groups."""
    n, k = w.shape
    if fmt in ("nvfp4", "mxfp4"):
        group, table = 16 if fmt == "nvfp4" else 32, torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
        amax = w.reshape(n, k // group, group).abs().amax(-1) / 6
        if fmt == "nvfp4":
            stored = (amax / 0.01).to(torch.float8_e4m3fn)
            wide = stored.float() * 0.01
        else:
            exponent = torch.ceil(torch.log2(amax))
            stored, wide = (exponent + 127).to(torch.uint8), 2**exponent
        x = w / wide.repeat_interleave(group, 1)
        code = (x.abs()[..., None] - table).abs().argmin(-1) + 8 * (x < 0)
        packed = (code[:, 0::2] | code[:, 1::2] << 4).to(torch.uint8)
        if fmt == "nvfp4":
            return {"weight": packed, "weight_scale": stored, "weight_scale_2": torch.tensor(0.01)}
        return {"weight_packed": packed, "weight_scale": stored}
    order = torch.randperm(k, generator=generator) // 32 if fmt == "gptq" else torch.arange(k) // 32
    scale, zero = torch.empty(k // 32, n), torch.empty(k // 32, n, dtype=torch.int64)
    for g in range(k // 32):
        low, high = w[:, order == g].amin(1), w[:, order == g].amax(1)
        scale[g] = ((high - low) / 15).half().float()
        zero[g] = torch.round(-low / scale[g]).clamp(1, 15).long()
    code = (torch.round(w.T / scale[order]) + zero[order]).clamp(0, 15).long()  # [K, N]
    if fmt == "gptq":
        along, kept = _packed(code.numpy(), 0), _packed(zero.numpy() - 1, 1)
    else:
        along, kept = _packed(code.numpy(), 1, AWQ_ORDER), _packed(zero.numpy(), 1, AWQ_ORDER)
    more = {"g_idx": order.to(torch.int32)} if fmt == "gptq" else {}
    return {"qweight": torch.from_numpy(along), "qzeros": torch.from_numpy(kept), "scales": scale.half()} | more


QUANTISATION = {
    "nvfp4": {"quant_method": "modelopt", "quant_algo": "NVFP4"},
    "mxfp4": {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True, "sym": False},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True},
}


@pytest.mark.parametrize("fmt", QUANTISATION)
def test_reference_runs_what_it_decodes(fmt: str, tmp_path: pathlib.Path) -> None:
    """The decoded twin, near the numbers it was made of, gives the same tokens."""
    generator, quantised = torch.Generator().manual_seed(43), {}
    weights = llama_weights()
    for name, w in weights.items():
        if w.dim() == 2 and ".layers." in name:
            quantised |= {name.removesuffix("weight") + k: v for k, v in in_format(fmt, w, generator).items()}
        else:
            quantised[name] = w
    path = folder(tmp_path / "model", quantised, LLAMA | {"quantization_config": QUANTISATION[fmt]})
    code, result, _ = audit(path)
    assert code == 0, result["findings"]
    plain = decode(path, tmp_path / "out.safetensors")
    assert plain.keys() == weights.keys()
    for name, w in weights.items():
        assert np.abs(plain[name] - w.numpy()).max() <= 0.2 * np.abs(w.numpy()).max(), name
    twin = folder(tmp_path / "plain", {name: torch.from_numpy(x) for name, x in plain.items()}, LLAMA)
    assert generated(path) == generated(twin)


def test_checkpoint_is_not_written_over(tmp_path):
    path = folder(tmp_path, {"a.weight": torch.ones(2, 2)}, {})
    before = (path / "model.safetensors").read_bytes()
    argv = [ASSAY, "weights", str(path), "--decode", str(path / "model.safetensors")]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "name another file" in done.stderr
    assert (path / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize("axis", ["block", "row", "column"])
def test_experts_that_lie_together_in_float8(axis: str, tmp_path: pathlib.Path) -> None:
    """[E, rows, columns] with a grid or a scale a row of each expert; one a column is no layout of rows, and refused."""
    generator = torch.Generator().manual_seed(29)
    code = (torch.randn(3, 64, 64, generator=generator) * 20).to(torch.float8_e4m3fn)
    shape = {"block": (3, 2, 2), "row": (3, 64, 1), "column": (3, 1, 64)}[axis]
    scale = torch.rand(shape, generator=generator) + 0.01
    name = "model.layers.0.mlp.experts.gate_up_proj"
    quantisation = {"quant_method": "fp8"} | ({"weight_block_size": [32, 32]} if axis == "block" else {})
    suffix = "_scale_inv" if axis == "block" else "_scale"
    path = folder(tmp_path / "model", {name: code, name + suffix: scale}, {"model_type": "qwen3_moe", "quantization_config": quantisation})
    if axis == "column":
        result = audit(path)[1]
        assert [f["first_bad"]["class"] for f in result["findings"]] == ["Q-LAYOUT"]
        return
    wide = scale.repeat_interleave(32, 1).repeat_interleave(32, 2) if axis == "block" else scale
    np.testing.assert_array_equal(decode(path, tmp_path / "out.safetensors")[name], (code.float() * wide).numpy())

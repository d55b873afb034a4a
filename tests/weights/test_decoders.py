"""assay weights --decode against the packages that write the formats: gguf, torch, compressed-tensors, transformers."""

from __future__ import annotations

import os
import pathlib
import subprocess

import numpy as np
import pytest

gguf = pytest.importorskip("gguf")
torch = pytest.importorskip("torch")
from safetensors.numpy import load_file  # noqa: E402
from safetensors.torch import save_file  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parents[2]
ASSAY = os.environ.get("ASSAY_BINARY", str(ROOT / "build" / "assay"))


def decode(path: pathlib.Path, out: pathlib.Path, only: str = "") -> dict[str, np.ndarray]:
    """What assay makes of the checkpoint; findings (exit code 1) are the audit's business."""
    argv = [ASSAY, "weights", str(path), "--decode", str(out)] + (["--only", only] if only else [])
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120)
    assert done.returncode in (0, 1), done.stderr
    return load_file(out)


def folder(tmp_path: pathlib.Path, tensors: dict[str, torch.Tensor], config: dict) -> pathlib.Path:
    import json

    save_file({k: v.contiguous() for k, v in tensors.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


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


STEM = "model.layers.0.mlp.down_proj."


def compressed(fmt: str, args: dict, parts: dict[str, torch.Tensor], tmp_path: pathlib.Path) -> tuple[np.ndarray, np.ndarray]:
    """Compressed by compressed-tensors, decoded by it and by assay."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**args))
    compressor = BaseCompressor.get_value_from_registry(fmt)
    stored = compressor.compress(dict(parts), scheme)
    want = compressor.decompress(dict(stored), scheme)["weight"].to(torch.float32).numpy()
    quantisation = {"quant_method": "compressed-tensors", "format": fmt,
                    "config_groups": {"group_0": {"targets": ["Linear"], "weights": args}}}  # fmt: skip
    path = folder(tmp_path, {STEM + k: v.detach() for k, v in stored.items()}, {"model_type": "llama", "quantization_config": quantisation})
    return decode(path, tmp_path / "out.safetensors")[STEM + "weight"], want


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("strategy", ["group", "channel"])
def test_pack_quantized(bits: int, symmetric: bool, strategy: str, tmp_path: pathlib.Path) -> None:
    pytest.importorskip("compressed_tensors")
    generator = torch.Generator().manual_seed(bits)
    n, k, groups = 24, 96, 3 if strategy == "group" else 1
    scale = torch.rand(n, groups, generator=generator) * 0.02 + 0.01
    parts = {"weight": torch.randn(n, k, generator=generator) / 10, "weight_scale": scale}
    if not symmetric:
        parts["weight_zero_point"] = torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), (n, groups), generator=generator).to(torch.int8)
    args = {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": strategy}
    if strategy == "group":
        args["group_size"] = 32
    got, want = compressed("pack-quantized", args, parts, tmp_path)
    np.testing.assert_allclose(got, want, rtol=2.0**-23)


def test_nvfp4_pack_quantized(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("compressed_tensors")
    generator = torch.Generator().manual_seed(9)
    weight = torch.randn(16, 64, generator=generator)
    amax = weight.reshape(16, 4, 16).abs().amax(-1)
    global_scale = torch.tensor([448 * 6 / float(weight.abs().max())])
    scale = (amax / 6 * global_scale).to(torch.float8_e4m3fn).to(torch.float32)
    args = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16}
    got, want = compressed("nvfp4-pack-quantized", args, {"weight": weight, "weight_scale": scale, "weight_global_scale": global_scale}, tmp_path)  # fmt: skip
    # The package decodes to bfloat16.
    np.testing.assert_allclose(got, want, rtol=2.0**-7)


def test_mxfp4_pack_quantized(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("compressed_tensors")
    weight = torch.randn(16, 64, generator=torch.Generator().manual_seed(10))
    scale = 2.0 ** torch.floor(torch.log2(weight.reshape(16, 2, 32).abs().amax(-1) / 6))
    args = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "group", "group_size": 32}
    got, want = compressed("mxfp4-pack-quantized", args, {"weight": weight, "weight_scale": scale}, tmp_path)
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
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
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
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    assert generated(tmp_path / "m.gguf") == generated(plain)


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


def test_checkpoint_is_not_written_over(tmp_path):
    path = folder(tmp_path, {"a.weight": torch.ones(2, 2)}, {})
    before = (path / "model.safetensors").read_bytes()
    argv = [ASSAY, "weights", str(path), "--decode", str(path / "model.safetensors")]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "name another file" in done.stderr
    assert (path / "model.safetensors").read_bytes() == before

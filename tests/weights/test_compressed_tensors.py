"""assay weights --decode against compressed-tensors: every format that it writes."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("compressed_tensors")
from compressed_tensors.compressors import BaseCompressor  # noqa: E402
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme  # noqa: E402
from decoded import audit, decode, folder  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

STEM = "model.layers.0.mlp.down_proj."


def stored(fmt: str, args: dict[str, Any], parts: dict[str, torch.Tensor], path: pathlib.Path) -> np.ndarray:
    """Compressed by compressed-tensors into the folder, and what it decompresses that to."""
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**args))
    compressor = BaseCompressor.get_value_from_registry(fmt)
    packed = compressor.compress(dict(parts), scheme)
    want = compressor.decompress(dict(packed), scheme)["weight"].to(torch.float32).numpy()
    quantisation = {"quant_method": "compressed-tensors", "format": fmt,
                    "config_groups": {"group_0": {"targets": ["Linear"], "weights": args}}}  # fmt: skip
    folder(path, {STEM + k: v.detach() for k, v in packed.items()}, {"model_type": "llama", "quantization_config": quantisation})
    return want


def compressed(fmt: str, args: dict[str, Any], parts: dict[str, torch.Tensor], tmp_path: pathlib.Path) -> tuple[np.ndarray, np.ndarray]:
    want = stored(fmt, args, parts, tmp_path / "model")
    code, result, _ = audit(tmp_path / "model")
    assert code == 0, result["findings"]
    return decode(tmp_path / "model", tmp_path / "out.safetensors")[STEM + "weight"], want


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("strategy", ["group", "channel"])
def test_pack_quantized(bits: int, symmetric: bool, strategy: str, tmp_path: pathlib.Path) -> None:
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


def test_pack_quantized_in_activation_order(tmp_path: pathlib.Path) -> None:
    """weight_g_idx says the group of each column. The package no longer writes it, older ones did."""
    generator = torch.Generator().manual_seed(5)
    group = torch.randperm(96, generator=generator) // 32
    code = torch.randint(-8, 8, (24, 96), generator=generator).to(torch.int8)
    scale = torch.rand(24, 3, generator=generator) * 0.02 + 0.01
    args = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
    stored("pack-quantized", args, {"weight": code * 1.0, "weight_scale": torch.ones(24, 3)}, tmp_path / "model")
    tensors = load_file(tmp_path / "model" / "model.safetensors") | {STEM + "weight_scale": scale, STEM + "weight_g_idx": group.to(torch.int32)}
    folder(tmp_path / "model", tensors, json.loads((tmp_path / "model" / "config.json").read_text()))
    got = decode(tmp_path / "model", tmp_path / "out.safetensors")[STEM + "weight"]
    np.testing.assert_array_equal(got, (code * scale[:, group]).numpy())


@pytest.mark.parametrize("fmt, kind", [("int-quantized", "int"), ("naive-quantized", "int"), ("float-quantized", "float"), ("naive-quantized", "float")])
@pytest.mark.parametrize("strategy", ["tensor", "channel", "group", "block"])
def test_codes_of_a_byte(fmt: str, kind: str, strategy: str, tmp_path: pathlib.Path) -> None:
    generator = torch.Generator().manual_seed(6)
    n, k = 70, 96
    shape = {"tensor": (1,), "channel": (n, 1), "group": (n, 3), "block": (3, 3)}[strategy]
    scale = torch.rand(shape, generator=generator) * 0.01 + 0.005
    args: dict[str, Any] = {"num_bits": 8, "type": kind, "symmetric": True, "strategy": strategy}
    args |= {"group": {"group_size": 32}, "block": {"block_structure": [32, 32]}}.get(strategy, {})
    if strategy == "block":
        n = 64
        scale = scale[:2]
    if strategy == "tensor" and kind == "float":
        scale = scale.reshape(1)
    parts = {"weight": torch.randn(n, k, generator=generator) / 5, "weight_scale": scale}
    got, want = compressed(fmt, args, parts, tmp_path)
    np.testing.assert_allclose(got, want, rtol=2.0**-23)


@pytest.mark.parametrize("strategy", ["tensor", "channel", "group"])
def test_integers_with_zero_points(strategy: str, tmp_path: pathlib.Path) -> None:
    generator = torch.Generator().manual_seed(7)
    shape = {"tensor": (1,), "channel": (24, 1), "group": (24, 3)}[strategy]
    parts = {"weight": torch.randn(24, 96, generator=generator), "weight_scale": torch.rand(shape, generator=generator) * 0.02 + 0.01,
             "weight_zero_point": torch.randint(-20, 20, shape, generator=generator).to(torch.int8)}  # fmt: skip
    args = {"num_bits": 8, "type": "int", "symmetric": False, "strategy": strategy} | ({"group_size": 32} if strategy == "group" else {})
    got, want = compressed("int-quantized", args, parts, tmp_path)
    np.testing.assert_allclose(got, want, rtol=2.0**-23)


def test_nvfp4_pack_quantized(tmp_path: pathlib.Path) -> None:
    generator = torch.Generator().manual_seed(9)
    weight = torch.randn(16, 64, generator=generator)
    amax = weight.reshape(16, 4, 16).abs().amax(-1)
    global_scale = torch.tensor([448 * 6 / float(weight.abs().max())])
    scale = (amax / 6 * global_scale).to(torch.float8_e4m3fn).to(torch.float32)
    args = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16}
    got, want = compressed("nvfp4-pack-quantized", args, {"weight": weight, "weight_scale": scale, "weight_global_scale": global_scale}, tmp_path)  # fmt: skip
    # The package decodes to bfloat16.
    np.testing.assert_allclose(got, want, rtol=2.0**-7)


def mx_parts(largest: int, seed: int) -> dict[str, torch.Tensor]:
    """A weight and its scales, powers of two for every 32 columns; largest: the number that a format has."""
    weight = torch.randn(16, 64, generator=torch.Generator().manual_seed(seed))
    return {"weight": weight, "weight_scale": 2.0 ** torch.floor(torch.log2(weight.reshape(16, 2, 32).abs().amax(-1) / largest))}


def mx_args(num_bits: int) -> dict[str, Any]:
    return {"num_bits": num_bits, "type": "float", "symmetric": True, "strategy": "group", "group_size": 32}


@pytest.mark.parametrize(
    ("form", "num_bits", "largest", "seed"), [("mxfp4-pack-quantized", 4, 6, 10), ("mxfp8-quantized", 8, 448, 11)]
)
def test_mx_formats(form: str, num_bits: int, largest: int, seed: int, tmp_path: pathlib.Path) -> None:
    got, want = compressed(form, mx_args(num_bits), mx_parts(largest, seed), tmp_path)
    np.testing.assert_array_equal(got, want)


def test_six_bits_are_said_not_to_be_decoded(tmp_path: pathlib.Path) -> None:
    stored("mxfp6-pack-quantized", mx_args(6), mx_parts(28, 12), tmp_path / "model")
    code, _, error = audit(tmp_path / "model")
    assert code == 3 and "mxfp6 is not decoded" in error

"""Every type of GGUF files: decoded as the gguf package does, or said not to be."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
import pytest

gguf = pytest.importorskip("gguf")
pytest.importorskip("torch")
from decoded import audit, decode  # noqa: E402

Kind = gguf.GGMLQuantizationType
STORED, OURS = "blk.0.ffn_down.weight", "model.layers.0.mlp.down_proj.weight"
NOT_DECODED = {"IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "TQ1_0", "TQ2_0", "Q1_0"}


def write(path: pathlib.Path, tensors: dict[str, tuple[np.ndarray, Any, tuple[int, ...] | None]]) -> pathlib.Path:
    """tensors: bytes, type, and the logical shape where the package has another size of blocks than ggml."""
    writer = gguf.GGUFWriter(path, "qwen2")
    for name, (data, kind, shape) in tensors.items():
        writer.add_tensor(name, data if shape is None else data.view(np.int8), raw_shape=shape, raw_dtype=kind)
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    return path


def decoded(path: pathlib.Path) -> np.ndarray:
    return decode(path, path.with_suffix(".safetensors"))[OURS]


@pytest.mark.parametrize("kind", list(Kind), ids=lambda kind: kind.name)
def test_type_is_decoded_or_said_not_to_be(kind: Any, tmp_path: pathlib.Path) -> None:
    """A type that a later gguf package adds fails here until it is one or the other."""
    elems, size = gguf.GGML_QUANT_SIZES[kind]
    if kind == Kind.Q8_1:
        size = 36  # 40 in the package, which ggml's two half-precision sums have long since made untrue
    beside = (np.ones((2, 8), np.float32), Kind.F32, None)
    blocks = np.zeros((2, 2 * size), np.uint8)
    path = write(tmp_path / "m.gguf", {STORED: (blocks, kind, (2, 2 * elems)), "blk.0.ffn_up.weight": beside})
    code, result, _ = audit(path)
    assert code == 0, result
    measured = {w["name"]: w["stats"]["count"] for w in result["weights"]}
    said = [note for note in result["notes"] if f"type {kind.name.lower()} is not decoded" in note]
    if kind.name in NOT_DECODED:
        assert OURS not in measured and len(said) == 1, result["notes"]
    else:
        assert measured[OURS] == 4 * elems and said == []


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4"])
def test_quantised_by_the_package(name: str, tmp_path: pathlib.Path) -> None:
    """What the package writes of real numbers, beside its own reading and beside the numbers themselves."""
    x = np.random.default_rng(31).standard_normal((7, 96)).astype(np.float32)
    raw = gguf.quantize(x, Kind[name])
    got, want = decoded(write(tmp_path / "m.gguf", {STORED: (raw, Kind[name], None)})), gguf.dequantize(raw, Kind[name])
    np.testing.assert_allclose(got, want, rtol=2.0**-23, atol=2.0**-23 * np.abs(want).max())
    # Half a step of the coarsest block (e2m1: of 4 to 6), and one step for those that are cut off at one end.
    steps = {"Q4_0": 8, "Q4_1": 15 / 2, "Q5_0": 16, "Q5_1": 31 / 2, "Q8_0": 127, "MXFP4": 3}[name]
    assert np.abs(got - x).max() <= 1.01 * np.abs(x).max() / steps


@pytest.mark.parametrize("name", ["F32", "F16", "BF16", "F64", "I8", "I16", "I32", "I64"])
def test_plain_numbers(name: str, tmp_path: pathlib.Path) -> None:
    x = np.random.default_rng(32).standard_normal((5, 12)) * 100
    if name == "BF16":
        raw = gguf.quantize(x.astype(np.float32), Kind.BF16)
        want = gguf.dequantize(raw, Kind.BF16)
    else:
        stored = x.astype({"F32": "f4", "F16": "f2", "F64": "f8", "I8": "i1", "I16": "i2", "I32": "i4", "I64": "i8"}[name])
        raw, want = stored.view(np.uint8), stored.astype(np.float32)
    np.testing.assert_array_equal(decoded(write(tmp_path / "m.gguf", {STORED: (raw, Kind[name], (5, 12))})), want)


@pytest.mark.parametrize("name", ["Q8_1", "Q8_K"])
def test_types_of_products_which_the_package_does_not_read(name: str, tmp_path: pathlib.Path) -> None:
    """ggml's block_q8_1 is {half d, half s, int8 qs[32]}, block_q8_K {float d, int8 qs[256], int16 sums[16]}."""
    rng, elems = np.random.default_rng(33), {"Q8_1": 32, "Q8_K": 256}[name]
    scale = (rng.uniform(0.01, 1, (3, 2, 1))).astype(np.float16 if name == "Q8_1" else np.float32)
    code = rng.integers(-128, 128, (3, 2, elems)).astype(np.int8)
    sums = rng.integers(0, 256, (3, 2, 2 if name == "Q8_1" else 32), np.uint8)  # of the codes: not read
    fields = [scale.view(np.uint8), sums, code.view(np.uint8)] if name == "Q8_1" else [scale.view(np.uint8), code.view(np.uint8), sums]
    raw = np.concatenate(fields, 2).reshape(3, -1)
    got = decoded(write(tmp_path / "m.gguf", {STORED: (raw, Kind[name], (3, 2 * elems))}))
    np.testing.assert_array_equal(got, (scale.astype(np.float32) * code).reshape(3, -1))

"""Checkpoint folders in memory, and quantisers of the formats that the cases need. Plain NumPy."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from . import numerics as nx

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
NAMES = {"float32": "F32", "float16": "F16", "uint8": "U8", "int32": "I32", "int64": "I64"}


class Raw:
    """A tensor of a type that NumPy lacks: the safetensors name of the type, the shape and the bytes."""

    def __init__(self, dtype: str, shape: tuple[int, ...], data: bytes) -> None:
        self.dtype, self.shape, self.data = dtype, shape, data


def raw_bf16(x: np.ndarray) -> Raw:
    bits = nx.bf16(x).view(np.uint32) >> 16
    return Raw("BF16", x.shape, bits.astype("<u2").tobytes())


def e4m3_codes(x: np.ndarray) -> np.ndarray:
    """Bytes of the nearest float8 e4m3fn, saturating."""
    every = e4m3_values(np.arange(127))  # 0x7F is NaN
    x = np.asarray(x, np.float64)
    code = np.abs(np.minimum(np.abs(x), 448.0)[..., None] - every).argmin(-1)
    return (code | np.where(np.signbit(x), 0x80, 0)).astype(np.uint8)


def e4m3_values(code: np.ndarray) -> np.ndarray:
    code = np.asarray(code, np.int64)
    exponent, mantissa = (code >> 3) & 15, code & 7
    value = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10))
    return np.where(code & 0x80, -value, value)


def raw_e4m3(x: np.ndarray) -> Raw:
    return Raw("F8_E4M3", x.shape, e4m3_codes(x).tobytes())


def e2m1_codes(x: np.ndarray) -> np.ndarray:
    """Codes 0..15 of the nearest e2m1 value."""
    x = np.asarray(x, np.float64)
    return (np.abs(np.abs(x)[..., None] - E2M1).argmin(-1) | np.where(x < 0, 8, 0)).astype(np.uint8)


def e2m1_values(code: np.ndarray) -> np.ndarray:
    return np.where(code & 8, -1.0, 1.0) * E2M1[code & 7]


def nibbles(code: np.ndarray) -> np.ndarray:
    """Two codes a byte along the last axis, the low nibble first."""
    return (code[..., 0::2] | code[..., 1::2] << 4).astype(np.uint8)


def blocks(x: np.ndarray, n: int, k: int) -> np.ndarray:
    """The grid of scales, repeated to the shape of the weight."""
    return np.repeat(np.repeat(x, n, 0), k, 1)


def safetensors(tensors: dict[str, Any]) -> bytes:
    header: dict[str, Any] = {}
    data = b""
    for name, x in tensors.items():
        raw = x if isinstance(x, Raw) else Raw(NAMES[x.dtype.name], x.shape, np.ascontiguousarray(x).tobytes())
        header[name] = {
            "dtype": raw.dtype,
            "shape": list(raw.shape),
            "data_offsets": [len(data), len(data) + len(raw.data)],
        }
        data += raw.data
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    return len(head).to_bytes(8, "little") + head + data


def folder(tensors: dict[str, Any], config: dict[str, Any]) -> dict[str, bytes]:
    return {"config.json": json.dumps(config, indent=1).encode(), "model.safetensors": safetensors(tensors)}


def read_safetensors(data: bytes) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """For the self-tests: dtype name, shape and bytes of each tensor."""
    size = int.from_bytes(data[:8], "little")
    base = 8 + size
    return {
        name: (x["dtype"], tuple(x["shape"]), data[base + x["data_offsets"][0] : base + x["data_offsets"][1]])
        for name, x in json.loads(data[8:base]).items()
        if name != "__metadata__"
    }

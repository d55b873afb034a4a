"""Element types: numbers of the C interface, and the names by which torch, NumPy, ml_dtypes and DLPack know them."""

from __future__ import annotations

from ._errors import UsageError

# name -> (number, bits of one element in memory)
DTYPES: dict[str, tuple[int, int]] = {
    "f64": (1, 64),
    "f32": (2, 32),
    "f16": (3, 16),
    "bf16": (4, 16),
    "f8_e4m3fn": (5, 8),
    "f8_e5m2": (6, 8),
    "f8_e4m3fnuz": (7, 8),
    "f8_e5m2fnuz": (8, 8),
    "f8_e8m0": (9, 8),
    "f4_e2m1": (10, 4),
    "i64": (16, 64),
    "i32": (17, 32),
    "i16": (18, 16),
    "i8": (19, 8),
    "u64": (20, 64),
    "u32": (21, 32),
    "u16": (22, 16),
    "u8": (23, 8),
    "bool": (24, 8),
}
# The numbers are those of ASSAY_DTYPE_* in assay.h and of the file format: never renumbered.
BITS = {number: bits for number, bits in DTYPES.values()}
NAMES = {number: name for name, (number, _) in DTYPES.items()}

# torch's and NumPy's (with ml_dtypes') spellings.
ALIASES: dict[str, str] = {
    "float64": "f64",
    "float32": "f32",
    "float16": "f16",
    "bfloat16": "bf16",
    "float8_e4m3fn": "f8_e4m3fn",
    "float8_e5m2": "f8_e5m2",
    "float8_e4m3fnuz": "f8_e4m3fnuz",
    "float8_e5m2fnuz": "f8_e5m2fnuz",
    "float8_e8m0fnu": "f8_e8m0",
    "float4_e2m1fn_x2": "f4_e2m1",
    "int64": "i64",
    "int32": "i32",
    "int16": "i16",
    "int8": "i8",
    "uint64": "u64",
    "uint32": "u32",
    "uint16": "u16",
    "uint8": "u8",
    "bool": "bool",
}

# (DLDataTypeCode, bits) -> name
DLPACK: dict[tuple[int, int], str] = {
    (0, 8): "i8",
    (0, 16): "i16",
    (0, 32): "i32",
    (0, 64): "i64",
    (1, 8): "u8",
    (1, 16): "u16",
    (1, 32): "u32",
    (1, 64): "u64",
    (2, 16): "f16",
    (2, 32): "f32",
    (2, 64): "f64",
    (4, 16): "bf16",
    (6, 8): "bool",
    (10, 8): "f8_e4m3fn",
    (11, 8): "f8_e4m3fnuz",
    (12, 8): "f8_e5m2",
    (13, 8): "f8_e5m2fnuz",
    (14, 8): "f8_e8m0",
    (17, 4): "f4_e2m1",
}

# Format of the buffer protocol (native sizes) -> name
BUFFER: dict[str, str] = {"d": "f64", "f": "f32", "e": "f16", "q": "i64", "Q": "u64", "i": "i32", "I": "u32"}
# Native "l" and "L" are 64 bits wide where assay runs (LP64); _from_buffer holds the item size against it.
BUFFER |= {"l": "i64", "L": "u64", "h": "i16", "H": "u16", "b": "i8", "B": "u8", "c": "u8", "?": "bool"}

# Numbers of ASSAY_PHASE_*.
PHASES = {"unknown": 0, "prefill": 1, "decode": 2, "mixed": 3, "warmup": 4, "dummy": 5, "capture": 6, "load": 7}


def dtype_number(dtype: object) -> int:
    """The number of "bf16", "bfloat16", torch.bfloat16 or numpy.dtype("float32").

    UsageError for a name that is none of these, with the names that are.
    """
    text = str(dtype).removeprefix("torch.")
    text = ALIASES.get(text, text)
    if text not in DTYPES:
        raise UsageError(f"unknown dtype {dtype!r}; expected one of {', '.join(DTYPES)}")
    return DTYPES[text][0]


def phase_number(phase: str | int) -> int:
    """The number of "decode" and so on.

    A number is passed on as it is: the library refuses one that is none. UsageError for an unknown name.
    """
    if isinstance(phase, int):
        return phase
    if phase not in PHASES:
        raise UsageError(f"unknown phase {phase!r}; expected one of {', '.join(PHASES)}")
    return PHASES[phase]

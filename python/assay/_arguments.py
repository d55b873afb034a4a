"""What callers give to a recording, read for C: rows, requests and numbers, checked and never cut.

It knows nothing of recordings: what the fields of an event may mean together is checked in C.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_int64, c_uint64, c_void_p
from operator import index
from typing import Any, NamedTuple

from . import _library
from ._dtypes import BITS, NAMES, dtype_number
from ._errors import UsageError
from ._tensor import locate


class Run(NamedTuple):
    """``n_rows`` consecutive rows of a tensor, of one request, at consecutive positions.

    ``request`` is a key of request_key(), 0 when not known; ``first_row`` counts along the row axis;
    ``first_position`` counts tokens from 0 at the first prompt token; padding rows belong to no request.

    Rows and positions are 64-bit numbers from 0 on; UsageError where a run reaches outside the tensor.
    """

    request: int
    first_row: int
    n_rows: int
    first_position: int = 0
    padding: bool = False


def request_key(tokens: Sequence[int] | Any, ordinal: int = 0) -> int:
    """The key of a request: a hash of its prompt's token ids (ints, or an integer array) and its ordinal among equal
    prompts of the run. Never 0; the same in every engine.

    Raises UsageError for a token id of more than 64 bits, TypeError for one that is no integer.
    """
    array, count, _keep = integers(tokens, c_int64)
    return int(_library.host().assay_request_key(array, count, ordinal))


def integers(values: Any, kind: Any) -> tuple[Any, int, object]:
    """A C array of 64-bit integers: the memory of a contiguous 64-bit array, else a copy."""
    if hasattr(values, "__array_interface__") or hasattr(values, "data_ptr"):
        where = locate(values)
        if len(where.shape) != 1:
            raise UsageError(f"expected a row of integers, got an array of shape {where.shape}")
        own = "u64" if kind is c_uint64 else "i64"
        same = NAMES[where.dtype] == own or (own == "u64" and NAMES[where.dtype] == "i64")  # keys, signed: as below
        if same and where.strides in (None, (1,)):
            return c_void_p(where.data + 8 * where.offset), where.shape[0], where
        values = values.tolist()
    values = list(values)
    mask = (1 << 64) - 1 if kind is c_uint64 else -1  # keys above 2^63 come back from signed arrays as negative
    low, high = (-(1 << 63), (1 << 64) - 1) if kind is c_uint64 else (-(1 << 63), (1 << 63) - 1)
    numbers = [index(v) for v in values]  # a float is refused, not cut
    for number in numbers:
        if not low <= number <= high:
            raise UsageError(f"{number} does not fit; expected {low} to {high}")
    array = (kind * len(numbers))(*[n & mask for n in numbers])
    return ctypes.cast(array, c_void_p), len(numbers), array


def check_width(field: str, value: Any, low: int, bits: int) -> None:
    """ctypes cuts a number that its C field does not hold; what the number may mean is checked in C."""
    if not low <= index(value) < 1 << bits:
        raise UsageError(f"{field}={value!r} does not fit; expected {low} to 2^{bits} - 1")


def read_runs(runs: Sequence[Run | tuple[int, ...]]) -> list[Run]:
    """Lengths and positions are checked for their width alone: ctypes would cut them in silence."""
    read = [Run(*run) for run in runs]
    for number, run in enumerate(read):
        check_width(f"runs[{number}].request", run.request, -(1 << 63), 64)
        for field in ("first_row", "n_rows", "first_position"):
            check_width(f"runs[{number}].{field}", getattr(run, field), -(1 << 63), 63)
    return read


def fill_rows(event: Any, shape: tuple[int, ...], requests: Any, positions: Any, keep: list[object]) -> None:
    """Fills in one entry a row. A single key stands for all rows, which are then as many as the positions, or
    as the row axis (axis 0 unless given) has.
    """
    count = None
    if positions is not None:
        event.row_positions, count, kept = integers(positions, c_int64)
        keep.append(kept)
    if requests is not None:
        if isinstance(requests, int):
            if count is None:
                count = shape[max(event.row_axis, 0)] if shape else 0
            requests = [requests] * count
        event.row_requests, n, kept = integers(requests, c_uint64)
        keep.append(kept)
        if count is not None and count != n:
            raise UsageError(f"{n} row_requests with {count} row_positions")
        count = n
    event.n_rows = count or 0


def reinterpreted(own: int, dtype: object) -> int:
    """The number of the dtype that the caller gives; UsageError when an element would have another size."""
    number = dtype_number(dtype)
    if BITS[number] != BITS[own]:
        raise UsageError(f"dtype={dtype!r} has {BITS[number]} bits, the tensor's {NAMES[own]} has {BITS[own]}")
    return number

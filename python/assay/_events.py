"""Reading a trace: events, what was recorded around them, and the Arrow table."""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Iterator
from ctypes import byref, c_char_p, c_uint64, c_void_p
from dataclasses import dataclass, field
from typing import Any, overload

from . import _library
from ._dtypes import ALIASES
from ._errors import UsageError


@dataclass(frozen=True)
class Segment:
    """Statistics of one request's rows within one block of positions, or of a tensor without token rows.

    Non-finite elements are counted and enter ``sum`` and ``sum_sq`` as 0; min, max and abs_max are of the finite
    elements, NaN when there is none. ``row_l2`` and ``head_l2``: norms of each row and each local head, or empty.

    ``first_position`` counts tokens of the request from 0, ``first_row`` rows of the tensor; ``padding``: rows of no
    request. ``abs_max_index`` is the row-major number of the element in the view; ``digest`` is a hash of the bits at
    their positions in the request, and adds up over segments unless ``digest_split``. What is exact and what is
    bounded: docs/numerics.md.
    """

    request: int
    first_position: int
    n_rows: int
    first_row: int
    padding: bool
    count: int
    nan: int
    pos_inf: int
    neg_inf: int
    zero: int
    subnormal: int
    min: float
    max: float
    abs_max: float
    abs_max_index: int
    sum: float
    sum_sq: float
    digest: int
    digest_split: bool
    row_l2: tuple[float, ...]
    head_l2: tuple[float, ...]

    @property
    def nonfinite(self) -> int:
        """NaN and infinities."""
        return self.nan + self.pos_inf + self.neg_inf


@dataclass(frozen=True)
class Event:
    """One observation of one tensor. Fields as in docs/fields.md; ``strides`` and ``storage_offset`` in elements.

    ``number`` counts in the whole trace, ``sequence`` in its process. ``row_axis`` and ``head_axis`` are -1 without
    one, ``step`` too when it was not said. ``dtype`` is how the elements were stored, ``compute_dtype`` the coarsest
    rounding they have been through (empty: not said). ``base_address`` is of the storage in the traced process. The
    shard_* fields say which columns of the whole row are here. ``payload_rows`` is empty when all rows were stored.
    Equality leaves out the reader that the event came from.
    """

    number: int
    file: str
    sequence: int
    time_ns: int
    site: str
    engine_name: str
    axes: str
    rank: int
    step: int
    phase: str
    dtype: str
    compute_dtype: str
    before_inplace: bool
    in_graph: bool
    anomaly_ring: bool
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    storage_offset: int
    base_address: int
    stream: int
    row_axis: int
    head_axis: int
    shard_index: int
    shard_count: int
    shard_col_offset: int
    shard_full_cols: int
    meta: dict[str, str]
    payload_sha256: str
    payload_bytes: int
    payload_rows: tuple[int, ...]
    segments: tuple[Segment, ...]
    _events: Events = field(repr=False, compare=False)

    @property
    def norm(self) -> float:
        """L2 norm over all real rows."""
        return float(sum(s.sum_sq for s in self.segments if not s.padding) ** 0.5)

    @property
    def nonfinite(self) -> int:
        """NaN and infinities in real rows."""
        return sum(s.nonfinite for s in self.segments if not s.padding)

    def payload(self) -> memoryview | None:
        """The stored bytes: contiguous, row-major, little-endian; all of the tensor, or ``payload_rows`` of its row axis
        (axis 0 without one). None when nothing was stored. BadInputError when the file is missing or altered."""
        return self._events._payload(self.number)

    def numpy(self) -> Any:
        """The payload as a NumPy array of the event's shape (the row axis cut to ``payload_rows``), read-only. bf16 and
        fp8 need the package ml_dtypes; f4_e2m1 comes as uint8 with two elements a byte, flat."""
        import numpy

        data = self.payload()
        if data is None:
            return None
        if self.dtype == "f4_e2m1":
            return numpy.frombuffer(data, numpy.uint8)
        shape = list(self.shape)
        if self.payload_rows:
            # Sampled tensors without token rows are cut along axis 0.
            shape[max(self.row_axis, 0)] = len(self.payload_rows)
        name = {short: long for long, short in ALIASES.items()}[self.dtype]
        try:
            dtype = numpy.dtype(name)
        except TypeError:
            try:
                import ml_dtypes  # type: ignore[import-not-found, unused-ignore]
            except ImportError:
                raise UsageError(f"NumPy has no {self.dtype}: install ml_dtypes, or use payload()") from None
            dtype = numpy.dtype(getattr(ml_dtypes, name))
        return numpy.frombuffer(data, dtype).reshape(shape)


@dataclass(frozen=True)
class Site:
    """One place in a model where a tensor is observed: the canonical ``name`` (`assay sites` lists them), the
    engine's own, and axes such as "T H d".
    """
    name: str
    engine_name: str
    axes: str


@dataclass(frozen=True)
class Request:
    """A request as one process saw it. ``tokens`` is empty unless token ids were stored.

    ``key`` is request_key() of its prompt, equal in every engine; ``ordinal`` counts equal prompts of a run;
    ``engine_id`` is the engine's own name for it. ``prompt_tokens`` is a number of tokens.
    """

    key: int
    prompt_tokens: int
    ordinal: int
    engine_id: str
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class CoverageNote:
    """What the trace cannot show: a site or pattern, why, how often.

    ``count`` is 0 where nothing is counted; ``reason`` is one of a few short phrases ("not found", "dropped"),
    ``detail`` is free text.
    """

    site: str
    reason: str
    count: int
    detail: str


@dataclass(frozen=True)
class Process:
    """One traced process. ``closed`` is False when it was killed, or still runs.

    ``start_time_ns`` is of the recording, since 1970 by the host's clock; ``dropped`` counts observations that did not
    reach the file; ``sites`` in the order in which they were announced.
    """

    file: str
    host: str
    pid: int
    rank: int
    world_size: int
    start_time_ns: int
    command: tuple[str, ...]
    cwd: str
    meta: dict[str, str]
    closed: bool
    dropped: int
    sites: tuple[Site, ...]
    requests: tuple[Request, ...]
    coverage: tuple[CoverageNote, ...]


@dataclass(frozen=True)
class Damage:
    """Bytes of a trace file that were skipped; benign: a torn tail, or a record of a newer minor version.

    ``offset`` and ``size_bytes`` are in bytes of ``file``.
    """

    file: str
    offset: int
    size_bytes: int
    what: str
    benign: bool


# JSON has no such numbers; the library writes them as text.
_NONFINITE = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}


def _number(value: float | str) -> float:
    return _NONFINITE[value] if isinstance(value, str) else value


class _Reader:
    """Owns an assay_reader.

    Closed when the last Events, Event and memoryview that hold it are gone.
    """

    def __init__(self, path: str) -> None:
        self.handle = c_void_p()
        error = _library.CError()
        code = _library.offline().assay_reader_open(os.fsencode(path), byref(self.handle), byref(error))
        _library.check(code, error)

    def __del__(self) -> None:
        if getattr(self, "handle", None):
            _library.offline().assay_reader_close(self.handle)

    def text(self, function: str, *arguments: Any) -> Any:
        """What a function of the offline library describes as JSON; its text is freed."""
        text = c_void_p()
        error = _library.CError()
        code = getattr(_library.offline(), function)(self.handle, *arguments, byref(text), byref(error))
        _library.check(code, error)
        return json.loads(_library.take_text(text))


class Events:
    """The events of a trace, by process, then in the order of recording.

    Indexed, iterated and counted like a list of Event, and an Arrow table with a row a segment through
    ``__arrow_c_stream__``: ``pyarrow.table(events)``, ``polars.DataFrame(events)``, ``pandas.DataFrame.from_arrow``;
    DuckDB queries the pyarrow table. May be used from any number of threads.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Reads the processes and an index of the events; events and payloads are read when asked for. Raises as
        open() does.
        """
        self._reader = _Reader(os.fspath(path))
        about = self._reader.text("assay_reader_describe")
        self.path: str = about["path"]
        self.processes: tuple[Process, ...] = tuple(_process(p) for p in about["processes"])
        self.damages: tuple[Damage, ...] = tuple(Damage(**d) for d in about["damages"])
        self._count = int(_library.offline().assay_reader_count(self._reader.handle))

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> Event: ...

    @overload
    def __getitem__(self, index: slice) -> list[Event]: ...

    def __getitem__(self, index: int | slice) -> Event | list[Event]:
        if isinstance(index, slice):
            return [self._event(i) for i in range(*index.indices(self._count))]
        number = index + self._count if index < 0 else index
        if not 0 <= number < self._count:
            raise IndexError(f"event {index} of a trace with {self._count} events")
        return self._event(number)

    def __iter__(self) -> Iterator[Event]:
        return (self._event(i) for i in range(self._count))

    @property
    def sites(self) -> tuple[str, ...]:
        """Names of all sites that the processes announced or recorded, each once."""
        return tuple(dict.fromkeys(s.name for p in self.processes for s in p.sites))

    def _event(self, number: int) -> Event:
        raw = self._reader.text("assay_reader_event", number)
        for key in ("shape", "strides", "payload_rows"):
            raw[key] = tuple(raw[key])
        raw["segments"] = tuple(_segment(s) for s in raw["segments"])
        return Event(number=number, _events=self, **raw)

    def _payload(self, number: int) -> memoryview | None:
        """The view keeps the reader, and so the mapped file, alive."""
        data, size = c_void_p(), c_uint64()
        error = _library.CError()
        code = _library.offline().assay_reader_payload(
            self._reader.handle, number, byref(data), byref(size), byref(error)
        )
        _library.check(code, error)
        if not data.value:
            return None
        array = (ctypes.c_char * size.value).from_address(data.value)
        array._reader = self._reader  # type: ignore[attr-defined]  # keeps the mapping
        return memoryview(array).toreadonly().cast("B")

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        """A PyCapsule of the Arrow C stream interface; a requested schema is ignored, as the protocol allows."""
        stream = _ArrowArrayStream()
        error = _library.CError()
        code = _library.offline().assay_reader_stream(self._reader.handle, byref(stream), byref(error))
        _library.check(code, error)
        address = ctypes.addressof(stream)
        # ctypes owns the memory of the struct: it has to stay until the capsule is destroyed.
        _streams[address] = stream
        return _new_capsule(address, _STREAM_NAME, _release_capsule)

    def __repr__(self) -> str:
        return f"<assay.Events {self.path!r}: {self._count} events of {len(self.processes)} process(es)>"


# JSON gives lists and text for what does not fit; dataclasses hold tuples and floats.
def _segment(raw: dict[str, Any]) -> Segment:
    for key in ("min", "max", "abs_max", "sum", "sum_sq"):
        raw[key] = _number(raw[key])
    for key in ("row_l2", "head_l2"):
        raw[key] = tuple(_number(v) for v in raw[key])
    return Segment(**raw)


def _process(raw: dict[str, Any]) -> Process:
    raw["command"] = tuple(raw["command"])
    raw["sites"] = tuple(Site(**s) for s in raw["sites"])
    raw["requests"] = tuple(Request(**{**r, "tokens": tuple(r["tokens"])}) for r in raw["requests"])
    raw["coverage"] = tuple(CoverageNote(**c) for c in raw["coverage"])
    return Process(**raw)


def open(path: str | os.PathLike[str]) -> Events:  # noqa: A001
    """Opens a trace folder, or one file of it, for reading.

    Raises BadInputError when there is no trace or it is of a newer major version. Damage inside is skipped and listed
    in ``damages``.
    """
    return Events(path)


# ---- the capsule around an ArrowArrayStream


class _ArrowArrayStream(ctypes.Structure):
    _fields_ = [
        ("get_schema", c_void_p),
        ("get_next", c_void_p),
        ("get_last_error", c_void_p),
        ("release", ctypes.CFUNCTYPE(None, c_void_p)),
        ("private_data", c_void_p),
    ]


_STREAM_NAME = b"arrow_array_stream"
_streams: dict[int, _ArrowArrayStream] = {}  # memory of the streams in capsules

_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_capsule_pointer = ctypes.PYFUNCTYPE(c_void_p, c_void_p, c_char_p)(("PyCapsule_GetPointer", ctypes.pythonapi))
_Destructor = ctypes.PYFUNCTYPE(None, c_void_p)
_new_capsule.argtypes = [c_void_p, c_char_p, _Destructor]


def _release(capsule: int) -> None:
    # The consumer has moved the stream out (release is null then), or never looked at it.
    address = _capsule_pointer(capsule, _STREAM_NAME)
    stream = _streams.pop(address)
    if stream.release:
        stream.release(address)


_release_capsule = _Destructor(_release)

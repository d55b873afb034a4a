"""Where a generator puts its tensors: a list in memory, and a trace folder when a writer is attached.

A generator calls `Recording.record` with the live array, as an engine would. The list keeps a copy with the strides and
the address that the array had, which is what the self-tests look at.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Callable, Iterable

import numpy as np


@dataclass(frozen=True)
class Run:
    """n rows of one request at consecutive positions, from row `row` of the tensor; padding rows have request None."""

    request: "Request | None"
    row: int
    n: int
    position: int = 0


@dataclass(frozen=True)
class Request:
    """A prompt (token ids) and its ordinal among equal prompts of the recording."""

    tokens: tuple[int, ...]
    ordinal: int = 0


@dataclass(frozen=True)
class Shard:
    """Columns of this rank in the whole row: count 1 means replicated."""

    index: int
    count: int
    col_offset: int
    full_cols: int


@dataclass
class Observation:
    site: str
    array: np.ndarray  # copy, contiguous
    strides: tuple[int, ...]  # elements, of the live array
    address: int  # bytes, of the live array
    axes: str = ""
    rows: tuple[Run, ...] = ()
    rank: int = 0
    step: int = 0
    phase: str = "prefill"
    meta: dict[str, str] = field(default_factory=dict)
    shard: Shard | None = None
    stream: int = 0
    in_graph: bool = False
    compute_dtype: str = "f32"


def text(value: Any) -> str:
    """Metadata is text: booleans 0 and 1, floats with all their digits, lists with commas."""
    if isinstance(value, (bool, np.bool_)):
        return "1" if value else "0"
    if isinstance(value, (float, np.floating)):
        return repr(float(value))
    if isinstance(value, (list, tuple)):
        return ",".join(text(x) for x in value)
    return str(value)


class Recording:
    """One run. `meta` describes the run, `files` is its checkpoint (name of the file to bytes), empty without one."""

    def __init__(self) -> None:
        self.observations: list[Observation] = []
        self.requests: list[Request] = []
        self.meta: dict[str, str] = {}
        self.files: dict[str, bytes] = {}
        self.world_size = 1
        self.on_record: Callable[[Observation, np.ndarray], None] | None = None
        self.on_request: Callable[[Request], None] | None = None

    def request(self, tokens: Iterable[int]) -> Request:
        """Announces a request; equal prompts get rising ordinals."""
        key = tuple(int(x) for x in tokens)
        out = Request(key, sum(r.tokens == key for r in self.requests))
        self.requests.append(out)
        if self.on_request:
            self.on_request(out)
        return out

    def record(
        self,
        site: str,
        array: np.ndarray,
        axes: str = "",
        rows: Iterable[Run] = (),
        *,
        rank: int = 0,
        step: int = 0,
        phase: str = "prefill",
        meta: dict[str, Any] | None = None,
        shard: Shard | None = None,
        stream: int = 0,
        in_graph: bool = False,
        compute_dtype: str = "f32",
    ) -> None:
        """Takes the tensor as it is now. `rows` cuts its T axis into requests and positions."""
        seen = Observation(
            site,
            np.ascontiguousarray(array).copy(),
            tuple(s // array.itemsize for s in array.strides),
            array.__array_interface__["data"][0],
            axes,
            tuple(rows),
            rank,
            step,
            phase,
            {k: text(v) for k, v in (meta or {}).items()},
            shard,
            stream,
            in_graph,
            compute_dtype,
        )
        self.observations.append(seen)
        if self.on_record:
            self.on_record(seen, array)

    def all(self, site: str, **fields: Any) -> list[np.ndarray]:
        """Arrays of a site in order of recording, those whose fields have the given values."""
        return [
            o.array for o in self.observations if o.site == site and all(getattr(o, k) == v for k, v in fields.items())
        ]

    def one(self, site: str, **fields: Any) -> np.ndarray:
        """The only such array, in float64 when it is a float array."""
        found = self.all(site, **fields)
        assert len(found) == 1, f"{site}: {len(found)} observations"
        return found[0].astype(np.float64) if found[0].dtype.kind == "f" else found[0]

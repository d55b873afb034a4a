"""A recording that goes into a trace folder as it is made, through the Python package `assay`."""

from __future__ import annotations

import pathlib
from types import TracebackType
from typing import Any

import numpy as np

from .recording import Observation, Recording, Request


class Writer(Recording):
    """FOLDER/trace, payloads of every tensor, and FOLDER/checkpoint when the case has files. The trace is opened at
    the first observation, when the number of ranks is known."""

    def __init__(self, folder: pathlib.Path) -> None:
        super().__init__()
        self.folder = pathlib.Path(folder)
        self.trace: Any = None
        self.keys: dict[Request, int] = {}
        self.waiting: list[Request] = []
        self.on_request = self.waiting.append
        self.on_record = self._write

    def _open(self) -> None:
        import assay

        if self.trace is None:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.trace = assay.trace(
                self.folder / "trace",
                level="payload",
                rank=0,
                world_size=self.world_size,
                meta=self.meta,
                environment=False,
            )
        while self.waiting:
            request = self.waiting.pop(0)
            self.keys[request] = self.trace.request(request.tokens, request.ordinal)

    def _write(self, o: Observation, live: np.ndarray) -> None:
        import assay

        self._open()
        shard = {}
        if o.shard is not None:
            shard = {
                "shard_index": o.shard.index,
                "shard_count": o.shard.count,
                "shard_col_offset": o.shard.col_offset,
                "shard_full_cols": o.shard.full_cols,
            }
        runs = [
            assay.Run(0 if r.request is None else self.keys[r.request], r.row, r.n, r.position, r.request is None)
            for r in o.rows
        ]
        kept = self.trace.record(
            o.site,
            live,
            axes=o.axes or None,
            runs=runs or None,
            rank=o.rank,
            step=None if o.step < 0 else o.step,
            phase=o.phase,
            flags=assay.IN_GRAPH if o.in_graph else 0,
            stream=o.stream,
            compute_dtype=o.compute_dtype,
            meta=o.meta,
            **shard,
        )
        if not kept:
            raise RuntimeError(f"{o.site} was dropped: {self.trace.drops()}")

    def __enter__(self) -> Writer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.trace is not None:
            self.trace.close()
        for name, data in self.files.items():
            place = self.folder / "checkpoint" / name
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(data)

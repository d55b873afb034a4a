"""Whose the rows of a step's tensors are."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from ctypes import addressof

from .._fast_call import CStep
from .._prepared import Rows as PreparedRows
from .._trace import Run

_lock = threading.RLock()  # what has an address is made once


class Rows:
    """The rows of the step under way, shared by all tensors of the step.

    runs: Run(request, first_row, n_rows, first_position, padding) or tuples, in row order; n_rows: rows of such a
    tensor, padding included (the sum of the runs when left out); step, phase: as of Trace.record().
    """

    __slots__ = ("_c", "_prepared", "n_rows", "phase", "runs", "step")

    def __init__(
        self,
        runs: Sequence[Run | tuple[int, ...]],
        *,
        n_rows: int | None = None,
        step: int | None = None,
        phase: str = "unknown",
    ) -> None:
        self.runs = tuple(Run(*run) for run in runs)
        self.n_rows = sum(run.n_rows for run in self.runs) if n_rows is None else n_rows
        self.step = step
        self.phase = phase
        self._prepared: tuple[PreparedRows, PreparedRows] | None = None
        self._c: CStep | None = None

    def prepared(self, fit: bool) -> PreparedRows:
        """For prepared sites: fit for tensors that have these rows, otherwise the step and phase alone."""
        both = self._prepared
        if both is None:
            both = self._prepare()
        return both[0] if fit else both[1]

    def _prepare(self) -> tuple[PreparedRows, PreparedRows]:
        with _lock:
            if self._prepared is not None:
                return self._prepared
            step = -1 if self.step is None else self.step
            whole = PreparedRows(self.runs, step=step, phase=self.phase)
            self._prepared = whole, PreparedRows([], step=step, phase=self.phase)
            return self._prepared

    @property
    def address(self) -> int:
        """Of the same for _fast_call.py."""
        if self._c is None:
            with _lock:
                if self._c is None:
                    self._c = CStep(self.n_rows, self.prepared(True).address, self.prepared(False).address)
        return addressof(self._c)

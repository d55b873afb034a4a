"""Whose the rows of a step's tensors are."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from ctypes import addressof, c_uint64, sizeof
from itertools import chain
from typing import Any

from .._arguments import Run
from .._dtypes import phase_number
from .._fast_call import CRows, CStep
from .._library import CRowRun
from .._prepared import Rows as PreparedRows

_lock = threading.RLock()  # what has an address is made once

# Of _lay_out, in words. A run's last field is half of one, as is the phase.
_STEP, _ROWS, _RUN = sizeof(CStep) // 8, sizeof(CRows) // 8, sizeof(CRowRun) // 8
_HEAD = _STEP + 2 * _ROWS
_POSITION = 3  # of a run: its first_position
_ADDRESSES = 1, 2, _STEP, _STEP + _ROWS  # those of the words themselves


class Rows:
    """The rows of the step under way, shared by all tensors of the step.

    runs: Run(request, first_row, n_rows, first_position, padding) or tuples, in row order; n_rows: rows of such a
    tensor, padding included (the sum of the runs when left out); step, phase: as of Trace.record().
    """

    __slots__ = ("_address", "_c", "_prepared", "_runs", "n_rows", "phase", "step")

    def __init__(
        self,
        runs: Sequence[Run | tuple[int, ...]],
        *,
        n_rows: int | None = None,
        step: int | None = None,
        phase: str = "unknown",
    ) -> None:
        self._runs = tuple([run if type(run) is Run else Run(*run) for run in runs])
        self.n_rows = sum([run.n_rows for run in self._runs]) if n_rows is None else n_rows
        self.step = step
        self.phase = phase
        self._prepared: tuple[PreparedRows, PreparedRows] | None = None
        self._c: Any = None
        self._address = 0

    @property
    def runs(self) -> tuple[Run, ...]:
        if not self._runs and self._c is not None:  # made by moved()
            words = self._c[_HEAD:]
            runs = zip(*[words[field::_RUN] for field in range(_RUN)])
            self._runs = tuple([Run(key, row, n, at, bool(padding)) for key, row, n, at, padding in runs])
        return self._runs

    def moved(self, positions: Sequence[int], step: int) -> Rows:
        """The same rows of the same requests at a later step: the first position of each run. In a tenth of the time: a
        step of decode differs from the one before in nothing else."""
        begin = self.address
        rows = Rows.__new__(Rows)
        rows.n_rows, rows.step, rows.phase = self.n_rows, step, self.phase
        rows._prepared, rows._runs = None, ()
        words = rows._c = type(self._c).from_buffer_copy(self._c)
        rows._address = at = addressof(words)
        for place in _ADDRESSES:
            words[place] += at - begin
        words[_STEP + 2] = words[_STEP + _ROWS + 2] = step
        words[_HEAD + _POSITION :: _RUN] = positions
        return rows

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
        return self._address or self._lay_out()

    def _lay_out(self) -> int:
        """A CStep, its two CRows and the runs of the first one, as 64-bit words: made field by field they would take as
        long as recording ten tensors, once a step."""
        with _lock:
            if self._address == 0:
                words = (c_uint64 * (_HEAD + _RUN * len(self._runs)))()
                begin = addressof(words)
                fit, rest, runs = (begin + 8 * at for at in (_STEP, _STEP + _ROWS, _HEAD))
                step, phase = -1 if self.step is None else self.step, phase_number(self.phase)
                head = self.n_rows, fit, rest, runs, len(self._runs), step, phase, runs, 0, step, phase
                words[:] = list(chain(head, *self._runs))
                self._c, self._address = words, begin
        return self._address

"""Recording one site again and again, at the least cost a call: for probes that fire at every step.

Trace.record() looks everything up anew each time. Here the event is laid out once a site and thread, and a call changes
what differs: the address, the rows, and shape, strides and dtype when they are not those of the call before.
It takes torch tensors in host memory alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from ctypes import c_int64
from threading import get_ident
from typing import Any

from . import _library
from ._dtypes import BITS, dtype_number, phase_number
from ._errors import UsageError
from ._tensor import on_device, torch_dtype_number
from ._trace import Run, Trace

Extents = tuple[int, ...]
Fold = Callable[[Extents, Extents], tuple[Extents, Extents]]


class Rows:
    """Whose the rows of a tensor are, with the step and phase they belong to; shared by all tensors of a step."""

    __slots__ = ("array", "count", "n_rows", "runs", "step", "phase", "compute_dtype")

    def __init__(
        self,
        runs: Sequence[Run],
        *,
        step: int = -1,
        phase: str | int = 0,
        compute_dtype: object = None,
    ) -> None:
        """runs: as in Trace.record(). compute_dtype: coarsest rounding of this step's arithmetic, None: each
        tensor's own dtype."""
        self.runs = tuple(runs)
        self.array = (_library.CRowRun * len(self.runs))(*[_library.CRowRun(*run) for run in self.runs])
        self.count = len(self.runs)
        self.n_rows = sum(run.n_rows for run in self.runs)
        self.step = step
        self.phase = phase_number(phase)
        self.compute_dtype = 0 if compute_dtype is None else dtype_number(compute_dtype)


class _Layout:
    """The event of one thread, and what it was laid out for."""

    __slots__ = ("event", "error", "shape", "strides", "dtype", "rows", "bytes")

    def __init__(self, site: int) -> None:
        self.event = _library.CEvent.from_buffer_copy(_library.BLANK_EVENT)
        self.event.site = site
        self.error = _library.CError()
        self.shape: object = None
        self.strides: object = None
        self.dtype: object = None
        self.rows: Rows | None = None
        self.bytes = 0


class PreparedSite:
    """One site of an open trace. record() may be called from any thread."""

    __slots__ = ("_axes", "_engine_name", "_fold", "_layouts", "_meta", "_trace", "name", "number")

    def __init__(
        self,
        trace: Trace,
        name: str,
        *,
        engine_name: str | None = None,
        axes: str | None = None,
        meta: Mapping[str, object] | None = None,
        fold: Fold | None = None,
    ) -> None:
        """name, engine_name, axes: as in Trace.record(). meta: kept with each event of the site. fold: the shape and
        strides to record for those of the tensor, as host tensors have axes that the site does not (batch before
        rows); it may raise ValueError when there is no such view."""
        self._fold = fold
        self.name, self._engine_name, self._axes = name, engine_name, axes
        self._meta = (_library.pairs(dict(meta)), len(meta)) if meta else None
        self.bind(trace)

    def bind(self, trace: Trace) -> None:
        """Goes on in another trace: a forked child opens one of its own."""
        self._trace = trace
        self.number = trace._add_site(self.name, self._engine_name, self._axes)
        self._layouts: dict[int, _Layout] = {}

    def wanted(self, step: int = -1) -> bool:
        """Whether the settings let this site through at this step now; False once the trace is closed."""
        trace = self._trace
        trace._calls.append(None)
        try:
            if trace._closed or not trace._armed.value:
                return False
            return bool(trace._library.assay_wants(trace._handle, self.number, -1, step) == 1)
        finally:
            trace._calls.pop()

    def record(self, tensor: Any, rows: Rows | None) -> bool:
        """Measures a torch tensor in host memory. rows: None for a tensor without token rows. As Trace.record() it
        returns True when recorded or left out, and raises UsageError for what does not fit."""
        trace = self._trace
        trace._calls.append(None)
        try:
            if trace._closed:
                return False
            if not trace._armed.value:
                return True
            layout = self._layouts.get(get_ident())
            if layout is None:
                layout = self._layouts[get_ident()] = _Layout(self.number)
                if self._meta is not None:
                    layout.event.meta, layout.event.n_meta = self._meta
            event = layout.event
            if not tensor.is_cpu:
                raise UsageError(on_device(str(tensor.device)))
            if tensor.is_neg():
                tensor = tensor.resolve_neg()  # its memory holds the negated values
            if tensor.dtype is not layout.dtype:
                event.dtype = torch_dtype_number(tensor.dtype)
                if BITS[event.dtype] < 8:
                    raise UsageError(f"{self.name}: {tensor.dtype} packs elements; use Trace.record()")
                layout.bytes = BITS[event.dtype] // 8
                layout.dtype = tensor.dtype
            shape = tensor.shape
            if shape != layout.shape or tensor.stride() != layout.strides:
                layout.shape = None
                strides = tensor.stride()
                as_shape, as_strides = self._fold(shape, strides) if self._fold is not None else (shape, strides)
                extents = c_int64 * len(as_shape)
                event.ndim = len(as_shape)
                event.shape, event.strides = extents(*as_shape), extents(*as_strides)
                layout.shape, layout.strides = shape, strides
            if rows is not layout.rows:
                if rows is None:
                    event.runs, event.n_runs, event.step, event.phase, event.compute_dtype = None, 0, -1, 0, 0
                else:
                    event.runs, event.n_runs = rows.array, rows.count
                    event.step, event.phase = rows.step, rows.phase
                    event.compute_dtype = rows.compute_dtype
                layout.rows = rows
            offset = tensor.storage_offset()
            address = tensor.data_ptr()
            event.data, event.offset = (address - offset * layout.bytes, offset) if address else (None, 0)
            code = trace._record(trace._handle, event, layout.error)
            if code == 0:
                return True
            if code == 4:  # dropped: counted by the library
                return False
            _library.check(code, layout.error)
        finally:
            trace._calls.pop()
        return False



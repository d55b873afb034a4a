"""Recording one site again and again, at the least cost a call: for probes that fire at every step.

Trace.record() looks everything up anew each time. Here the event is laid out once a site and thread, and a call changes
what differs: the address, the rows, and shape, strides and dtype when they are not those of the call before. For most
tensors one built-in function does it all (_fast_call.py); a site with a fold has it for the layout of the last call.
It takes torch tensors in host memory alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from ctypes import POINTER, addressof, c_int64, c_uint64, cast, pointer
from itertools import chain
from threading import get_ident
from typing import Any

from . import _fast_call, _library
from ._arguments import Run
from ._dtypes import BITS, dtype_number, phase_number
from ._errors import UsageError
from ._tensor import on_device, torch_dtype_number
from ._trace import Trace

# Shape or strides in elements.
Extents = tuple[int, ...]
# (shape, strides) of a tensor -> those to record: a view of the same elements.
Fold = Callable[[Extents, Extents], tuple[Extents, Extents]]


class Rows:
    """Whose the rows of a tensor are, with the step and phase they belong to; shared by all tensors of a step.

    Immutable once made: the built-in function reads it by its address, from any thread that holds Python's lock. Keep
    it as long as tensors of the step may be recorded.
    """

    __slots__ = ("address", "array", "at", "c", "count", "n_rows", "runs", "step", "phase", "compute_dtype")

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
        # Each run is five 64-bit words, the last one of two halves; made one by one they would take most of the time.
        self.array = (c_uint64 * (5 * len(self.runs)))(*chain.from_iterable(self.runs))
        self.count = len(self.runs)
        self.n_rows = sum(run.n_rows for run in self.runs)
        self.step = step
        self.phase = phase_number(phase)
        self.compute_dtype = 0 if compute_dtype is None else dtype_number(compute_dtype)
        runs_at = cast(self.array, POINTER(_library.CRowRun))
        self.at = runs_at
        self.c = _fast_call.CRows(runs_at, self.count, step, self.phase, self.compute_dtype)
        self.address = addressof(self.c)


class _Layout:
    """The event of one thread, and what it was laid out for."""

    __slots__ = ("event", "error", "shape", "strides", "dtype", "rows", "bytes", "seen", "learned")

    def __init__(self, site: int) -> None:
        self.event = _library.CEvent.from_buffer_copy(_library.BLANK_EVENT)
        self.event.site = site
        self.error = _library.CError()
        self.shape: object = None
        self.strides: object = None
        self.dtype: object = None
        self.rows: Rows | None = None
        self.bytes = 0
        self.seen = False  # the tensor of the last call had this layout
        self.learned = False  # the built-in function was given it, if it takes such tensors


class PreparedSite:
    """One site of an open trace. record() may be called from any thread.

    ``type``, ``fast``, ``address``: tensors of this very type can be given to fast(address, tensor, rows) of
    _fast_call.py.

    A call that the built-in function does not take (another type, too large, on a device) goes the long way in Python;
    both write the same event.
    """

    __slots__ = (
        "_axes",
        "_engine_name",
        "_event",
        "_fields",
        "_fold",
        "_layouts",
        "_meta",
        "_row_axis",
        "_site",
        "_trace",
        "address",
        "fast",
        "name",
        "number",
        "type",
    )

    def __init__(
        self,
        trace: Trace,
        name: str,
        *,
        engine_name: str | None = None,
        axes: str | None = None,
        meta: Mapping[str, object] | None = None,
        fold: Fold | None = None,
        row_axis: int = -1,
        compute_dtype: object = None,
        **shard: int,
    ) -> None:
        """name, engine_name, axes, compute_dtype, shard_*: as in Trace.record(), the same for each event of the site, as
        is meta. fold: the shape and strides to record for those of the tensor, as host tensors have axes that the site
        does not (batch before rows); it may raise ValueError when there is no such view. row_axis: of the tensors that
        come with rows; -1: as the axes say."""
        self._fold = fold
        self._fields = dict(shard)
        if compute_dtype is not None:
            self._fields["compute_dtype"] = dtype_number(compute_dtype)
        self._row_axis = row_axis
        self.name, self._engine_name, self._axes = name, engine_name, axes
        self._meta = (_library.pairs(dict(meta)), len(meta)) if meta else None
        self.bind(trace)

    def bind(self, trace: Trace) -> None:
        """Goes on in another trace: a forked child opens one of its own."""
        self._trace = trace
        self.number: int = trace._add_site(self.name, self._engine_name, self._axes)
        # By thread: two threads fill in addresses at the same time, and events are read without Python's lock.
        self._layouts: dict[int, _Layout] = {}
        self._site = _fast_call.CSite(trace=addressof(trace._live), row_axis=self._row_axis)
        self.address = addressof(self._site)
        self.fast: _fast_call.Record = _fast_call.never
        self.type: type[Any] = _fast_call.Nothing
        if self._fold is None:
            self._take_any()

    def _take_any(self) -> None:
        """Gives the built-in function all tensors that it can read. Once torch is there."""
        functions = _fast_call.functions()
        # The sink stderr may be a pipe that a thread of this process reads, which needs Python's lock for it.
        if functions is None or not self._trace.file:
            return
        self._event = _library.CEvent.from_buffer_copy(_library.BLANK_EVENT)
        self._event.site = self.number
        self._set_constants(self._event)
        self._site.event = pointer(self._event)
        self._site.ready = 1
        self.fast, self.type = functions.record, functions.type

    def _set_constants(self, event: _library.CEvent) -> None:
        if self._meta is not None:
            event.meta, event.n_meta = self._meta
        for field, value in self._fields.items():
            setattr(event, field, value)

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
        if type(tensor) is self.type:
            done = self.fast(self.address, tensor, 0 if rows is None else rows.address)
            if done:
                return True
            if done is None:
                if self._site.result != 4:  # 4: dropped, counted by the library
                    _library.check(self._site.result, self._site.error)
                return False
        return self._record(tensor, rows)

    def _learn(self, layout: _Layout, tensor: Any) -> None:
        """Gives the built-in function the layout of a tensor that was recorded."""
        if self._fold is None:
            self._take_any()
            return
        code = _fast_call.CODES.get(str(tensor.dtype))
        functions = _fast_call.functions()
        shape = tensor.shape
        if code is None or functions is None or not self._trace.file:
            return
        if not 0 < tensor.numel() <= _fast_call.LARGEST:
            return
        site = self._site
        site.ready = 0  # a call of another thread may come between any two lines
        event = _library.CEvent.from_buffer_copy(layout.event)  # of the thread's: arrays of its own
        rank = event.ndim
        event.shape, event.strides = (c_int64 * rank)(*event.shape[:rank]), (c_int64 * rank)(*event.strides[:rank])
        extents = c_int64 * len(shape)
        site.event, site.shape, site.strides = pointer(event), extents(*shape), extents(*tensor.stride())
        site.ndim = len(shape)
        site.code, site.bits = code
        site.ready = 1
        self.fast, self.type = functions.record, functions.type

    def _record(self, tensor: Any, rows: Rows | None) -> bool:
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
                self._set_constants(layout.event)
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
                layout.seen = layout.learned = False
                layout.dtype = tensor.dtype
            shape = tensor.shape
            if shape != layout.shape or tensor.stride() != layout.strides:
                # Until all of it fits again: the fold may raise in between.
                layout.shape = None
                layout.seen = layout.learned = False
                strides = tensor.stride()
                as_shape, as_strides = self._fold(shape, strides) if self._fold is not None else (shape, strides)
                extents = c_int64 * len(as_shape)
                event.ndim = len(as_shape)
                event.shape, event.strides = extents(*as_shape), extents(*as_strides)
                layout.shape, layout.strides = shape, strides
            if rows is not layout.rows:
                event.compute_dtype = self._fields.get("compute_dtype", 0)
                if rows is None:
                    event.runs, event.n_runs, event.step, event.phase = None, 0, -1, 0
                else:
                    event.runs, event.n_runs = rows.at, rows.count
                    event.step, event.phase = rows.step, rows.phase
                    event.compute_dtype = rows.compute_dtype or event.compute_dtype
                given = rows is not None and rows.count != 0
                event.row_axis = self._row_axis if given else -1
                layout.rows = rows
            offset = tensor.storage_offset()
            address = tensor.data_ptr()
            event.data, event.offset = (address - offset * layout.bytes, offset) if address else (None, 0)
            # Return codes of assay.h: 0 recorded or left out, 4 dropped, others are errors with a text.
            code = trace._record(trace._handle, event, layout.error)
            if code == 0:
                if not layout.learned and layout.seen:
                    layout.learned = True
                    self._learn(layout, tensor)
                layout.seen = True
                return True
            if code == 4:  # dropped: counted by the library
                return False
            _library.check(code, layout.error)
        finally:
            trace._calls.pop()
        return False



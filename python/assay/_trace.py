"""Recording from Python: a thin layer over assay.h."""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Mapping, Sequence
from ctypes import byref, c_int64, c_uint32, c_uint64, c_void_p
from operator import index
from types import TracebackType
from typing import Any, Literal, NamedTuple

from . import _library
from ._arguments import Run, check_width, fill_rows, integers, read_runs, reinterpreted
from ._dtypes import dtype_number, phase_number
from ._errors import Error, MachineError, UsageError
from ._library import c_text, printable_text
from ._settings import NO_ENVIRONMENT, Value, assignments, settings
from ._tensor import locate

BEFORE_INPLACE = 1
"""Flag: the value was taken before a later in-place write."""
IN_GRAPH = 2
"""Flag: recorded from inside a captured graph."""

Errors = Literal["raise", "warn", "count"]


class AssayWarning(UserWarning):
    """An observation that could not be recorded, once a site and reason (``errors="warn"``)."""


class Drops(NamedTuple):
    """Observations that did not reach the trace, by reason; ``recorded`` for comparison.

    byte_cap: the budget of the trace is used up; disk_full; payload_budget: recorded without its values; internal:
    what did not fit, and faults.
    """

    byte_cap: int
    disk_full: int
    payload_budget: int
    internal: int
    recorded: int


class Trace:
    """One process's recording. Made by trace(); all methods may be called from any thread.

    A trace that is off (ASSAY=off, or no path and ASSAY unset) has ``armed`` False and does nothing.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        meta: Mapping[str, object] | None = None,
        errors: Errors = "raise",
        environment: bool = True,
        **knobs: Value | None,
    ) -> None:
        """As trace() says. Raises UsageError and MachineError."""
        if errors not in ("raise", "warn", "count"):
            raise UsageError(f"errors={errors!r}; expected raise, warn or count")
        if path is not None:
            if knobs.get("dir") is not None:
                raise UsageError("give the folder as path or as dir, not both")
            knobs["dir"] = path
            knobs.setdefault("profile", None if environment and os.environ.get("ASSAY") else "all")
        given = assignments(knobs)
        options = _library.COptions(struct_size=ctypes.sizeof(_library.COptions), rank=-1)
        keep = _library.strings(given)
        options.settings, options.n_settings = keep, len(given)
        options.flags = 0 if environment else NO_ENVIRONMENT
        options.rank = -1 if rank is None else rank
        options.world_size = world_size or 0
        facts = {"engine": "python", "python": sys.version.split()[0], **(meta or {})}
        options.meta, options.n_meta = _library.pairs(facts), len(facts)
        self._library = _library.host()
        self._record = self._library.assay_record
        self._handle = c_void_p()
        self._closed = False
        self._errors = errors
        self._sites: dict[str, int] = {}
        self._lost: dict[tuple[str, str], int] = {}
        self._final_counts: Any = None  # CDropCounts, once closed
        self._last_runs: tuple[Any, Any] = (None, None)
        # One entry for each call under way: close() waits for them. append and pop are atomic.
        self._calls: deque[None] = deque()
        error = _library.CError()
        _library.check(self._library.assay_open(byref(options), byref(self._handle), byref(error)), error)
        # Asked now: close() comes when the environment may be another.
        self._strict = settings(environment=environment, **knobs).get("ASSAY_STRICT") == "on"
        # The handle points at the flag that says whether anything is wanted: a disarmed trace costs this read and no
        # call into C.
        self._armed = c_uint32.from_address(self._handle.value or 0)
        self._live = c_void_p(self._handle.value)  # for calls that are not in _calls; NULL before the handle goes
        _open_traces.append(self)

    # ---- state

    @property
    def armed(self) -> bool:
        """Whether observations are wanted now."""
        self._calls.append(None)
        try:
            return not self._closed and self._armed.value != 0
        finally:
            self._calls.pop()

    def arm(self, on: bool = True) -> None:
        """Pauses (False) or goes on (True). UsageError when the trace is off."""
        self._call("assay_arm", int(on))

    @property
    def path(self) -> str:
        """The trace folder; empty when off or with the sink stderr."""
        return self._text("assay_dir")

    @property
    def file(self) -> str:
        """This process's file in the folder; empty as path is."""
        return self._text("assay_path")

    # ---- recording

    def record(
        self,
        name: str,
        tensor: Any,
        *,
        engine_name: str | None = None,
        axes: str | None = None,
        layer: int | None = None,
        step: int | None = None,
        rank: int | None = None,
        phase: str | int = 0,
        flags: int = 0,
        stream: int = 0,
        dtype: object = None,
        compute_dtype: object = None,
        row_axis: int | None = None,
        head_axis: int | None = None,
        runs: Sequence[Run | tuple[int, ...]] | None = None,
        row_requests: int | Sequence[int] | Any = None,
        row_positions: Sequence[int] | Any = None,
        shard_index: int = 0,
        shard_count: int = 1,
        shard_col_offset: int = 0,
        shard_full_cols: int = 0,
        meta: Mapping[str, object] | None = None,
    ) -> bool:
        """Measures one tensor and writes the event. True when it was recorded or the settings leave it out; False when
        it was dropped, which is counted (drops()), or the trace is closed. The tensor is read on this thread, without the GIL.

        name: canonical, ``layers.3.attn.q``, or the engine's own; with layer=3 ``attn.q`` is enough.
        tensor: torch (any strided CPU tensor), NumPy (ml_dtypes too), DLPack on the host, or the buffer protocol; any
            rank up to 32, any strides. Nothing is copied or changed.
        engine_name, axes: kept with the site; axes such as "T H d" name the row axis T and the head axis H. Needed once
            a site, and not at all for canonical names.
        step: of the engine. rank: of this process when left out. phase: "prefill", "decode" and so on.
        flags: BEFORE_INPLACE, IN_GRAPH. stream: identity of a stream or graph.
        dtype: what the elements are, when the tensor's own dtype is a stand-in of the same width ("bf16" in uint16).
        compute_dtype: coarsest rounding the value has been through ("bf16" for a bf16 result held in float32).
        row_axis, head_axis: in place of axes.
        runs: whose the rows are, Run or tuples; or, a row at a time, row_requests (keys, or one key for all rows) and
            row_positions (-1: a padding row), sequences or integer arrays of one entry a row. None of them: rows of no
            known request, from position 0.
        shard_*: where this rank's columns lie in the whole row (tensor parallelism), in columns.
        meta: free pairs, kept with the event.

        Raises UsageError (as trace(errors=...) says) when the fields do not fit together, the dtype is not known, or
        the tensor is on a device.
        """
        self._calls.append(None)  # from here on close() waits
        try:
            if self._closed:
                return False
            if not self._armed.value:
                return True
            where = locate(tensor)
            event = _library.CEvent.from_buffer_copy(_library.BLANK_EVENT)
            if layer is not None and not name.startswith("layers."):
                if index(layer) < 0:
                    raise UsageError(f"layer={layer}; expected 0 or above")
                name = f"layers.{index(layer)}.{name}"
            site = self._sites.get(name)
            event.site = self._add_site(name, engine_name, axes) if site is None else site
            rank_of = len(where.shape)
            event.ndim = rank_of
            if rank_of:
                extents = c_int64 * rank_of
                event.shape = extents(*where.shape)
                if where.strides is not None:
                    event.strides = extents(*where.strides)
            event.data = where.data
            event.offset = where.offset
            event.dtype = where.dtype
            if dtype is not None:
                event.dtype = reinterpreted(where.dtype, dtype)
            if step is not None:
                check_width("step", step, -(1 << 63), 63)
                event.step = step
            if rank is not None:
                check_width("rank", rank, -(1 << 31), 31)
                event.rank = rank
            if phase:
                event.phase = phase_number(phase)
            if flags:
                check_width("flags", flags, 0, 32)
                event.flags = flags
            if stream:
                check_width("stream", stream, 0, 64)
                event.stream = stream
            if compute_dtype is not None:
                event.compute_dtype = dtype_number(compute_dtype)
            if row_axis is not None:
                check_width("row_axis", row_axis, -(1 << 31), 31)
                event.row_axis = row_axis
            if head_axis is not None:
                check_width("head_axis", head_axis, -(1 << 31), 31)
                event.head_axis = head_axis
            if shard_count != 1 or shard_full_cols or shard_col_offset:
                check_width("shard_index", shard_index, -(1 << 31), 31)
                check_width("shard_count", shard_count, -(1 << 31), 31)
                check_width("shard_col_offset", shard_col_offset, -(1 << 63), 63)
                check_width("shard_full_cols", shard_full_cols, -(1 << 63), 63)
                event.shard_index, event.shard_count = shard_index, shard_count
                event.shard_col_offset, event.shard_full_cols = shard_col_offset, shard_full_cols
            keep: list[object] = [where]
            if runs is not None:
                event.runs, event.n_runs = self._row_runs(runs), len(runs)
            if row_requests is not None or row_positions is not None:
                fill_rows(event, where.shape, row_requests, row_positions, keep)
            if meta:
                event.meta, event.n_meta = _library.pairs(dict(meta)), len(meta)
            error = _library.CError()
            code = self._record(self._handle, event, error)
            if code == 0:
                return True
            if code == 4:  # dropped: counted by the library
                return False
            try:
                _library.check(code, error)
            except Error as problem:
                return self._refuse(name, problem, counted=True)
        except Error as problem:
            return self._refuse(name, problem)
        except (AttributeError, TypeError, ValueError, RuntimeError) as problem:
            # What a field of the wrong type, or a tensor that is none, raises on its way to C.
            return self._refuse(name, UsageError(f"{type(problem).__name__}: {problem}"), problem)
        finally:
            self._calls.pop()
        return False

    def _add_site(self, name: str, engine_name: str | None, axes: str | None) -> int:
        """The number of the site, from now on or as before."""
        info = _library.CSiteInfo(
            struct_size=ctypes.sizeof(_library.CSiteInfo),
            name=c_text("name", name),
            engine_name=None if engine_name is None else c_text("engine_name", engine_name),
            axes=None if axes is None else c_text("axes", axes),
        )
        number = c_uint32()
        error = _library.CError()
        code = self._library.assay_add_site(self._handle, byref(info), byref(number), byref(error))
        _library.check(code, error)
        self._sites[name] = number.value
        return number.value

    def _row_runs(self, runs: Sequence[Run | tuple[int, ...]]) -> Any:
        """The C array of runs. That of a tuple is kept for the next tensor of the same step."""
        known, array = self._last_runs
        if known is not runs or not isinstance(runs, tuple):
            array = (_library.CRowRun * len(runs))(*[_library.CRowRun(*run) for run in read_runs(runs)])
            if isinstance(runs, tuple):
                self._last_runs = (runs, array)
        return array

    def _refuse(
        self, name: Any, problem: Error, cause: BaseException | None = None, *, counted: bool = False
    ) -> bool:
        """counted: by the library already; what never reached it is counted here and noted at close()."""
        if self._errors == "raise":
            raise problem from cause
        key = (name if isinstance(name, str) else repr(name), str(problem))
        first = key not in self._lost
        self._lost[key] = self._lost.get(key, 0) + (0 if counted else 1)
        if first and self._errors == "warn":
            warnings.warn(f"{name}: {problem}", AssayWarning, stacklevel=3)
        return False

    def request(self, tokens: Sequence[int] | Any, ordinal: int = 0, *, engine_id: str | None = None) -> int:
        """Announces a request by its prompt's token ids and returns its key. The ids themselves are stored only with
        ASSAY_TOKENS=on or at level payload."""
        array, count, _keep = integers(tokens, c_int64)
        info = _library.CRequest(
            struct_size=ctypes.sizeof(_library.CRequest),
            tokens=array,
            n_tokens=count,
            ordinal=ordinal,
            engine_id=None if engine_id is None else c_text("engine_id", engine_id),
        )
        key = c_uint64()
        self._call("assay_add_request", byref(info), byref(key))
        return key.value

    def add_site(self, name: str, *, engine_name: str | None = None, axes: str | None = None) -> None:
        """Announces a site: when it is never recorded, the trace's coverage says so."""
        self._calls.append(None)
        try:
            if not self._closed:
                self._add_site(name, engine_name, axes)
        finally:
            self._calls.pop()

    def wants(self, name: str, *, step: int | None = None, rank: int | None = None) -> bool:
        """Whether the settings let an observation of this name through now: armed, include, exclude, layers, ranks, steps.
        For hosts to which the tensor is dear to make; it announces nothing."""
        self._calls.append(None)
        try:
            if self._closed or not self._armed.value:
                return False
            return bool(
                self._library.assay_wants_name(
                    self._handle, c_text("name", name), -1 if rank is None else rank, -1 if step is None else step
                )
            )
        finally:
            self._calls.pop()

    def lets_through(self, name: str) -> bool:
        """Whether the settings let an observation of this name through at some step, armed or not: it stays so."""
        self._calls.append(None)
        try:
            return not self._closed and bool(
                self._library.assay_python_lets_through(self._handle, c_text("name", name))
            )
        finally:
            self._calls.pop()

    def coverage(self, site: str, reason: str, count: int = 0, detail: str = "") -> None:
        """A note on what the trace cannot show; reason: "not found", "skipped", "absent on this path" and so on."""
        self._call(
            "assay_coverage", c_text("site", site), c_text("reason", reason), count, c_text("detail", detail)
        )

    def set_meta(self, key: str, value: object) -> None:
        """A fact of the process; a later value of the same key wins."""
        self._call("assay_set_meta", c_text("key", key), c_text(key, str(value)))

    def trigger(self, reason: str = "") -> None:
        """Writes out the on-anomaly ring (setting ring). Nothing without one."""
        self._call("assay_trigger", c_text("reason", reason))

    def flush(self) -> None:
        """Forces the file to disk, against loss of power; a killed process loses nothing anyway."""
        self._call("assay_flush")

    def drops(self) -> Drops:
        """What did not reach the trace, by reason."""
        counts = self._final_counts or _library.CDropCounts(struct_size=ctypes.sizeof(_library.CDropCounts))
        self._call("assay_drops", byref(counts))
        lost = sum(self._lost.values())
        return Drops(
            counts.byte_cap, counts.disk_full, counts.payload_budget, counts.internal + lost, counts.recorded
        )

    def _text(self, name: str) -> str:
        self._calls.append(None)
        try:
            return "" if self._closed else os.fsdecode(getattr(self._library, name)(self._handle))
        finally:
            self._calls.pop()

    def _call(self, name: str, *arguments: Any) -> None:
        self._calls.append(None)
        try:
            if self._closed:
                return
            error = _library.CError()
            code = getattr(self._library, name)(self._handle, *arguments, byref(error))
            _library.check(code, error)
        finally:
            self._calls.pop()

    # ---- end

    def close(self) -> None:
        """Writes coverage and drop counts and closes the file. Safe to call twice.

        With strict=True: UsageError when a pattern matched no site, MachineError when something was dropped. Else a disk
        that takes no more is no exception: an AssayWarning, or with errors="count" nothing; drops() has the count.
        """
        problem = self._end()
        if problem is None:
            return
        if self._strict or not isinstance(problem, MachineError):
            raise problem
        if self._errors != "count":
            warnings.warn(f"{problem}", AssayWarning, stacklevel=2)

    def _end(self) -> Error | None:
        """Closes whatever happens; the first thing that went wrong. None when closed before."""
        problem: Error | None = None
        with _close_lock:
            if self._closed:
                return None
            for (name, reason), count in self._lost.items():
                if count == 0:
                    continue  # the library notes its own
                try:
                    self._call("assay_coverage", printable_text(name), b"dropped", count, printable_text(reason))
                except Error as refused:
                    problem = problem or refused
            self._closed = True
        while self._calls:
            time.sleep(0.001)  # a record of another thread is under way
        if self in _open_traces:
            _open_traces.remove(self)
        self._live.value = None
        error = _library.CError()
        counts = _library.CDropCounts(struct_size=ctypes.sizeof(_library.CDropCounts))
        if self._library.assay_drops(self._handle, byref(counts), None) == 0:
            self._final_counts = counts
        try:
            _library.check(self._library.assay_close(byref(self._handle), byref(error)), error)
        except Error as refused:
            problem = problem or refused
        if problem is None and counts.disk_full:
            problem = MachineError(f"the disk takes no more: {counts.disk_full} observation(s) are not in the trace")
        return problem

    def __enter__(self) -> Trace:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self.close()
        except Error:
            if kind is None:  # what ends the block is the host's own exception
                raise

    def __repr__(self) -> str:
        state = "closed" if self._closed else "armed" if self.armed else "not armed"
        return f"<assay.Trace {self.path!r} {state}>"


# In the order of opening; the last is current().
_open_traces: list[Trace] = []
_close_lock = threading.Lock()
_environment_tried = False


def trace(
    path: str | os.PathLike[str] | None = None,
    *,
    rank: int | None = None,
    world_size: int | None = None,
    meta: Mapping[str, object] | None = None,
    errors: Errors = "raise",
    environment: bool = True,
    **knobs: Value | None,
) -> Trace:
    """Opens a recording; use it as a context, or call close().

    With a path it records (profile "all" unless ASSAY or ``profile=`` says otherwise); without one the environment
    decides, and without ASSAY nothing is recorded.

    path: the trace folder, made when missing; %r rank, %p pid, %h host, %i next free number.
    rank, world_size: of this process; RANK, WORLD_SIZE and their like when left out.
    meta: facts of the process, kept in the trace: engine, version, model, dtype.
    errors: what record() does with an observation that does not fit: "raise" an exception, "warn" once a site and
        reason, or "count" it in silence. Full disks and budgets are never an exception.
    knobs: settings by name, ``level="payload"``, ``layers="0-3"``, ``include=["layers.*.attn.*"]`` (docs/settings.md);
        they win over the environment, which is not looked at with environment=False.

    Raises UsageError for a wrong setting, MachineError when the folder cannot be written.
    """
    return Trace(
        path, rank=rank, world_size=world_size, meta=meta, errors=errors, environment=environment, **knobs
    )


def record(name: str, tensor: Any, **fields: Any) -> bool:
    """Trace.record() into the recording opened last. Without one, the environment (ASSAY) decides at the first call
    whether a recording is opened, which then ends with the process."""
    if _open_traces:
        return _open_traces[-1].record(name, tensor, **fields)
    if not _environment_tried and _open_from_environment():
        return _open_traces[-1].record(name, tensor, **fields)
    return True


def _open_from_environment() -> bool:
    """Tried once a process; False when ASSAY is off. errors="warn": a host that did not ask for it gets no
    exception.
    """
    global _environment_tried
    _environment_tried = True
    if os.environ.get("ASSAY", "") in ("", "0", "off"):
        return False
    Trace(errors="warn")
    return True


def current() -> Trace | None:
    """The recording opened last, or None."""
    return _open_traces[-1] if _open_traces else None


@atexit.register
def _close_all() -> None:
    for open_trace in list(_open_traces):
        try:
            open_trace.close()
        except Error as problem:  # strict, or a full disk: the others are closed all the same
            warnings.warn(f"{problem}", AssayWarning, stacklevel=1)


def _after_fork_in_child() -> None:
    """A lock that another thread held at the fork would stay locked for ever."""
    global _close_lock
    _close_lock = threading.Lock()
    for open_trace in _open_traces:
        open_trace._calls.clear()  # calls of threads that the child does not have


os.register_at_fork(after_in_child=_after_fork_in_child)

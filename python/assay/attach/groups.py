"""What a probe records each time that it fires: views of the same tensors, under the same names.

A group is learned from what was recorded the long way. From then on one built-in call records all of it (_fast_call.py)
without a view being made in Python, as long as the tensors look alike: their rank, type, extents and strides but for the
rows, which are those of the step. Of what is learned nothing depends on values.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import POINTER, addressof, c_int64, cast, pointer
from typing import TYPE_CHECKING, Any

from .. import _fast_call
from .._prepared import PreparedSite

if TYPE_CHECKING:
    from .._trace import Trace
    from .rows import Rows
    from .session import Session

MAX_MEMBERS = 8
MAX_RANK = 8

MAX_LEARNED = 8
"""Times that a group is learned; one whose tensors change all the time goes the long way."""

CONSTANT = frozenset(
    (
        *("engine_name", "axes", "meta", "compute_dtype"),
        *("shard_index", "shard_count", "shard_col_offset", "shard_full_cols"),
    )
)
"""Fields of Session.record() that a group may have. They stay what they were when it was learned."""

Recorded = tuple[str, "int | None", Any, dict[str, Any]]
"""Name, layer, tensor and fields, as given to Session.record()."""


class Group:
    """One probe's. record() may be called from any thread."""

    __slots__ = ("_address", "_call", "_kept", "_session", "_trace", "by_row")

    def __init__(self, session: Session) -> None:
        self._session = session
        self._trace: Trace | None = None
        self._call: _fast_call.Group = _fast_call.never
        self._address = 0
        # All that C may have addresses of. What was learned before stays: a call of another thread may be under way.
        self._kept: list[object] = []
        self.by_row = False  # see learn()

    @property
    def address(self) -> int:
        """Of the CGroup that was learned last; 0 where there is none in the trace of now."""
        return self._address if self._trace is not None and self._trace is self._session._trace else 0

    def record(self, rows: Rows, tensors: Sequence[Any]) -> bool:
        """Records what was learned of tensors like these; False: nothing was done. rows: of the step."""
        if not self.address:  # nothing learned, or a forked child
            return False
        return self._call(self._address, rows.address, *tensors)

    def learn(
        self, rows: Rows, tensors: Sequence[Any], recorded: Sequence[Recorded], by_row: tuple[Any, Any] | None = None
    ) -> None:
        """recorded: all that a call with these tensors recorded the long way, with these rows. by_row: (whole, numbers)
        where the one tensor is a copy of rows of a contiguous one (its last axis is a row), by number. Where such two can be
        taken (by_row then is True), the group's tensors are those from then on, not the copy."""
        functions, trace = _fast_call.functions(), self._session._trace
        if functions is None or trace is None or not trace.file or len(self._kept) >= MAX_LEARNED:
            return
        if not recorded or not 1 <= len(tensors) <= MAX_MEMBERS:
            return
        if not all(_takes(functions, tensor, rows.n_rows) for tensor in tensors):
            return
        found = [self._view(functions, rows, tensors, *one) for one in recorded]
        if any(view is None for view in found):
            return
        if by_row is not None and not _takes_by_row(functions, *by_row):
            by_row = None
        given = tensors if by_row is None else by_row
        members = (_fast_call.CMember * len(given))(*map(_member, given))
        views = (_fast_call.CView * len(found))()
        sites = []
        for c, (name, layer, tensor, fields), view in zip(views, recorded, found):
            assert view is not None
            member, first = view
            site = PreparedSite(trace, _full_name(name, layer), **fields)
            sites.append(site)
            c.site, c.member, c.first, c.ndim = pointer(site._site), member, first, tensor.ndim
            c.shape, c.strides = _extents(tensor.shape), _extents(tensor.stride())
        group = _fast_call.CGroup(cast(members, POINTER(_fast_call.CMember)), cast(views, POINTER(_fast_call.CView)))
        group.n_members, group.n_views, group.by_row = len(members), len(views), by_row is not None
        self.by_row = by_row is not None
        self._kept.append((members, views, sites, group))
        self._trace, self._call, self._address = trace, functions.group, addressof(group)

    @staticmethod
    def _view(
        functions: _fast_call.Functions,
        rows: Rows,
        tensors: Sequence[Any],
        name: str,
        layer: int | None,
        tensor: Any,
        fields: dict[str, Any],
    ) -> tuple[int, int] | None:
        """Number of the member that the tensor is a view of, and elements between their first ones; None: it is none, or
        recorded with more than a group can have.

        Each row of a view lies within the same row of its member: where the members of a later call lie to each other,
        and how many rows they have, plays no part."""
        if not CONSTANT.issuperset(fields) or (layer is not None and layer < 0):
            return None
        if not _takes(functions, tensor, rows.n_rows):
            return None
        within = None
        for number, member in enumerate(tensors):
            same = tensor.untyped_storage().data_ptr() == member.untyped_storage().data_ptr()
            if not same or tensor.dtype != member.dtype or tensor.stride(0) != member.stride(0):
                continue
            first = tensor.storage_offset() - member.storage_offset()
            if first == 0 and tensor.shape == member.shape and tensor.stride() == member.stride():
                return number, 0
            if within is None and 0 <= first <= _row_span(member) - _row_span(tensor):
                within = number, first
        return within


def _row_span(tensor: Any) -> int:
    """Elements between the first and the last one of a row."""
    return sum((n - 1) * stride for n, stride in zip(tensor.shape[1:], tensor.stride()[1:]))


def _takes(functions: _fast_call.Functions, tensor: Any, n_rows: int) -> bool:
    return (
        type(tensor) is functions.type
        and tensor.is_cpu
        and str(tensor.dtype) in _fast_call.CODES
        and 1 <= tensor.ndim <= MAX_RANK
        and tensor.shape[0] == n_rows
        and 0 < tensor.numel() <= _fast_call.LARGEST
        and not tensor.is_neg()
    )


def _takes_by_row(functions: _fast_call.Functions, whole: Any, numbers: Any) -> bool:
    return (
        type(whole) is type(numbers) is functions.type
        and str(whole.dtype) == "torch.bfloat16"
        and str(numbers.dtype) == "torch.int64"
        and whole.is_cpu
        and numbers.is_cpu
        and whole.is_contiguous()
        and 1 <= whole.ndim <= MAX_RANK
        and numbers.ndim == 1
    )


def _extents(values: Sequence[int]) -> Any:
    return cast((c_int64 * len(values))(*values), POINTER(c_int64))


def _member(tensor: Any) -> _fast_call.CMember:
    code, bits = _fast_call.CODES[str(tensor.dtype)]
    return _fast_call.CMember(_extents(tensor.shape), _extents(tensor.stride()), tensor.ndim, code, bits)


def _full_name(name: str, layer: int | None) -> str:
    return name if layer is None or name.startswith("layers.") else f"layers.{layer}.{name}"

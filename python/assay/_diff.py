"""Comparing two traces; the work is the library's, the result is typed here."""

from __future__ import annotations

import json
import os
from ctypes import byref, c_int32, c_void_p
from dataclasses import dataclass
from typing import Any, Literal

from . import _library
from ._events import Events, _number

Verdict = Literal["same", "noise", "fault", "incomparable"]


@dataclass(frozen=True)
class Finding:
    """One fault: the first tensor whose inputs agree and whose value does not, where in it, and what bounds the noise.

    ``request`` is a key; ``positions`` are inclusive ranges of token positions; ``heads`` is empty for all heads or
    when they are not known; ``measured`` and ``bound`` are relative L2 differences (``measured_of`` says of what, as
    "relative L2 of B - A", and ``measured_from`` what they are computed or estimated from); ``cls`` is a class of the
    case bank or "UNKNOWN"; ``constant`` is a fitted constant with its meaning, or empty; ``confidence`` is 0 to 1.

    ``layer`` and ``step`` are -1 when they do not apply; ``method`` says how the class was found, ``evidence``
    has a line each. Fields as in docs/json.md, assay.diff/1.
    """

    name: str
    layer: int
    step: int
    request: int
    positions: tuple[tuple[int, int], ...]
    heads: tuple[int, ...]
    ranks: tuple[int, ...]
    cls: str
    constant: str
    measured: float
    bound: float
    bound_basis: str
    measured_of: str
    measured_from: str
    method: str
    confidence: float
    evidence: tuple[str, ...]


@dataclass(frozen=True)
class Coverage:
    """How much of both traces was compared; ``share`` is of the common sites. Rows set aside depend on a near tie or lie
    behind a differing token.

    ``rows_only_a`` and ``rows_only_b``: (request, position) pairs that one trace alone has; ``only_a`` and ``only_b``:
    site names; ``notes``: what could not be compared, and why.
    """

    sites_a: int
    sites_b: int
    sites_common: int
    sites_compared: int
    share: float
    rows_compared: int
    rows_only_a: int
    rows_only_b: int
    rows_set_aside: int
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class NearTie:
    """A discrete choice that fell differently within the bound. ``margin`` is None when it was not recorded.

    ``margin`` is the mean of both sides' gaps between the scores that changed places, in their own unit; ``bound`` is
    what a right run may close.
    """

    name: str
    request: int
    position: int
    margin: float | None
    bound: float


@dataclass(frozen=True)
class SiteComparison:
    """The worst row of one site. ``cosine`` and ``max_abs`` are None when they are not known.

    The row is the one whose difference is largest against its bound. ``rel_l2``: its relative L2
    difference; ``rel_l2_in``: the largest of its inputs; ``bound``: what noise may reach. ``rows_set_aside`` are not in
    ``rows_bad``.
    """

    name: str
    rows: int
    rows_bad: int
    rows_set_aside: int
    rel_l2: float
    rel_l2_in: float
    bound: float
    cosine: float | None
    max_abs: float | None
    note: str


@dataclass(frozen=True)
class DiffResult:
    """``exit_code`` is that of `assay diff`: 0 same or noise, 1 fault, 3 incomparable. ``raw`` is the whole JSON, schema
    assay.diff/1."""

    verdict: Verdict
    summary: str
    findings: tuple[Finding, ...]
    coverage: Coverage
    near_ties: tuple[NearTie, ...]
    sites: tuple[SiteComparison, ...]
    exit_code: int
    raw: dict[str, Any]

    @property
    def first_bad(self) -> Finding | None:
        """The first finding in causal order, or None."""
        return self.findings[0] if self.findings else None


# Keys are unsigned 64 bits wide, which many JSON readers cannot hold: they are hexadecimal text there.
def _key(value: str | int) -> int:
    return value if isinstance(value, int) else int(value, 16)


def _optional(value: float | str | None) -> float | None:
    return None if value is None else _number(value)


def _finding(raw: dict[str, Any]) -> Finding:
    return Finding(
        name=raw["name"],
        layer=raw["layer"],
        step=raw["step"],
        request=_key(raw["request"]),
        positions=tuple((first, last) for first, last in raw["positions"]),
        heads=tuple(raw["heads"]),
        ranks=tuple(raw["ranks"]),
        cls=raw["class"],
        constant=raw["constant"],
        measured=_number(raw["measured"]),
        bound=_number(raw["bound"]),
        bound_basis=raw["bound_basis"],
        measured_of=raw["measured_of"],
        measured_from=raw["measured_from"],
        method=raw["method"],
        confidence=_number(raw["confidence"]),
        evidence=tuple(raw["evidence"]),
    )


def _coverage(raw: dict[str, Any]) -> Coverage:
    return Coverage(
        sites_a=raw["sites_a"],
        sites_b=raw["sites_b"],
        sites_common=raw["sites_common"],
        sites_compared=raw["sites_compared"],
        share=_number(raw["share"]),
        rows_compared=raw["rows_compared"],
        rows_only_a=raw["rows_only_a"],
        rows_only_b=raw["rows_only_b"],
        rows_set_aside=raw["rows_set_aside"],
        only_a=tuple(raw["only_a"]),
        only_b=tuple(raw["only_b"]),
        notes=tuple(raw["notes"]),
    )


def _site(raw: dict[str, Any]) -> SiteComparison:
    return SiteComparison(
        name=raw["name"],
        rows=raw["rows"],
        rows_bad=raw["rows_bad"],
        rows_set_aside=raw["rows_set_aside"],
        rel_l2=_number(raw["rel_l2"]),
        rel_l2_in=_number(raw["rel_l2_in"]),
        bound=_number(raw["bound"]),
        cosine=_optional(raw["cosine"]),
        max_abs=_optional(raw["max_abs"]),
        note=raw["note"],
    )


def diff(
    a: Events | str | os.PathLike[str],
    b: Events | str | os.PathLike[str],
    *,
    tolerance: str | None = None,
    floor: str | os.PathLike[str] | None = None,
    threads: int = 0,
) -> DiffResult:
    """Compares two traces by canonical name, request and position, and names the first tensor that is wrong in b.

    a, b: trace folders, or what open() gave; a is the reference.
    tolerance: "1e-5,layers.*.q:1e-3" (relative L2) in place of the derived bounds.
    floor: a trace of a's run once more with its inputs disturbed in the last place; raises the bounds to its noise.
    threads: 0 for all cores.

    Raises BadInputError when a trace cannot be read, UsageError for a wrong tolerance. Traces that have nothing in
    common are no error: the verdict is "incomparable".
    """
    # The readers have to live until the library returns: it borrows their mapped files.
    readers = [t if isinstance(t, Events) else Events(t) for t in (a, b)]
    text, exit_code = c_void_p(), c_int32()
    error = _library.CError()
    code = _library.offline().assay_diff_traces(
        readers[0]._reader.handle,
        readers[1]._reader.handle,
        None if tolerance is None else tolerance.encode(),
        None if floor is None else os.fsencode(floor),
        threads,
        byref(text),
        byref(exit_code),
        byref(error),
    )
    _library.check(code, error)
    raw = json.loads(_library.take_text(text))
    return DiffResult(
        verdict=raw["verdict"],
        summary=raw["summary"],
        findings=tuple(_finding(f) for f in raw["findings"]),
        coverage=_coverage(raw["coverage"]),
        near_ties=tuple(
            NearTie(t["name"], _key(t["request"]), t["position"], _optional(t["margin"]), _number(t["bound"]))
            for t in raw["near_ties"]
        ),
        sites=tuple(_site(s) for s in raw["sites"]),
        exit_code=exit_code.value,
        raw=raw,
    )

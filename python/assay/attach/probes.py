"""What was asked for and what became of it."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable
from typing import Any, Literal

State = Literal["waiting", "attached", "not found", "absent on this path", "failed"]


@dataclasses.dataclass(eq=False)
class Probe:
    """One place in the host that is observed, or was to be.

    ``label``: as in a selector, "call:pkg.mod:Class.method". ``requested``: named by the user (ASSAY_PROBES); it is
    reported even when its module was never imported. ``state``: waiting (its module has not been imported), attached, not
    found, absent on this path (the profile expects that, ``detail`` says why) or failed. ``fired`` counts, but for what _fast_call.py records (``times`` has all); ``note`` says what limits an attached one.
    """

    label: str
    requested: bool = False
    required: bool = True
    absent_reason: str | None = None
    state: State = "waiting"
    detail: str = ""
    fired: int = 0
    note: str = ""
    profile: str = ""  # of the package that it belongs to
    _told: str = dataclasses.field(default="", repr=False)  # the state that the trace knows
    _counts: list[Any] = dataclasses.field(default_factory=list, repr=False)  # objects with more of ``fired``

    @property
    def times(self) -> int:
        """How often it fired, by whatever way."""
        return self.fired + sum(int(c.fired) for c in self._counts)

    def forget_times(self) -> None:
        self.fired = 0
        for count in self._counts:
            count.fired = 0

    def not_found(self, detail: str) -> None:
        if self.absent_reason is not None:
            self.state, self.detail = "absent on this path", self.absent_reason
        elif not self.required:
            self.state, self.detail = "absent on this path", detail
        else:
            self.state, self.detail = "not found", detail


class NotFoundError(Exception):
    """A part of a target does not exist; the text has the nearest names that do."""


def nearest(name: str, known: Iterable[str]) -> str:
    """"; nearest: a, b", or nothing."""
    matches = difflib.get_close_matches(name, [k for k in known if not k.startswith("__")], n=3, cutoff=0.5)
    return "; nearest: " + ", ".join(matches) if matches else ""

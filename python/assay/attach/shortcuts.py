"""What takes the place of a callback: one call of a built-in function, without a line of Python run.

A callback that records the same tensors each time leaves a shortcut behind: the group (groups.py) that knows them, and
where the call has them. From then on the wrapper of the callable, or the operator in a compiled graph, asks the built-in
function first. It does nothing when anything is not as it was learned, and the callback runs as before.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from ctypes import POINTER, addressof, c_void_p, cast, pointer
from typing import TYPE_CHECKING, Any

from .. import _fast_call
from .groups import Group

if TYPE_CHECKING:
    from .probes import Probe
    from .session import Session

RESULT = -1

MAX_TABLES = 1024
"""Times that one callable's shortcuts change; from then on calls that have none keep their callbacks."""

Where = tuple[int, int, "str | None"]
"""Where a call has a value: number of the argument or RESULT, member of that when it is a tuple (-1: itself), name of the
argument."""


class Shortcut:
    """One callback's, for calls like one that it has recorded. Keeps alive what C has addresses of."""

    def __init__(
        self,
        session: Session,
        probe: Probe | None,
        group: Group,
        places: Sequence[Where] = (),
        nothing: Sequence[Where] = (),
    ) -> None:
        """probe: fires with each; None: it has with something else of the call. group: has learned the tensors, which are at
        places of a call; what is at nothing has to be None."""
        every = [*places, *nothing]
        at = (_fast_call.CPlace * max(1, len(every)))()
        for c, (argument, member, name) in zip(at, every):
            c.argument, c.member, c.name = argument, member, None if name is None else id(name)
        self.learned = group.address
        self._keep = session.now, group, at, every
        self.c = _fast_call.CShortcut(
            now=pointer(session.now),
            group=cast(c_void_p(group.address), POINTER(_fast_call.CGroup)),
            places=cast(at, POINTER(_fast_call.CPlace)),
            n_places=len(places),
            n_nothing=len(nothing),
        )
        self.address = addressof(self.c)
        if probe is not None:
            probe._counts.append(self.c)


class Shortcuts:
    """Of one callable, by the first argument of its calls. before, after: built-in functions for ``address``, what a call
    is given and what it gives; there is none before the first put()."""

    def __init__(self) -> None:
        self.before: _fast_call.BeforeCall = _fast_call.never_before
        self.after: _fast_call.AfterCall = _fast_call.never_after
        self.address = 0  # of the table that C looks at
        self._wants = True, True
        self._by_owner: dict[int, tuple[Any, Shortcut | None, Shortcut | None]] = {}
        self._changed = object()  # another one after each change of the dictionary
        self._kept: list[object] = []  # all that C may look at

    @property
    def full(self) -> bool:
        """First arguments or their groups change all the time: what is put is not kept for ever."""
        return len(self._kept) > MAX_TABLES

    def known(self, owner: Any, when: str) -> Shortcut | None:
        found = self._by_owner.get(id(owner))
        return None if found is None else found[1] if when == "before" else found[2]

    def put(self, owner: Any, when: str, shortcut: Shortcut, wants: tuple[bool, bool]) -> None:
        """when: "before" or "after" the call. wants: whether there is something to be done then; calls have shortcuts once
        there are all that are wanted. owner: of a type that has weak references."""
        functions, identity = _fast_call.functions(), id(owner)
        if functions is None:
            return
        self.before, self.after, self._wants = functions.before, functions.after, wants
        _, before, after = self._by_owner.get(identity, (None, None, None))
        before, after = (shortcut, after) if when == "before" else (before, shortcut)
        self._by_owner[identity] = weakref.ref(owner, lambda _: self._gone(identity)), before, after
        self._changed = object()
        self._show()

    def forget(self) -> None:
        if self._by_owner:
            self._by_owner.clear()
            self._changed = object()
            self._show()

    def _gone(self, identity: int) -> None:
        if self._by_owner.pop(identity, None) is not None:
            self._changed = object()
            self._show()

    def _show(self) -> None:
        """Gives C what there is by now: a table of its own, by one store of its address. Calls of other threads may be under
        way, and what there is may change meanwhile: another thread's owner comes, or an owner goes."""
        while True:
            seen = self._changed
            every = self._by_owner.copy()
            whole = [
                (identity, before, after)
                for identity, (_, before, after) in sorted(every.items(), key=lambda item: item[0])
                if (before is not None or not self._wants[0]) and (after is not None or not self._wants[1])
            ]
            words = c_void_p * len(whole)
            owners = words(*(identity for identity, _, _ in whole))
            befores = words(*(None if s is None else s.address for _, s, _ in whole))
            afters = words(*(None if s is None else s.address for _, _, s in whole))
            c = _fast_call.CCallable(addressof(owners), addressof(befores), addressof(afters), len(whole))
            self._kept.append((c, owners, befores, afters, whole))
            if seen is self._changed:
                self.address = addressof(c)
            if seen is self._changed:
                return

"""Modules whose results all look alike: one built-in function records them (_fast_call.py), at the least cost a call.

A module is learned from a result that was recorded the long way: a tensor, or a tuple or dictionary with tensors at some
places and other things at others. As long as results are of the same types in the same order, their tensors go to the
same sites.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable
from ctypes import POINTER, c_void_p, cast, pointer
from typing import Any

from .. import _fast_call
from .._prepared import PreparedSite
from .groups import Group

MAX_PARTS = 8
"""Members of a result."""

MAX_LEARNED = 8
"""Kinds of results that a module is learned from; one that changes all the time goes the long way."""

Parts = list[tuple[Any, Any, "PreparedSite | None"]]
"""Key (None in a tuple), member, site of a tensor; for a result that is a tensor, one part with the key None."""

_table = _fast_call.ModuleTable()


def members(result: Any) -> list[tuple[Any, Any]] | None:
    """Keys and members of a result that can be learned from; None for any other."""
    kind = type(result)
    if isinstance(result, tuple) and kind.__iter__ is tuple.__iter__:
        found = [(None, value) for value in result]
    elif isinstance(result, dict) and kind.items in (dict.items, OrderedDict.items):
        found = list(result.items())
    else:
        return None
    nested = any(isinstance(value, (tuple, list, dict)) for _key, value in found)
    return None if nested or len(found) > MAX_PARTS else found


def parts_of_a_group(result: Any) -> Parts | None:
    """All tensors of a result go to one group, and the rest is nothing that would be recorded."""
    found = [(None, result)] if fits(result) else members(result)
    if found is None or not all(fits(value) or holds_nothing(value) for _key, value in found):
        return None
    return [(key, value, None) for key, value in found]


class Learned:
    """What one module's results look like. Keeps alive what C has addresses of."""

    def __init__(
        self,
        number: int,
        module: Any,
        result: Any,
        parts: Parts,
        now: _fast_call.CNow,
        group: Group | None = None,
    ) -> None:
        """number: the module's in the table. group: what all its tensors are given to, in place of sites."""
        # Not the members themselves: they may be a whole cache.
        self._keep = type(result), [(key, type(value), site) for key, value, site in parts], now, group
        self.group = 0 if group is None else group.address
        self._parts = (_fast_call.CPart * max(1, len(parts)))()
        for c, (key, value, site) in zip(self._parts, parts):
            c.key = None if key is None else id(key)
            c.type = id(type(value))
            c.site = None if site is None else site.address
        self.c = _fast_call.CModule(
            module=id(module),
            result_type=id(type(result)),
            parts=cast(self._parts, POINTER(_fast_call.CPart)),
            n_parts=len(parts),
            is_dict=isinstance(result, dict),
            now=pointer(now),
            group=cast(c_void_p(self.group or None), POINTER(_fast_call.CGroup)),
        )
        _table.set(number, self.c)

    def gone(self) -> None:
        """The module is no more: another may get its address."""
        self.c.module = None


def forget(number: int | None = None) -> None:
    """Sends a module, or all of them, the long way again."""
    if number is None:
        _table.clear()
    else:
        _table.set(number, None)


def leave_function() -> Callable[[int, Any, Any], bool] | None:
    functions = _fast_call.functions()
    return None if functions is None else functions.leave


def fits(value: Any) -> bool:
    """Whether the built-in function takes such tensors."""
    functions = _fast_call.functions()
    return functions is not None and type(value) is functions.type


def holds_nothing(value: Any) -> bool:
    """Whether things of this type hold no tensor that would be recorded."""
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    kinds = (getattr(torch, "Tensor", ()), getattr(numpy, "ndarray", ()))
    return not isinstance(value, tuple(kind for kind in kinds if kind != ()))

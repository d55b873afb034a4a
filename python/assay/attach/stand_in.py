"""What takes the place of a callable that is an object and not a function.

The host may do more with such a one than call it: clear the cache of an lru_cache, read a partial's func, launch
kernel[grid], register a fake of a custom operator. A function in its place would lose all of that. A stand-in is called in
its place, and passes everything else on to it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType, MethodType, WrapperDescriptorType
from typing import Any

_FUNCTIONS = (FunctionType, BuiltinFunctionType, MethodDescriptorType, WrapperDescriptorType)

# What a class has whatever it is, or what makes the stand-in what it is.
_OWN = frozenset(
    "__new__ __init__ __del__ __class__ __call__ __get__ __set_name__ __dict__ __weakref__ __slots__ __getattribute__ "
    "__getattr__ __setattr__ __delattr__ __init_subclass__ __subclasshook__ __class_getitem__ __prepare__".split()
)
_COMPILERS_OWN = (functools.partial, type(functools.lru_cache(len)))
"""Dynamo looks into these by itself, and so would not call what only says to be one."""
_MINE = ("_assay_call", "_assay_original", "_assay_site")


def is_function(original: Any) -> bool:
    """Whether the callable is a function, for which another one can stand."""
    return isinstance(original, _FUNCTIONS)


def binds(raw: Any) -> bool:
    """Whether a callable takes the object as its first argument where it stands in a class."""
    return hasattr(type(raw), "__get__") and not isinstance(raw, (MethodType, BuiltinFunctionType))


class StandIn:
    """Made by stand_in(), of a class of its own for each."""

    def __init__(self, original: Any, call: Callable[..., Any]) -> None:
        self._assay_original = original
        self._assay_call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._assay_call(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._assay_original, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _MINE:
            object.__setattr__(self, name, value)
        else:
            setattr(self._assay_original, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._assay_original, name)


def _passed_on(kind: type, name: str) -> Any:
    if not callable(getattr(kind, name)):
        return property(lambda self: getattr(self._assay_original, name))

    def method(self: StandIn, *args: Any, **kwargs: Any) -> Any:
        return getattr(type(self._assay_original), name)(self._assay_original, *args, **kwargs)

    method.__name__ = name
    return method


def _bind(self: StandIn, owner: Any, _kind: Any = None) -> Any:
    return self if owner is None else MethodType(self, owner)


def stand_in(original: Any, call: Callable[..., Any]) -> StandIn:
    """Called it does ``call``; all else, operators included, is the original's."""
    kind = type(original)
    special = [name for name in dir(kind) if name.startswith("__") and name.endswith("__") and name not in _OWN]
    members: dict[str, Any] = {name: _passed_on(kind, name) for name in special}
    if getattr(kind, "__hash__", None) is None:
        members["__hash__"] = None
    if binds(original):
        members["__get__"] = _bind
    if not isinstance(original, _COMPILERS_OWN):
        members["__class__"] = property(lambda self: kind)
    made: type[StandIn] = type(kind.__name__, (StandIn,), members)
    return made(original, call)

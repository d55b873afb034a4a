"""Finding what a dotted target names: "pkg.mod:Class.method", or the same with dots alone."""

from __future__ import annotations

import dataclasses
from types import ModuleType
from typing import Any

from .probes import NotFoundError, nearest


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a callable is kept: ``raw`` is what stands under ``name`` in ``owner`` (a module or class) or, inherited, in
    one of its bases: a function, staticmethod, classmethod or any callable."""

    module: ModuleType
    owner: Any
    name: str
    raw: Any

    @property
    def function(self) -> Any:
        """The callable itself, out of a staticmethod or classmethod."""
        return self.raw.__func__ if isinstance(self.raw, (staticmethod, classmethod)) else self.raw


def split(target: str) -> tuple[str, str]:
    """"pkg.mod:Class.method" -> ("pkg.mod", "Class.method"). With dots alone the module ends before the first part that
    begins with a capital, else before the last part."""
    if ":" in target:
        module, _, path = target.partition(":")
        return module, path
    parts = target.split(".")
    for i, part in enumerate(parts):
        if i > 0 and part.lstrip("_")[:1].isupper():
            return ".".join(parts[:i]), ".".join(parts[i:])
    return ".".join(parts[:-1]), parts[-1]


def resolve(module: ModuleType, path: str) -> Place:
    """Raises NotFoundError. Properties and data are refused: they are no calls."""
    owner: Any = module
    *outer, name = path.split(".")
    for part in outer:
        try:
            owner = getattr(owner, part)
        except AttributeError:
            raise NotFoundError(_missing(owner, part)) from None
    raw = _static(owner, name)
    if isinstance(raw, type):
        raise NotFoundError(f"{path} in {module.__name__} is a class; name one of its methods, such as {path}.__init__")
    if not callable(raw) and not isinstance(raw, (staticmethod, classmethod)):
        kind = "a property" if isinstance(raw, property) else f"a {type(raw).__name__}, which cannot be called"
        raise NotFoundError(f"{path} in {module.__name__} is {kind}")
    return Place(module, owner, name, raw)


def _static(owner: Any, name: str) -> Any:
    if isinstance(owner, type):
        for base in owner.__mro__:
            if name in vars(base):
                return vars(base)[name]
    else:
        try:
            return getattr(owner, name)
        except AttributeError:
            pass
    raise NotFoundError(_missing(owner, name))


def _missing(owner: Any, name: str) -> str:
    what = owner.__qualname__ if isinstance(owner, type) else owner.__name__
    return f"{what} has no {name}{nearest(name, dir(owner))}"

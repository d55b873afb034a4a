"""Calls back when a module has been executed.

A finder in front of sys.meta_path that answers for watched names alone: it asks the other finders and puts a loader
around theirs that calls back behind exec_module. The module sees its own loader, so that sources, resources and reloads
work as without the hook.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

Callback = Callable[[ModuleType], object]


class _Loader(Loader):
    """Stands for the real loader from find_spec to exec_module."""

    def __init__(self, real: Loader, hook: ImportHook) -> None:
        self._real = real
        self._hook = hook

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._real.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._real
        module.__loader__ = self._real
        self._real.exec_module(module)
        self._hook.executed(module)

    def __getattr__(self, name: str) -> object:
        return getattr(self._real, name)


class ImportHook(MetaPathFinder):
    """The finder. ``guard(what, function, *arguments)`` runs a callback so that nothing it raises reaches the host."""

    def __init__(self, guard: Callable[..., object]) -> None:
        self._guard = guard
        self._callbacks: dict[str, list[Callback]] = {}
        self._late: dict[str, list[Callback]] = {}  # being executed when they were asked for, without our loader
        self._calling: set[str] = set()  # modules whose callbacks are being called
        self._retries: list[Callable[[], bool]] = []
        self._lock = threading.RLock()
        self._inside = threading.local()

    def install(self) -> None:
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def when_imported(self, name: str, then: Callback) -> None:
        """Calls then(module) now, when the module is there, and each time it is executed (reloads too)."""
        with self._lock:
            self._callbacks.setdefault(name, []).append(then)
            module = sys.modules.get(name)
            if module is None or name in self._calling:  # executed() comes to it
                return
            if _is_executing(module):
                self._late.setdefault(name, []).append(then)
                return
        self._guard(f"when {name} is imported", then, module)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if self._late or self._retries:
            self.settle()
        if name not in self._callbacks or getattr(self._inside, "name", None) == name:
            return None
        before = getattr(self._inside, "name", None)
        self._inside.name = name
        try:
            for finder in list(sys.meta_path):
                find = getattr(finder, "find_spec", None)
                spec: ModuleSpec | None = None if finder is self or find is None else find(name, path, target)
                if spec is not None:
                    break
            else:
                return None
        finally:
            self._inside.name = before
        # Extension modules and the like may have a loader of the old kind; those are imported without us.
        if spec.loader is not None and hasattr(spec.loader, "exec_module") and not isinstance(spec.loader, _Loader):
            spec.loader = _Loader(spec.loader, self)
        return spec

    def executed(self, module: ModuleType) -> None:
        name = module.__name__
        module = sys.modules.get(name, module)  # some put another object in their place
        with self._lock:
            self._late.pop(name, None)
            self._calling.add(name)
        callbacks = self._callbacks.get(name, [])
        done = 0
        while True:
            with self._lock:  # a callback may ask for more
                if done == len(callbacks):
                    self._calling.discard(name)
                    return
                then = callbacks[done]
            done += 1
            self._guard(f"when {name} is imported", then, module)

    def _call_late(self) -> None:
        with self._lock:
            ready = [n for n in self._late if n in sys.modules and not _is_executing(sys.modules[n])]
            due = [(name, self._late.pop(name)) for name in ready]
        for name, callbacks in due:
            for then in callbacks:
                self._guard(f"when {name} is imported", then, sys.modules[name])

    def settle(self) -> None:
        """Calls back for modules that were being executed when they were asked for, and retries; at each import, and at
        the end."""
        if self._late:
            self._call_late()
        if self._retries:
            with self._lock:
                due, self._retries = self._retries, []
            again = [attempt for attempt in due if not attempt()]
            with self._lock:
                self._retries.extend(again)

    def retry(self, attempt: Callable[[], bool]) -> None:
        """Calls attempt() at each import until it gives True: for what a running script has yet to define."""
        with self._lock:
            self._retries.append(attempt)


def _is_executing(module: ModuleType) -> bool:
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))

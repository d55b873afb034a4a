"""Inputs and outputs of modules, by glob over named_modules, and finding the root modules of a program.

A module is observed by a wrapper around its class's forward, which knows its modules by a number that each carries.
Hooks would take the slow path of Module.__call__, and compiled code does not look for hooks; the wrapper is traced with
the rest of the module. Nothing is put into a module but that number.
"""

from __future__ import annotations

import fnmatch
import functools
import importlib
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from . import compiled
from . import quick as quick_modules
from .calls import busy, inside, structure
from .groups import Group
from .probes import Probe, nearest
from .shortcuts import Shortcut

if TYPE_CHECKING:
    from .session import Session

# then(module, name, args, kwargs, result); before(module, name, args, kwargs)
Then = Callable[[Any, str, tuple[Any, ...], dict[str, Any], Any], object]
Before = Callable[[Any, str, tuple[Any, ...], dict[str, Any]], object]

_lock = threading.RLock()


class Modules:
    """What session.modules() found: ``names`` of the observed modules, in the order of named_modules."""

    def __init__(self, probe: Probe, names: tuple[str, ...]) -> None:
        self.probe = probe
        self.names = names


class _Watched:
    """One observed module."""

    __slots__ = ("__weakref__", "befores", "label", "learned", "module", "n_learned", "name", "number", "session", "shortcuts", "thens")

    def __init__(self, session: Session, module: Any, name: str, label: str) -> None:
        self.learned: quick_modules.Learned | None = None
        self.n_learned = 0
        self.shortcuts: dict[str, Shortcut] = {}  # of compiled code: "before", "after"
        self.module = weakref.ref(module, self._gone)
        self.session = session
        self.name = name
        self.label = label
        self.thens: list[tuple[Probe, Then]] = []
        self.befores: list[tuple[Probe, Before]] = []
        self.number = -1

    def _gone(self, _module: Any) -> None:
        if self.learned is not None:
            self.learned.gone()
            quick_modules.forget(self.number)
            self.learned = None
        if self.shortcuts:  # another module may get the label
            self.shortcuts.clear()
            compiled.forget()

    def enter(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inside.callback = True
        busy.append(None)
        try:
            for probe, before in self.befores:
                probe.fired += 1
                before(module, self.name, args, kwargs)
        except Exception as problem:
            self.session.failed(self.name, problem)
        finally:
            busy.pop()
            inside.callback = False

    def leave(
        self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, learn: bool = True
    ) -> None:
        inside.callback = True
        busy.append(None)
        try:
            for probe, then in self.thens:
                probe.fired += 1
                then(module, self.name, args, kwargs, result)
            if learn and self.n_learned < quick_modules.MAX_LEARNED:
                self._learn(module, result)
        except Exception as problem:
            self.session.failed(self.name, problem)
        finally:
            busy.pop()
            inside.callback = False

    def _learn(self, module: Any, result: Any) -> None:
        """From now on results like this one go through the built-in function, when nothing else is to be done."""
        if len(self.thens) != 1 or self.befores or self.module() is not module:
            return
        probe, then = self.thens[0]
        group: Group | None = None
        if (group_of := getattr(then, "group", None)) is not None:
            group = group_of(self.name)
            if group is None or not group.address or (self.learned and self.learned.group == group.address):
                return
            self.n_learned += 1
            found = quick_modules.parts_of_a_group(result)
        elif (parts := getattr(then, "parts", None)) is not None:
            self.n_learned += 1
            found = parts(self.name, result)
        else:
            self.n_learned = quick_modules.MAX_LEARNED
            return
        if found is None:
            return
        self.learned = quick_modules.Learned(self.number, module, result, found, self.session.now, group)
        probe._counts.append(self.learned.c)  # and those before stay: a call of another thread may count there yet
        object.__setattr__(module, "_assay_quick", self.number)

    def again(
        self, when: str, listeners: Sequence[tuple[Probe, Callable[..., object]]], values: list[Any], *seen: Any
    ) -> Shortcut | None:
        """For compiled code, behind a call that delivered these values: what does the same for values like them, if there is
        one listener and it has such a thing, as again(name, values, *seen). seen: what the values were made into."""
        if len(listeners) != 1:
            return None
        probe, listener = listeners[0]
        find = getattr(listener, "again", None)
        group: Group | None = None if find is None else find(self.name, values, *seen)
        if group is None or not group.address:
            return None
        known = self.shortcuts.get(when)
        if known is None or known.learned != group.address:
            known = self.shortcuts[when] = Shortcut(self.session, probe, group)
        return known

    def unlearn(self, module: Any) -> None:
        """Somebody else listens to the module, too."""
        self.n_learned = quick_modules.MAX_LEARNED
        quick_modules.forget(self.number)
        self.shortcuts.clear()
        compiled.forget()
        object.__setattr__(module, "_assay_quick", -1)


class _CompiledModules:
    """Where graphs deliver: they know a module by its label."""

    def observe_compiled(
        self, when: str, label: str, names: list[str], values: list[Any]
    ) -> Shortcut | None:
        watched = _by_label.get(label)
        if watched is None:
            return None
        module = watched.session.labelled(label)
        if when == "before":
            args = structure(names, values)
            named = isinstance(args, dict)
            seen = () if named else args[1:], args if named else {}
            watched.enter(module, *seen)
            return watched.again(when, watched.befores, values, *seen)
        else:
            result = values[0] if not names and values else structure(names, values)
            watched.leave(module, (), {}, result, learn=False)
            return watched.again(when, watched.thens, values, result)


_watched: list[_Watched] = []
_by_label: dict[str, _Watched] = {}
compiled.register("module", _CompiledModules())


_wrapped: dict[Any, tuple[Any, Any]] = {}  # class -> its own forward or None, and the wrapper


def _let_script(torch: Any) -> None:
    """TorchScript reads the source of forward, which a wrapper hides: scripting sees the classes as they were."""
    script = torch.jit.script
    if hasattr(script, "_assay_script"):
        return

    @functools.wraps(script)
    def without(*args: Any, **kwargs: Any) -> Any:
        with _lock:
            wrapped = dict(_wrapped)
        for kind, (own, _wrapper) in wrapped.items():
            if own is None:
                del kind.forward
            else:
                kind.forward = own
        try:
            return script(*args, **kwargs)
        finally:
            for kind, (_own, wrapper) in wrapped.items():
                kind.forward = wrapper

    without._assay_script = True  # type: ignore[attr-defined]
    torch.jit.script = without


def _leave(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
    """What a quick module has to do whose result the built-in function did not take."""
    if compiled.is_compiling():  # by another than Dynamo
        compiled.observe_result("module", module, result)
        return
    watched = None if inside.callback else _of(module)
    if watched is not None:
        watched.leave(module, args, kwargs, result)


def _wrap_forward(kind: Any) -> None:
    """Puts the wrapper around the class's forward, once."""
    import torch

    # Cheaper than is_compiling(), and a constant to Dynamo as well.
    is_dynamo_compiling = torch.compiler.is_dynamo_compiling
    original = getattr(kind, "forward", None)
    if original is None or "_assay_forward" in vars(kind):
        return

    leave = quick_modules.leave_function()

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        # Most calls of a step take this way: every instruction counts.
        # Dynamo must not get to see the number, or it would compile anew when the module is learned.
        if not is_dynamo_compiling() and (quick := self._assay_quick) >= 0 and type(self) is kind:
            result = original(self, *args, **kwargs)
            if not leave(quick, self, result):  # type: ignore[misc]
                _leave(self, args, kwargs, result)
            return result
        number = self._assay_number
        if number < 0 or type(self) is not kind:
            return original(self, *args, **kwargs)
        if compiled.is_compiling():
            if self._assay_before:
                compiled.observe_arguments("module", "before", (self, *args), kwargs)
            result = original(self, *args, **kwargs)
            if self._assay_after:
                compiled.observe_result("module", self, result)
            return result
        if inside.callback:
            return original(self, *args, **kwargs)
        watched = _of(self)
        if watched is None:  # a copy, or out of another process
            return original(self, *args, **kwargs)
        if watched.befores:
            watched.enter(self, args, kwargs)
        result = original(self, *args, **kwargs)
        watched.leave(self, args, kwargs, result)
        return result

    # Python fits code to the types that it meets: each class has a copy, which meets one.
    forward.__code__ = forward.__code__.replace()
    functools.update_wrapper(forward, original)
    _wrapped[kind] = (vars(kind).get("forward"), forward)
    kind.forward = forward
    kind._assay_forward = True


def _of(module: Any) -> _Watched | None:
    """The module's own; the number that it carries goes into copies and pickles, too."""
    number = getattr(module, "_assay_number", -1)
    watched = _watched[number] if 0 <= number < len(_watched) else None
    return watched if watched is not None and watched.module() is module else None


def _watch(session: Session, module: Any, name: str, prefix: str) -> _Watched:
    known = _of(module)
    if known is not None:
        return known
    watched = _Watched(session, module, name, session.label(module, prefix + name))
    with _lock:
        watched.number = len(_watched)
        _watched.append(watched)
        _by_label[watched.label] = watched
    import torch

    base: Any = torch.nn.Module
    if not hasattr(base, "_assay_number"):
        base._assay_number = base._assay_quick = -1
        base._assay_before = base._assay_after = False
        _let_script(torch)
    _wrap_forward(type(module))
    object.__setattr__(module, "_assay_number", watched.number)
    return watched


def _mark(module: Any, name: str, compiled_too: bool) -> None:
    """Says to Dynamo that the module is observed."""
    if compiled_too:
        object.__setattr__(module, name, True)


def observe(
    session: Session,
    root: Any,
    patterns: str | Sequence[str],
    then: Then | None,
    before: Before | None,
    probe: Probe,
    prefix: str = "",
    compiled_too: bool = True,
) -> Modules:
    """Observes the modules under ``root`` whose qualified names match a glob; the root's own name is "". compiled_too:
    whether code that is compiled from now on has the probe."""
    globs = [patterns] if isinstance(patterns, str) else list(patterns)
    found: list[str] = []
    replaced: list[str] = []  # their forward is not their class's
    every = dict(root.named_modules())
    for name, module in every.items():
        if not any(fnmatch.fnmatchcase(name, g) for g in globs):
            continue
        if "forward" in vars(module):
            replaced.append(name)
            continue
        watched = _watch(session, module, name, prefix)
        if then is not None:
            watched.thens.append((probe, then))
            if len(watched.thens) > 1:
                watched.unlearn(module)
            _mark(module, "_assay_after", compiled_too)
        if before is not None:
            watched.befores.append((probe, before))
            watched.unlearn(module)
            _mark(module, "_assay_before", compiled_too)
        found.append(name)
    if found:
        if probe.state != "attached":
            probe.state, probe.detail = "attached", compiled.compiled_before()
    elif probe.state == "waiting" and not replaced:
        near = "".join(nearest(g, every) for g in globs)
        probe.not_found(f"no module of {type(root).__name__} has such a name{near}")
    if replaced:
        text = f"not observed, as forward is replaced on the module itself: {', '.join(replaced[:8])}"
        if not found and probe.state == "waiting":
            probe.not_found(text)
        else:
            probe.detail = text
    return Modules(probe, tuple(found))


def _modules_of(function: Any, kind: type) -> list[Any]:
    """The modules that a function given to torch.compile is about: itself, the object it is bound to, and what its closure,
    defaults and globals hold."""
    if isinstance(function, kind):
        return [function]
    owner = getattr(function, "__self__", None)
    if isinstance(owner, kind):
        return [owner]
    inner = getattr(owner, "__func__", function)
    code = getattr(inner, "__code__", None)
    if code is None:
        return []
    held = [*(getattr(inner, "__defaults__", None) or ()), *(getattr(inner, "__kwdefaults__", None) or {}).values()]
    for cell in getattr(inner, "__closure__", None) or ():
        try:
            held.append(cell.cell_contents)
        except ValueError:  # not filled yet
            continue
    held.extend(inner.__globals__[name] for name in code.co_names if name in inner.__globals__)
    return [value for value in held if isinstance(value, kind)]


class _FirstCall:
    """Sees modules that are called for the first time, and costs nothing from then on.

    Module.__call__ asks each module for ``_compiled_call_impl``, which is None unless Module.compile() was called. In the
    class it is this; a module that was seen has one of its own, which hides it. Copies and pickles are made without.
    """

    def __init__(self, roots: Roots, call: Any) -> None:
        """call: Module.__call__."""
        self._roots = roots
        self._call = call.__code__

    def __get__(self, module: Any, kind: type | None = None) -> Any:
        if module is None or compiled.is_compiling() or sys._getframe(1).f_code is not self._call:
            return None  # nobody calls it: somebody looks at what the module has
        self._roots._session.guard("finding root modules", self._roots.found, module)
        return vars(module).get("_compiled_call_impl")


class Roots:
    """Finds root modules: a module that is called, or given to torch.compile, before any module that contains it.

    Each module is looked at once: all modules under a root are marked before it runs.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._callbacks: list[Callable[[Any], object]] = []
        self._compiled: list[Callable[[Any, bool], object]] = []
        self._installed = False
        self._n_compiled = 0  # modules given to torch.compile

    def when_root(self, then: Callable[[Any], object]) -> None:
        self._callbacks.append(then)
        if not self._installed:
            self._installed = True
            self._session.when_imported("torch", self._install)

    def when_compiled(self, then: Callable[[Any, bool], object]) -> None:
        """then(module, itself) for each module that is given to torch.compile itself, or held by a function that is."""
        self._compiled.append(then)
        self._session.when_imported("torch", self._watch_compile)

    def found(self, root: Any) -> None:
        if type(root).__module__.startswith(("torch.fx", "torch._")):
            return  # a graph that a compiler made of a program's modules
        with _lock:
            if vars(root).get("_assay_seen") == id(root):
                return
            for module in root.modules():
                object.__setattr__(module, "_assay_seen", id(module))  # a copy's is another's
                vars(module).setdefault("_compiled_call_impl", None)
                self._forget_the_originals(module)
        self._session.hook.settle()
        for then in self._callbacks:
            self._session.guard(f"root module {type(root).__name__}", then, root)

    def _allow_recompiles(self) -> None:
        """Layers that are compiled one by one share a graph by default; observed ones are told apart and have one each.
        Torch gives up at a number of graphs for one function, with fullgraph by an exception: the number is raised."""
        config = importlib.import_module("torch._dynamo.config")
        self._n_compiled += 1
        for name, default in (("recompile_limit", 8), ("accumulated_recompile_limit", 256)):
            wanted = default * self._n_compiled
            if getattr(config, name, wanted) < wanted:
                setattr(config, name, wanted)

    def _forget_the_originals(self, module: Any) -> None:
        """Takes out of a copy what it carries of its original: compiled code goes by that."""
        carried = vars(module)
        if carried.get("_assay_number", -1) >= 0 and _of(module) is None:
            for name in ("_assay_number", "_assay_quick", "_assay_before", "_assay_after"):
                carried.pop(name, None)
        if "_assay_label" in carried and self._session.labelled(carried["_assay_label"]) is not module:
            del carried["_assay_label"]

    def _install(self, torch: Any) -> None:
        kind = torch.nn.Module
        if "_assay_seen" in vars(kind):
            return
        kind._assay_seen = 0
        if "_compiled_call_impl" in vars(kind) and "_compiled_call_impl" in kind.__call__.__code__.co_names:
            kind._compiled_call_impl = _FirstCall(self, kind.__call__)
            # TorchScript would look for the type of a module's own.
            ignored = getattr(kind, "__jit_ignored_attributes__", [])
            kind.__jit_ignored_attributes__ = [*ignored, "_compiled_call_impl"]
        else:
            self._wrap_call(kind)
        self._watch_compile(torch)

    def _wrap_call(self, kind: Any) -> None:
        """For versions of torch whose Module.__call__ does not ask for what _FirstCall takes the place of."""
        call = kind.__call__
        roots = self

        def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
            if not compiled.is_compiling() and self._assay_seen != id(self):
                roots._session.guard("finding root modules", roots.found, self)
            return call(self, *args, **kwargs)

        kind.__call__ = functools.wraps(call)(__call__)

    def _watch_compile(self, torch: Any) -> None:
        """Looks at what is given to torch.compile, once."""
        compile_ = torch.compile
        if hasattr(compile_, "_assay_compile"):
            return
        guard = self._session.guard

        @functools.wraps(compile_)
        def compile(model: Any = None, *args: Any, **kwargs: Any) -> Any:
            for owner in guard("finding root modules", _modules_of, model, torch.nn.Module) or ():
                if self._installed:
                    guard("finding root modules", self.found, owner)
                for module in owner.modules():
                    guard("a copied module", self._forget_the_originals, module)
                for then in self._compiled:
                    guard(f"{type(owner).__name__} given to torch.compile", then, owner, owner is model)
                guard("limits of recompilation", self._allow_recompiles)
            return compile_(model, *args, **kwargs)

        compile._assay_compile = True  # type: ignore[attr-defined]
        torch.compile = compile

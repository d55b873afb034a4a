"""Arguments and results of any callable, by a wrapper in its place.

The wrapper stands where the callable is consumed: in its module or class, and under every name in another module that
was bound to it before (``from x import f``). Callbacks run outside the host's sight: what they raise is counted, and
what they call themselves is not observed.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

from . import compiled, stand_in
from .groups import Group
from .probes import Probe
from .shortcuts import Shortcut, Shortcuts, Where
from .targets import Place

if TYPE_CHECKING:
    from .session import Session

_by_key: dict[str, Site] = {}
_after_wanted: dict[str, bool] = {}
"""Keys of sites whose results are asked for. Dynamo reads it in place of the site: the method of an object that was made
in the graph may have text and functions in its closure, and nothing else."""

_short: dict[str, Shortcuts] = {}  # by key, once there are some


class _Inside(threading.local):
    callback = False


inside = _Inside()
"""``inside.callback`` is True on a thread that runs a callback."""

busy: list[None] = []
"""Has a member for each callback that runs on any thread: for _fast_call.py, which observes nothing then."""


class Call:
    """One call of an observed callable.

    ``args`` and ``kwargs`` as given, ``function`` the original; ``self`` the first argument (the object of a method);
    ``state`` keeps what ``before`` leaves for ``after``. ``compiled`` is True inside torch.compile, where args has the
    tensors and numbers alone.
    """

    __slots__ = ("args", "compiled", "function", "kwargs", "state", "_bound", "_self", "_site", "_when")

    def __init__(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], site: Site | None = None, when: str = ""
    ) -> None:
        self.function = function
        self._site, self._when = site, when
        self.args = args
        self.kwargs = kwargs
        self.state: dict[str, Any] = {}
        self.compiled = False
        self._bound: dict[str, Any] | None = None
        self._self: Any = None

    @property
    def self(self) -> Any:
        return self._self if self.compiled else self.args[0] if self.args else None

    @property
    def bound(self) -> dict[str, Any]:
        """Arguments by parameter name, defaults filled in. Made at the first use; a callable without a signature has its
        positional arguments as arg0, arg1 and so on."""
        if self._bound is None:
            try:
                bound = signature(self.function).bind_partial(*self.args, **self.kwargs)
                bound.apply_defaults()
                self._bound = dict(bound.arguments)
                if self.compiled:
                    self._bound = {k: v for k, v in self._bound.items() if v is not None}
            except (TypeError, ValueError):
                self._bound = {**{f"arg{i}": v for i, v in enumerate(self.args)}, **self.kwargs}
        return self._bound

    def shorten(self, group: Group, places: Sequence[Where], nothing: Sequence[Where] = ()) -> None:
        """For a callback that has done nothing but record the group's tensors, which are at these places of the call: calls
        with the same first argument need it no more, as long as their tensors look alike and what is at ``nothing`` is
        None. For a callable that no other probe observes."""
        if self._site is not None and not self.compiled:
            self._site.shorten(self.self, self._when, group, places, nothing)


@functools.lru_cache(maxsize=None)
def signature(function: Any) -> inspect.Signature:
    return inspect.signature(function)


Before = Callable[[Call], object]
After = Callable[[Call, Any], object]
Around = Callable[[Call, Callable[[], Any]], object]


class Listener:
    """The callbacks of one probe at one callable."""

    __slots__ = ("after", "around", "before", "probe")

    def __init__(self, probe: Probe, before: Before | None, after: After | None, around: Around | None) -> None:
        self.probe, self.before, self.after, self.around = probe, before, after, around


class Site:
    """A wrapped callable and who listens to it."""

    def __init__(self, session: Session, original: Any, label: str) -> None:
        self.session = session
        self.original = original
        self.label = label
        self.listeners: list[Listener] = []
        self.key = compiled.register(f"call:{label}", self)
        _by_key[self.key] = self
        self.wrapper: Any = None
        self.shortcuts = Shortcuts()

    def listen(self, listener: Listener) -> None:
        """Adds callbacks, once."""
        if listener not in self.listeners:
            self.listeners = [*self.listeners, listener]
            self.forget()
        if listener.after is not None:
            _after_wanted[self.key] = True

    def shorten(
        self,
        owner: Any,
        when: str,
        group: Group,
        places: Sequence[Where],
        nothing: Sequence[Where],
    ) -> None:
        """See Call.shorten()."""
        listeners = self.listeners
        if not type(owner).__weakrefoffset__ or len(listeners) != 1 or listeners[0].around is not None:
            return
        if self.shortcuts.full:
            return
        known = self.shortcuts.known(owner, when)
        if not group.address or (known is not None and known.learned == group.address):
            return
        before, after = listeners[0].before, listeners[0].after
        first = when == "before" or before is None
        shortcut = Shortcut(self.session, listeners[0].probe if first else None, group, places, nothing)
        self.shortcuts.put(owner, when, shortcut, (before is not None, after is not None))
        _short[self.key] = self.shortcuts

    def forget(self) -> None:
        """Callbacks run again at each call."""
        self.shortcuts.forget()
        _short.pop(self.key, None)

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The call, observed. What the original raises passes unchanged."""
        call, listeners = self._enter(args, kwargs)
        arounds = [listener.around for listener in listeners if listener.around is not None]
        result = self._run_around(call, arounds) if arounds else self.original(*args, **kwargs)
        self._leave(call, listeners, result)  # behind all arounds: what they put into buffers is out again
        return result

    def leave(self, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Behind a call whose beginning had a shortcut, and its end has none any more."""
        listeners = self.listeners
        for listener in listeners:
            if listener.before is None:  # the others are counted at the beginning
                listener.probe.fired += 1
        self._leave(Call(self.original, args, kwargs, self), listeners, result)

    async def run_async(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call, listeners = self._enter(args, kwargs)
        result = await self.original(*args, **kwargs)
        self._leave(call, listeners, result)
        return result

    def _enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Call, list[Listener]]:
        call = Call(self.original, args, kwargs, self, "before")
        listeners = self.listeners
        for listener in listeners:
            listener.probe.fired += 1
            if listener.before is not None:
                self._callback(listener.before, call)
        return call, listeners

    def _leave(self, call: Call, listeners: list[Listener], result: Any) -> None:
        call._when = "after"
        for listener in listeners:
            if listener.after is not None:
                self._callback(listener.after, call, result)

    def _callback(self, function: Callable[..., object], *arguments: Any) -> None:
        inside.callback = True
        busy.append(None)
        try:
            function(*arguments)
        except Exception as problem:
            self.session.failed(self.label, problem)
        finally:
            busy.pop()
            inside.callback = False

    def _run_around(self, call: Call, arounds: list[Around]) -> Any:
        """The callable runs exactly once, inside all of ``arounds``, whatever they do; its outcome is the host's."""
        outcome: list[Any] = []
        error: list[BaseException] = []

        def proceed() -> Any:
            if error:
                raise error[0]
            if not outcome:
                inside.callback = False
                busy.pop()
                try:
                    outcome.append(self._innermost(call, arounds[1:]))
                except BaseException as problem:
                    error.append(problem)
                    raise
                finally:
                    busy.append(None)
                    inside.callback = True
            return outcome[0]

        inside.callback = True
        busy.append(None)
        try:
            arounds[0](call, proceed)
        except BaseException as problem:
            if not error and isinstance(problem, Exception):
                self.session.failed(self.label, problem)
            elif not error:
                raise
        finally:
            busy.pop()
            inside.callback = False
        if not outcome and not error:
            return self._innermost(call, arounds[1:])
        if error:
            raise error[0]
        return outcome[0]

    def _innermost(self, call: Call, arounds: list[Around]) -> Any:
        if arounds:
            return self._run_around(call, arounds)
        return self.original(*call.args, **call.kwargs)

    def observe_compiled(
        self, when: str, label: str, names: list[str], values: list[Any]
    ) -> Shortcut | None:
        """What a compiled graph delivers instead of run()."""
        if when == "after":
            result = values[0] if not names and values else structure(names, values)
            call = Call(self.original, (), {})
            call.compiled, call._self = True, self.session.labelled(label)
            for listener in self.listeners:
                if listener.after is not None:
                    self._callback(listener.after, call, result)
            return None
        call = Call(self.original, *self._arguments(names, values))
        call.compiled, call._self = True, self.session.labelled(label)
        for listener in self.listeners:
            listener.probe.fired += 1
            if listener.around is not None:
                self.session.failed(self.label, RuntimeError("compiled: what must hold during the call is not run"))
            if listener.before is not None:
                self._callback(listener.before, call)
        return None

    def _arguments(self, names: list[str], values: list[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        positional = [pair for pair in zip(names, values) if pair[0][0].isdigit()]
        keywords = [pair for pair in zip(names, values) if not pair[0][0].isdigit()]
        args = structure([n for n, _ in positional], [v for _, v in positional])
        kwargs: dict[str, Any] = {}
        for name, value in keywords:
            key, _, inner = name.partition(".")
            if inner:
                kwargs.setdefault(key, []).append(value)
            else:
                kwargs[key] = value
        return (tuple(args) if isinstance(args, (tuple, list)) else ()), kwargs


def structure(names: list[str], values: list[Any]) -> Any:
    """Values by paths "0", "2.1" as a tuple, None for what was no tensor; by other names as a dictionary."""
    if any(not name[0].isdigit() for name in names):
        return dict(zip(names, values))
    out: list[Any] = []
    for name, value in zip(names, values):
        place, _, inner = name.partition(".")
        out.extend([None] * (int(place) + 1 - len(out)))
        if not inner:
            out[int(place)] = value
            continue
        if out[int(place)] is None:
            out[int(place)] = []
        out[int(place)].extend([None] * (int(inner) + 1 - len(out[int(place)])))
        out[int(place)][int(inner)] = value
    return tuple(tuple(v) if isinstance(v, list) else v for v in out)


def _wrapper_of(site: Site) -> Any:
    original = site.original
    key = site.key

    def plain(*args: Any, **kwargs: Any) -> Any:
        # Most calls of a step take this way: every instruction counts.
        if not compiled.is_dynamo_compiling() and (short := _short.get(key)) and short.before(short.address, args, kwargs):
            result = original(*args, **kwargs)
            if not short.after(short.address, args, kwargs, result):
                _by_key[key].leave(args, kwargs, result)
            return result
        if compiled.is_compiling():
            compiled.observe_arguments(key, "before", args, kwargs)  # counts the firing too
            result = original(*args, **kwargs)
            if key in _after_wanted:
                compiled.observe_result(key, args[0] if args else None, result)
            return result
        if inside.callback:
            return original(*args, **kwargs)
        return _by_key[key].run(args, kwargs)

    async def asynchronous(*args: Any, **kwargs: Any) -> Any:
        if inside.callback:
            return await original(*args, **kwargs)
        return await _by_key[key].run_async(args, kwargs)

    wrapper: Any = asynchronous if inspect.iscoroutinefunction(original) else plain
    if stand_in.is_function(original):
        functools.update_wrapper(wrapper, original)
    else:
        wrapper = stand_in.stand_in(original, wrapper)
    wrapper._assay_site = site
    return wrapper


def forget() -> None:
    """All callbacks run again at each call: for a forked child."""
    for site in _by_key.values():
        site.forget()


def runs_later(function: Any) -> str:
    """What a callable is whose body runs behind its call; empty for others. Nothing can hold while it runs."""
    for what, matches in (
        ("asynchronous", inspect.iscoroutinefunction),
        ("an asynchronous generator", inspect.isasyncgenfunction),
        ("a generator", inspect.isgeneratorfunction),
    ):
        if matches(inspect.unwrap(function)):
            return what
    return ""


def wrap(session: Session, place: Place, label: str) -> Site:
    """The site of the callable at the place; put there when it is not yet (a reload makes a new one)."""
    function = place.function
    known = getattr(function, "_assay_site", None)
    if isinstance(known, Site) and known.wrapper is function:  # functools.wraps copies it to others
        return known
    site = Site(session, function, label)
    site.wrapper = _wrapper_of(site)
    put: Any = site.wrapper
    if isinstance(place.raw, (staticmethod, classmethod)):
        put = type(place.raw)(put)
    elif isinstance(place.owner, type) and not stand_in.binds(place.raw):
        put = staticmethod(put)  # a built-in or an object in a class does not bind
    setattr(place.owner, place.name, put)
    if isinstance(place.owner, ModuleType):
        rebind(function, site.wrapper)
    return site


def rebind(old: Any, new: Any) -> int:
    """Puts ``new`` under every module-level name that is bound to ``old``; the number of names. Copies elsewhere (in a
    dictionary, a default, a closure) are not found."""
    count = 0
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", None)
        if not isinstance(names, dict):
            continue
        for name, value in list(names.items()):
            if value is old and name != "__wrapped__":
                names[name] = new
                count += 1
    return count

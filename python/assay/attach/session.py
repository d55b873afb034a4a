"""The attachment of one process: what it observes, where that goes, what became of each probe."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from .. import _fast_call
from .._errors import Error
from .._prepared import PreparedSite
from .._settings import settings as read_settings
from .._trace import Trace
from . import audit, calls, compiled, local_variables, modules, quick, selectors, targets
from .calls import After, Around, Before, Call
from .import_hook import ImportHook
from .probes import NotFoundError, Probe
from .rows import Rows
from .say import say

PROFILES = {"torch": ("torch",), "transformers": ("transformers",), "vllm": ("vllm",)}
"""Profiles that come with the package, and the modules whose import loads each."""

_PLAIN = frozenset(("engine_name", "axes"))  # what a site alone has

MAX_FAILURES = 256
"""Kinds of error that are kept apart; a message may hold a number that differs each time."""


class Session:
    """One a process, made by start(). No method raises to the host; what goes wrong is counted and noted.

    ``rows``: of the step under way, set by a profile; ``now``: the same for _fast_call.py, once somebody needed it; ``rank``: gives (rank, world size), read when the trace is opened;
    ``audits``: canonical name and rows of output buffers, by callable and argument, for audits of them (audit.py).
    """

    def __init__(self) -> None:
        self.settings: dict[str, str] = read_settings()
        self._rows: Rows | None = None
        self.now = _fast_call.CNow(busy=id(calls.busy))
        self.rank: Callable[[], tuple[int, int]] | None = None
        self.audits: dict[tuple[str, str], audit.Known] = {}
        self.probes: list[Probe] = []
        self.hook = ImportHook(self.guard)
        self.roots = modules.Roots(self)
        self._trace: Trace | None = None
        self._trace_failed = ""
        self._facts: dict[str, str] = {}
        self._absent: dict[str, str] = {}
        self._failures: dict[tuple[str, str], int] = {}
        self._lock = threading.RLock()
        self._labels: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
        self._selectors = selectors.parse(self.settings.get("ASSAY_PROBES", ""))
        self._sites: dict[tuple[str, int | None], PreparedSite] = {}
        self._plain: tuple[type[Any] | None, frozenset[Any]] = (None, frozenset())
        self._possible: dict[tuple[str, ...], tuple[str, ...]] = {}  # names asked for: those that the settings let through
        self._step_wanted: tuple[Rows | None, bool] = None, False  # rows of a step, and whether it is recorded
        self._finished = False
        self._profile = ""  # the one that is being installed
        os.register_at_fork(after_in_child=self._after_fork)

    @property
    def rows(self) -> Rows | None:
        return self._rows

    @rows.setter
    def rows(self, rows: Rows | None) -> None:
        self.now.on = 0  # before the rows that it has addresses of may go
        self._rows = rows

    def show_rows(self) -> None:
        """Gives the built-in functions the rows of now, once a step: without them everything goes the long way."""
        rows = self._rows
        self.now.step = None if rows is None else rows.address
        self.now.on = 1
        if self._rows is not rows:  # set by another thread: these live no longer than here
            self.now.on = 0

    # ---- start

    def start(self) -> None:
        """Installs the import hook and what the settings ask for."""
        self.hook.install()
        compiled.install(self)
        wanted = self.settings.get("ASSAY_ATTACH", "all")
        names = [] if wanted == "none" else list(PROFILES) if wanted == "all" else wanted.split(",")
        for name in names:
            if "." in name:
                self.guard(f"profile {name}", self._load_profile, name)
            else:
                for trigger in PROFILES.get(name, (name,)):
                    self.when_imported(trigger, lambda _module, name=name: self._load_builtin(name))  # type: ignore[misc]
        for selector in self._selectors:
            self.guard(selector.text, self._select, selector)

    def _load_builtin(self, name: str) -> None:
        full = f"{__package__}.profiles.{name}"
        if importlib.util.find_spec(full) is not None:
            self._load_profile(full)

    def _load_profile(self, full: str) -> None:
        if full in self._loaded:
            return
        self._loaded.add(full)
        profile = importlib.import_module(full)
        install: Callable[[Session], object] = profile.install
        triggers: Sequence[str] = getattr(profile, "TRIGGERS", ())

        def begin() -> None:
            self._profile = full.rpartition(".")[2]
            try:
                install(self)
            finally:
                self._profile = ""

        if not triggers or any(t in sys.modules for t in triggers):
            begin()
            return
        done: list[str] = []

        def once(_module: ModuleType) -> None:
            if not done:
                done.append(full)
                begin()

        for trigger in triggers:
            self.when_imported(trigger, once)

    _loaded: set[str] = set()

    def _select(self, selector: selectors.Selector) -> None:
        from . import defaults

        if selector.kind == "module":
            defaults.observe_modules(self, selector)
        elif selector.kind == "call":
            defaults.observe_call(self, selector)
        elif selector.kind == "local":
            defaults.observe_local(self, selector)
        elif selector.kind == "audit":
            audit.audit(self, selector.target, selector.name, label=selector.text, requested=True)

    # ---- where it goes

    def trace(self) -> Trace | None:
        """This process's recording, opened at the first need; None when it cannot be opened, which is said once."""
        trace = self._trace
        if trace is not None or self._trace_failed or self._finished:
            return trace
        with self._lock:
            if self._trace is None and not self._trace_failed:
                self._open()
            return self._trace

    def _open(self) -> None:
        knobs: dict[str, Any] = {}
        if self._selectors and "ASSAY_INCLUDE" in self.settings:  # the user's own probes pass the profile's list
            knobs["include"] = ",".join([self.settings["ASSAY_INCLUDE"], *(s.include for s in self._selectors)])
        try:
            rank, world = self.rank() if self.rank is not None else (None, None)
            facts = {"attached": "assay.attach", **self._facts}
            self._trace = Trace(rank=rank, world_size=world, meta=facts, errors="count", **knobs)
        except Exception as problem:
            self._trace_failed = str(problem)
            say(f"cannot record: {problem}; the program goes on without")
            return
        with contextlib.suppress(Exception):
            self._finish_with_a_child()
        for probe in self.probes:
            self._tell(probe)
        for site, why in self._absent.items():
            self._note(site, "absent on this path", 0, why)

    def _finish_with_a_child(self) -> None:
        """A child of multiprocessing ends without atexit."""
        process = sys.modules.get("multiprocessing.process")
        if process is not None and process.parent_process() is not None:
            from multiprocessing.util import Finalize

            Finalize(None, self.finish, exitpriority=0)

    def fact(self, key: str, value: object) -> None:
        """Metadata of the process, at any time."""
        self._facts[key] = str(value)
        if self._trace is not None:
            self.guard(f"fact {key}", self._trace.set_meta, key, str(value))

    def record(
        self, name: str, tensor: Any, *, layer: int | None = None, rows: Rows | None = None, **fields: Any
    ) -> bool:
        """Trace.record(), with errors counted. rows: self.rows when left out; they are used when their number is the
        extent of the tensor's row axis (axis 0, or fields' row_axis), and give step and phase in any case."""
        site = self._sites.get((name, layer))
        if site is not None and type(tensor) is site.type and _PLAIN.issuperset(fields):
            given = self._rows if rows is None else rows
            done = site.fast(site.address, tensor, 0, 0 if given is None else given.address)
            if done is not False:
                return done is True  # None: the library has counted it, with the reason
        trace = self.trace()
        if trace is None:
            return False
        if not trace.armed:
            return True
        calling = calls.inside.callback
        calls.inside.callback = True
        try:
            rows = rows if rows is not None else self.rows
            site = self._site_of(trace, name, layer, tensor, fields)
            if site is not None:
                fit = rows is not None and tensor.ndim > 0 and tensor.size(0) == rows.n_rows
                try:
                    return site.record(tensor, None if rows is None else rows.prepared(fit))
                except Error:
                    return False  # the library has counted it, with the reason
            if rows is not None:
                if "runs" not in fields and "row_requests" not in fields and tensor.ndim:
                    if tensor.shape[fields.get("row_axis") or 0] == rows.n_rows:
                        fields["runs"] = rows.runs
                fields.setdefault("step", rows.step)
                fields.setdefault("phase", rows.phase)
            return trace.record(name, tensor, layer=layer, **fields)
        except Exception as problem:
            self.failed(name, problem)
            return False
        finally:
            calls.inside.callback = calling

    def _site_of(
        self, trace: Trace, name: str, layer: int | None, tensor: Any, fields: dict[str, Any]
    ) -> PreparedSite | None:
        """The site for a plain torch tensor in host memory and nothing but a site's own fields; else None. The same is
        recorded either way, at a fraction of the cost."""
        if not _PLAIN.issuperset(fields):
            return None
        kind, dtypes = self._plain
        if type(tensor) is not kind:
            torch = sys.modules.get("torch")
            if torch is None or type(tensor) is not torch.Tensor:
                return None
            dtypes = frozenset(getattr(torch, dtype.removeprefix("torch.")) for dtype in _fast_call.CODES)
            self._plain = torch.Tensor, dtypes
        if not tensor.is_cpu or tensor.dtype not in dtypes:
            return None
        site = self._sites.get((name, layer))
        if site is None:
            full = name
            if layer is not None and not name.startswith("layers."):
                if layer < 0:
                    return None  # refused in words
                full = f"layers.{layer}.{name}"
            site = self._sites[name, layer] = PreparedSite(trace, full, **fields)
        return site

    def observed(self, *names: str) -> bool:
        """Whether any of these canonical names would be recorded now: armed, and let through by profile, include,
        exclude, layers, ranks and steps. Cheap; ask before preparing anything."""
        possible = self._possible.get(names)
        if possible is not None and not possible:
            return False
        trace = self.trace()
        if trace is None or not trace.armed:
            return False
        try:
            if possible is None:
                possible = self._possible[names] = tuple([name for name in names if trace.lets_through(name)])
            return len(possible) != 0 and self._in_steps(trace, possible[0])
        except Error as problem:
            self.failed(names[0] if names else "", problem)
            return False

    def _in_steps(self, trace: Trace, name: str) -> bool:
        """Whether this name, which is let through, is recorded at this step: as all of them are, so it is asked once."""
        rows, known = self._rows, self._step_wanted
        if rows is not None and known[0] is rows:
            return known[1]
        wanted = trace.wants(name, step=None if rows is None else rows.step)
        self._step_wanted = rows, wanted
        return wanted

    def absent(self, site: str, why: str) -> None:
        """A site that this path does not have: noted as absent, not missing."""
        if self._absent.get(site) != why:
            self._absent[site] = why
            if self._trace is not None:
                self._note(site, "absent on this path", 0, why)

    # ---- probes

    def when_imported(self, module: str, then: Callable[[ModuleType], object]) -> None:
        """Calls then(module) behind the module's execution, or at once when it is there; again after a reload."""
        self.hook.when_imported(module, then)

    def when_root(self, then: Callable[[Any], object]) -> None:
        """Calls then(root) for each torch.nn.Module that is called, or given to torch.compile, and that no other module
        contains: before it runs."""
        self.roots.when_root(then)

    def when_compiled(self, then: Callable[[Any, bool], object]) -> None:
        """Calls then(module, itself) for each module that is given to torch.compile, before it is compiled. itself: False
        for a method of it, or a function that holds it."""
        self.roots.when_compiled(then)

    def wrap(
        self,
        target: str,
        *,
        before: Before | None = None,
        after: After | None = None,
        around: Around | None = None,
        required: bool = True,
        absent_reason: str | None = None,
        label: str | None = None,
        requested: bool = False,
        fits: Callable[[Any], None] | None = None,
    ) -> Probe:
        """Observes a callable, "pkg.mod:Class.method" or "pkg.mod:function", once its module is imported.

        before(call): ahead of the call, arguments as they went in. after(call, result): behind it. around(call, run): for
        what must hold during the call; run() makes it and gives its result, which is the host's whatever around does.
        required: False when it may be missing in some versions. absent_reason: what a missing symbol means.
        fits(function): raises NotFoundError for a callable that is there and cannot be observed so.
        """
        probe = self._new_probe(label or f"call:{target}", requested, required, absent_reason)
        listener = calls.Listener(probe, before, after, around)

        def put(module: ModuleType, path: str) -> None:
            place = targets.resolve(module, path)
            if fits is not None:
                fits(place.function)
            later = calls.runs_later(place.function) if around is not None else ""
            if later:
                raise TypeError(f"{path} is {later}: its body runs behind the call, so nothing can hold meanwhile")
            probe.note = compiled.compiled_before(place.function)
            calls.wrap(self, place, target).listen(listener)

        self._when_there(probe, target, put)
        return probe

    def locals(
        self,
        target: str,
        names: Sequence[str],
        then: Callable[[dict[str, object], Call], object],
        *,
        required: bool = True,
        absent_reason: str | None = None,
        label: str | None = None,
        requested: bool = False,
    ) -> Probe:
        """Observes local variables of a Python function: then({name: value}, call) right behind the assignment.

        names: "k#2" behind the second assignment of k in the source, "k" behind each, "k#last" what k holds when the
        function returns. call.self is the first argument; call.function the function.
        """
        probe = self._new_probe(label or f"local:{target}:{','.join(names)}", requested, required, absent_reason)

        def put(module: ModuleType, path: str) -> None:
            place = targets.resolve(module, path)
            function = local_variables.plain(place.function, place.name)
            probe.note = compiled.compiled_before(function)
            local_variables.observe(self, function, list(names), then, probe)

        self._when_there(probe, target, put)
        return probe

    def modules(
        self,
        root: Any,
        patterns: str | Sequence[str] = "*",
        *,
        then: modules.Then | None = None,
        before: modules.Before | None = None,
        prefix: str = "",
        label: str | None = None,
        requested: bool = False,
        required: bool = True,
        compiled: bool = True,
    ) -> modules.Modules:
        """Observes modules under ``root`` by glob over named_modules (the root itself is ""): before(module, name, args,
        kwargs) and then(module, name, args, kwargs, result) at each call of their forward. compiled: False where compiled
        code is to be left without."""
        globs = patterns if isinstance(patterns, str) else ",".join(patterns)
        probe = self._new_probe(label or f"module:{globs}", requested, required, None)
        found = modules.Modules(probe, ())
        try:
            found = modules.observe(self, root, patterns, then, before, probe, prefix, compiled)
        except Exception as problem:
            probe.state, probe.detail = "failed", f"{type(problem).__name__}: {problem}"
            self.failed(probe.label, problem)
        self._tell(probe)
        return found

    def audit(self, target: str, output: str = "output", **options: Any) -> Probe:
        """Looks for parts of an output buffer that a callable leaves unwritten (audit.py)."""
        return audit.audit(self, target, output, **options)

    def label(self, owner: Any, text: str) -> str:
        """Gives an object a name by which compiled code knows it: call.self is looked up by it. The name in use."""
        known: str | None = getattr(owner, "_assay_label", None)
        if isinstance(known, str) and self._labels.get(known) is owner:
            return known
        base, n = text, 1
        while text in self._labels and self._labels[text] is not owner:
            n += 1
            text = f"{base}#{n}"
        self._labels[text] = owner
        object.__setattr__(owner, "_assay_label", text)
        return text

    def labelled(self, text: str) -> Any:
        """The object of a label, or None."""
        return self._labels.get(text)

    def _new_probe(self, label: str, requested: bool, required: bool, absent_reason: str | None) -> Probe:
        probe = Probe(label, requested, required, absent_reason, profile=self._profile)
        self.probes.append(probe)
        return probe

    def _when_there(self, probe: Probe, target: str, put: Callable[[ModuleType, str], None]) -> None:
        name, path = targets.split(target)
        probe.detail = f"{name} was never imported"
        if f"{name}.".startswith("torch.ops."):
            probe.not_found("operators are not observed: name the Python function that calls it, or the module around it")
            return

        def attach(module: ModuleType) -> bool:
            try:
                put(module, path)
                probe.state, probe.detail = "attached", probe.note
            except NotFoundError as problem:
                if name == "__main__" and not self._finished:
                    probe.detail = str(problem)  # the script runs: it may be defined yet
                    return False
                probe.not_found(str(problem))
            except Exception as problem:
                probe.state, probe.detail = "failed", f"{type(problem).__name__}: {problem}"
                self.failed(probe.label, problem)
            self._tell(probe)
            return True

        if name == "__main__":
            self.hook.retry(lambda: attach(sys.modules["__main__"]))
        else:
            self.when_imported(name, attach)

    # ---- errors and the end

    def guard(self, what: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """function(*arguments); an exception is counted and None given."""
        try:
            return function(*arguments)
        except Exception as problem:
            self.failed(what, problem)
            return None

    def failed(self, what: str, problem: BaseException) -> None:
        """Counts an error of a callback or of the attachment itself; the end of the trace has them."""
        key = (what, f"{type(problem).__name__}: {problem}"[:500])
        if key not in self._failures and len(self._failures) >= MAX_FAILURES:
            key = ("others", f"beyond the first {MAX_FAILURES} kinds of error")
        self._failures[key] = self._failures.get(key, 0) + 1

    def note(self, site: str, reason: str, count: int = 0, detail: str = "") -> None:
        """A note in the trace's coverage. Opens the trace."""
        if self.trace() is not None:
            self._note(site, reason, count, detail)

    def _note(self, site: str, reason: str, count: int = 0, detail: str = "") -> None:
        if self._trace is not None:
            try:
                self._trace.coverage(site, reason, count, detail)
            except Error:
                pass  # a full disk; the trace counts it

    def _tell(self, probe: Probe) -> None:
        """Writes the probe's state into the trace once it is known: a killed process has it too."""
        if self._trace is not None and probe.state != "waiting" and probe._told != probe.state:
            probe._told = probe.state
            self._note(probe.label, probe.state, 0, probe.detail)

    def finish(self) -> None:
        """Writes what became of each probe and closes the trace. Safe to call twice."""
        with self._lock:
            if self._finished:
                return
            self.guard("what was still waited for", self.hook.settle)
            missing = [p for p in self.probes if p.requested or p.state == "not found"]
            if missing or self._failures:
                self.trace()
            self._finished = True
        if self._trace is None:
            return
        # vLLM imports transformers and runs none of its models: that is one thing to say, and not one for each probe.
        idle = {p.profile for p in self.probes} - {p.profile for p in self.probes if p.times} - {""}
        for profile in sorted(idle):
            self._note(f"profile:{profile}", "absent on this path", 0, "none of its probes fired")
        for probe in self.probes:
            if probe.profile in idle:
                continue
            if probe.state == "attached":
                self._note(probe.label, "fired" if probe.times else "never fired", probe.times, probe.detail)
            elif probe.state == "waiting" and probe.requested:
                self._note(probe.label, "not found", 0, probe.detail)
        for (what, problem), count in self._failures.items():
            self._note(what, "failed", count, problem)
        lost = self._trace._end()
        if lost is not None:
            say(str(lost))

    def _after_fork(self) -> None:
        """The child opens a recording of its own: its rank may be another."""
        from .. import _trace

        self._lock = threading.RLock()
        if self._trace is not None and self._trace in _trace._open_traces:
            _trace._open_traces.remove(self._trace)
        self._trace, self._trace_failed, self._finished = None, "", False
        self._sites.clear()
        self._possible.clear()
        self.now.on = 0
        quick.forget()
        calls.forget()
        compiled.forget()
        self._failures.clear()
        for probe in self.probes:
            probe.forget_times()
            probe._told = ""

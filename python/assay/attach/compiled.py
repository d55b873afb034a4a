"""Probes inside torch.compile.

Dynamo does not look for hooks, and drops what has no result. A probe in compiled code is therefore an operator of its own,
``assay::observe``: it is opaque to the compiler, has an effect, so that it is neither removed nor moved past another of its
kind, and calls back when the graph runs. Wrappers and rewritten functions emit it when Dynamo traces them
(``is_compiling()`` is a constant to it). The functions here that take part in a trace are plain enough for fullgraph.

All that a graph keeps of a probe is text: where in the call, what the tensors are, which site, and the label of the object
it belongs to. A graph that is loaded from a cache in another process finds its site by that text, or nothing.
"""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING, Any, Protocol

from .. import _fast_call
from .shortcuts import Shortcut

if TYPE_CHECKING:
    from .session import Session


class CompiledSite(Protocol):
    def observe_compiled(self, when: str, label: str, names: list[str], values: list[Any]) -> Shortcut | None:
        """when: "before" or "after"; names: what each value is, paths such as "0", "1.0", "hidden_states". Returns what may
        take its place in calls that differ in the values alone; None: nothing may."""


_shortcuts: dict[str, int] = {}  # address by the text of a probe
_kept: list[Shortcut] = []  # all that C may look at
_sites: dict[str, CompiledSite] = {}
_session: Session | None = None
_lock = threading.Lock()
_library: Any = None
_observe: Any = None  # torch.ops.assay.observe, once torch is there
_tensor: Any = ()  # torch.Tensor
_unknown: set[str] = set()


def is_compiling() -> bool:
    """Whether Dynamo is tracing the caller. torch's own function takes this one's place when torch is there."""
    return False


def is_dynamo_compiling() -> bool:
    """The same at less cost, without other tracers than Dynamo."""
    return False


def register(key: str, site: CompiledSite) -> str:
    """The text by which graphs know the site."""
    with _lock:
        base, n = key, 1
        while key in _sites and _sites[key] is not site:
            n += 1
            key = f"{base}#{n}"
        _sites[key] = site
    return key


def install(session: Session) -> None:
    """Registers the operator once torch is imported."""
    global _session
    _session = session
    session.when_imported("torch", _define)


def _define(torch: Any) -> None:
    global _library, _observe, _tensor, is_compiling, is_dynamo_compiling
    if _library is not None:
        return
    library = torch.library.Library("assay", "FRAGMENT")
    library.define("observe(Tensor[] values, str probe) -> ()")
    library.impl("observe", _fast_call.set_observers(_shortcuts, _run) or _run, "CompositeExplicitAutograd")
    library.impl("observe", _nothing, "Meta")
    try:
        from torch._library.effects import EffectType

        library._register_effectful_op("assay::observe", EffectType.ORDERED)
    except (ImportError, AttributeError):  # older: kept, but not in order
        torch.fx.node.has_side_effect(torch.ops.assay.observe.default)
    _library, _observe, _tensor = library, torch.ops.assay.observe, torch.Tensor
    is_compiling, is_dynamo_compiling = torch.compiler.is_compiling, torch.compiler.is_dynamo_compiling


def _nothing(values: Any, probe: str) -> None:
    pass


def _text(when: str, names: str, site: str, label: str) -> str:
    """What a graph keeps. A label may have any characters."""
    return f"{when}\n{names}\n{site}\n{label}"


def _run(values: Any, probe: str) -> None:
    """The operator at run time, where there is no shortcut. Raises nothing."""
    when, names, site, label = probe.split("\n", 3)
    known = _sites.get(site)
    if known is None:
        if site not in _unknown and _session is not None:
            _unknown.add(site)
            _session.failed(site, LookupError("a compiled graph has a probe that this run did not ask for"))
        return
    try:
        shortcut = known.observe_compiled(when, label, names.split(",") if names else [], list(values))
        if shortcut is not None and _shortcuts.get(probe) != shortcut.address:
            _kept.append(shortcut)
            _shortcuts[probe] = shortcut.address
    except Exception as problem:
        if _session is not None:
            _session.failed(site, problem)


def forget() -> None:
    """Sends all compiled probes the long way again: somebody else listens, or this is a forked child."""
    _shortcuts.clear()


# ---- traced by Dynamo


def observe_arguments(site: str, when: str, args: Any, kwargs: Any) -> None:
    """Emits the operator for the tensors among the arguments, one level of tuples and lists deep."""
    values: list[Any] = []
    names = ""
    label = ""
    if len(args) > 0 and not isinstance(args[0], _tensor):
        label = getattr(args[0], "_assay_label", "")
    for i, value in enumerate(args):
        if isinstance(value, _tensor):
            values.append(value)
            names += f",{i}"
        elif isinstance(value, (tuple, list)):
            for j, inner in enumerate(value):
                if isinstance(inner, _tensor):
                    values.append(inner)
                    names += f",{i}.{j}"
    for key, value in kwargs.items():
        if isinstance(value, _tensor):
            values.append(value)
            names += f",{key}"
        elif isinstance(value, (tuple, list)):
            for j, inner in enumerate(value):
                if isinstance(inner, _tensor):
                    values.append(inner)
                    names += f",{key}.{j}"
    _observe(values, _text(when, names[1:], site, label))


def observe_result(site: str, owner: Any, result: Any) -> None:
    """Emits the operator for the tensors of a result; ``owner`` is the first argument of the call, or None."""
    label = ""
    if owner is not None and not isinstance(owner, _tensor):
        label = getattr(owner, "_assay_label", "")
    values: list[Any] = []
    names = ""
    if isinstance(result, _tensor):
        values.append(result)
    elif isinstance(result, (tuple, list)):
        for i, value in enumerate(result):
            if isinstance(value, _tensor):
                values.append(value)
                names += f",{i}"
    elif hasattr(result, "items"):
        for key, value in result.items():
            if isinstance(value, _tensor):
                values.append(value)
                names += f",{key}"
    _observe(values, _text("after", names[1:], site, label))


def observe_value(site: str, which: str, owner: Any, value: Any) -> None:
    """Emits the operator for a local variable."""
    if isinstance(value, _tensor):
        label = ""
        if owner is not None and not isinstance(owner, _tensor):
            label = getattr(owner, "_assay_label", "")
        _observe([value], _text(which, "", site, label))


# ---- what was compiled before


def compiled_before(function: Any = None) -> str:
    """A note when code was compiled before a probe was placed, which then cannot be in it; empty when none was."""
    utils = sys.modules.get("torch._dynamo.utils")
    if utils is None:
        return ""
    try:
        from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list

        code = getattr(function, "__code__", None)
        entries = len(_debug_get_cache_entry_list(code) or ()) if code is not None else 0
        frames = len(utils.compilation_time_metrics.get("_compile.compile_inner", ()))
    except Exception:  # internals of a version that we do not know
        return ""
    if entries:
        return f"compiled {entries} time(s) before the probe was placed; those graphs do not have it"
    if frames:
        return f"{frames} function(s) were compiled before the probe was placed; where they hold this one it does not fire"
    return ""

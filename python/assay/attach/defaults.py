"""What the selectors of ASSAY_PROBES record."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING, Any

from .._prepared import PreparedSite
from . import quick, selectors
from .calls import Call

if TYPE_CHECKING:
    from .._trace import Trace
    from .session import Session

_LAYER = re.compile(r"\blayers?\.(\d+)\b|\bh\.(\d+)\b|\bblocks\.(\d+)\b")


def layer_of(owner: Any) -> int | None:
    """The layer that an object's name tells: a module's place in its root, vLLM's prefix or layer_name."""
    for attribute in ("_assay_label", "prefix", "layer_name"):
        text = getattr(owner, attribute, None)
        if isinstance(text, str):
            match = _LAYER.search(text)
            if match:
                return int(next(g for g in match.groups() if g is not None))
    index = getattr(owner, "layer_idx", None)
    return index if isinstance(index, int) else None


def _tensor_types() -> tuple[type, ...]:
    """torch.Tensor and numpy.ndarray, of those that the program has imported."""
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    found = (getattr(torch, "Tensor", None), getattr(numpy, "ndarray", None))
    return tuple(kind for kind in found if kind is not None)


def tensors_of(name: str, value: Any) -> list[tuple[str, Any]]:
    """The tensors of a value, with names: those of a tuple, list or dictionary one by one."""
    if isinstance(value, _tensor_types()):
        return [(name, value)]
    if isinstance(value, (tuple, list)):
        found = [pair for i, v in enumerate(value) for pair in tensors_of(f"{name}.{i}", v)]
        return [(name, found[0][1])] if len(found) == 1 else found
    if isinstance(value, dict):
        return [pair for k, v in value.items() for pair in tensors_of(f"{name}.{k}", v)]
    return []


def record_all(session: Session, name: str, value: Any, layer: int | None) -> None:
    rows = session.rows
    for full, tensor in tensors_of(name, value):
        # Names of the host's own have no axes that would say which one the rows of the step are on.
        if rows is not None and tensor.ndim > 0 and tensor.shape[0] == rows.n_rows:
            session.record(full, tensor, layer=layer, row_axis=0)
        else:
            session.record(full, tensor, layer=layer)


class Outputs:
    """Records what modules give, as NAME.out, through prepared sites: at the least cost, for hosts that call their modules
    thousands of times a second. Tensors with as many rows as the step under way have its rows; a callback of
    session.modules()."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._trace: Trace | None = None
        self._sites: dict[str, PreparedSite] = {}

    def __call__(self, module: Any, name: str, args: Any, kwargs: Any, result: Any) -> None:
        session = self._session
        trace = self._trace
        if trace is None or trace is not session._trace:  # the first call, or a forked child
            trace = self._trace = session.trace()
            self._sites.clear()
            if trace is None:
                return
        if not session.now.on:  # shared by all that observe modules
            session.show_rows()
        if hasattr(result, "data_ptr"):
            self._record(trace, name or "model", result)
            return
        for full, tensor in tensors_of(name or "model", result):
            self._record(trace, full, tensor)

    def parts(self, name: str, result: Any) -> quick.Parts | None:
        """For a result that was recorded: what of it goes where, if results like it can be recorded quickly."""
        if quick.leave_function() is None or self._trace is None or not self._trace.file:
            return None
        if quick.fits(result):
            found: list[tuple[Any, Any]] | None = [(None, result)]
        else:
            found = quick.members(result)
        if found is None:
            return None
        sites = {id(tensor): self._sites.get(full) for full, tensor in tensors_of(name or "model", result)}
        if len(sites) != sum(not quick.holds_nothing(value) for _key, value in found):
            return None  # one tensor at two places
        parts = [(key, value, sites.get(id(value))) for key, value in found]
        good = all(site is not None and quick.fits(v) if id(v) in sites else True for _key, v, site in parts)
        return parts if good else None

    def _record(self, trace: Trace, name: str, tensor: Any) -> None:
        site = self._sites.get(name)
        if site is None:
            site = self._sites[name] = PreparedSite(trace, f"{name}.out", row_axis=0)
        rows = self._session.rows
        fit = rows is not None and tensor.ndim > 0 and tensor.shape[0] == rows.n_rows
        site.record(tensor, None if rows is None else rows.prepared(fit))


def observe_modules(session: Session, selector: selectors.Selector) -> None:
    def before(module: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for i, value in enumerate([*args, *kwargs.values()]):
            record_all(session, f"{name or 'model'}.in" + (f".{i}" if i else ""), value, None)

    outputs = Outputs(session)
    probe = session._new_probe(selector.text, True, True, None)
    probe.detail = "no module was called"

    def root(module: Any) -> None:
        from . import modules

        modules.observe(session, module, selector.target, outputs, None if selector.name == "out" else before, probe)
        session._tell(probe)

    session.when_root(root)


def observe_call(session: Session, selector: selectors.Selector) -> None:
    name = selector.target.replace(":", ".")

    def before(call: Call) -> None:
        layer = layer_of(call.self)
        for argument, value in call.bound.items():
            record_all(session, f"{name}.{argument}", value, layer)

    def after(call: Call, result: Any) -> None:
        record_all(session, f"{name}.result", result, layer_of(call.self))

    session.wrap(selector.target, before=before, after=after, label=selector.text, requested=True)


def observe_local(session: Session, selector: selectors.Selector) -> None:
    name = selector.target.replace(":", ".")

    def then(values: dict[str, object], call: Call) -> None:
        for variable, value in values.items():
            record_all(session, f"{name}.{variable}", value, layer_of(call.self))

    session.locals(selector.target, [selector.name], then, label=selector.text, requested=True)

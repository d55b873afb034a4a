"""Output buffers that a callable leaves unwritten.

Ahead of a call the declared output is filled with a pattern; behind it what still holds the pattern was not written, and
gets its bits back, also when the call raises (output_buffer.py). Both looks are recorded under one name with the metadata
``audit`` (before, after), by which `assay check` judges them, and what was left is counted in a note. Other probes of the
same callable read the arguments ahead of the filling and the results behind the giving back.

A callable that reads its output buffer (accumulates into it) reads the pattern: auditing changes the results of such a
one. It is therefore never done unless asked for. A buffer that shares memory with another argument is left alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .calls import Call, signature
from .output_buffer import FilledBuffer, is_another, ranges, unfit
from .probes import NotFoundError, Probe, nearest

if TYPE_CHECKING:
    from .session import Session

Name = Callable[[Call], tuple[str, int | None]]
Known = Callable[[Call, Any], dict[str, Any]]
"""(call, buffer) -> fields of Session.record: name, tensor (a view of the buffer), and layer, rows, shards as known."""


def audit(
    session: Session,
    target: str,
    output: str = "output",
    *,
    name: str | Name | None = None,
    view: Callable[[Any], Any] | None = None,
    required: bool = True,
    label: str | None = None,
    requested: bool = False,
) -> Probe:
    """Audits argument ``output`` of a callable at each call.

    name: the site under which both looks are recorded (its layer is that of the object called), or a function of the
    call that gives name and layer; when left out, what a profile knows of the buffer (Session.audits), or
    "TARGET.OUTPUT" with axis 0 as rows. view: the tensor to record for the buffer, such as
    lambda b: b.view(-1, heads, size); the audit is of the whole buffer.
    """
    site = target.replace(":", ".") + f".{output}"
    text = label or f"audit:{target}:{output}"
    auditor = _Auditor(session, text, (target, output), site, name, view)
    return session.wrap(
        target, around=auditor.around, required=required, label=text, requested=requested, fits=auditor.has_output
    )


class _Auditor:
    def __init__(
        self, session: Session, label: str, place: tuple[str, str], site: str, name: str | Name | None, view: Any
    ) -> None:
        self.session = session
        self.label = label
        self.place = place
        self.output = place[1]
        self.site = site
        self.name = name
        self.view = view
        self._noted: set[str] = set()

    def has_output(self, function: Any) -> None:
        """NotFoundError when no call of the function has the audited argument."""
        try:
            known = signature(function).parameters
        except (TypeError, ValueError):
            return  # a built-in: its calls tell
        takes_any = any(p.kind is p.VAR_KEYWORD for p in known.values())
        if self.output not in known and not takes_any:
            raise NotFoundError(f"{self.place[0]} has no argument {self.output}{nearest(self.output, known)}")

    def around(self, call: Call, run: Callable[[], Any]) -> None:
        trace = self.session.trace()
        if trace is None or not trace.armed:
            run()
            return
        buffer: Any = call.bound.get(self.output)
        why = unfit(buffer, self.output, call.bound)
        if not why and not buffer.is_cpu:
            why = f"{self.output} is not in host memory"
        if why:
            self._note("skipped", 0, why)
            run()
            return
        filled = FilledBuffer(buffer)
        result: Any = None
        try:
            self.session.guard(self.label, self._record, call, buffer, "before", filled.pattern, {})
            result = run()
        finally:
            filled.look()  # before anything else touches the buffer
            try:
                self.session.guard(self.label, self._look, call, buffer, filled, result)
            finally:
                filled.restore()

    def _look(self, call: Call, buffer: Any, filled: FilledBuffer, result: Any) -> None:
        count = filled.count
        facts = {"unwritten": f"{count} of {buffer.numel()}"}
        if count:
            facts["unwritten_rows"] = ranges(filled.rows) if buffer.ndim else "all"
            if is_another(result, buffer):
                facts["returned"] = "another tensor, not the buffer"
        self._record(call, buffer, "after", filled.pattern, facts)
        if count:
            layer = self._fields(call, buffer).get("layer")
            where = "" if layer is None else f"layer {layer}: "
            self._note("unwritten", count, where + "; ".join(f"{k.replace('_', ' ')} {v}" for k, v in facts.items()))

    def _fields(self, call: Call, buffer: Any) -> dict[str, Any]:
        from .defaults import layer_of

        known = self.session.audits.get(self.place) if self.name is None else None
        if known is not None:
            return known(call, buffer)
        name, layer = self.name(call) if callable(self.name) else (self.name or self.site, layer_of(call.self))
        shown = buffer if self.view is None else self.view(buffer)
        return {"name": name, "tensor": shown, "layer": layer, "row_axis": 0 if shown.ndim else None}

    def _record(self, call: Call, buffer: Any, look: str, pattern: int, facts: dict[str, str]) -> None:
        fields = self._fields(call, buffer)
        meta = {"audit": look, "poison": f"{pattern:#x}", "audited": self.place[0], **facts}
        self.session.record(fields.pop("name"), fields.pop("tensor").detach(), meta=meta, **fields)

    def _note(self, reason: str, count: int, detail: str) -> None:
        """Once a different outcome; a call more of the same adds nothing."""
        if detail not in self._noted and len(self._noted) < 64:
            self._noted.add(detail)
            self.session.note(self.label, reason, count, detail)

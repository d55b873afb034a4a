"""Output buffers that a callable leaves unwritten.

Ahead of a call the declared output is filled with a pattern that no computation gives; behind it what still holds the
pattern was not written. Then every such element gets back the bits that it had before the call, so that the buffer is as
the callable alone would have left it, also when it raises. Both looks are recorded under one name with the metadata
``audit`` (before, after), by which `assay check` judges them, and what was left is counted in a note.

A callable that reads its output buffer (accumulates into it) reads the pattern: auditing changes the results of such a
one. It is therefore never done unless asked for. A buffer that shares memory with another argument is left alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .calls import Call
from .probes import Probe

if TYPE_CHECKING:
    from .session import Session

# Bits of one element by its size in bytes: for floating types a NaN whose payload arithmetic does not produce. A byte has
# no pattern that could not be a result.
PATTERNS = {2: 0x7FA5, 4: 0x7FA5A5A5, 8: 0x7FFA5A5A5A5A5A5A}

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
    return session.wrap(target, around=auditor.around, required=required, label=text, requested=requested)


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

    def around(self, call: Call, run: Callable[[], Any]) -> None:
        trace = self.session.trace()
        if trace is None or not trace.armed:
            run()
            return
        buffer: Any = call.bound.get(self.output)
        why = _unfit(buffer, call, self.output)
        if why:
            self._note("skipped", 0, why)
            run()
            return
        import torch

        with torch.inference_mode():
            bits = buffer.detach().view(_integer_of(torch, buffer.element_size()))
            before = bits.clone()
            pattern = PATTERNS[buffer.element_size()]
            bits.fill_(pattern)
        result: Any = None
        try:
            self.session.guard(self.label, self._record, call, buffer, "before", pattern, {})
            result = run()
        finally:
            with torch.inference_mode():
                left = bits == pattern
                count = int(left.sum())
            try:
                self.session.guard(self.label, self._look, call, buffer, left, count, pattern, result)
            finally:
                if count:
                    with torch.inference_mode():
                        bits.copy_(torch.where(left, before, bits))

    def _look(self, call: Call, buffer: Any, left: Any, count: int, pattern: int, result: Any) -> None:
        facts = {"unwritten": f"{count} of {buffer.numel()}"}
        if count:
            facts["unwritten_rows"] = _ranges(left.reshape(left.shape[0], -1).any(1).tolist()) if left.ndim else "all"
            if _is_another(result, buffer):
                facts["returned"] = "another tensor, not the buffer"
        self._record(call, buffer, "after", pattern, facts)
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


def _integer_of(torch: Any, size: int) -> Any:
    return {2: torch.int16, 4: torch.int32, 8: torch.int64}[size]


def _unfit(buffer: Any, call: Call, output: str) -> str:
    """Why a buffer cannot be audited; empty when it can."""
    import torch

    if not isinstance(buffer, torch.Tensor):
        return f"{output} is {type(buffer).__name__}, not a tensor"
    if not buffer.is_cpu or buffer.layout is not torch.strided:
        return f"{output} is not a strided tensor in host memory"
    if buffer.element_size() not in PATTERNS:
        return f"{output} is {buffer.dtype}: elements of one byte have no pattern that could not be a result"
    if buffer.is_complex() or buffer.numel() == 0:
        return f"{output} is empty or complex"
    if buffer.requires_grad and torch.is_grad_enabled():
        return f"{output} takes part in autograd"
    if any(size > 1 and stride == 0 for size, stride in zip(buffer.shape, buffer.stride())):
        return f"{output} is broadcast: its elements share memory"
    first, last = _span(buffer)
    for name, value in call.bound.items():
        if name == output or not isinstance(value, torch.Tensor) or not value.is_cpu or value.numel() == 0:
            continue
        other_first, other_last = _span(value)
        if first < other_last and other_first < last:
            return f"{output} shares memory with {name}"
    return ""


def _span(tensor: Any) -> tuple[int, int]:
    """First address and the one behind the last."""
    size = tensor.element_size()
    reach = [(n - 1) * s for n, s in zip(tensor.shape, tensor.stride())]
    low, high = sum(r for r in reach if r < 0), sum(r for r in reach if r > 0)
    start = tensor.data_ptr()
    return start + low * size, start + (high + 1) * size


def _is_another(result: Any, buffer: Any) -> bool:
    import torch

    if not isinstance(result, torch.Tensor) or result.numel() == 0:
        return False
    return bool(result.untyped_storage().data_ptr() != buffer.untyped_storage().data_ptr())


def _ranges(flags: list[bool]) -> str:
    """[False, True, True, False, True] -> "1-2,4"."""
    out: list[str] = []
    start: int | None = None
    for i, flag in enumerate([*flags, False]):
        if flag and start is None:
            start = i
        elif not flag and start is not None:
            out.append(str(start) if start == i - 1 else f"{start}-{i - 1}")
            start = None
    return ",".join(out[:16]) + (",..." if len(out) > 16 else "")

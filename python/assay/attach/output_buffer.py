"""A pattern in an output buffer while a callable runs, and what of it is left behind the call.

Used by audits (audit.py) and by the lines of ``ASSAY=mla:stderr`` (hand_patch.py). The buffer is filled with bits that no
computation gives; what still has them afterwards was not written, and gets back the bits that it had. So the program
goes on with what it would have had alone, unless the callable reads its output before it writes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

# Bits of one element by its size in bytes: for floating types a NaN whose payload arithmetic does not produce. A byte has
# no pattern that could not be a result.
PATTERNS = {2: 0x7FA5, 4: 0x7FA5A5A5, 8: 0x7FFA5A5A5A5A5A5A}


class FilledBuffer:
    """Fills the tensor when it is made; ask unfit() first. ``pattern``: the bits of an element.

    look() finds what was left, restore() gives that its bits back; both may be called again and do nothing then."""

    def __init__(self, buffer: torch.Tensor) -> None:
        import torch

        size = buffer.element_size()
        self.pattern = PATTERNS[size]
        self._left: torch.Tensor | None = None
        self._restored = False
        with torch.inference_mode():
            self._bits = buffer.detach().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[size])
            self._before = self._bits.clone()
            self._bits.fill_(self.pattern)

    def look(self) -> torch.Tensor:
        """Which elements still hold the pattern, in the buffer's shape."""
        import torch

        if self._left is None:
            with torch.inference_mode():
                self._left = self._bits == self.pattern
        return self._left

    def restore(self) -> None:
        """Gives the elements that were not written the bits that they had."""
        import torch

        left = self.look()
        if self._restored:
            return
        self._restored = True
        if self.count:
            with torch.inference_mode():
                self._bits.copy_(torch.where(left, self._before, self._bits))

    @property
    def count(self) -> int:
        """Elements that were not written."""
        return int(self.look().sum())

    @property
    def rows(self) -> list[int]:
        """Numbers of the rows (axis 0) with such elements; none for a single element without axes."""
        left = self.look()
        if not left.ndim:
            return []
        rows: list[int] = left.reshape(left.shape[0], -1).any(1).nonzero().flatten().tolist()
        return rows


def unfit(buffer: Any, name: str, arguments: Mapping[str, Any]) -> str:
    """Why a buffer cannot be filled without changing the call; empty when it can. name: the buffer's among the arguments."""
    import torch

    if not isinstance(buffer, torch.Tensor):
        return f"{name} is {type(buffer).__name__}, not a tensor"
    if buffer.is_meta or buffer.layout is not torch.strided:
        return f"{name} is not a strided tensor in memory"
    if buffer.is_complex() or buffer.numel() == 0:
        return f"{name} is empty or complex"
    if buffer.element_size() not in PATTERNS:
        return f"{name} is {buffer.dtype}: elements of one byte have no pattern that could not be a result"
    if buffer.requires_grad and torch.is_grad_enabled():
        return f"{name} takes part in autograd"
    if any(size > 1 and stride == 0 for size, stride in zip(buffer.shape, buffer.stride())):
        return f"{name} is broadcast: its elements share memory"
    first, last = _span(buffer)
    for other, value in arguments.items():
        if other == name or not isinstance(value, torch.Tensor) or value.device != buffer.device or not value.numel():
            continue
        if value.layout is not torch.strided:
            continue
        other_first, other_last = _span(value)
        if first < other_last and other_first < last:
            return f"{name} shares memory with {other}"
    return ""


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """First address and the one behind the last. Strides are not negative."""
    size = tensor.element_size()
    start = tensor.data_ptr()
    return start, start + (sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride())) + 1) * size


def is_another(result: Any, buffer: torch.Tensor) -> bool:
    """Whether a result is a tensor of its own and not the buffer."""
    import torch

    if not isinstance(result, torch.Tensor) or result.numel() == 0:
        return False
    return result.untyped_storage().data_ptr() != buffer.untyped_storage().data_ptr()


def ranges(numbers: list[int], most: int = 16) -> str:
    """[0, 1, 2, 5] -> "0-2,5"; of more than ``most`` ranges the number of the others."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    text = ",".join(f"{a}-{b}" if b > a else f"{a}" for a, b in runs[:most])
    return text + (f" and {len(runs) - most} ranges more" if len(runs) > most else "")

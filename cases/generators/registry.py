"""The list of cases: a function for each id, called with an empty recording, a variant and whether to be faulty."""

from __future__ import annotations

import importlib
import json
import pathlib
import re
from dataclasses import dataclass
from typing import Any, Callable

import numpy as np

from .recording import Recording

MODULES = (
    "scale",
    "rope",
    "lse",
    "buffers",
    "padding",
    "cache",
    "kvscale",
    "stride",
    "ranks",
    "weights",
    "moe",
    "ranges",
    "mask",
    "graph",
    "kernel",
    "controls",
)
EXPECTED = pathlib.Path(__file__).resolve().parent.parent / "expected.json"


@dataclass(frozen=True)
class Variant:
    """What may change without changing the answer. size 0 is the default; larger ones make longer sequences,
    odd ones record the log-sum-exp of whole attention calls as well."""

    seed: int = 1
    size: int = 0
    first_layer: int = 0  # number of the first recorded layer
    fault_layer: int = 0  # recorded layers before this one are right

    def rng(self, stream: int = 0) -> np.random.Generator:
        return np.random.default_rng([self.seed, self.size, stream])

    @property
    def lse(self) -> bool:
        """Whether whole attention calls return their log-sum-exp too; not every engine's do."""
        return self.size % 2 == 1

    def layer(self, i: int) -> str:
        """Prefix of the i-th recorded layer."""
        return f"layers.{self.first_layer + i}."


Program = Callable[[Recording, Variant, bool], None]
_cases: dict[str, Program] = {}
_fixed: set[str] = set()  # cases whose faulty layer follows from the fault
_controls: dict[str, Callable[[Recording, Recording, Variant], None]] = {}


def case(identifier: str, fixed: bool = False) -> Callable[[Program], Program]:
    """`fixed`: Variant.fault_layer does not apply."""

    def add(program: Program) -> Program:
        assert identifier not in _cases, identifier
        if fixed:
            _fixed.add(identifier)
        _cases[identifier] = program
        return program

    return add


def control(name: str) -> Callable[[Any], Any]:
    """A pair of right runs that differ by rounding alone: program(first, second, variant)."""

    def add(program: Any) -> Any:
        assert name not in _controls, name
        _controls[name] = program
        return program

    return add


def _load() -> None:
    for module in MODULES:
        importlib.import_module(f"{__package__}.{module}")


def cases() -> dict[str, Program]:
    _load()
    return dict(sorted(_cases.items()))


def controls() -> dict[str, Any]:
    _load()
    return dict(sorted(_controls.items()))


def generate(
    identifier: str, variant: Variant = Variant(), faulty: bool = True, recording: Recording | None = None
) -> Recording:
    out = Recording() if recording is None else recording
    cases()[identifier](out, variant, faulty)
    return out


def expected(variant: Variant = Variant()) -> dict[str, dict[str, Any]]:
    """The answers, with the layer of the variant in the names."""
    _load()
    answers = json.loads(EXPECTED.read_text())["cases"]
    for answer in answers:
        move = variant.first_layer + (0 if answer["id"] in _fixed else variant.fault_layer)
        for key in ("first_bad", "checkpoint_name"):
            if answer.get(key):
                answer[key] = re.sub(
                    r"(layers|blk)\.(\d+)", lambda m: f"{m[1]}.{int(m[2]) + move}", answer[key], count=1
                )
    return {answer["id"]: answer for answer in answers}

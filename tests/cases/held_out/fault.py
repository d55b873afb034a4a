"""A fault that no case of the bank has: name, answer, and the function that records the operation right or faulty."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Callable

import numpy as np

from cases.generators.recording import Recording, Run

Body = Callable[[Recording, np.random.Generator, bool], None]


@dataclass(frozen=True)
class HeldOut:
    name: str
    first_bad: str
    fault_class: str
    constant: float | None
    hypothesis: str  # of the ladder, that it confirms and its clean twin rules out; empty: not asked
    body: Body


ALL: list[HeldOut] = []


def fault(
    name: str, first_bad: str, fault_class: str, constant: float | None = None, hypothesis: str = ""
) -> Callable[[Body], Body]:
    def add(body: Body) -> Body:
        ALL.append(HeldOut(name, first_bad, fault_class, constant, hypothesis, body))
        return body

    return add


def two_requests(rec: Recording, rng: np.random.Generator, n: int = 11, m: int = 7) -> tuple[Run, ...]:
    a, b = (rec.request(rng.integers(0, 50, k)) for k in (n, m))
    return (Run(a, 0, n), Run(b, n, m))


def positions(rows: tuple[Run, ...]) -> np.ndarray:
    return np.concatenate([r.position + np.arange(r.n) for r in rows])

"""Probes inside torch.compile: a custom operator that a graph keeps and that calls back at run time."""

from __future__ import annotations

from typing import Any


def is_compiling() -> bool:
    """Whether Dynamo is tracing the caller; torch's own function once torch is there."""
    return False


_sites: list[Any] = []


def register(site: Any) -> int:
    """The number by which the operator knows the site."""
    _sites.append(site)
    return len(_sites) - 1


def observe_call(number: int, when: str, args: Any, kwargs: Any) -> None:
    pass


def observe_result(number: int, args: Any, result: Any) -> None:
    pass


def observe_module(number: int, when: str, label: str, values: Any) -> None:
    pass


def observe_local(number: int, which: int, value: Any, first: Any) -> None:
    pass


def install(session: Any) -> None:
    pass

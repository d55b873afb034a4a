"""ASSAY_PROBES: the user's own probes. The grammar is checked by the settings' parser (docs/settings.md)."""

from __future__ import annotations

from typing import NamedTuple


class Selector(NamedTuple):
    """``kind`` module, call, local or audit; ``target`` a glob or dotted name; ``name`` the variable or argument;
    for a module "out" where its inputs are left out."""

    kind: str
    target: str
    name: str
    text: str

    @property
    def include(self) -> str:
        """A pattern of ASSAY_INCLUDE for what the selector records."""
        if self.kind == "module":
            return f"*{self.target}.*" if self.target.startswith("*") else f"{self.target}.*"
        return f"*{self.target.replace(':', '.')}.*"


def parse(text: str) -> list[Selector]:
    """"call:pkg.mod:Class.method,local:pkg.mod.f:k#last" -> selectors."""
    selectors = []
    for one in text.split(","):
        kind, _, rest = one.strip().partition(":")
        if not rest:
            continue
        target, name = rest, ""
        if kind == "module":
            target, _, name = rest.partition(":")
        elif kind in ("local", "audit"):
            target, _, name = rest.rpartition(":")
        selectors.append(Selector(kind, target, name, one.strip()))
    return selectors

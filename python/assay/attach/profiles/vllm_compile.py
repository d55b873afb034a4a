"""Compiled runs: what of the model can be seen there, and keeping their graphs apart from those of other runs.

vLLM compiles the whole model into one graph and keeps it on disk under VLLM_CACHE_ROOT, keyed by its configuration
and its source files. A graph with probes must not be found by a run without them, nor the other way round: an
observed run keeps its compiled graphs in a folder of its own, named by the set of probes.
"""

from __future__ import annotations

import hashlib
import os
import pathlib
import re
from collections.abc import Iterable
from typing import Any

from ..session import Session


def cache_root(root: str, probes: str) -> str:
    """Where an observed run keeps its graphs: below the user's root, by the set of probes."""
    mark = hashlib.sha256(probes.encode())
    attach = pathlib.Path(__file__).parents[1]
    for source in sorted(attach.rglob("*.py")):  # what places the probes
        mark.update(source.read_bytes())
    return root if re.search(r"/assay-[0-9a-f]{12}$", root) else os.path.join(root, f"assay-{mark.hexdigest()[:12]}")


class Compilation:
    def __init__(self, session: Session) -> None:
        self._session = session
        self.compiles = False  # the model of this process, once it is built
        settings = session.settings
        knobs = ("ASSAY_INCLUDE", "ASSAY_EXCLUDE", "ASSAY_LAYERS", "ASSAY_PROBES", "ASSAY_ATTACH")
        probes = " ".join(f"{knob}={settings.get(knob, '')}" for knob in knobs)
        root = os.environ.get("VLLM_CACHE_ROOT") or os.path.join(
            os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache"), "vllm"
        )
        os.environ["VLLM_CACHE_ROOT"] = cache_root(os.path.expanduser(root), probes)

    def compiled(self) -> bool:
        """Whether the model that is being built will be compiled."""
        from vllm.config import CompilationMode, get_current_vllm_config

        self.compiles = bool(get_current_vllm_config().compilation_config.mode != CompilationMode.NONE)
        return self.compiles

    def asked_for(self, sites: Iterable[str]) -> bool:
        """Whether ASSAY_INCLUDE names one of these sites, not by a wildcard alone."""
        ends = {pattern.strip() for pattern in os.environ.get("ASSAY_INCLUDE", "").split(",")}
        return any(end == site or end.endswith(f".{site}") for end in ends for site in sites)

    def wanted(self, names: Iterable[str]) -> bool:
        """Whether a probe of these sites is worth placing: a graph keeps it for good. While the trace is not armed,
        everything is."""
        trace = self._session.trace()
        if trace is None or not trace.armed:
            return True
        return any(trace.wants(name) for name in names)

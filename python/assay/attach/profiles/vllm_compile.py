"""Compiled runs: what of the model can be seen there, and keeping their graphs apart from those of other runs.

vLLM compiles the whole model into one graph and keeps it on disk under VLLM_CACHE_ROOT, keyed by its configuration
and its source files. A graph with probes must not be found by a run without them, nor the other way round: an
observed run keeps its compiled graphs in a folder of its own, named by the set of probes.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable
from typing import Any

import assay

from ..session import Session

SAFE = (
    # Probes on these outputs were shown to leave every bit of the results (docs/vllm.md).
)


def cache_root(root: str, probes: str) -> str:
    """Where an observed run keeps its graphs: below the user's root, by the set of probes."""
    mark = hashlib.sha256(f"{assay.version()} {probes}".encode()).hexdigest()[:12]
    return root if re.search(r"/assay-[0-9a-f]{12}$", root) else os.path.join(root, f"assay-{mark}")


class Compilation:
    def __init__(self, session: Session) -> None:
        self._session = session
        settings = session.settings
        knobs = ("ASSAY_INCLUDE", "ASSAY_EXCLUDE", "ASSAY_LAYERS", "ASSAY_PROBES", "ASSAY_ATTACH")
        probes = " ".join(f"{knob}={settings.get(knob, '')}" for knob in knobs)
        root = os.environ.get("VLLM_CACHE_ROOT") or os.path.join(
            os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache"), "vllm"
        )
        os.environ["VLLM_CACHE_ROOT"] = cache_root(os.path.expanduser(root), probes)

    @staticmethod
    def compiled() -> bool:
        """Whether the model that is being built will be compiled."""
        from vllm.config import CompilationMode, get_current_vllm_config

        return bool(get_current_vllm_config().compilation_config.mode != CompilationMode.NONE)

    def visible(self, paths: Iterable[str]) -> list[str]:
        """The module paths to observe in this run."""
        return [] if self.compiled() else list(paths)

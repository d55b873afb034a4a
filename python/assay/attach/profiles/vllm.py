"""vLLM, unmodified: every worker records the canonical sites of its part of the model.

The profile is loaded when ``vllm`` is imported and only then. It patches class methods where they are consumed, reads
ranks when the first tensor comes, and touches no device. Its parts: vllm_steps (whose the rows are), vllm_modules
(outputs of modules), vllm_attention (the attention boundary), vllm_experts (routing), vllm_logits, vllm_weights,
vllm_compile (the cache of compiled graphs). docs/vllm.md has the sites, the paths and the versions tried.
"""

from __future__ import annotations

from typing import Any

from .. import hand_patch
from ..session import Session
from .vllm_attention import Attention
from .vllm_compile import Compilation
from .vllm_experts import Experts
from .vllm_facts import Facts
from .vllm_logits import Logits
from .vllm_modules import Modules
from .vllm_reduce import Reductions
from .vllm_steps import Recorder, Steps
from .vllm_weights import Weights

TRIGGERS = ("vllm",)


def install(session: Session) -> None:
    """Called once a process. What cannot be attached is reported by the session; the host goes on."""
    ranks = Ranks()
    session.rank = ranks.read
    if hand_patch.wanted(session.settings):
        hand_patch.install(session)
        return
    recorder = Recorder(session)
    compilation = Compilation(session)
    steps = Steps(session)
    Facts(recorder, steps)
    Weights(session, ranks.shard)
    attention = Attention(recorder, ranks.shard)
    reductions = Reductions(recorder)
    Modules(recorder, compilation, attention, reductions, Experts(recorder), ranks.shard)
    Logits(recorder, steps, compilation)


class Ranks:
    """The tensor-parallel place of this process, read once vLLM has its groups."""

    def __init__(self) -> None:
        self._known: tuple[int, int] | None = None

    def read(self) -> tuple[int, int]:
        """(rank, world size); (0, 1) as long as there are no groups."""
        if self._known is None:
            import sys

            state: Any = sys.modules.get("vllm.distributed.parallel_state")
            group = getattr(state, "_TP", None)
            if group is None:
                return 0, 1
            self._known = int(group.rank_in_group), int(group.world_size)
        return self._known

    def shard(self, columns: int) -> dict[str, int]:
        """Fields of a tensor of which each rank holds as many columns; nothing without tensor parallelism."""
        rank, size = self.read()
        if size == 1:
            return {}
        return {
            "shard_index": rank,
            "shard_count": size,
            "shard_col_offset": rank * columns,
            "shard_full_cols": size * columns,
        }

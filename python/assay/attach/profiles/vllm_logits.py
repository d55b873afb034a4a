"""Logits, the token chosen and how close the choice was."""

from __future__ import annotations

from typing import Any

from assay import Run

from ..rows import Rows
from ..session import Session
from .vllm_steps import RUNNERS, Steps


class Logits:
    """Logits are of the last scheduled token of each request; a token is taken where the prompt has ended."""

    def __init__(self, session: Session, steps: Steps) -> None:
        self._session = session
        self._steps = steps
        for runner in RUNNERS:
            session.wrap(f"{runner}._sample", before=self._before, after=self._after)

    def _rows(self, n: int) -> Rows | None:
        sampled, rows = self._steps.sampled, self._session.rows
        if sampled is None or rows is None or len(sampled.runs) != n:
            return None
        return Rows(sampled.runs, n_rows=n, step=rows.step, phase=rows.phase)

    def _before(self, call: Any) -> None:
        """Before the sampler, which works on the logits in place."""
        logits = call.args[1] if len(call.args) > 1 else call.kwargs.get("logits")
        if logits is None or (rows := self._rows(logits.shape[0])) is None:
            return
        self._session.record("logits", logits, rows=rows)
        if self._session.observed("next_token.margin"):
            top = logits.float().topk(2, dim=-1).values
            self._session.record(
                "next_token.margin", top[:, 0] - top[:, 1], rows=self._final(rows), compute_dtype=logits.dtype
            )

    def _after(self, call: Any, result: Any) -> None:
        tokens = result.sampled_token_ids
        if tokens is None or tokens.ndim != 2 or tokens.shape[1] != 1 or (rows := self._rows(tokens.shape[0])) is None:
            return
        if self._session.observed("next_token"):
            self._session.record("next_token", tokens[:, 0].long(), rows=self._final(rows))

    def _final(self, rows: Rows) -> Rows:
        """The rows that take a token. The others are in no run and are not measured."""
        assert self._steps.sampled is not None
        runs: list[Run] = [r for r, final in zip(rows.runs, self._steps.sampled.final) if final]
        return Rows(runs, n_rows=rows.n_rows, step=rows.step, phase=rows.phase)

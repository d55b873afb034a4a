"""Logits, the token chosen and how close the choice was."""

from __future__ import annotations

from typing import Any

from assay import Run

from ..rows import Rows
from .vllm_compile import Compilation
from .vllm_steps import RUNNERS, Recorder, Steps, given


class Logits:
    """Logits are of the last scheduled token of each request; a token is taken where the prompt has ended."""

    def __init__(self, recorder: Recorder, steps: Steps, compilation: Compilation) -> None:
        self._recorder = recorder
        self._compilation = compilation
        session = self._session = recorder.session
        self._steps = steps
        for runner in RUNNERS:
            session.wrap(f"{runner}._sample", before=self._before, after=self._after)
            session.wrap(f"{runner}._model_forward", after=self._forward)

    def _rows(self, n: int) -> Rows | None:
        sampled, rows = self._steps.sampled, self._session.rows
        if sampled is None or rows is None or len(sampled.runs) != n:
            return None
        if rows.n_rows == n and rows.runs == tuple(sampled.runs):
            return rows  # a decode step: each row is the last of its request
        return Rows(sampled.runs, n_rows=n, step=rows.step, phase=rows.phase)

    def _forward(self, call: Any, result: Any) -> None:
        """A compiled model gives its last norm; in eager runs the norm itself is observed."""
        if self._compilation.compiles and hasattr(result, "shape") and self._session.observed("final_norm"):
            self._recorder.record("final_norm", result)

    def _before(self, call: Any) -> None:
        """Before the sampler, which works on the logits in place."""
        logits = given(call, 1, "logits")
        if logits is None or not self._session.observed("logits", "next_token.margin"):
            return
        if (rows := self._rows(logits.shape[0])) is None:
            return
        self._session.record("logits", logits, rows=rows)
        if self._session.observed("next_token.margin"):
            top = logits.float().topk(2, dim=-1).values
            self._session.record(
                "next_token.margin", top[:, 0] - top[:, 1], rows=self._final(rows), compute_dtype=logits.dtype
            )

    def _after(self, call: Any, result: Any) -> None:
        tokens = result.sampled_token_ids
        if tokens is None or tokens.ndim != 2 or tokens.shape[1] != 1 or not self._session.observed("next_token"):
            return
        if (rows := self._rows(tokens.shape[0])) is not None:
            self._session.record("next_token", tokens[:, 0].long(), rows=self._final(rows))

    def _final(self, rows: Rows) -> Rows:
        """The rows that take a token. The others are in no run and are not measured."""
        assert self._steps.sampled is not None
        if all(self._steps.sampled.final):
            return rows
        runs: list[Run] = [r for r, final in zip(rows.runs, self._steps.sampled.final) if final]
        return Rows(runs, n_rows=rows.n_rows, step=rows.step, phase=rows.phase)

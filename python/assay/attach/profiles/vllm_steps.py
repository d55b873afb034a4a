"""Whose the rows of a vLLM step are.

The model runner knows: its input batch has, for each scheduled request, the prompt's tokens, how many tokens are
computed already and how many are scheduled now. They are read when the runner has prepared its inputs, in every
worker by itself; all ranks see the same batch. Passes without requests (profiling, warm-up, graph capture) are marked
as what they are.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import assay
from assay import Run

from ..groups import Group, Recorded
from ..rows import Rows
from ..session import Session

RUNNERS = (
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner",  # CPU's runner inherits it
)

_EQUAL_PROMPTS_KEPT = 65536  # different prompts whose number of occurrences is remembered


@dataclass
class Sampled:
    """The rows of the step whose logits are computed: one a request, the last scheduled token of each."""

    runs: list[Run]
    final: list[bool]  # whether the request samples a token here: not in the middle of its prompt


@dataclass
class _Batch:
    """One step's requests in the order of their rows."""

    rows: Rows
    requests: list[str]  # the engine's ids
    prompts: list[int]  # length of each request's
    scheduled: list[int]
    computed: list[int]

    def next(self, step: int, requests: list[str], scheduled: list[int], computed: list[int]) -> _Batch | None:
        """The batch of the next step, if that is one of decode as this one was, of the same requests; None: look closer."""
        if self.rows.phase != "decode" or requests != self.requests or scheduled != self.scheduled:
            return None
        if computed != [at + n for at, n in zip(self.computed, self.scheduled)]:
            return None
        return _Batch(self.rows.moved(computed, step), self.requests, self.prompts, self.scheduled, computed)

    def sampled(self) -> Sampled:
        ends = [run.first_position + run.n_rows for run in self.rows.runs]
        runs = [Run(run.request, i, 1, end - 1) for i, (run, end) in enumerate(zip(self.rows.runs, ends))]
        return Sampled(runs, [end >= prompt for end, prompt in zip(ends, self.prompts)])


def given(call: Any, index: int, name: str) -> Any:
    """An argument by its place or name; binding the signature would cost more than the recording."""
    return call.args[index] if len(call.args) > index else call.kwargs.get(name)


class Steps:
    """Keeps session.rows up to date. ``sampled``: the rows of its logits."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._keys: dict[str, int] = {}  # the engine's id of a live request -> key
        self._seen: OrderedDict[int, int] = OrderedDict()  # key of a prompt -> how often it came
        self._step = -1
        self._batch: _Batch | None = None
        self._sampled: Sampled | None = None  # of the batch, once it was asked for
        for runner in RUNNERS:
            session.wrap(f"{runner}._prepare_inputs", after=self._prepared)
            session.wrap(f"{runner}._dummy_run", before=self._dummy_begins, after=self._dummy_ends)
            session.wrap(f"{runner}.execute_model", before=self._begins)

    @property
    def sampled(self) -> Sampled | None:
        if self._sampled is None and self._batch is not None:
            self._sampled = self._batch.sampled()
        return self._sampled

    # ---- callbacks

    def _begins(self, call: Any) -> None:
        for gone in given(call, 1, "scheduler_output").finished_req_ids:
            self._keys.pop(gone, None)
            if self._batch is not None and gone in self._batch.requests:
                self._batch = self._sampled = None  # another may come by its id, at the position that was next

    def _prepared(self, call: Any, result: Any) -> None:
        scheduled, batch, before = given(call, 2, "num_scheduled_tokens").tolist(), call.self.input_batch, self._batch
        self._step += 1
        n = len(scheduled)
        requests, computed = batch.req_ids[:n], batch.num_computed_tokens_cpu[:n].tolist()
        now = None if before is None else before.next(self._step, requests, scheduled, computed)
        if now is None:
            now = self._read(batch, requests, scheduled, computed)
        self._batch, self._sampled = now, None
        self._session.rows = now.rows
        self._session.show_rows()

    def _dummy_begins(self, call: Any) -> None:
        arguments = call.bound
        capturing = bool(arguments.get("is_graph_capturing"))
        n = int(arguments["num_tokens"])
        phase = "capture" if capturing else "warmup" if arguments.get("is_profile") else "dummy"
        self._session.rows = Rows([Run(0, 0, n, 0, True)], phase=phase)
        self._batch = self._sampled = None

    def _dummy_ends(self, call: Any, result: Any) -> None:
        self._session.rows = None

    # ---- the batch

    def _read(self, batch: Any, requests: list[str], scheduled: list[int], computed: list[int]) -> _Batch:
        prompts = batch.num_prompt_tokens[: len(requests)].tolist()
        runs = []
        row = 0
        for i, (request, n_rows) in enumerate(zip(requests, scheduled)):
            key = self._keys.get(request) or self._key(request, batch, i, prompts[i])
            runs.append(Run(key, row, n_rows, computed[i]))
            row += n_rows
        decodes = sum([at >= prompt for at, prompt in zip(computed, prompts)])
        phase = "prefill" if decodes == 0 else "decode" if decodes == len(runs) else "mixed"
        return _Batch(Rows(runs, step=self._step, phase=phase), requests, prompts, scheduled, computed)

    def _key(self, request: str, batch: Any, i: int, n_prompt: int) -> int:
        key = self._keys.get(request)
        if key is None:
            tokens = batch.token_ids_cpu[i, :n_prompt].tolist()
            first = assay.request_key(tokens)
            ordinal = self._seen.pop(first, 0)
            self._seen[first] = ordinal + 1
            if len(self._seen) > _EQUAL_PROMPTS_KEPT:
                self._seen.popitem(last=False)
            trace = self._session.trace()
            key = trace.request(tokens, ordinal, engine_id=request) if trace else assay.request_key(tokens, ordinal)
            self._keys[request] = key
        return key


class Recorder:
    """Session.record() for tensors of a step, which may have more rows than tokens: the rest is padding."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._padded: tuple[Rows | None, int, Rows | None] = (None, 0, None)
        self._groups: dict[Hashable, Group] = {}

    def views(
        self,
        key: Hashable,
        tensors: Sequence[Any],
        found: Iterable[Recorded],
        rows: Rows | None = None,
        by_row: tuple[Any, Any] | None = None,
    ) -> Group:
        """Records what a probe finds in the same tensors each time. key: of the probe, and whatever else than the tensors
        decides what is recorded; found: is looked at when the group (groups.py) does not know such tensors; rows: those of
        the step when left out; by_row: as of Group.learn(). Returns the group."""
        if rows is None:
            rows = self.session.rows
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = Group(self.session)
        if rows is not None and group.record(rows, by_row if by_row and group.by_row else tensors):
            return group
        recorded = list(found)
        for name, layer, tensor, fields in recorded:
            self.record(name, tensor, layer, rows, **fields)
        if rows is not None:
            group.learn(rows, tensors, recorded, by_row)
        return group

    def group(self, key: Hashable) -> Group | None:
        """What views() has under this key."""
        return self._groups.get(key)

    def record(self, name: str, tensor: Any, layer: int | None = None, rows: Rows | None = None, **fields: Any) -> None:
        """rows: those of the step when left out."""
        session = self.session
        if rows is None:
            rows = session.rows
        if rows is not None and tensor.ndim and tensor.shape[0] > rows.n_rows:
            rows = self._pad(rows, tensor.shape[0])
        session.record(name, tensor, layer=layer, rows=rows, **fields)

    def rows_of(self, n: int) -> Rows | None:
        """The step's rows for a tensor of n, those behind the tokens as padding."""
        rows = self.session.rows
        return self._pad(rows, n) if rows is not None and n > rows.n_rows else rows

    def _pad(self, rows: Rows, n: int) -> Rows:
        if self._padded[0] is not rows or self._padded[1] != n or self._padded[2] is None:
            padding = Run(0, rows.n_rows, n - rows.n_rows, 0, True)
            self._padded = (rows, n, Rows([*rows.runs, padding], step=rows.step, phase=rows.phase))
        assert self._padded[2] is not None
        return self._padded[2]

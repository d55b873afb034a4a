"""Whose the rows of a transformers forward are: requests, positions, padding.

Identity comes from the tokens and the padding mask alone. The position_ids that the host computes are a value to be
judged, so they play no part: a padded batch with wrong position_ids still lines up with a right run, and differs there.
A batch is followed from forward to forward by its cache object; without a cache, by its growing tokens.
Beams that change places are not followed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch

from ..._arguments import Run
from ..._prepared import Rows


class Batch:
    """The requests of one batch, a slot a row of the batch, over all forwards of it."""

    __slots__ = ("keys", "prompts", "seen", "columns", "finished", "tokens", "open_choice")

    def __init__(self, keys: list[int], prompts: list[int], seen: list[int], columns: int) -> None:
        self.keys = keys
        self.prompts = prompts  # tokens of each prompt
        self.seen = seen  # real tokens so far, which is the position of the next one
        self.columns = columns  # of the batch so far, padding included
        self.finished = [False] * len(keys)  # behind its end token: the host goes on with padding
        self.tokens: Any = None  # [B, columns], of a batch without a cache
        self.open_choice: Choice | None = None  # rows whose next token the host has not shown yet


class Choice:
    """The rows of a step that a next token is chosen from: the last real row of each slot that goes on."""

    __slots__ = ("slots", "columns", "rows", "next_column")

    def __init__(self, slots: list[int], columns: list[int], rows: Rows, next_column: int) -> None:
        self.slots = slots
        self.columns = columns  # of this forward, counted from its first
        self.rows = rows
        self.next_column = next_column  # of the whole batch


class Forward:
    """One forward of the decoder: what its hooks need to name rows."""

    __slots__ = (
        "batch", "choice", "decoder", "inside", "length", "past", "rows", "size", "_positions", "_tails", "_valid"
    )  # fmt: skip

    def __init__(
        self,
        batch: Batch,
        size: int,
        length: int,
        past: int,
        valid: list[list[bool]] | None,
        positions: list[int],
        **common: Any,
    ) -> None:
        """size: slots; length: columns of this forward; past: columns before. valid: [size][length], None: all real.
        positions: of the first real row of each slot. common: step and compute_dtype of Rows."""
        self.batch, self.size, self.length, self.past = batch, size, length, past
        self.inside = True  # between the decoder's call and its return
        self.decoder: Any = None  # whose hooks may record it
        self._valid, self._positions = valid, positions
        runs = self._runs(length)
        real = [run for run in runs if not run.padding]
        old = sum(run.first_position + run.n_rows <= self._prompt_of(run) for run in real)
        new = sum(run.first_position >= self._prompt_of(run) for run in real)
        common["phase"] = "prefill" if old == len(real) else "decode" if new == len(real) else "mixed"
        self.rows = Rows(runs, **common)
        self._tails: dict[int, Rows] = {length: self.rows}
        slots: list[int] = []
        columns: list[int] = []
        last: list[Run] = []
        for slot in range(size):
            column = self._last_real(slot)
            if column >= 0:
                position = positions[slot] + self._count(slot, column)
                last.append(Run(batch.keys[slot], len(last), 1, position))
                slots.append(slot)
                columns.append(column)
        common["phase"] = self.rows.phase
        self.choice = Choice(slots, columns, Rows(last, **common), past + length)

    def tail(self, columns: int) -> Rows:
        """The last `columns` columns of each slot, as rows of a tensor [size * columns, ...]."""
        rows = self._tails.get(columns)
        if rows is None:
            whole = self.rows
            rows = Rows(self._runs(columns), step=whole.step, phase=whole.phase)
            rows.compute_dtype = whole.compute_dtype
            self._tails[columns] = rows
        return rows

    def _prompt_of(self, run: Run) -> int:
        return self.batch.prompts[run.first_row // self.length]

    def _last_real(self, slot: int) -> int:
        if self.batch.finished[slot]:
            return -1
        if self._valid is None:
            return self.length - 1
        return max((c for c, real in enumerate(self._valid[slot]) if real), default=-1)

    def _count(self, slot: int, column: int) -> int:
        """Real rows of the slot before the column."""
        return column if self._valid is None else sum(self._valid[slot][:column])

    def _runs(self, columns: int) -> list[Run]:
        skip = self.length - columns
        runs = []
        for slot in range(self.size):
            first_row, finished = slot * columns, self.batch.finished[slot]
            if finished or self._valid is None:
                position = self._positions[slot] + skip
                runs.append(Run(0 if finished else self.batch.keys[slot], first_row, columns, position, finished))
                continue
            row = self._valid[slot]
            column = skip
            while column < self.length:
                end = column
                while end < self.length and row[end] == row[column]:
                    end += 1
                position = self._positions[slot] + sum(row[:column])
                key = self.batch.keys[slot] if row[column] else 0
                runs.append(Run(key, first_row + column - skip, end - column, position, not row[column]))
                column = end
        return runs


class Requests:
    """Follows the batches of one decoder. announce(tokens) registers a prompt and returns its request's key."""

    def __init__(self, announce: Callable[[Sequence[int]], int]) -> None:
        self._announce = announce
        self._by_cache: WeakKeyDictionary[Any, Batch] = WeakKeyDictionary()
        self._without_cache: Batch | None = None
        self._out_of_sight: Batch | None = None  # the last one whose cache, if any, was not to be seen
        self._told = threading.local()

    def tell_prompts(self, ids: Any, mask: Any, ends: frozenset[int]) -> None:
        """What the generate() call that this thread is in was given: ids and mask [B, T]. A prompt fed in chunks has
        its whole prompt's key then, and padding is known where the forwards get 4-D masks. ends: the tokens behind
        which a slot is given padding alone."""
        self._told.mask = None if mask is None or mask.shape != ids.shape or bool(mask.all()) else mask.bool()
        flags = None if self._told.mask is None else self._told.mask.tolist()
        self._told.prompts, self._told.ends, self._told.batch = real_tokens(ids, flags), ends, None

    def finish(self, sequences: Any) -> tuple[Choice, list[int]] | None:
        """The end of generate(), whose result shows the last choice."""
        batch = getattr(self._told, "batch", None)
        self._told.prompts = self._told.batch = self._told.mask = None
        if batch is None or not isinstance(sequences, torch.Tensor) or sequences.shape[0] != len(batch.keys):
            return None
        return self._shown(batch, sequences, 0)

    def begin(
        self,
        ids: Any,
        mask: Any,
        cache: Any,
        size: int,
        length: int,
        *,
        past: int | None = None,
        known: tuple[int, Batch | None] | None = None,
        **common: Any,
    ) -> tuple[Forward, tuple[Choice, list[int]] | None]:
        """The rows of a forward over ids [size, length] (None: embeddings were given), before it runs; and the tokens
        that it shows to have been chosen by the forward before. past: the cache's length, read earlier. known: what
        out_of_sight() gave."""
        if known is not None:
            past, batch = known
        else:
            if past is None:
                past = int(cache.get_seq_length()) if cache is not None else 0
            batch = self._by_cache.get(cache) if cache is not None else self._without_cache
            if batch is not None and cache is None and not _grown(batch, ids):
                batch = None
            told: Batch | None = getattr(self._told, "batch", None)
            if batch is None and past and told is not None and told.columns == past:
                batch = told  # whose cache was out of sight so far
        if batch is not None and (len(batch.keys) != size or (past == 0 and batch.columns and cache is not None)):
            batch = None  # the cache was reset, or serves another batch
        shown = None if batch is None else self._shown(batch, ids, past)
        valid, before = self._padding(mask, size, past, length)
        flags = None if valid is None or bool(valid.all()) else valid.bool().tolist()
        if batch is None:
            seen = [past] * size if before is None else [int(n) for n in before.sum(1).tolist()]
            prompts = self._prompts(ids, flags, size, past)
            batch = Batch([self._announce(p) for p in prompts], [len(p) for p in prompts], seen, past)
        elif cache is None and past == 0:
            batch.seen, batch.columns = [0] * size, 0
        elif batch.columns != past:  # cropped: draft tokens were refused
            batch.seen = (
                [min(s, past) for s in batch.seen] if before is None else [int(n) for n in before.sum(1).tolist()]
            )
        forward = Forward(batch, size, length, past, flags, list(batch.seen), **common)
        for slot in range(size):
            batch.seen[slot] += length if flags is None else sum(flags[slot])
        batch.columns = past + length
        batch.open_choice = forward.choice
        if getattr(self._told, "prompts", None) is not None:
            self._told.batch = batch
        if cache is not None:
            self._by_cache[cache] = batch
        elif known is not None:
            batch.tokens = ids
            self._out_of_sight = batch
        else:
            batch.tokens = ids
            self._without_cache = batch
        return forward, shown

    def out_of_sight(self, ids: Any, mask: Any, size: int, length: int) -> tuple[int, Batch | None]:
        """Columns so far, and the batch (None: a new one), of a forward whose cache, if any, is not to be seen: of
        generate()'s batch, or of the one before. Without a 2-D mask, one token alone goes on and several begin."""
        told = getattr(self._told, "prompts", None) is not None
        batch: Batch | None = self._told.batch if told else self._out_of_sight
        if batch is None or len(batch.keys) != size:
            return 0, None
        if told:
            return batch.columns, batch
        if _grown(batch, ids):
            return 0, batch
        if isinstance(mask, torch.Tensor) and mask.ndim == 2 and mask.shape[0] == size:
            past = max(mask.shape[1] - length, 0)
        else:
            past = batch.columns if length == 1 else 0
        return past, batch if past else None

    def bind(self, batch: Batch, cache: Any) -> None:
        """Says which cache a forward that was given none has made."""
        if cache is not None:
            self._by_cache[cache] = batch
            if self._without_cache is batch:
                self._without_cache = None
            batch.tokens = None

    def _padding(self, mask: Any, size: int, past: int, length: int) -> tuple[Any, Any]:
        """Which columns of this forward, and of those before it, hold real tokens: [B, T] and [B, past], None: not
        known, or all. 4-D masks say who sees whom, not what is padding."""
        if isinstance(mask, torch.Tensor) and mask.ndim == 2 and mask.shape[0] == size:
            if mask.shape[1] >= past + length:
                return mask[:, past : past + length], mask[:, :past]
            return (mask, None) if mask.shape[1] == length else (None, None)
        told = getattr(self._told, "mask", None)
        if told is None or size % told.shape[0]:
            return None, None
        whole = told.repeat_interleave(size // told.shape[0], dim=0)
        missing = past + length - whole.shape[1]
        if missing > 0:
            whole = torch.cat((whole, whole.new_ones(size, missing)), dim=1)
        return whole[:, past : past + length], whole[:, :past]

    def _shown(self, batch: Batch, ids: Any, past: int) -> tuple[Choice, list[int]] | None:
        """The open choice of the batch and its tokens, from ids whose first column is column `past` of the batch."""
        choice = batch.open_choice
        batch.open_choice = None
        if choice is None or ids is None or past > choice.next_column:
            return None
        if 0 < past < choice.next_column:  # cut off again: drafted tokens were refused, and nothing was chosen there
            return None
        column = choice.next_column - past
        if column >= ids.shape[1]:
            return None
        tokens = [int(t) for t in ids[choice.slots, column].tolist()]
        ends = getattr(self._told, "ends", ())
        for slot, token in zip(choice.slots, tokens):
            batch.finished[slot] = token in ends
        return choice, tokens

    def _prompts(self, ids: Any, flags: list[list[bool]] | None, size: int, past: int) -> list[list[int]]:
        """The prompt of each slot of a new batch: that of generate() where these tokens are a part of it, or it and tokens
        drafted behind it; else the tokens of this forward."""
        told = getattr(self._told, "prompts", None)
        own = [[] for _ in range(size)] if ids is None else real_tokens(ids, flags)
        if not told or size % len(told):
            return own
        told = [told[slot // (size // len(told))] for slot in range(size)]
        fits = all(past or all(a == b for a, b in zip(part, whole)) for part, whole in zip(own, told))
        return told if fits else own


def _grown(batch: Batch, ids: Any) -> bool:
    """Whether these tokens are those of the batch and more, as a loop without a cache gives them."""
    if ids is None or batch.tokens is None or batch.tokens.shape[0] != ids.shape[0]:
        return False
    columns = batch.tokens.shape[1]
    return bool(ids.shape[1] > columns and torch.equal(ids[:, :columns], batch.tokens))


def real_tokens(ids: Any, flags: list[list[bool]] | None) -> list[list[int]]:
    """The tokens of ids [B, T] that are not padding, a list a row."""
    rows: list[list[int]] = ids.tolist()
    if flags is None:
        return rows
    return [[token for token, real in zip(row, keep) if real] for row, keep in zip(rows, flags)]

"""What can be seen at vLLM's attention boundary, in eager and in compiled runs alike.

vLLM registers attention as an opaque operation, so that torch.compile leaves its Python code alone: what is read here
is read without touching a compiled graph. The classes that run are found from the layers as they are built (the
backend is chosen then), and their methods are patched in the class of the method resolution order that defines them.
"""

from __future__ import annotations

import math
import re
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from assay import Run

from ..groups import Recorded
from ..rows import Rows
from ..shortcuts import RESULT
from .vllm_steps import Recorder, given

MLA = "vllm.model_executor.layers.attention.mla_attention:MLAAttention"
ATTENTION = "vllm.model_executor.layers.attention.attention:Attention"
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


WITHOUT_MLA = (
    (("kv_write",), "writes its cache inside its kernel, in an order of its own"),
    (("lse",), "returns no log-sum-exp"),
    (("q_latent", "latent_out"), "attends over expanded keys and values"),
    (("chunk.*.out", "chunk.*.lse"), "attends over all keys at once"),
)
"""Sites that attention without MLA does not have, and why."""


def layer_of(name: str) -> int | None:
    """``model.layers.3.self_attn.attn`` -> 3."""
    found = _LAYER.search(name)
    return int(found.group(1)) if found else None


def part_of(rows: Rows | None, first: int, count: int) -> Rows | None:
    """Rows first to first + count of a step, numbered from 0."""
    if rows is None or (first == 0 and count == rows.n_rows):
        return rows
    runs = []
    for run in rows.runs:
        low, high = max(run.first_row, first), min(run.first_row + run.n_rows, first + count)
        if low < high:
            position = run.first_position + low - run.first_row
            runs.append(Run(run.request, low - first, high - low, position, run.padding))
    return Rows(runs, n_rows=count, step=rows.step, phase=rows.phase)


def defined_at(cls: type, method: str) -> str | None:
    """Target of session.wrap for the class among cls and its bases that defines the method; None: none does."""
    for base in cls.__mro__:
        if method in vars(base):
            return f"{base.__module__}:{base.__qualname__}.{method}"
    return None


class Attention:
    """Probes of attention layers, MLA or not."""

    def __init__(self, recorder: Recorder, shard: Callable[[int], dict[str, int]]) -> None:
        """shard: columns of this rank's part of a tensor cut by heads -> where they lie in the whole."""
        self._recorder = recorder
        session = self._session = recorder.session
        self._shard = shard
        self._wrapped: set[str] = set()
        self.heads: dict[int, tuple[int, int, int]] = {}  # layer without MLA -> (nope, rope, value) head sizes
        self._mla: Any = None  # the MLA layer whose prefill is under way
        self._metadata: Any = None  # what it was given
        self._of_impl: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()  # MLA implementation -> layer
        self._chunk = 0  # context chunks seen in this call
        self._cache_sites: dict[str, str] = {}  # by layer_name
        self._slots: tuple[Any, Rows | None, Any] = (None, None, None)  # as given, of which rows, and as an index
        session.wrap(f"{MLA}.__init__", after=self._built)
        session.wrap(f"{MLA}.forward_impl", before=self._mla_enters, after=self._mla_leaves)
        session.audits[f"{MLA}.forward_impl", "output"] = self._mla_buffer
        session.wrap(f"{MLA}.update_kv_cache", after=self._mla_kv_written)
        session.wrap(f"{ATTENTION}.__init__", after=self._built)

    # ---- finding what runs

    def _wrap(self, cls: type, method: str, **callbacks: Any) -> None:
        target = defined_at(cls, method)
        if target is not None and target not in self._wrapped:
            self._wrapped.add(target)
            self._session.wrap(target, **callbacks)

    def _built(self, call: Any, result: Any) -> None:
        layer = call.self
        impl = getattr(layer, "impl", None)
        if impl is None:
            return
        session = self._session
        session.fact("attention.backend", layer.attn_backend.get_name())
        session.fact("attention.impl", f"{type(impl).__module__}:{type(impl).__qualname__}")
        session.fact("kv_cache_dtype", getattr(layer, "kv_cache_dtype", "auto"))
        for name in ("vllm_flash_attn_version", "fa_version"):
            version = getattr(impl, name, None) or getattr(getattr(layer, "prefill_backend", None), name, None)
            if version is not None:
                session.fact("attention.fa_version", version)
        if not hasattr(layer, "kv_lora_rank"):
            self._wrap(type(impl), "forward", before=self._enters, after=self._leaves)
            for sites, why in WITHOUT_MLA:
                for site in sites:
                    session.absent(f"layers.*.attn.{site}", f"{layer.attn_backend.get_name()} {why}")
            return
        session.fact("attention.pad_v", int(bool(getattr(impl, "_pad_v", False))))
        self._of_impl[impl] = weakref.ref(layer)
        self._wrap(type(impl), "forward_mqa", before=self._mqa_enters, after=self._mqa_leaves)
        self._wrap(type(impl), "forward_mha", before=self._mha_enters, after=self._mha_leaves)
        if getattr(impl, "uses_amx_bmm", False):
            self._amx_sites(layer)
            return
        prefill = getattr(layer, "prefill_backend", None)
        if prefill is not None:
            session.fact("attention.prefill_backend", prefill.get_name())
            self._wrap(type(prefill), "run_prefill_new_tokens", before=self._new_enter, after=self._new_leave)
            self._wrap(type(prefill), "run_prefill_context_chunk", after=self._context_leaves)

    def _record(self, name: str, layer: int | None, tensor: Any, rows: Rows | None, cut: bool, **fields: Any) -> None:
        """cut: by heads, over the ranks."""
        if cut:
            fields.update(self._cut(tensor))
        self._recorder.record(name, tensor, layer, rows, **fields)

    def _cut(self, tensor: Any) -> dict[str, int]:
        """Fields of a tensor that the ranks cut by heads."""
        return self._shard(math.prod(tensor.shape[1:]))

    # ---- MLA

    def _mla_enters(self, call: Any) -> None:
        layer = call.self
        tensors = given(call, 1, "q"), given(call, 2, "k_c_normed"), given(call, 3, "k_pe")
        group = self._recorder.views(("into", layer.layer_name), tensors, self._into_mla(layer, *tensors))
        call.shorten(group, ((1, -1, "q"), (2, -1, "k_c_normed"), (3, -1, "k_pe")))

    def _into_mla(self, layer: Any, q: Any, kv_c_normed: Any, k_pe: Any) -> Iterator[Recorded]:
        number = layer_of(layer.layer_name)
        q = q.view(q.shape[0], layer.num_heads, -1)
        nope = layer.qk_nope_head_dim
        for name, part in (("q_nope", q[..., :nope]), ("q_pe", q[..., nope:]), ("q", q)):
            yield f"attn.{name}", number, part, self._cut(part)
        yield "attn.kv_c_normed", number, kv_c_normed, {}
        yield "attn.k_pe", number, k_pe.view(k_pe.shape[0], 1, k_pe.shape[-1]), {}

    def _mla_leaves(self, call: Any, result: Any) -> None:
        layer, output = call.self, given(call, 6, "output")
        group = self._recorder.views(("out of", layer.layer_name), (output,), self._out_of_mla(layer, output))
        call.shorten(group, ((6, -1, "output"),))

    def _out_of_mla(self, layer: Any, output: Any) -> Iterator[Recorded]:
        out = output.view(output.shape[0], layer.num_heads, layer.v_head_dim)
        yield "attn.out", layer_of(layer.layer_name), out, self._cut(out)

    def _mla_buffer(self, call: Any, output: Any) -> dict[str, Any]:
        """What an audited output of forward_impl is."""
        layer = call.self
        out = output.view(output.shape[0], layer.num_heads, layer.v_head_dim)
        rows = self._recorder.rows_of(out.shape[0])
        shard = self._shard(out.shape[1] * out.shape[2])
        return {"name": "attn.out", "tensor": out, "layer": layer_of(layer.layer_name), "rows": rows, **shard}

    def _mla_kv_written(self, call: Any, result: Any) -> None:
        layer, slots, cache = call.self, given(call, 4, "slot_mapping"), given(call, 3, "kv_cache")
        if slots is None or cache.numel() == 0 or not self._session.observed(self._cache_site(layer)):
            return
        cells, slots = cache.view(-1, cache.shape[-1]), self._slots_of(slots)
        # The first takes half as long, but not every type.
        written = cells.index_select(0, slots) if cache.dtype.itemsize > 1 else cells[slots]
        dtype, scale = given(call, 6, "kv_cache_dtype"), getattr(layer, "_k_scale_float", 1.0)
        found = self._written(layer, written, {"kv_cache_dtype": dtype, "kv_scale": scale})
        by_row = cache, given(call, 4, "slot_mapping")
        group = self._recorder.views(("cache", layer.layer_name, dtype, scale), (written,), found, by_row=by_row)
        if group.by_row:
            call.shorten(group, ((3, -1, "kv_cache"), (4, -1, "slot_mapping")))

    def _written(self, layer: Any, written: Any, meta: dict[str, object]) -> Iterator[Recorded]:
        number = layer_of(layer.layer_name)
        yield "attn.kv_write", number, written, {"compute_dtype": written.dtype, "meta": meta}

    def _cache_site(self, layer: Any) -> str:
        name = self._cache_sites.get(layer.layer_name)
        if name is None:
            name = self._cache_sites[layer.layer_name] = f"layers.{layer_of(layer.layer_name)}.attn.kv_write"
        return name

    def _slots_of(self, slots: Any) -> Any:
        """The slots of the step's rows; made once a step, as all layers are given the same tensor."""
        rows = self._session.rows
        if self._slots[0] is not slots or self._slots[1] is not rows:
            flat = slots.flatten()
            if rows is not None and flat.numel() > rows.n_rows:
                flat = flat[: rows.n_rows]  # behind them is padding, which is not written
            self._slots = slots, rows, flat.clamp(min=0).long()
        return self._slots[2]

    def _mqa_enters(self, call: Any) -> None:
        layer, q = self._layer_of(call.self), given(call, 1, "q")
        member = 0 if isinstance(q, tuple) else -1
        q = q[0] if isinstance(q, tuple) else q
        rows = part_of(self._session.rows, 0, q.shape[0])
        group = self._recorder.views(("into decode", layer.layer_name), (q,), self._into_mqa(layer, q), rows)
        call.shorten(group, ((1, member, "q"),))

    def _into_mqa(self, layer: Any, q: Any) -> Iterator[Recorded]:
        latent = q[..., : layer.kv_lora_rank]
        yield "attn.q_latent", layer_of(layer.layer_name), latent, self._cut(latent)

    def _mqa_leaves(self, call: Any, result: Any) -> None:
        layer = self._layer_of(call.self)
        out, lse = result if isinstance(result, tuple) else (result, None)
        tensors = (out,) if lse is None else (out, lse)
        rows = part_of(self._session.rows, 0, out.shape[0])
        found = self._out_of_mqa(layer, out, lse)
        group = self._recorder.views(("out of decode", layer.layer_name), tensors, found, rows)
        members = [(RESULT, member, None) for member in range(2)] if isinstance(result, tuple) else [(RESULT, -1, None)]
        call.shorten(group, members[: len(tensors)], members[len(tensors) :])

    def _layer_of(self, impl: Any) -> Any:
        """The layer of an implementation of MLA, which has one."""
        return self._of_impl[impl]()

    def _out_of_mqa(self, layer: Any, out: Any, lse: Any) -> Iterator[Recorded]:
        number = layer_of(layer.layer_name)
        by_heads = out.view(out.shape[0], layer.num_heads, -1)
        yield "attn.latent_out", number, by_heads, self._cut(by_heads)
        if lse is None:
            self._session.absent("layers.*.attn.lse", "the decode kernel returns none")
        else:
            of_heads = lse.view(out.shape[0], -1)
            yield "attn.lse", number, of_heads, self._cut(of_heads)

    def _mha_enters(self, call: Any) -> None:
        """vLLM decides by the number of a request's rows what goes this way: in a step of decode, too, those that a draft
        model proposed, or that are computed again."""
        self._mla, self._metadata, self._chunk = self._layer_of(call.self), given(call, 5, "attn_metadata"), 0

    def _mha_leaves(self, call: Any, result: Any) -> None:
        self._mla = self._metadata = None

    def _prefill_rows(self, count: int) -> Rows | None:
        """vLLM puts decodes first: prefill has the last rows of the real ones."""
        rows = self._session.rows
        return None if rows is None else part_of(rows, rows.n_rows - count, count)

    def _new_enter(self, call: Any) -> None:
        layer = self._mla
        if layer is None:
            return
        number = layer_of(layer.layer_name)
        k, v = given(call, 2, "k"), given(call, 3, "v")
        rows = self._prefill_rows(k.shape[0])
        self._record("attn.k", number, k, rows, True)
        self._record("attn.k_nope", number, k[..., : layer.qk_nope_head_dim], rows, True)
        self._record("attn.v", number, v[..., : layer.v_head_dim], rows, True)

    def _new_leave(self, call: Any, result: Any) -> None:
        layer = self._mla
        if layer is None:
            return
        number = layer_of(layer.layer_name)
        if not isinstance(result, tuple):
            self._session.absent("layers.*.attn.lse", "prefill without context asks the kernel for none")
            return
        # With context, which is chunk 0 and above, the new tokens are the last chunk.
        out, lse = result[:2]
        rows = self._prefill_rows(out.shape[0])
        last = len(self._metadata.prefill.chunked_context.chunks)
        own = [f"{r.first_position}:{r.first_position + r.n_rows}" for r in rows.runs] if rows else []
        keys = {"causal": 1, **({"keys": ",".join(own)} if own else {})}
        self._record(f"attn.chunk.{last}.out", number, out[..., : layer.v_head_dim], rows, True, meta=keys)
        self._record(f"attn.chunk.{last}.lse", number, lse.transpose(0, 1), rows, True, meta=keys)

    def _context_leaves(self, call: Any, result: Any) -> None:
        layer = self._mla
        if layer is None:
            return
        number, chunk = layer_of(layer.layer_name), given(call, 1, "chunk")
        out, lse = result[:2]
        first = chunk.token_slice.start or 0
        rows = self._session.rows
        if rows is not None:
            n_prefill = sum(r.n_rows for r in rows.runs) - int(self._metadata.num_decode_tokens)
            rows = part_of(rows, rows.n_rows - n_prefill + first, out.shape[0])
        bounds = chunk.starts.tolist(), (chunk.cu_seq_lens[1:] - chunk.cu_seq_lens[:-1]).tolist()
        keys = {"causal": 0, "keys": ",".join(f"{a}:{a + n}" for a, n in zip(*bounds))}
        self._record(f"attn.chunk.{self._chunk}.out", number, out[..., : layer.v_head_dim], rows, True, meta=keys)
        self._record(f"attn.chunk.{self._chunk}.lse", number, lse.transpose(0, 1), rows, True, meta=keys)
        self._chunk += 1

    # ---- MLA whose prefill works in the latent space, on AMX

    def _amx_sites(self, layer: Any) -> None:
        for site in ("k", "k_nope", "v", "lse"):
            self._session.absent(f"layers.*.attn.{site}", "AMX_MLA works in the latent space, prefill too")
        self._session.wrap("vllm._custom_ops:cpu_mla_extend", after=self._extended)

    def _extended(self, call: Any, result: Any) -> None:
        layer = self._mla
        if layer is None:
            return
        number = layer_of(layer.layer_name)
        q, out = call.args[0], call.args[3]
        rows = self._prefill_rows(q.shape[0])
        self._record("attn.q_latent", number, q[..., : layer.kv_lora_rank], rows, True)
        self._record("attn.latent_out", number, out, rows, True)

    # ---- all others

    def _enters(self, call: Any) -> None:
        layer = given(call, 1, "layer")
        number = layer_of(layer.layer_name)
        rows = self._session.rows
        q = _by_heads(given(call, 2, "query"), layer.num_heads)
        k = _by_heads(given(call, 3, "key"), layer.num_kv_heads)
        v = _by_heads(given(call, 4, "value"), layer.num_kv_heads)
        if number in self.heads:  # latent attention, materialised: v comes padded to the width of k
            nope, _, value = self.heads[number]
            if q is not None and k is not None and v is not None:
                self._record("attn.q_nope", number, q[..., :nope], rows, True)
                self._record("attn.q_pe", number, q[..., nope:], rows, True)
                self._record("attn.k_nope", number, k[..., :nope], rows, True)
                self._record("attn.k_pe", number, k[:, :1, nope:], rows, False)
                self._session.fact("attention.pad_v", int(v.shape[-1] != value))
                v = v[..., :value]
        for name, tensor in (("q", q), ("k", k), ("v", v)):
            if tensor is not None:
                self._record(f"attn.{name}", number, tensor, rows, True)

    def _leaves(self, call: Any, result: Any) -> None:
        layer = given(call, 1, "layer")
        number = layer_of(layer.layer_name)
        out = _by_heads(given(call, 7, "output"), layer.num_heads)
        if number in self.heads:
            out = out[..., : self.heads[number][2]]
        self._record("attn.out", number, out, self._session.rows, True)


def _by_heads(tensor: Any, heads: int) -> Any:
    return None if tensor is None else tensor.view(tensor.shape[0], heads, -1)

"""Sites that are outputs of vLLM's modules: embedding, norms, projections, feed-forward, experts.

A table maps module paths (``model.layers.3.mlp.gate_up_proj``) to readers. A reader takes what went in and came out
and gives sites with tensors; it makes views only. vLLM adds the residual inside its norms, so the residual stream
behind layer N (``layers.N.out``) is the second result of the norm that follows, which is the tensor that the engine
goes on with: nothing is added up here.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from ..groups import Group, Recorded
from .vllm_attention import Attention, layer_of
from .vllm_compile import Compilation
from .vllm_experts import Experts
from .vllm_reduce import Reductions
from .vllm_steps import Recorder

LOADER = "vllm.model_executor.model_loader.base_loader"
Table = dict[str, list[tuple["Place", "Entry"]]]
Shard = Callable[[int], dict[str, int]]
Sites = Iterator[tuple[str, Any, bool]]
"""Site below the layer (or whole name), tensor, and whether the ranks hold parts of its columns."""
Reader = Callable[["Place", tuple[Any, ...], Any], Sites]


@dataclasses.dataclass(frozen=True)
class Place:
    """A module of the model: ``layer`` None outside of the layers; ``last`` is the number of the last layer."""

    path: str
    module: Any
    layer: int | None
    last: int
    parent: Any  # the module that has it


def first(output: Any) -> Any:
    """vLLM's linear layers give (output, bias)."""
    return output[0] if isinstance(output, tuple) else output


def _plain(site: str, cut: bool = False) -> Reader:
    def read(place: Place, args: tuple[Any, ...], output: Any) -> Sites:
        yield site, first(output), cut

    return read


def _residual(place: Place, args: tuple[Any, ...], output: Any) -> Sites:
    """Of the norm that follows: the residual stream behind the layer before it."""
    layer = place.last if place.layer is None else place.layer - 1
    if isinstance(output, tuple) and layer >= 0:
        yield f"layers.{layer}.out", output[1], False


def _latents(place: Place, args: tuple[Any, ...], output: Any) -> Sites:
    """fused_qkv_a_proj: both latents by one product."""
    a, rank = first(output), place.parent.q_lora_rank
    yield "attn.q_a", a[..., :rank], False
    yield "attn.kv_a", a[..., rank:], False


def _q_proj(place: Place, args: tuple[Any, ...], output: Any) -> Sites:
    q = first(output)
    yield "attn.q_proj", q.view(q.shape[0], -1, place.parent.qk_head_dim), True


def _qkv_proj(place: Place, args: tuple[Any, ...], output: Any) -> Sites:
    qkv, attention = first(output), place.parent
    start = 0
    for name, size in (("q_proj", attention.q_size), ("k_proj", attention.kv_size), ("v_proj", attention.kv_size)):
        part = qkv[..., start : start + size]
        yield f"attn.{name}", part.view(part.shape[0], -1, attention.head_dim), True
        start += size


def _gate_up(place: Place, args: tuple[Any, ...], output: Any) -> Sites:
    both = first(output)
    half = both.shape[-1] // 2
    yield "mlp.gate", both[..., :half], True
    yield "mlp.up", both[..., half:], True


@dataclasses.dataclass(frozen=True)
class Entry:
    """A row of the table: modules whose path ends with ``path``, and their sites. ``outside``: not in a layer."""

    path: str
    sites: tuple[str, ...]
    read: Reader
    outside: bool = False

    def names(self, place: Place) -> list[str]:
        """The sites in full; of a norm that shows the residual stream, the norm's own layer."""
        return [site if place.layer is None else f"layers.{place.layer}.{site}" for site in self.sites]

    def match(self, path: str) -> int | None:
        """The layer, -1 outside of layers; None: another module."""
        found = re.fullmatch(self.path if self.outside else r"(?:.*\.)?layers\.(\d+)\." + self.path, path)
        return None if found is None else -1 if self.outside else int(found.group(1))


def _one(path: str, site: str, cut: bool = False) -> Entry:
    return Entry(path, (site,), _plain(site, cut))


OUTPUTS = (
    _one(r"self_attn\.q_a_proj", "attn.q_a"),
    _one(r"self_attn\.kv_a_proj_with_mqa", "attn.kv_a"),
    Entry(r"self_attn\.fused_qkv_a_proj", ("attn.q_a", "attn.kv_a"), _latents),
    Entry(r"self_attn\.q_b_proj", ("attn.q_proj",), _q_proj),
    Entry(r"self_attn\.q_proj", ("attn.q_proj",), _q_proj),
    Entry(r"self_attn\.qkv_proj", ("attn.q_proj", "attn.k_proj", "attn.v_proj"), _qkv_proj),
    _one(r"self_attn\.o_proj", "attn.o_proj"),
    Entry(r"mlp\.gate_up_proj", ("mlp.gate", "mlp.up"), _gate_up),
    _one(r"mlp\.act_fn", "mlp.act", True),
    _one(r"mlp\.down_proj", "mlp.down"),
    _one(r"(?:mlp|block_sparse_moe)\.gate", "moe.router_logits"),
)
"""Results of products and activations, which a compiled run writes to memory in any case."""

FUSED = (
    Entry(r"(?:model\.)?embed_tokens", ("embed",), _plain("embed"), True),
    _one(r"input_layernorm", "input_norm"),
    Entry(r"input_layernorm", ("out",), _residual),
    _one(r"post_attention_layernorm", "post_norm"),
    _one(r"self_attn\.q_a_layernorm", "attn.q_a_normed"),
    _one(r"self_attn\.kv_a_layernorm", "attn.kv_c_normed"),
    _one(r"(?:mlp|block_sparse_moe)\.experts", "moe.out"),
    Entry(r"(?:model\.)?norm", ("out",), _residual, True),
    Entry(r"(?:model\.)?norm", ("final_norm",), _plain("final_norm"), True),
)
"""Results that a compiled run may never write: it looks up embeddings and adds residuals and experts inside the next
norm's loop, in float32. A probe would make it write them, rounded; and even where the value is exact, as an embedding,
the compiler then rounds elsewhere, because it decides by the number of reads which sums to keep in memory."""

INPUTS = (
    _one(r"self_attn\.(?:fused_qkv_a_proj|q_a_proj|q_proj|qkv_proj)", "input_norm"),
    _one(r"self_attn\.q_b_proj", "attn.q_a_normed"),
    _one(r"self_attn\.kv_b_proj", "attn.kv_c_normed"),
    _one(r"mlp\.gate_up_proj", "post_norm"),
    _one(r"(?:mlp|block_sparse_moe)\.gate", "post_norm"),
)
"""The same norms, seen where a product takes them in."""

OPT_IN = ("embed", "layers.*.out", "layers.*.moe.out")
"""Sites of FUSED that no input shows. In compiled runs they are observed only when ASSAY_INCLUDE ends in their name."""


def places(model: Any, table: Iterable[Entry]) -> Iterator[tuple[Place, Entry]]:
    """The modules of a model that the table names, each with its rows."""
    modules = dict(model.named_modules(remove_duplicate=False))
    last = max((n for n in map(layer_of, (f"{path}." for path in modules)) if n is not None), default=-1)
    seen = set()
    for path, module in modules.items():
        for entry in table:
            layer = entry.match(path)
            if layer is None or (id(module), entry) in seen:
                continue
            seen.add((id(module), entry))
            parent = modules.get(path.rpartition(".")[0])
            yield Place(path, module, None if layer < 0 else layer, last, parent), entry


def _tensors(output: Any) -> tuple[Any, ...]:
    tensors = output if isinstance(output, tuple) else (output,)
    return tensors[:-1] if tensors[-1] is None else tensors  # the bias that vLLM's linear layers give


def _input(args: Any, kwargs: Any) -> Any:
    return args[0] if args else next(iter(kwargs.values()))


def _same(tensors: Sequence[Any], values: Sequence[Any]) -> bool:
    return len(tensors) == len(values) and all(a is b for a, b in zip(tensors, values))


Found = Callable[[list[tuple[Place, Entry]], Any, Any], Iterator[Recorded]]
"""(rows of the table, arguments, result) -> what of it is recorded."""


class _Outputs:
    """Callback of session.modules(): what a module gives. again, group: for the short ways of compiled and other code."""

    def __init__(self, recorder: Recorder, table: Table, found: Found) -> None:
        self._recorder, self._table, self._found = recorder, table, found

    def __call__(self, module: Any, name: str, args: Any, kwargs: Any, output: Any) -> None:
        self._recorder.views(name, _tensors(output), self._found(self._table[name], args, output))

    def again(self, name: str, values: list[Any], output: Any) -> Group | None:
        return self.group(name) if _same(_tensors(output), values) else None

    def group(self, name: str) -> Group | None:
        return self._recorder.group(name)


class _Inputs:
    """The same for what a module is given, which is read as if it were an output, of the norm that made it."""

    def __init__(self, recorder: Recorder, table: Table, found: Found) -> None:
        self._recorder, self._table, self._found = recorder, table, found

    def __call__(self, module: Any, name: str, args: Any, kwargs: Any) -> None:
        taken = _input(args, kwargs)
        self._recorder.views(("input", name), (taken,), self._found(self._table[name], (), taken))

    def again(self, name: str, values: list[Any], args: Any, kwargs: Any) -> Group | None:
        return self._recorder.group(("input", name)) if _same((_input(args, kwargs),), values) else None


class Modules:
    """Observes the modules of the model once its weights are loaded."""

    def __init__(
        self,
        recorder: Recorder,
        compilation: Compilation,
        attention: Attention,
        reductions: Reductions,
        experts: Experts,
        shard: Shard,
    ) -> None:
        self._recorder = recorder
        self._session = recorder.session
        self._compilation = compilation
        self._attention = attention
        self._reductions = reductions
        self._experts = experts
        self._shard = shard
        self._by_output: Table = {}
        self._by_input: Table = {}
        self._session.wrap(f"{LOADER}:process_weights_after_loading", after=self._loaded)

    def _loaded(self, call: Any, result: Any) -> None:
        model = call.args[0]
        compiled = self._compilation.compiled()
        for name, module in model.named_modules():
            if hasattr(module, "qk_nope_head_dim") and hasattr(module, "attn") and not hasattr(module, "mla_attn"):
                layer = layer_of(name + ".")
                if layer is not None:
                    sizes = module.qk_nope_head_dim, module.qk_rope_head_dim, module.v_head_dim
                    self._attention.heads[layer] = sizes
        asked = [e for e in FUSED if self._compilation.asked_for(e.sites)]
        outputs = list(places(model, (*OUTPUTS, *(asked if compiled else FUSED))))
        inputs = list(places(model, INPUTS)) if compiled else []
        self._experts.install(model, self._compilation.wanted)
        if compiled:
            self._tell_invisible(asked)
        self._watch(model, outputs, self._by_output, {"then": _Outputs(self._recorder, self._by_output, self._found)})
        recorded = [name for found in self._by_output.values() for place, entry in found for name in entry.names(place)]
        self._reductions.expect((place for place, _ in places(model, (*OUTPUTS, *FUSED))), recorded)
        self._watch(model, inputs, self._by_input, {"before": _Inputs(self._recorder, self._by_input, self._found)})

    def _tell_invisible(self, asked: list[Entry]) -> None:
        shown = {site for entry in asked for site in entry.sites}
        for pattern in OPT_IN:
            if pattern.removeprefix("layers.*.") not in shown:
                self._session.absent(
                    pattern,
                    "not visible in compiled mode on this preset: the compiled code never writes it, and a probe would "
                    f"round it and change the results. ASSAY_INCLUDE='*,{pattern}' observes it all the same",
                )

    def _watch(self, model: Any, found: list[tuple[Place, Entry]], table: Table, callback: dict[str, Any]) -> None:
        for place, entry in found:
            mla = place.layer is not None and place.layer not in self._attention.heads
            if mla and "attn.kv_c_normed" in entry.sites:
                continue  # seen where it enters attention
            if self._compilation.wanted(entry.names(place)):
                table.setdefault(place.path, []).append((place, entry))
        if table:
            which = "outputs" if "then" in callback else "inputs"
            self._session.modules(model, list(table), label=f"module:vLLM's model, {which}", **callback)

    def _found(self, found: list[tuple[Place, Entry]], args: Any, output: Any) -> Iterator[Recorded]:
        for place, entry in found:
            for site, tensor, cut in entry.read(place, args, output):
                fields: dict[str, Any] = {"engine_name": place.path}
                if cut:
                    fields.update(self._shard(math.prod(tensor.shape[1:])))
                yield site, place.layer, tensor, fields

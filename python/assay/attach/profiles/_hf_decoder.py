"""The probes of one decoder model: which module gives which canonical site, and what is made of it.

It holds names and sizes, no module, so that the model is freed as without assay. What a probe raises is counted by the
session and reaches nobody.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ..._prepared import Fold, PreparedSite, Rows
from . import _hf_views as views
from ._hf_attention import NO_CACHE, Attention
from ._hf_rows import Choice, Forward, Requests

if TYPE_CHECKING:
    from ..._trace import Trace
    from .. import Call, Session



class _Now(threading.local):
    """forward: the one that this thread is in, or was in last. kept: what the model with the head was told to compute
    logits of (logits_to_keep). The others belong to compiled code: the call that led into it, cache updates so far in this
    forward, and keys and values of the one under way."""

    forward: Forward | None = None
    kept: Any = 0
    entered: Any = None
    updates: int = 0
    given: tuple[Any, Any] = (None, None)


now = _Now()


class Inputs:
    """What a call of a decoder, or of the model around it, is given: ids [B, T] or embeddings [B, T, h], mask, cache."""

    __slots__ = ("cache", "embeddings", "ids", "mask")

    def __init__(self, values: dict[str, Any]) -> None:
        self.ids: Any = values.get("input_ids")
        self.embeddings: Any = values.get("inputs_embeds")
        self.mask: Any = values.get("attention_mask")
        self.cache: Any = values.get("cache") if values.get("cache") is not None else values.get("past_key_values")

    @classmethod
    def of(cls, model: Any, call: Call) -> Inputs:
        return cls(arguments(model, call))


def arguments(model: Any, call: Call) -> dict[str, Any]:
    """Arguments of model(...) by the names of its forward."""
    names = _parameters(type(model).forward)
    return {**dict(zip(names, call.args[1:])), **call.kwargs}


@functools.lru_cache(maxsize=64)
def _parameters(function: Any) -> tuple[str, ...]:
    return tuple(inspect.signature(function).parameters)[1:]

ABSENT = {
    "attn.lse": "transformers' attention functions do not return it",
    "attn.chunk.*.out": "transformers attends over all keys at once",
    "attn.chunk.*.lse": "transformers attends over all keys at once",
}
ABSENT_IN_MLA = {
    "attn.q_latent": "transformers attends over expanded keys and values",
    "attn.latent_out": "transformers attends over expanded keys and values",
}

# Weights that the reference records too, once a run: what norms, the router and MLA's expansion work with.
LAYER_WEIGHTS = (
    ("input_layernorm.weight", "d"),
    ("post_attention_layernorm.weight", "d"),
    ("self_attn.q_a_layernorm.weight", "d"),
    ("self_attn.kv_a_layernorm.weight", "d"),
    ("self_attn.q_norm.weight", "d"),
    ("self_attn.k_norm.weight", "d"),
    ("mlp.gate.weight", "E h"),
    ("mlp.gate.e_score_correction_bias", "d"),
    ("self_attn.kv_b_proj.weight", "o c"),
)

After = Callable[[Forward, Any, Any], None]
Before = Callable[[Forward, Any], None]


class Decoder:
    """Everything recorded of one decoder, from its embedding to the norm behind its last layer, and of its head."""

    def __init__(self, session: Session, trace: Trace, model: Any, requests: Requests) -> None:
        self.session, self.requests = session, requests
        self.config = model.config.get_text_config()
        self.dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
        self.layers: dict[int, Attention] = {}
        self.attention_function = ""  # the implementation whose function is observed
        self._trace = trace
        self._step = 0
        self._has_head = False
        self._sites: dict[str, PreparedSite] = {}
        self._after: dict[str, PreparedSite | After] = {}  # by module name
        self._before: dict[str, Before] = {}
        self._moe_blocks: dict[str, str] = {}  # module -> site
        self.not_compiled: list[str] = []  # sites that compiled code is left without
        self._observe(model)

    # ---- recording

    def site(
        self, name: str, *, engine_name: str | None = None, axes: str | None = None, fold: Fold | None = None
    ) -> PreparedSite:
        known = self._sites.get(name)
        if known is None:
            known = PreparedSite(self._trace, name, engine_name=engine_name, axes=axes, fold=fold)
            self._sites[name] = known
        return known

    def put(self, site: PreparedSite, tensor: Any, rows: Rows | None) -> None:
        site.record(tensor if tensor.is_cpu else tensor.detach().cpu(), rows)

    def compute_dtype(self) -> Any:
        """Coarsest rounding of this forward's arithmetic; None for float32 and finer."""
        dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else self.dtype
        return None if dtype in (torch.float32, torch.float64) else dtype

    # ---- one forward

    def begin(self, inputs: Inputs, *, past: int | None = None, out_of_sight: bool = False) -> Forward | None:
        """past: columns that the cache had, when it may have more by now. out_of_sight: whether there is a cache is not
        known. None when nothing can be recorded."""
        trace = self.session.trace()
        if trace is None:
            return None
        if trace is not self._trace:  # a forked child records for itself
            self._trace = trace
            for site in self._sites.values():
                site.bind(trace)
        ids = inputs.ids
        if ids is None and inputs.embeddings is None:
            return None
        size, length = (ids if ids is not None else inputs.embeddings).shape[:2]
        known = self.requests.out_of_sight(ids, inputs.mask, size, length) if out_of_sight else None
        forward, shown = self.requests.begin(
            ids, inputs.mask, inputs.cache, size, length, past=past, known=known, step=self._step,
            compute_dtype=self.compute_dtype(),
        )  # fmt: skip
        self._step += 1
        forward.decoder = self
        if shown is not None:
            self.chosen(*shown)
        now.forward = forward
        return forward

    def bind(self, forward: Forward, result: Any) -> None:
        """The end of a forward that was given no cache: its result has the one that it made, if any."""
        # The older name warns where there is a newer one.
        fields = getattr(type(result), "__dataclass_fields__", {})
        made = getattr(result, "cache" if "cache" in fields else "past_key_values", None)
        self.requests.bind(forward.batch, made)
        if made is None:
            self.session.absent("layers.*.attn.kv_write", NO_CACHE)

    def chosen(self, choice: Choice, tokens: list[int]) -> None:
        """The tokens that a step's rows were continued with."""
        if self._has_head and tokens:
            self.put(self.site("next_token"), torch.tensor(tokens), choice.rows)

    def _logits(self, module: Any, name: str, args: Any, kwargs: Any, logits: Any) -> None:
        """logits [B, T', vocab] of the last T' columns."""
        forward = now.forward
        if forward is None or forward.decoder is not self:
            return
        size, columns = logits.shape[:2]
        if size != forward.size or columns > forward.length or not isinstance(now.kept, int):
            self.session.absent("logits", "computed for rows that are not the last ones of each request")
            return
        self.put(self.site("logits"), logits, forward.tail(columns))
        margin, choice, skip = self.site("next_token.margin"), forward.choice, forward.length - columns
        if choice.slots and min(choice.columns) >= skip and margin.wanted(choice.rows.step):
            with torch.no_grad():
                last = logits[choice.slots, [c - skip for c in choice.columns]].float()
                top = last.topk(2, dim=1).values
                self.put(margin, top[:, 0] - top[:, 1], choice.rows)

    # ---- the probes

    def _observe(self, model: Any) -> None:
        self.output("embed_tokens", "embed")
        for index, layer in enumerate(model.layers):
            Layer(self, index, layer)
        self.output("norm", "final_norm")
        mla = any(attention.mla for attention in self.layers.values())
        for name, why in {**ABSENT, **(ABSENT_IN_MLA if mla else {})}.items():
            self.session.absent(f"layers.*.{name}", why)
        # Compiled code goes on with these in float32, never writing them; where it rounds, it is left as it is.
        fused = {"embed_tokens": "embed", **{f"layers.{i}": "layers.*.out" for i in self.layers}, **self._moe_blocks}
        if self.compute_dtype() is not None:
            self.not_compiled = sorted(set(fused.values()))
        written = [name for name in self._after if name not in fused]
        self.session.modules(model, written, then=self._left, label="module: outputs")
        self.session.modules(
            model, list(fused), then=self._left, label="module: sums and embedding", compiled=not self.not_compiled
        )
        self.session.modules(model, list(self._before), before=self._entered, label="module: inputs")

    def weights(self, model: Any) -> None:
        """Records weights under the phase "load". A quantised layer, whose weight is no such matrix, has none."""
        rows = Rows([], phase="load")
        if getattr(model.norm, "weight", None) is not None:
            self.put(self.site("norm.weight", engine_name="norm.weight", axes="d"), model.norm.weight.detach(), rows)
        for index, layer in enumerate(model.layers):
            for path, axes in LAYER_WEIGHTS:
                weight = layer
                for part in path.split("."):
                    weight = getattr(weight, part, None)
                if weight is None or weight.ndim != len(axes.split()) or not weight.is_floating_point():
                    continue
                name = f"layers.{index}.{path.replace('self_attn.', 'attn.')}"
                self.put(self.site(name, engine_name=f"layers.{index}.{path}", axes=axes), weight.detach(), rows)

    def observe_head(self, whole: Any) -> None:
        """whole: the model whose decoder this is, with an lm_head."""
        self._has_head = True
        self.site("logits", engine_name="lm_head", fold=views.fold_rows())
        self.site("next_token.margin", engine_name="lm_head")
        self.site("next_token", engine_name="input_ids of the forward behind it")
        self.session.modules(whole, "lm_head", then=self._logits)

    def output(self, module: str, name: str, heads: int = 0) -> None:
        """The module's output is the site: rows of [B, T, X], X cut into heads."""
        self._after[module] = self.site(name, engine_name=module, fold=views.fold_rows(heads))

    def moe_block(self, module: str) -> None:
        """Says that the module's output is a sum of experts."""
        self._moe_blocks[module] = "layers.*.moe.out"

    def after(self, module: str, then: After) -> None:
        """then(forward, module, output) after each call of the module."""
        self._after[module] = then

    def before(self, module: str, then: Before) -> None:
        """then(forward, first argument) before each call of the module."""
        self._before[module] = then

    def attention(self, module: Any) -> Attention | None:
        """The sites of an attention module of this decoder."""
        index = getattr(module, "layer_idx", None)
        sites = self.layers.get(index) if isinstance(index, int) else None
        return sites if sites is not None and sites.kind is type(module) else None

    def _left(self, module: Any, name: str, args: Any, kwargs: Any, output: Any) -> None:
        forward = now.forward
        if forward is None or forward.decoder is not self or not forward.inside:
            return
        then = self._after[name]
        if not isinstance(then, PreparedSite):
            with torch.no_grad():
                then(forward, module, output)
            return
        try:
            then.record(output, forward.rows)
        except ValueError:  # on a device, or no view of rows
            then.record(output.detach().cpu().contiguous(), forward.rows)

    def _entered(self, module: Any, name: str, args: Any, kwargs: Any) -> None:
        forward = now.forward
        if forward is not None and forward.decoder is self and forward.inside and args:
            with torch.no_grad():
                self._before[name](forward, args[0])


class Layer:
    """The probes of one decoder layer."""

    def __init__(self, decoder: Decoder, index: int, layer: Any) -> None:
        self.decoder = decoder
        self.index = index
        self._output("input_layernorm", "input_norm")
        self._attention(layer.self_attn)
        self._output("post_attention_layernorm", "post_norm")
        ffn = "mlp" if hasattr(layer, "mlp") else "block_sparse_moe"
        if hasattr(getattr(layer, ffn), "experts"):
            self._moe(getattr(layer, ffn), ffn)
        else:
            self._mlp(getattr(layer, ffn), ffn)
        self.site("out", "", fold=views.fold_rows())
        decoder.after(f"layers.{index}", self._out)

    def site(self, name: str, source: str, *, axes: str | None = None, fold: Fold | None = None) -> None:
        """Announces a site; source: where in the layer it is taken."""
        engine_name = f"layers.{self.index}.{source}".rstrip(".")
        self.decoder.site(f"layers.{self.index}.{name}", engine_name=engine_name, axes=axes, fold=fold)

    def put(self, name: str, tensor: Any, rows: Rows) -> None:
        self.decoder.put(self.decoder.site(f"layers.{self.index}.{name}"), tensor, rows)

    def wants(self, name: str, forward: Forward) -> bool:
        """Whether the site would be recorded now: to be asked before anything is computed for it."""
        return self.decoder.site(f"layers.{self.index}.{name}").wanted(forward.rows.step)

    def _output(self, module: str, name: str, heads: int = 0) -> None:
        self.decoder.output(f"layers.{self.index}.{module}", f"layers.{self.index}.{name}", heads)

    def _out(self, forward: Forward, module: Any, output: Any) -> None:
        self.put("out", output[0] if isinstance(output, tuple) else output, forward.rows)

    # ---- attention

    def _attention(self, attention: Any) -> None:
        heads = self.decoder.config.num_attention_heads
        key_heads = getattr(self.decoder.config, "num_key_value_heads", None) or heads
        self.decoder.layers[self.index] = Attention(self, attention)
        for module, name, count in (
            ("q_a_proj", "attn.q_a", 0),
            ("q_a_layernorm", "attn.q_a_normed", 0),
            ("q_b_proj", "attn.q_proj", heads),
            ("q_proj", "attn.q_proj", heads),
            ("k_proj", "attn.k_proj", key_heads),
            ("v_proj", "attn.v_proj", key_heads),
            ("kv_a_proj_with_mqa", "attn.kv_a", 0),
            ("kv_a_layernorm", "attn.kv_c_normed", 0),
            ("o_proj", "attn.o_proj", 0),
        ):
            if getattr(attention, module, None) is not None:
                self._output(f"self_attn.{module}", name, count)

    # ---- feed-forward

    def _mlp(self, mlp: Any, ffn: str) -> None:
        if hasattr(mlp, "gate_up_proj"):
            self.site("mlp.gate", f"{ffn}.gate_up_proj, first half", fold=views.fold_rows())
            self.site("mlp.up", f"{ffn}.gate_up_proj, second half", fold=views.fold_rows())
            self.decoder.after(f"layers.{self.index}.{ffn}.gate_up_proj", self._gate_up)
        else:
            self._output(f"{ffn}.gate_proj", "mlp.gate")
            self._output(f"{ffn}.up_proj", "mlp.up")
        self.site("mlp.act", f"{ffn}.down_proj, input", fold=views.fold_rows())
        self.decoder.before(f"layers.{self.index}.{ffn}.down_proj", self._act)
        self._output(f"{ffn}.down_proj", "mlp.down")

    def _gate_up(self, forward: Forward, module: Any, output: Any) -> None:
        gate, up = output.chunk(2, dim=-1)
        self.put("mlp.gate", gate, forward.rows)
        self.put("mlp.up", up, forward.rows)

    def _act(self, forward: Forward, given: Any) -> None:
        self.put("mlp.act", given, forward.rows)

    def _moe(self, moe: Any, ffn: str) -> None:
        for name in ("router_logits", "topk_ids.margin", "topk_ids", "topk_weights"):
            self.site(f"moe.{name}", f"{ffn}.gate")
        self.decoder.after(f"layers.{self.index}.{ffn}.gate", self._router)
        self._output(f"{ffn}.experts", "moe.routed")
        if hasattr(moe, "shared_experts"):
            self._output(f"{ffn}.shared_experts", "moe.shared")
        elif hasattr(moe, "shared_expert_gate"):
            self.site("moe.shared", f"{ffn}, shared_expert_output", fold=views.fold_rows())
        self._output(ffn, "moe.out")
        self.decoder.moe_block(f"layers.{self.index}.{ffn}")

    def gated_shared(self, forward: Forward, tensor: Any) -> None:
        """The shared expert behind its gate, which no module gives."""
        self.put("moe.shared", tensor, forward.rows)

    def _router(self, forward: Forward, router: Any, output: Any) -> None:
        """output of a router module: logits [T, E], weights [T, k], ids [T, k]; of a plain linear: logits."""
        logits = output[0] if isinstance(output, tuple) else output
        self.put("moe.router_logits", logits.flatten(0, -2), forward.rows)
        if not isinstance(output, tuple) or len(output) < 3:
            for name in ("topk_ids.margin", "topk_ids", "topk_weights"):
                self.decoder.session.absent(f"layers.*.moe.{name}", "the router module gives logits alone")
            return
        if self.wants("moe.topk_ids", forward) or self.wants("moe.topk_weights", forward):
            choice = views.Choice(router, logits, output[1], output[2])
            self.put("moe.topk_ids.margin", choice.margin, forward.rows)
            self.put("moe.topk_ids", choice.ids, forward.rows)
            self.put("moe.topk_weights", choice.weights, forward.rows)

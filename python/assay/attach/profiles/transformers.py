"""Profile of Hugging Face transformers: decoder models by the canonical site names, with no naming by hand.

A model is read by its structure (layers with self_attn and a feed-forward part, the names of their projections), not by
its class, so that one profile serves the DeepSeek-V2 and V3, GLM, Llama, Mistral, Qwen and Mixtral families and their
like. Modules give their outputs; queries, keys, values and the attention's output are taken at the attention function,
whichever is chosen (eager, SDPA, a registered one), cache rows at Cache.update. Rows get their requests and positions
from the tokens and the padding mask (_hf_rows.py). docs/transformers.md has the table of which site comes from where.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ..._arguments import request_key

if TYPE_CHECKING:
    from .. import Call, Session
    from ._hf_compiled import CompiledDecoders
    from ._hf_decoder import Decoder

TRIGGERS = ("transformers.modeling_utils",)


def install(session: Session) -> None:
    """Called once, when transformers' modelling code has been imported."""
    _Profile(session).install()


class _Profile:
    """What is common to all models of the process."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._ordinals: dict[int, int] = {}  # by the key of the prompt: how often it came
        self._decoders: weakref.WeakKeyDictionary[Any, Decoder | None] = weakref.WeakKeyDictionary()
        # The model with the head, by the decoder inside it.
        self._wholes: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        self._targets: set[str] = set()  # functions that are wrapped
        self._compiled: CompiledDecoders
        self._gated: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # MoE block -> its layer

    def install(self) -> None:
        from ._hf_compiled import CompiledDecoders

        self._compiled = CompiledDecoders(self.session, self._ready, lambda: any(self._decoders.values()))
        wrap = self.session.wrap
        wrap("transformers.modeling_utils:PreTrainedModel.post_init", after=self._made)
        wrap("transformers.modeling_utils:PreTrainedModel.__call__", before=self._enter, after=self._leave)
        wrap("transformers.cache_utils:Cache.update", after=self._cached)
        wrap("transformers.generation.utils:GenerationMixin.generate", around=self._generate)
        self.session.when_imported("transformers", self._facts)

    def _facts(self, module: ModuleType) -> None:
        self.session.fact("engine", "transformers")
        self.session.fact("transformers", getattr(module, "__version__", "unknown"))

    # ---- models

    def _made(self, call: Call, result: Any) -> None:
        self._own(call.self)

    def _own(self, model: Any) -> None:
        """Remembers which decoder this model has inside, when it is one with a head."""
        base = getattr(model, getattr(model, "base_model_prefix", "") or "_", None)
        for part in (base, getattr(base, "language_model", None)):
            part = getattr(part, "_orig_mod", part)  # of a compiled module
            if part is not None and part is not model and _is_decoder(part):
                self._wholes[part] = weakref.ref(model)

    def _decoder_inside(self, model: Any) -> Decoder | None:
        return self._decoder(self._part(model))

    def _part(self, model: Any) -> Any:
        """The decoder's module in a model with a head; another model itself."""
        self._own(model)
        return next((part for part, whole in list(self._wholes.items()) if whole() is model), model)

    def _ready(self, model: Any) -> tuple[Any, Decoder] | None:
        """Makes the probes of the decoder in the model, all of them, before it is compiled."""
        part = self._part(model)
        decoder = self._decoder(part)
        if decoder is None:
            return None
        self._observe_attention(part, decoder)
        return part, decoder

    def _decoder(self, model: Any) -> Decoder | None:
        """The probes of the model, made at its first call; None for what is no decoder, or not the one observed."""
        try:
            return self._decoders[model]
        except KeyError:
            pass
        trace = self.session.trace()
        if trace is None:
            return None
        self._decoders[model] = None
        if not _is_decoder(model):
            return None
        if any(other is not None for other in self._decoders.values()):
            self.session.absent(type(model).__name__, "a second model of the process; the first is the one observed")
            return None
        return self._observe(model, trace)

    def _observe(self, model: Any, trace: Any) -> Decoder:
        from ._hf_decoder import Decoder
        from ._hf_facts import model_facts
        from ._hf_rows import Requests

        self.session.label(model, f"transformers {type(model).__name__}")
        for index, layer in enumerate(model.layers):
            self.session.label(layer.self_attn, f"transformers layers.{index}.self_attn")
        decoder = Decoder(self.session, trace, model, Requests(self._announce))
        self._decoders[model] = decoder
        for key, value in model_facts(model).items():
            self.session.fact(key, value)
        reference = self._wholes.get(model)
        whole = reference() if reference is not None else None
        if whole is not None:
            self.session.label(whole, f"transformers {type(whole).__name__}")
        if getattr(whole, "lm_head", None) is not None:
            decoder.observe_head(whole)
        decoder.weights(model)
        for index, layer in enumerate(model.layers):
            if hasattr(getattr(layer, "mlp", None), "shared_expert_gate"):
                self._observe_gate(layer.mlp, index)
        return decoder

    def _announce(self, tokens: Sequence[int]) -> int:
        prompt = request_key(tokens)
        ordinal = self._ordinals.get(prompt, 0)
        self._ordinals[prompt] = ordinal + 1
        trace = self.session.trace()
        return request_key(tokens, ordinal) if trace is None else trace.request(tokens, ordinal)

    # ---- forwards

    def _enter(self, call: Call) -> None:
        from ._hf_decoder import Inputs, arguments, now

        if call.compiled:
            self._compiled.enter(call)
            return
        model = call.self
        decoder = self._decoder(model)
        if decoder is None:
            if model not in self._wholes.values():
                self._own(model)
            values = arguments(model, call)
            now.kept = values.get("logits_to_keep") or 0
            if self._compiled.any:
                self._compiled.entering(model, Inputs(values))
            return
        inputs = Inputs.of(model, call)
        if inputs.ids is None and inputs.embeddings is None:
            return
        self._observe_attention(model, decoder)
        call.state["cache"] = inputs.cache
        call.state["forward"] = decoder.begin(inputs)
        now.updates = 0

    def _leave(self, call: Call, result: Any) -> None:
        if call.compiled:
            self._compiled.leave(call)
            return
        forward = call.state.get("forward")
        if forward is None:
            if self._compiled.any:
                self._compiled.leaving(result)
            return
        forward.inside = False
        if call.state["cache"] is None:
            forward.decoder.bind(forward, result)

    # ---- attention, cache, gates

    def _observe_attention(self, model: Any, decoder: Decoder) -> None:
        """Wraps the attention function that the model's configuration chooses, when it is not yet."""
        chosen = getattr(model.config, "_attn_implementation", None) or "eager"
        if decoder.attention_function == chosen:
            return
        decoder.attention_function = chosen
        attention = type(model.layers[0].self_attn)
        table = sys.modules["transformers.modeling_utils"].ALL_ATTENTION_FUNCTIONS
        function = table.get(chosen)
        if function is None:
            self._wrap_attention(f"{attention.__module__}:eager_attention_forward")
            return
        module = sys.modules.get(getattr(function, "__module__", ""))
        name = getattr(function, "__name__", "")
        if module is None or getattr(module, name, None) is not function:
            for site in ("q", "k", "v", "out"):
                self.session.absent(f"layers.*.attn.{site}", f"the attention function {chosen} is not a module's own")
            return
        self._wrap_attention(f"{module.__name__}:{name}")
        table[chosen] = getattr(module, name)  # the table holds the function itself

    def _wrap_attention(self, target: str) -> None:
        if target not in self._targets:
            self._targets.add(target)
            self.session.wrap(target, before=self._attend, after=self._attended)

    def _attend(self, call: Call) -> None:
        import torch

        from ._hf_decoder import now

        forward = now.forward
        if forward is None or not forward.inside or len(call.args) < 4:
            return
        sites = forward.decoder.attention(call.self)
        if sites is not None:
            with torch.no_grad():
                sites.operands(forward, *call.args[1:4])

    def _attended(self, call: Call, result: Any) -> None:
        from ._hf_decoder import now

        forward = now.forward
        if forward is None or not forward.inside:
            return
        sites = forward.decoder.attention(call.self)
        if sites is not None:
            sites.output(forward, result[0])

    def _cached(self, call: Call, result: Any) -> None:
        import torch

        from ._hf_decoder import now

        forward = now.forward
        if forward is None or not forward.inside:
            return
        if call.compiled:
            index, key, value = self._compiled.cache_update(forward)
        else:
            bound = call.bound
            index, key, value = bound["layer_idx"], bound["key_states"], bound["value_states"]
            now.updates = index + 1  # the layer behind it may be compiled
        sites = forward.decoder.layers.get(index)
        if sites is not None:
            with torch.no_grad():
                sites.cache_rows(forward, key, value, *result[:2])

    def _observe_gate(self, moe: Any, index: int) -> None:
        """A shared expert behind a gate is a local variable of the block."""
        self._gated[moe] = index
        target = f"{type(moe).__module__}:{type(moe).__qualname__}.forward"
        if target not in self._targets:
            self._targets.add(target)
            self.session.locals(target, ["shared_expert_output#last"], self._gated_shared, required=False)

    def _gated_shared(self, values: dict[str, Any], call: Call) -> None:
        from ._hf_decoder import now

        forward = now.forward
        index = self._gated.get(call.self)
        if forward is not None and forward.inside and index is not None:
            site = forward.decoder.site(f"layers.{index}.moe.shared")
            forward.decoder.put(site, values["shared_expert_output#last"], forward.rows)

    # ---- generate

    def _generate(self, call: Call, run: Callable[[], Any]) -> None:
        """Here the prompts are whole, before they are cut into chunks, and the end tokens are known."""
        decoder = self._decoder_inside(call.self)
        values = {**call.bound, **(call.bound.get("kwargs") or {})}
        ids = values.get("inputs") if values.get("inputs") is not None else values.get("input_ids")
        if decoder is None or ids is None or ids.ndim != 2 or values.get("inputs_embeds") is not None:
            run()
            return
        config = values.get("generation_config") or getattr(call.self, "generation_config", None)
        ends = values.get("eos_token_id", getattr(config, "eos_token_id", None))
        ends = [] if ends is None else [ends] if isinstance(ends, int) else [int(e) for e in ends]
        decoder.requests.tell_prompts(ids, values.get("attention_mask"), frozenset(ends))
        result = None
        try:
            result = run()
        finally:
            shown = decoder.requests.finish(getattr(result, "sequences", result))
        if shown is not None:
            decoder.chosen(*shown)


def _is_decoder(model: Any) -> bool:
    """A stack of layers between an embedding and a norm, each with attention and norms of the known names."""
    layers = getattr(model, "layers", None)
    if layers is None or not hasattr(model, "embed_tokens") or not hasattr(model, "norm"):
        return False
    names = ("self_attn", "input_layernorm", "post_attention_layernorm")
    ffn = ("mlp", "block_sparse_moe")
    return len(layers) > 0 and all(
        all(hasattr(layer, n) for n in names) and any(hasattr(layer, n) for n in ffn) for layer in layers
    )

"""Decoders under torch.compile.

In a graph a probe gets tensors alone (../compiled.py), not the cache by which a batch is followed. Whose the rows are is
therefore read where a call enters compiled code: the compiled module, or the model with the head whose forward is
compiled. Where the model is called from inside a graph (generate() with a compiled call, a compiled function) it
follows from the graph's tokens and mask, and from what generate() was told.

A model is made ready when it is given to torch.compile, so that what is traced has the probes. One that is not known by
then is said not to be recorded.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..say import say
from ._hf_decoder import Inputs, arguments, now

if TYPE_CHECKING:
    from .. import Call, Session
    from ._hf_decoder import Decoder
    from ._hf_rows import Forward

NOT_VISIBLE = (
    "not visible in compiled code that rounds: it never writes this tensor, and a probe would round it"
)
ROUNDS = (
    "a model under torch.compile that computes in a shorter type than float32 is observed: its results may differ in their "
    "last bits from those without assay"
)
UNSEEN = (
    "a transformers model is called from code that was given to torch.compile when the model was not known yet: it is not "
    "recorded. Give torch.compile the model itself, or call the model once before"
)


class Entered:
    """A call from plain code that leads into compiled code: its arguments, and how long the cache was."""

    def __init__(self, part: Any, inputs: Inputs) -> None:
        self.part = part
        self.inputs = inputs
        self.past = int(inputs.cache.get_seq_length()) if inputs.cache is not None else 0
        self.forward: Forward | None = None


class CompiledDecoders:
    """``ready(model)`` makes the probes of the decoder in a model and gives (its module, its probes), or None;
    ``observed()`` tells whether some decoder has its probes."""

    def __init__(
        self, session: Session, ready: Callable[[Any], tuple[Any, Decoder] | None], observed: Callable[[], bool]
    ) -> None:
        self.any = False  # whether one was given to torch.compile, or met in compiled code
        self._session = session
        self._ready = ready
        self._observed = observed
        self._as_module = self._cache_watched = False
        self._said = False
        session.when_compiled(self._given)

    def _given(self, owner: Any, itself: bool) -> None:
        """owner: a model, a part of one, or something that holds one. itself: its calls go through a module of torch's."""
        self._watch_cache()
        kind = sys.modules["transformers.modeling_utils"].PreTrainedModel
        for module in owner.modules():
            ready = self._ready(module) if isinstance(module, kind) else None
            if ready is not None:
                self._expect(ready[1])
                break
        if itself and self.any and not self._as_module:
            self._as_module = True
            target = "torch._dynamo.eval_frame:OptimizedModule.__call__"
            self._session.wrap(target, before=self._called, after=self._returned, label="compiled module")

    def _expect(self, decoder: Decoder) -> None:
        if self.any:
            return
        self.any = True
        self._watch_cache()
        if decoder.not_compiled:
            say(ROUNDS)
            self._session.fact("compiled.rounding", ROUNDS)
        for site in decoder.not_compiled:
            self._session.absent(site, NOT_VISIBLE)

    def _watch_cache(self) -> None:
        if not self._cache_watched:
            self._cache_watched = True
            self._session.wrap("transformers.cache_utils:Cache.update", before=self._cache_given, label="compiled cache")

    # ---- from plain code

    def entering(self, model: Any, inputs: Inputs) -> None:
        """A model with a head, or a compiled module, is called."""
        ready = self._ready(model)
        now.entered = None if ready is None else Entered(ready[0], inputs)

    def leaving(self, result: Any) -> None:
        entered, now.entered = now.entered, None
        if entered is not None and entered.forward is not None:
            entered.forward.inside = False
            if entered.inputs.cache is None:
                entered.forward.decoder.bind(entered.forward, result)

    def _called(self, call: Call) -> None:
        model = getattr(call.self, "_orig_mod", None)
        if isinstance(model, sys.modules["transformers.modeling_utils"].PreTrainedModel):
            values = arguments(model, call)
            now.kept = values.get("logits_to_keep") or 0
            self.entering(model, Inputs(values))

    def _returned(self, call: Call, result: Any) -> None:
        self.leaving(result)

    # ---- from the graph

    def enter(self, call: Call) -> None:
        """A decoder, or a model around one, begins inside a graph. call has its tensors."""
        part = call.self
        ready = None if part is None else self._ready(part)
        if ready is None:
            # The trace is opened for this note alone, where nothing else is recorded.
            if not self._said and not self._observed() and self._session.trace() is not None:
                self._said = True
                say(UNSEEN)
                self._session.absent("layers.*", UNSEEN)
            return
        if ready[0] is not part:
            return  # the model with the head
        decoder = ready[1]
        self._expect(decoder)
        now.updates = 0
        entered = now.entered
        if entered is not None and entered.part is part and entered.forward is None:
            entered.forward = decoder.begin(entered.inputs, past=entered.past)
        else:
            now.kept = 0
            decoder.begin(Inputs.of(part, call), out_of_sight=True)

    def leave(self, call: Call) -> None:
        forward = now.forward
        if forward is not None and call.self is not None:
            ready = self._ready(call.self)
            if ready is not None and ready[0] is call.self and ready[1] is forward.decoder:
                forward.inside = False

    def _cache_given(self, call: Call) -> None:
        if call.compiled:
            now.given = call.bound.get("key_states"), call.bound.get("value_states")

    def cache_update(self, forward: Forward) -> tuple[int | None, Any, Any]:
        """Layer, keys and values of the update that is over: a graph does not tell the layer, but layers come in order."""
        layers = list(forward.decoder.layers)
        layer = layers[now.updates] if now.updates < len(layers) else None
        now.updates += 1
        return layer, *now.given

"""MASK: window, sink and soft cap."""

from __future__ import annotations

from . import mini_tf
from .mini_tf import Call
from .recording import Recording
from .registry import Variant, case


def _decoded(rec: Recording, v: Variant, model: mini_tf.Decoder, lengths: tuple[int, ...], steps: int) -> None:
    """Prefill, then so many decode steps with the tokens that the model chooses."""
    rows, tokens = mini_tf.prompts(rec, v, lengths)
    logits = model.step(rows, tokens)
    last = [r.row + r.n - 1 for r in rows]
    for step in range(1, steps + 1):
        chosen, rows = logits[last].argmax(-1), mini_tf.next_rows(rows)
        logits, last = model.step(rows, chosen, step, "decode"), list(range(len(rows)))


@case("B099")
def window_bound_inclusive(rec: Recording, v: Variant, faulty: bool) -> None:
    wide = {"attend": lambda call: mini_tf.attend(call.change(window=call.window + 1))}
    _decoded(rec, v, mini_tf.Decoder(rec, v, mini_tf.Config(window=6), wide if faulty else None), (16, 10), 2)


@case("B100")
def window_differs_in_prefill(rec: Recording, v: Variant, faulty: bool) -> None:
    def attend(call: Call) -> tuple:
        return mini_tf.attend(call.change(window=call.window + 1) if call.phase == "prefill" else call)

    _decoded(
        rec, v, mini_tf.Decoder(rec, v, mini_tf.Config(window=6), {"attend": attend} if faulty else None), (16, 10), 3
    )


@case("B102")
def soft_cap_ignored(rec: Recording, v: Variant, faulty: bool) -> None:
    uncapped = {"attend": lambda call: mini_tf.attend(call.change(soft_cap=0.0))}
    model = mini_tf.Decoder(rec, v, mini_tf.Config(soft_cap=5.0, gain=2.5), uncapped if faulty else None)
    _decoded(rec, v, model, (12, 7), 1)


@case("B103")
def sinks_ignored_in_prefill(rec: Recording, v: Variant, faulty: bool) -> None:
    def attend(call: Call) -> tuple:
        return mini_tf.attend(call.change(sinks=None) if call.phase == "prefill" else call)

    model = mini_tf.Decoder(rec, v, mini_tf.Config(sinks=True), {"attend": attend} if faulty else None)
    _decoded(rec, v, model, (12, 7), 2)

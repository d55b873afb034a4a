"""Faults put into transformers' own code: each is named, site and layer, and nothing else is."""

import re

import assay
import pytest
from transformers_runs import PROMPTS, Runs, describe

BATCHES = {"two": [[PROMPTS[3]], [PROMPTS[5]]], "eight": [PROMPTS[4:], PROMPTS]}
# kind, layer, batches, site, class
FAULTS = [
    ("stale", 0, "two", "attn.o_proj", "UNWRITTEN"),
    ("stale", 2, "eight", "attn.o_proj", "UNWRITTEN"),
    ("stale", 3, "two", "attn.o_proj", "UNWRITTEN"),
    ("pairing", 0, "two", "attn.q_pe", None),
    ("pairing", 1, "eight", "attn.q_pe", None),
    ("pairing", 3, "two", "attn.q_pe", None),
    ("shared-twice", 2, "two", "moe.out", "REDUCE"),
    ("shared-twice", 3, "eight", "moe.out", "REDUCE"),
]
NAMES = [f"{kind}-{layer}-{batches}" for kind, layer, batches, _, _ in FAULTS]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    runs = Runs(tmp_path_factory.mktemp("faults"))
    for batches, lists in BATCHES.items():
        for dtype in ("float32", "bfloat16"):
            runs.add(f"right-{dtype}-{batches}", batches=lists, dtype=dtype, tokens=3)
    for name, (kind, layer, batches, _, _) in zip(NAMES, FAULTS):
        runs.add(
            name, batches=BATCHES[batches], dtype="bfloat16", tokens=3, fault={"kind": kind, "layer": layer}
        )
    runs.run()
    return runs


@pytest.mark.parametrize("batches", BATCHES)
def test_without_a_fault_nothing_is_named(runs, batches):
    result = runs.diff(f"right-float32-{batches}", f"right-bfloat16-{batches}")
    assert result.verdict == "noise", describe(result)
    assert not result.findings


@pytest.mark.parametrize("good", ("bfloat16", "float32"))
@pytest.mark.parametrize(("fault", "name"), list(zip(FAULTS, NAMES)), ids=NAMES)
def test_fault_is_named_exactly(runs, fault, name, good):
    kind, layer, batches, site, cls = fault
    result = runs.diff(f"right-{good}-{batches}", name)
    assert result.verdict == "fault", describe(result)
    assert {f.name for f in result.findings} == {f"layers.{layer}.{site}"}, describe(result)
    if cls is not None:
        assert result.first_bad.cls == cls, describe(result)
    if kind == "shared-twice":
        fitted = re.fullmatch(rf"B = A \+ (\S+) x layers\.{layer}\.moe\.shared", result.first_bad.constant)
        assert fitted and abs(float(fitted[1]) - 1) < 0.01, result.first_bad.constant


def test_the_stale_rows_hardly_move_the_norm(runs):
    """The first fault is one that a norm does not show: less than half a percent, at the prompt of 130 tokens."""

    def norm(folder):
        return next(
            e.norm for e in assay.open(runs.folder / folder)
            if e.site == "layers.3.attn.o_proj" and e.phase == "prefill" and e.shape[0] == 130
        )

    right, stale = norm("right-bfloat16-two"), norm("stale-3-two")
    assert right != stale
    assert abs(stale / right - 1) < 0.005


def test_stale_rows_are_the_last_two(runs):
    found = runs.diff("right-bfloat16-two", "stale-0-two").first_bad
    assert found.positions == ((128, 129),)

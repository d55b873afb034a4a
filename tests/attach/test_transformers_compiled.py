"""A decoder under torch.compile, fullgraph: recorded in the compiled run, with the same results; or said not to be."""

import assay
import pytest
from transformers_runs import PROMPTS, Runs, covered, describe, reference, sites_of

PROMPT = [PROMPTS[0], PROMPTS[2]]  # 5 and 3 tokens
STATIC = {"cache_implementation": "static"}
WAYS = {
    "module": {"compile": {"how": "module"}, "loop": "forward"},
    "layers": {"compile": {"how": "layers"}},
    "in-place": {"compile": {"how": "in-place"}, "options": STATIC},
    "forward": {"compile": {"how": "forward"}},
    "generate": {"compile": {"how": "generate"}, "options": STATIC},
    "function": {"compile": {"how": "function"}, "loop": "uncached"},
}
INDUCTOR = {"f32": "float32", "bf16": "bfloat16"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Every way with Dynamo alone, which decides what is traced and changes no result; one with inductor's code."""
    runs = Runs(tmp_path_factory.mktemp("compiled"))
    argument = {"compile": {"how": "argument"}, "loop": "uncached"}
    for attached in (True, False):
        for name, way in {**WAYS, "argument": argument}.items():
            plain = {} if attached else {"compile": {"how": "no"}}
            runs.add(f"{name}-{attached}", prompts=PROMPT, tokens=3, **{**way, **plain})
        for name, dtype in INDUCTOR.items():
            way = {"compile": {"how": "module", "backend": "inductor"}, "loop": "once", "dtype": dtype}
            runs.add(f"{name}-{attached}", prompts=PROMPT, **way)
        log = runs.run(attached)
        if attached:
            runs.log = log
    reference(runs.folder / "reference", PROMPT, tokens=3)
    return runs


@pytest.mark.parametrize("name", [*WAYS, "f32", "argument"])
def test_results_keep_their_bits(runs, name):
    assert runs.result(f"{name}-True") == runs.result(f"{name}-False")


def test_that_bf16_may_round_elsewhere_is_said_before_it_runs(runs):
    assert runs.result("bf16-True")["tokens"] == runs.result("bf16-False")["tokens"]
    assert runs.log.count("may differ in their last bits from those without assay") == 1
    assert "last bits" in assay.open(runs.folder / "bf16-True").processes[0].meta["compiled.rounding"]


@pytest.mark.parametrize("name", [*WAYS, *INDUCTOR])
def test_the_compiled_run_is_recorded_and_right(runs, name):
    notes = [n for p in assay.open(runs.folder / f"{name}-True").processes for n in p.coverage]
    assert not [n for n in notes if n.reason == "failed"], notes
    result = runs.diff("reference", f"{name}-True")
    assert result.verdict == "noise", describe(result)
    assert result.coverage.share >= 0.9
    if name in WAYS:
        assert covered(runs.folder / "reference", runs.folder / f"{name}-True") >= (0.95 if name == "function" else 1)
        # All rows of both requests: the reference has logits and next_token of the last ones alone.
        assert result.coverage.rows_only_a <= 4 * 2, describe(result)


def test_what_compiled_code_would_round_is_absent_in_bf16_and_there_in_float32(runs):
    hidden = {"embed", "layers.*.out", "layers.*.moe.out"}
    (process,) = assay.open(runs.folder / "bf16-True").processes
    assert hidden <= {n.site for n in process.coverage if "not visible in compiled code" in n.detail}
    assert not {"embed", "layers.1.out", "layers.3.moe.out"} & sites_of(runs.folder / "bf16-True")
    assert {"embed", "layers.1.out", "layers.3.moe.out"} <= sites_of(runs.folder / "f32-True")


def test_a_model_that_was_not_known_when_its_caller_was_compiled_is_said_not_to_be_recorded(runs):
    assert runs.log.count("is called from code that was given to torch.compile when the model was not known yet") == 1
    notes = [n for p in assay.open(runs.folder / "argument-True").processes for n in p.coverage]
    assert any(n.site == "layers.*" and n.reason == "absent on this path" for n in notes)
    assert not sites_of(runs.folder / "argument-True")

"""Observed or not, the host computes the same bits: tokens and logits of 100 prompts."""

import pytest
from transformers_runs import Runs

PROMPTS = [[(13 * i + 7 * j) % 2000 + 3 for j in range(1 + i % 23)] for i in range(100)]
BATCHES = [PROMPTS[i : i + 10] for i in range(0, 100, 10)]
KINDS = {"bf16-sdpa": ("bfloat16", "sdpa"), "f32-eager": ("float32", "eager")}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    runs = Runs(tmp_path_factory.mktemp("exact"))
    for attached in (True, False):
        for kind, (dtype, attention) in KINDS.items():
            runs.add(f"{kind}-{attached}", batches=BATCHES, dtype=dtype, attention=attention)
        runs.run(attached)
    return runs


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_and_logits_are_the_same_bits(runs, kind):
    observed, plain = runs.result(f"{kind}-True"), runs.result(f"{kind}-False")
    assert len(plain["tokens"]) == 100
    assert observed == plain


@pytest.mark.parametrize("kind", KINDS)
def test_one_was_observed_and_the_other_was_not(runs, kind):
    assert list((runs.folder / f"{kind}-True").iterdir())
    assert not (runs.folder / f"{kind}-False").exists()

"""Each planted fault, in every layer where it exists, against its clean twin: the diff names the first wrong tensor.

The prompts are not those of the engine's own tests; ASSAY_E2E_SEED draws others.
"""

import json
import os
import random

import pytest

from assay_cli import MODEL, REFERENCE, Failed, describe, diff, reference, run

LAYERS = 4  # of the shipped model
BEGINNING = "And the LORD spake unto Moses in the wilderness of Sinai, saying, "
TEXTS = [
    "Take ye the sum of all the congregation, every male by their polls",
    "On the day that the tabernacle was reared up the cloud covered it",
    "Whosoever toucheth the dead body of any man shall be unclean",
    "Let them offer a burnt offering and a meat offering",
    "Ye shall not eat of it raw, nor sodden at all with water",
    "Blessed shall be the fruit of thy cattle, and thy kine",
    "He maketh the storm a calm, so that the waves thereof are still",
]


def prompts_of(case):
    """Two requests that begin unlike, or, for faults of the prefix cache, alike."""
    rng = random.Random(f"{os.environ.get('ASSAY_E2E_SEED', '1')} {case}")
    texts = rng.sample(TEXTS, 2)
    return [BEGINNING + text for text in texts] if case.startswith("prefix") else texts


def all_cases():
    listed = json.loads(run([REFERENCE, "reference", MODEL, "--list-faults", "--json"]).stdout)
    assert listed["schema"] == "assay.faults/1"
    cases = []
    for fault in listed["faults"]:
        in_layers = ".N." in fault["first_bad"]
        for layer in range(LAYERS) if in_layers else [None]:
            name = fault["name"] + ("" if layer is None else f"@{layer}")
            cases.append((name, fault["first_bad"].replace(".N.", f".{layer}.")))
    return cases


CASES = all_cases()


def test_there_are_at_least_25_faults():
    assert len({name.split("@")[0] for name, _ in CASES}) >= 25


@pytest.mark.parametrize("name,first_bad", CASES, ids=[name for name, _ in CASES])
def test_fault_is_named_at_the_first_wrong_tensor(name, first_bad, tmp_path):
    prompts = prompts_of(name)
    options = ["--max-tokens", "10", "--ignore-eos"]
    try:
        reference(tmp_path / "faulty", prompts, *options, "--fault", name)
    except Failed as failed:
        # A fault of a dense or an MoE layer is refused in the other kind, with the layers where it is possible.
        possible = str(failed).partition("possible: ")[2]
        assert failed.code == 2 and possible, str(failed)
        assert name.partition("@")[2] not in possible.replace(",", " ").split(), str(failed)
        return
    reference(tmp_path / "clean", prompts, *options, "--fault", f"none:{name}")
    result = diff(tmp_path / "clean", tmp_path / "faulty")
    assert result["verdict"] == "fault", describe(result)
    assert result["first_bad"]["name"] == first_bad, describe(result)
    assert result["coverage"]["share"] >= 0.95, result["coverage"]

"""Each planted fault, in every layer where it exists, against its clean twin: the diff names the first wrong tensor.

The prompts are not those of the engine's own tests; ASSAY_E2E_SEED draws others.
"""

import json
import os
import random
import shutil

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


def run_case(name, folder):
    """The diff of the clean twin and the faulty run, or the message that refuses the layer."""
    prompts = prompts_of(name)
    options = ["--max-tokens", "10", "--ignore-eos"]
    try:
        reference(folder / "faulty", prompts, *options, "--fault", name)
    except Failed as failed:
        if failed.code == 2:
            return str(failed)
        raise
    reference(folder / "clean", prompts, *options, "--fault", f"none:{name}")
    result = diff(folder / "clean", folder / "faulty")
    shutil.rmtree(folder)
    return result


@pytest.mark.parametrize("name,first_bad", CASES, ids=[name for name, _ in CASES])
def test_fault_is_named_at_the_first_wrong_tensor(name, first_bad, outcomes):
    result = outcomes[name]()
    if isinstance(result, str):
        # A fault of dense layers is refused in an MoE layer and the other way round, with the layers that have it.
        possible = result.partition("possible: ")[2].replace(",", " ").split()
        assert possible and name.partition("@")[2] not in possible, result
        return
    assert result["verdict"] == "fault", describe(result)
    assert result["first_bad"]["name"] == first_bad, describe(result)
    assert result["coverage"]["share"] >= 0.95, result["coverage"]

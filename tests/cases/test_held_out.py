"""`assay diagnose` names faults of kinds it knows in shapes and settings it has not seen, and nothing in right ones."""

import json
import os
import pathlib
import subprocess

import held_out
import numpy as np
import pytest
from cases.generators.writer import Writer

ROOT = pathlib.Path(__file__).resolve().parents[2]
ASSAY = os.environ.get("ASSAY_PROGRAM", str(ROOT / "build/assay"))


def verdict(folder, variant, bad, seed):
    with Writer(folder) as rec:
        variant.body(rec, np.random.default_rng(seed), bad)
    command = [ASSAY, "diagnose", "--json", str(folder / "trace")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode in (0, 1), done.stderr
    result = json.loads(done.stdout)
    found = [f["first_bad"] for f in result["findings"]]
    assert (done.returncode == 1) == bool(found)
    return found, result


@pytest.mark.parametrize("variant", held_out.ALL, ids=[v.name for v in held_out.ALL])
def test_fault_is_named_and_its_clean_twin_is_not(variant, tmp_path):
    seed = int(os.environ.get("ASSAY_CASES_SEED", "11"))
    found, clean = verdict(tmp_path / "clean", variant, False, seed)
    assert found == []
    found, faulty = verdict(tmp_path / "faulty", variant, True, seed)
    assert found, "not detected"
    first = found[0]
    assert first["name"] == variant.first_bad
    assert first["class"] == variant.fault_class, first["evidence"]
    if variant.constant is not None:
        assert first["constant"] is not None, first["evidence"]
        assert first["constant"]["value"] == pytest.approx(variant.constant, rel=0.02), first["constant"]
    if variant.hypothesis:
        ruled_out = [e for e in clean["ruled_out"] if e["hypothesis"] == variant.hypothesis]
        assert ruled_out and any(c.isdigit() for c in ruled_out[0]["evidence"]), clean["not_testable"]
        assert variant.hypothesis in [e["hypothesis"] for e in faulty["confirmed"]], faulty["confirmed"]


def test_every_hypothesis_is_asked(tmp_path):
    """Each rung of the ladder as the program prints it has a fault that confirms it and whose twin rules it out."""
    _, result = verdict(tmp_path, held_out.ALL[0], False, 11)
    ladder = [e["hypothesis"] for state in ("confirmed", "ruled_out", "not_testable") for e in result[state]]
    assert len(ladder) == len(set(ladder)) > 20
    assert {v.hypothesis for v in held_out.ALL} - {""} == set(ladder)

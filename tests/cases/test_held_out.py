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
    found = [f["first_bad"] for f in json.loads(done.stdout)["findings"]]
    assert (done.returncode == 1) == bool(found)
    return found


@pytest.mark.parametrize("variant", held_out.ALL, ids=[v.name for v in held_out.ALL])
def test_fault_is_named_and_its_clean_twin_is_not(variant, tmp_path):
    seed = int(os.environ.get("ASSAY_CASES_SEED", "11"))
    assert verdict(tmp_path / "clean", variant, False, seed) == []
    found = verdict(tmp_path / "faulty", variant, True, seed)
    assert found, "not detected"
    first = found[0]
    assert first["name"] == variant.first_bad
    assert first["class"] == variant.fault_class, first["evidence"]
    if variant.constant is not None:
        assert first["constant"] is not None, first["evidence"]
        assert first["constant"]["value"] == pytest.approx(variant.constant, rel=0.02), first["constant"]

"""The examples that the documentation shows run, and give what it says."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ASSAY = Path(os.environ["ASSAY_LIBRARY"]) / "assay"


def diagnose(trace):
    run = subprocess.run([ASSAY, "diagnose", "--json", trace], capture_output=True, text=True)
    return run.returncode, json.loads(run.stdout)


@pytest.mark.parametrize("factor", [None, "1.25"])
def test_attention_is_ruled_out_or_its_factor_is_found(tmp_path, factor):
    pytest.importorskip("numpy")
    command = [sys.executable, ROOT / "examples/attention.py", tmp_path / "trace", *([factor] if factor else [])]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": str(ROOT / "python")})
    code, diagnosis = diagnose(tmp_path / "trace")
    if factor is None:
        assert code == 0
        entry = next(e for e in diagnosis["ruled_out"] if e["hypothesis"] == "attention")
        assert entry["not_judged"] == 0 and "attention: 1 judged, all right" in entry["evidence"]
        return
    assert code == 1
    first = diagnosis["findings"][0]["first_bad"]
    assert (first["name"], first["class"]) == ("layers.0.attn.out", "SCALE")
    assert first["constant"]["value"] == pytest.approx(float(factor), rel=1e-4)
    assert first["positions"] == [[1, 5]]

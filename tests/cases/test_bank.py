"""The whole bank through the program: every mark is reached, and nothing is found in what is right."""

import json
import os
import pathlib

import pytest
from cases import scoreboard

ROOT = pathlib.Path(__file__).resolve().parents[2]
ASSAY = os.environ.get("ASSAY_PROGRAM", str(ROOT / "build/assay"))


@pytest.mark.parametrize("seed, size", [(1, 0), (7, 1)])
def test_marks_are_reached(tmp_path, seed, size):
    out = tmp_path / "cases.json"
    code = scoreboard.main(["--assay", ASSAY, "--out", str(tmp_path / "cases"), "--json", str(out),
                            f"--seed={seed}", f"--size={size}", "--controls=8"])  # fmt: skip
    result = json.loads(out.read_text())
    assert code == 0 and result["passed"], scoreboard.table(result)
    assert result["clean_pairs"] >= 200 and len(result["cases"]) >= 78

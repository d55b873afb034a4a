"""The package of this checkout over the libraries of its build folder (ASSAY_LIBRARY names another one)."""

import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
for name in [n for n in os.environ if n == "ASSAY" or (n.startswith("ASSAY_") and n != "ASSAY_LIBRARY")]:
    del os.environ[name]  # no setting from outside
os.environ.setdefault("ASSAY_LIBRARY", str(ROOT / "build"))
for place in (ROOT / "python", ROOT / "tests/common"):
    sys.path.insert(0, str(place))


@pytest.fixture
def trace_dir(tmp_path):
    return tmp_path / "trace"

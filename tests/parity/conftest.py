"""Where the build is: $ASSAY_BUILD, or build/ of the checkout."""

import os
import pathlib

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def build():
    return pathlib.Path(os.environ.get("ASSAY_BUILD", ROOT / "build"))


@pytest.fixture(scope="session")
def root():
    return ROOT

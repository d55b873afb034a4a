"""Puts the repository and its Python package on the path; recordings are written through that package."""

import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
for place in (ROOT, ROOT / "python"):
    sys.path.insert(0, str(place))

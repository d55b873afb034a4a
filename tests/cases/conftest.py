"""The generators are a package of the repository's root; they record through its Python package."""

import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
for place in (ROOT, ROOT / "python"):
    sys.path.insert(0, str(place))

"""Found in front of PYTHONPATH by a Python that `assay run` started: attaches, then runs the next sitecustomize."""

import os
import sys


def _run_the_next_one() -> None:
    own = os.path.dirname(os.path.abspath(__file__))
    folders = [folder for folder in sys.path if os.path.abspath(folder or ".") != own]
    spec = sys.modules["_frozen_importlib_external"].PathFinder.find_spec("sitecustomize", folders)
    if spec is None or spec.loader is None:
        return
    module = sys.modules["_frozen_importlib"].module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


if os.environ.get("ASSAY", "off") not in ("", "0", "off"):
    __import__("_assay_site").install(os.environ)
_run_the_next_one()

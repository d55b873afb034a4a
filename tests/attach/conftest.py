"""Programs are written into a folder and run as a user would run them: `assay run -- python program.py`."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUILD = Path(os.environ.get("ASSAY_LIBRARY", ROOT / "build"))
for variable in [n for n in os.environ if n == "ASSAY" or (n.startswith("ASSAY_") and n != "ASSAY_LIBRARY")]:
    del os.environ[variable]  # no setting from outside
os.environ.setdefault("ASSAY_LIBRARY", str(BUILD))
for place in (ROOT / "python", ROOT / "tests/common"):
    sys.path.insert(0, str(place))


class Outcome:
    """What a run left: its exit code and output, the report of `assay run`, and the trace's events."""

    def __init__(self, completed, report, folder):
        self.code = completed.returncode
        self.out = completed.stdout
        self.err = completed.stderr
        self.report = report
        self.folder = folder

    @property
    def events(self):
        import assay

        return assay.open(self.folder)

    @property
    def notes(self):
        """(site, reason) -> (count, detail), over all processes."""
        return {
            (note["site"], note["reason"]): (note["count"], note["detail"])
            for process in self.report["processes"]
            for note in process["coverage"]
        }


@pytest.fixture(scope="session")
def run_in():
    """run_in(place, {"main.py": text, ...}, "--probes", "...") runs main.py of the folder place attached."""

    def run(place, files, *options, env=None, folder=None):
        for name, text in files.items():
            path = place / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        folder = folder or place / "trace"
        report = place / "report.json"
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "python"), "OMP_NUM_THREADS": "1", **(env or {})}
        completed = subprocess.run(
            [BUILD / "assay", "run", "--dir", folder, "--json", report, *options, "--", sys.executable, "main.py"],
            cwd=place,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
        return Outcome(completed, json.loads(report.read_text()) if report.exists() else None, folder)

    return run


@pytest.fixture
def run(run_in, tmp_path):
    """run({"main.py": text, ...}, "--probes", "...") runs main.py attached, in a folder of its own."""
    return functools.partial(run_in, tmp_path)


@pytest.fixture
def session(tmp_path, monkeypatch):
    """A session of this process that records into its `folder`, where torch has what the built-in function needs."""
    from assay.attach.session import Session
    from two_ways import needs_fast_call

    needs_fast_call()
    monkeypatch.setenv("ASSAY", "all")
    monkeypatch.setenv("ASSAY_DIR", str(tmp_path / "trace"))
    session = Session()
    session.folder = tmp_path / "trace"
    yield session
    session.finish()

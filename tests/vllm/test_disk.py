"""Where a disk refuses the trace, that is said and the run is what it is without."""

import json
import os
import re
import subprocess

from ahead import ahead
from conftest import BUILD, HERE, ONE_PROCESS, PYTHON, assay_program, environment

EAGER = {"prompts": 4, "tokens": 4, "engine": {"enforce_eager": True}}


@ahead()
def unwritable(bench, cores):
    """(the finished program, its answers)."""
    blocked, out = bench.folder / "blocked", bench.folder / "unwritable.json"
    blocked.write_text("not a folder")
    hook = f"{HERE.parents[1] / 'python/assay/attach/site_hook'}:{os.environ.get('PYTHONPATH', '')}"
    env = environment(bench.cache, cores, ASSAY="mla", ASSAY_DIR=str(blocked / "trace"), PYTHONPATH=hook)
    done = subprocess.run(
        [PYTHON, HERE / "generate.py", out, json.dumps(EAGER)], env=env, capture_output=True, text=True, timeout=600
    )
    return done, json.loads(out.read_text()) if out.exists() else None


def test_UnwritableFolderIsSaidAndTheRunGoesOn(unwritable):
    done, answers = unwritable
    assert done.returncode == 0 and len(answers) == 4
    assert (done.stdout + done.stderr).count("assay: cannot record:") == 1, "once, by the worker"


@ahead()
def full_disk(bench, cores):
    """A file system of 2 MiB: (the finished program, its answers, a copy of the trace). In one process, which nothing ends
    before its trace is closed."""
    folder, out, kept = bench.folder / "small", bench.folder / "full-disk.json", bench.folder / "full-disk.trace"
    folder.mkdir()
    script = f"mount -t tmpfs -o size=2m none {folder} && \"$@\"; status=$?; cp -r {folder}/trace {kept}; exit $status"
    program = [str(BUILD / "assay"), "run", "--profile", "all", "--dir", f"{folder}/trace", "--"]
    program += [str(PYTHON), str(HERE / "generate.py"), str(out), json.dumps({**EAGER, "tokens": 32})]
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", script, "sh", *program],
        env=environment(bench.cache, cores, **ONE_PROCESS),
        capture_output=True,
        text=True,
        timeout=600,
    )
    return done, json.loads(out.read_text()) if out.exists() else None, kept


def test_FullDiskStopsTheRecordingNotTheRun(full_disk):
    """The recording ends there, the run does not, and the trace says so."""
    done, answers, kept = full_disk
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(answers[0]["tokens"]) == 32
    assert re.search(r"\b[1-9]\d* dropped", done.stderr), done.stderr[-3000:]
    assert assay_program("show", kept, "--limit", "1")[0] == 0

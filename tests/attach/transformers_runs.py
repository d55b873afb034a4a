"""Runs transformers_host.py attached and not, and the native reference beside it; used by test_transformers_*.py.

All jobs of a test module run in one process tree, so torch and transformers are imported once.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import assay

ROOT = Path(__file__).resolve().parents[2]
BUILD = Path(os.environ.get("ASSAY_LIBRARY", ROOT / "build"))
MODEL = ROOT / "models" / "kjv-mla-10m"
HOST = Path(__file__).with_name("transformers_host.py")

# Token ids of the shipped model, of lengths that cross no, one and two blocks of 64 positions.
PROMPTS = [
    [(7 * i + 31 * j + 5) % 2000 + 3 for j in range(n)] for i, n in enumerate((5, 77, 3, 18, 1, 130, 12, 31))
]


class Runs:
    """Jobs by name; each records into folder/NAME and writes folder/NAME.json."""

    def __init__(self, folder):
        self.folder = folder
        self.jobs = {}

    def add(self, name, **job):
        job = {"model": str(MODEL), "dtype": "float32", "tokens": 4, **job}
        job["env"] = {"ASSAY_DIR": str(self.folder / name), **job.get("env", {})}
        job["result"] = str(self.folder / f"{name}.json")
        self.jobs[name] = job

    def run(self, attached=True):
        """Runs all jobs added so far and forgets them; what they wrote to stderr. Not attached: without `assay run`."""
        path = self.folder / f"jobs-{len(os.listdir(self.folder))}.json"
        path.write_text(json.dumps(list(self.jobs.values())))
        command = [sys.executable, "-W", "ignore", HOST, path]
        if attached:
            command = [BUILD / "assay", "run", "--dir", self.folder / "parent", "--", *command]
        environment = {k: v for k, v in os.environ.items() if not k.startswith("ASSAY") or k == "ASSAY_LIBRARY"}
        environment.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
        environment.update(TORCHINDUCTOR_COMPILE_THREADS="1", TORCHINDUCTOR_CACHE_DIR=str(self.folder / "inductor"))
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
        assert done.returncode == 0, done.stderr[-4000:]
        for name in self.jobs:
            assert (self.folder / f"{name}.json").exists(), done.stderr[-4000:]
        self.jobs = {}
        return done.stderr

    def result(self, name):
        return json.loads((self.folder / f"{name}.json").read_text())

    def diff(self, a, b):
        return assay.diff(self.folder / a, self.folder / b)


def reference(folder, prompts, tokens=4, model=MODEL):
    """A traced run of the native reference in float32."""
    command = [BUILD / "assay", "reference", model, "--trace", folder, "--max-tokens", str(tokens), "--ignore-eos"]
    for prompt in prompts:
        command += ["--tokens", ",".join(map(str, prompt))]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("ASSAY")}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    return folder


def describe(result):
    """What a failed expectation shows."""
    found = [(f.name, f.cls, f.constant, f.positions[:2]) for f in result.findings[:4]]
    return f"{result.verdict}: {found} {result.summary}"


def sites_of(folder):
    """Names that the trace has events of."""
    return {event.site for event in assay.open(folder)}


# What the reference has and transformers has not: its attention functions do not return it.
ABSENT = {"attn.lse"}


def covered(reference_folder, folder):
    """Share of the reference's sites that the run has too, those absent on this path left aside."""
    there = sites_of(reference_folder)
    wanted = {s for s in there if not any(s.endswith(a) for a in ABSENT)}
    return len(wanted & sites_of(folder)) / len(wanted)

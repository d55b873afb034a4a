"""Runs the built program: reference runs into traces, and diffs of them. Standard library only."""

import json
import os
import pathlib
import subprocess

ROOT = pathlib.Path(__file__).resolve().parents[2]
ASSAY = pathlib.Path(os.environ.get("ASSAY_BINARY", ROOT / "build" / "assay"))
# The engine may be another build while it is being changed.
REFERENCE = pathlib.Path(os.environ.get("ASSAY_REFERENCE", ASSAY))
MODEL = ROOT / "models" / "kjv-mla-10m"


class Failed(Exception):
    """A command ended with an exit code that its caller did not expect."""

    def __init__(self, command, code, stderr):
        super().__init__(f"exit {code}: {' '.join(map(str, command))}\n{stderr}")
        self.code = code


def run(command, expected=(0,)):
    environment = {k: v for k, v in os.environ.items() if not k.startswith("ASSAY")}
    environment["OPENBLAS_NUM_THREADS"] = "1"
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, env=environment, timeout=300)
    if done.returncode not in expected:
        raise Failed(command, done.returncode, done.stderr)
    return done


def reference(trace, prompts, *options):
    """One traced run of the shipped model; raises Failed with the exit code."""
    command = [REFERENCE, "reference", MODEL, "--trace", trace]
    for prompt in prompts:
        command += ["--prompt", prompt]
    return run(command + list(options))


def diff(a, b, *options):
    """The parsed assay.diff/1 of two traces."""
    done = run([ASSAY, "diff", a, b, "--json", *options], expected=(0, 1, 3))
    result = json.loads(done.stdout)
    expected = {"same": 0, "noise": 0, "fault": 1, "incomparable": 3}[result["verdict"]]
    assert done.returncode == expected, f"verdict {result['verdict']} with exit code {done.returncode}"
    return result


def describe(result):
    """A failed expectation in a few lines."""
    lines = [result["summary"]]
    for finding in result["findings"][:4]:
        lines.append(f"  {finding['name']} {finding['class']} {finding['constant']} positions {finding['positions'][:3]} "
                     f"measured {finding['measured']} bound {finding['bound']}: {finding['bound_basis']}")
        lines += [f"    {line}" for line in finding["evidence"]]
    return "\n".join(lines)

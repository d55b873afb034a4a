"""`assay check` on audited output buffers, from statistics alone."""

import json
import subprocess

import pytest
from conftest import BUILD

torch = pytest.importorskip("torch")

HOST = """
import torch

def attend(x, output, rows):
    output[:rows] = x[:rows] * 2
    return output

def fresh(x, output):
    return x * 2
"""
MAIN = """
import torch, host
x = torch.arange(24.0).reshape(4, 6)
out = torch.full((4, 6), -7.0)
host.attend(x, output=out, rows={rows})
print(out.tolist())
buffer = torch.full((4, 6), -7.0)
host.fresh(x, buffer)
print(bool((buffer == -7).all()))
"""


def check(folder):
    done = subprocess.run([BUILD / "assay", "check", folder, "--json"], capture_output=True, text=True)
    return done.returncode, json.loads(done.stdout)


def test_unwritten_rows_are_found_and_the_host_sees_its_own_bits(run):
    done = run({"host.py": HOST, "main.py": MAIN.format(rows=3)}, "--probes", "audit:host.attend:output")
    assert done.code == 0, done.err
    assert done.out.splitlines()[0].endswith("[-7.0, -7.0, -7.0, -7.0, -7.0, -7.0]]")
    code, verdict = check(done.folder)
    assert code == 1
    bad = verdict["findings"][0]["first_bad"]
    assert (bad["name"], bad["class"]) == ("host.attend.output", "UNWRITTEN")
    assert bad["positions"] == [[3, 3]]
    assert any("6 of 24 elements were not written" in line for line in bad["evidence"])


def test_buffer_that_is_filled_has_no_finding(run):
    done = run({"host.py": HOST, "main.py": MAIN.format(rows=4)}, "--probes", "audit:host.attend:output")
    code, verdict = check(done.folder)
    assert code == 0 and not verdict["findings"]
    assert done.notes["audit:host.attend:output", "fired"][0] == 1


def test_tensor_of_its_own_is_told(run):
    done = run({"host.py": HOST, "main.py": MAIN.format(rows=4)}, "--probes", "audit:host.fresh:output")
    assert done.out.splitlines()[1] == "True"
    _, verdict = check(done.folder)
    assert any("the call returned another tensor" in line for line in verdict["findings"][0]["first_bad"]["evidence"])

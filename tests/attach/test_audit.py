"""Auditing an output buffer: what is left unwritten is counted, and the host sees what it would have seen."""

import json
import subprocess

import pytest
from conftest import BUILD

LIBRARY = """
import torch

def fill(x, output, rows):
    output[:rows] = x[:rows] * 2
    return output

def fresh(x, output):
    return x * 2

def fails(x, output):
    output[0] = 1
    raise RuntimeError("no kernel")

def in_place(x, output):
    output.mul_(3)
    return output
"""
MAIN = """
import torch, lib
dtype = DTYPE
x = torch.arange(24).reshape(6, 4).to(dtype)
def show(name, t):
    print(name, t.contiguous().view(torch.uint8).numpy().tobytes().hex())
for stride in (1, 2):
    output = torch.full((6, 4 * stride), 7, dtype=dtype)[:, ::stride]
    show("fill", lib.fill(x, output=output, rows=4)); show("buffer", output)
output = torch.full((6, 4), 7, dtype=dtype)
show("fresh", lib.fresh(x, output)); show("buffer", output)
try:
    lib.fails(x, output)
except RuntimeError as problem:
    print(problem)
show("buffer", output)
show("in place", lib.in_place(output, output)); show("buffer", output)
"""
PROBES = "audit:lib.fill:output,audit:lib.fresh:output,audit:lib.fails:output,audit:lib.in_place:output"


def files(dtype):
    return {"lib.py": LIBRARY, "main.py": MAIN.replace("DTYPE", dtype)}


@pytest.mark.parametrize("dtype", ["torch.bfloat16", "torch.float32", "torch.int64", "torch.int8"])
def test_TheHostSeesTheBitsThatItWouldHaveSeenAlone(run, tmp_path, dtype):
    off = run(files(dtype), "--attach", "none", folder=tmp_path / "off")
    on = run(files(dtype), "--probes", PROBES, folder=tmp_path / "on")
    assert on.out.count("\n") == 10 and on.out == off.out
    assert "no kernel" in on.out


def test_WhatIsLeftIsCountedWithItsRows(run):
    outcome = run(files("torch.bfloat16"), "--probes", PROBES)
    count, detail = outcome.notes["audit:lib.fill:output", "unwritten"]
    assert count == 8 and "unwritten rows 4-5" in detail
    count, detail = outcome.notes["audit:lib.fresh:output", "unwritten"]
    assert count == 24 and "another tensor, not the buffer" in detail
    assert outcome.notes["audit:lib.fails:output", "unwritten"][0] == 20
    assert "shares memory with x" in outcome.notes["audit:lib.in_place:output", "skipped"][1]
    assert "audit:lib.fill:output: unwritten 8" in outcome.err


def test_ACallThatWritesAllIsSilent(run):
    main = "import torch, lib\nlib.fill(torch.ones(4, 4), torch.zeros(4, 4), 4)\n"
    outcome = run({"lib.py": LIBRARY, "main.py": main}, "--probes", "audit:lib.fill:output")
    assert [note for note in outcome.notes if note[1] == "unwritten"] == []
    assert outcome.notes["audit:lib.fill:output", "fired"][0] == 1
    assert [e.meta["audit"] for e in outcome.events] == ["before", "after"]


def test_CheckNamesTheUnwrittenRowsFromTheTraceAlone(run):
    main = "import torch, lib\nlib.fill(torch.ones(6, 4), torch.zeros(6, 4), 4)\n"
    outcome = run({"lib.py": LIBRARY, "main.py": main}, "--probes", "audit:lib.fill:output", "--level", "payload")
    report = subprocess.run([BUILD / "assay", "check", outcome.folder, "--json"], capture_output=True, text=True)
    findings = json.loads(report.stdout)["findings"]
    assert report.returncode == 1
    assert [(f["first_bad"]["class"], f["first_bad"]["name"]) for f in findings] == [("UNWRITTEN", "lib.fill.output")]

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


NARROW = ["torch.int8", "torch.uint8", "torch.bool", "torch.float8_e4m3fn", "torch.float8_e5m2"]


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


def test_AnArgumentThatTheCallableDoesNotHaveIsNotFound(run):
    main = "import torch, lib\nprint(lib.fill(torch.ones(2, 2), torch.zeros(2, 2), 1).sum())\n"
    outcome = run({"lib.py": LIBRARY, "main.py": main}, "--probes", "audit:lib.fill:outptu")
    assert outcome.out == "tensor(4.)\n"
    assert outcome.notes["audit:lib.fill:outptu", "not found"][1] == "lib.fill has no argument outptu; nearest: output"
    assert ("audit:lib.fill:outptu", "attached") not in outcome.notes


def test_ElementsOfOneByteAreNotFilled(run):
    """Any byte may be a result."""
    main = """
import torch, lib
for dtype in DTYPES:
    output = torch.zeros(4, dtype=dtype)
    lib.fill(torch.zeros(4), output, 0)
    print(output.view(torch.uint8).tolist())
""".replace("DTYPES", f"[{', '.join(NARROW)}]")
    library = "def fill(x, output, rows):\n    seen.append(output.clone())\n    return output\nseen = []\n"
    outcome = run({"lib.py": library, "main.py": main}, "--probes", "audit:lib.fill:output")
    assert outcome.out.splitlines() == ["[0, 0, 0, 0]"] * len(NARROW), outcome.err
    details = [n["detail"] for p in outcome.report["processes"] for n in p["coverage"] if n["reason"] == "skipped"]
    assert sorted(d.split(":")[0] for d in details) == sorted(f"output is {dtype}" for dtype in NARROW)
    assert not [note for note in outcome.notes if note[1] == "unwritten"]


NESTED = """
import torch

def inner(x, output):
    output[:2] = x[:2]

def outer(x, output, second):
    inner(x, output[1:])
    second[0] = 1
"""


def test_AuditsNestInOneCallableAndInAnother(run, tmp_path):
    main = """
import torch, lib
a, b = torch.full((5, 2), 7.0), torch.full((3,), 7.0)
lib.outer(torch.zeros(4, 2), a, b)
print(a.tolist(), b.tolist())
"""
    files = {"lib.py": NESTED, "main.py": main}
    probes = "audit:lib.outer:output,audit:lib.outer:second,audit:lib.outer:output,audit:lib.inner:output"
    off = run(files, "--attach", "none", folder=tmp_path / "off")
    on = run(files, "--probes", probes, folder=tmp_path / "on")
    assert on.out == off.out and on.out
    left = {site: count for (site, reason), (count, _) in on.notes.items() if reason == "unwritten"}
    assert left == {"audit:lib.outer:output": 6, "audit:lib.outer:second": 2, "audit:lib.inner:output": 4}
    assert "rows 0,3-4" in on.notes["audit:lib.outer:output", "unwritten"][1]


def test_OtherProbesOfTheCallSeeWhatTheHostSees(run):
    """Arguments ahead of the filling, results behind the giving back: no event but the audit's own holds the pattern."""
    main = "import torch, lib\nlib.fill(torch.ones(6, 4), torch.full((6, 4), 7.0), 4)\n"
    probes = "call:lib.fill,audit:lib.fill:output"
    outcome = run({"lib.py": LIBRARY, "main.py": main}, "--probes", probes, "--level", "payload")
    events = {e.site: e for e in outcome.events if not e.meta.get("audit")}
    assert events["lib.fill.output"].numpy().tolist() == [[7.0] * 4] * 6
    assert events["lib.fill.result"].numpy().tolist() == [[2.0] * 4] * 4 + [[7.0] * 4] * 2
    looks = {e.meta["audit"]: e for e in outcome.events if e.meta.get("audit")}
    assert looks["before"].nonfinite == 24 and looks["after"].nonfinite == 8


@pytest.mark.parametrize(
    ("definition", "what"),
    [
        ("async def f(output): output[0] = 1", "asynchronous"),
        ("def f(output): yield output", "a generator"),
        ("async def f(output): yield output", "an asynchronous generator"),
    ],
)
def test_WhatRunsBehindItsCallIsSaidNotToBeAudited(run, definition, what):
    main = """
import asyncio, torch, lib
output = torch.zeros(4)
given = lib.f(output)
async def drain(given):
    if hasattr(given, "__await__"):
        await given
    elif hasattr(given, "__aiter__"):
        async for _ in given: pass
    else:
        list(given)
asyncio.run(drain(given))
print(output.isnan().any().item())
"""
    outcome = run({"lib.py": definition + "\n", "main.py": main}, "--probes", "audit:lib.f:output")
    assert outcome.out == "False\n" and outcome.code == 0, outcome.err
    assert f"f is {what}: its body runs behind the call" in outcome.notes["audit:lib.f:output", "failed"][1]
    assert f"f is {what}" in outcome.err
    assert not [note for note in outcome.notes if note[1] in ("fired", "unwritten")]


def test_CheckNamesTheUnwrittenRowsFromTheTraceAlone(run):
    main = "import torch, lib\nlib.fill(torch.ones(6, 4), torch.zeros(6, 4), 4)\n"
    outcome = run({"lib.py": LIBRARY, "main.py": main}, "--probes", "audit:lib.fill:output", "--level", "payload")
    report = subprocess.run([BUILD / "assay", "check", outcome.folder, "--json"], capture_output=True, text=True)
    findings = json.loads(report.stdout)["findings"]
    assert report.returncode == 1
    assert [(f["first_bad"]["class"], f["first_bad"]["name"]) for f in findings] == [("UNWRITTEN", "lib.fill.output")]

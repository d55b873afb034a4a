"""assay arm and assay disarm from outside, of Python and C hosts."""

import json
import os
import subprocess
import sys

import pytest
from conftest import BUILD, ROOT

HOST = """
import sys, assay
trace = assay.trace("trace", rank=0, armed=ARMED)
key = trace.request([1, 2, 3])
other = trace.request([4, 5])
print(f"{key:016x} {other:016x}", flush=True)
import array
for line in sys.stdin:
    step = int(line)
    values = memoryview(array.array("f", [1.0] * 12)).cast("B").cast("f", (3, 4))
    trace.record("layers.0.attn.q_a", values, step=step, runs=[(key, 0, 2, 0), (other, 2, 1, 0)])
    print(trace.armed, flush=True)
trace.close()
"""


def assay(*arguments, cwd):
    return subprocess.run([BUILD / "assay", *map(str, arguments)], cwd=cwd, capture_output=True, text=True, timeout=60)


class Host:
    def __init__(self, folder, armed):
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "python")}
        code = HOST.replace("ARMED", repr(armed))
        self.process = subprocess.Popen(
            [sys.executable, "-c", code], cwd=folder, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            text=True,
        )
        self.keys = self.process.stdout.readline().split()

    def step(self, number):
        self.process.stdin.write(f"{number}\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip() == "True"

    def end(self):
        self.process.stdin.close()
        assert self.process.wait(timeout=60) == 0
        self.process.stdout.close()


@pytest.fixture
def host(tmp_path):
    hosts = []

    def start(armed=True):
        hosts.append(Host(tmp_path, armed))
        return hosts[-1]

    yield start
    for one in hosts:
        one.process.kill()


def steps(folder):
    import assay

    return [e.step for e in assay.open(folder)]


def test_AHostThatStartsDisarmedRecordsOnlyBetweenArmAndDisarm(host, tmp_path):
    one = host(armed=False)
    assert one.step(0) is False
    armed = assay("arm", "trace", cwd=tmp_path)
    assert armed.returncode == 0 and f"pid {one.process.pid}: armed" in armed.stdout
    assert one.step(1) is True
    assert assay("disarm", one.process.pid, cwd=tmp_path).returncode == 0
    assert one.step(2) is False
    one.end()
    assert steps(tmp_path / "trace") == [1]


def test_StepsAndRequestsAreNarrowedAndWidenedAgain(host, tmp_path):
    import assay as package

    one = host()
    key = one.keys[0]
    assert assay("arm", "trace", "--steps", "5-6", "--requests", key, cwd=tmp_path).returncode == 0
    for step in range(4, 8):
        one.step(step)
    assert assay("arm", "trace", cwd=tmp_path).returncode == 0
    one.step(8)
    one.end()
    events = package.open(tmp_path / "trace")
    assert [e.step for e in events] == [5, 6, 8]
    assert [[s.request for s in e.segments] for e in events][:2] == [[int(key, 16)]] * 2
    assert len(events[2].segments) == 2


def test_TheDigitsThatShowPrintsNameARequestToo(host, tmp_path):
    import assay as package

    one = host()
    one.step(0)
    assert assay("arm", "trace", "--requests", one.keys[1][:8], cwd=tmp_path).returncode == 0
    one.step(1)
    unknown = assay("arm", "trace", "--requests", "00000000", cwd=tmp_path)
    assert unknown.returncode == 2 and "needs all 16 digits" in unknown.stderr
    assert assay("arm", "trace", "--requests", one.keys[1][:5], cwd=tmp_path).returncode == 2
    one.step(2)  # as before
    one.end()
    shown = [[s.request for s in e.segments] for e in package.open(tmp_path / "trace")]
    assert shown == [[int(k, 16) for k in one.keys], [int(one.keys[1], 16)], [int(one.keys[1], 16)]]


def test_TheReportNamesEveryProcessAndItsState(host, tmp_path):
    one = host()
    report = json.loads(assay("disarm", "trace", "--json", cwd=tmp_path).stdout)
    assert report["schema"] == "assay.arm/1" and report["changed"] == 1 and report["armed"] is False
    assert report["processes"][0]["pid"] == one.process.pid and report["processes"][0]["was_armed"] is True


def test_WhereNothingRunsIsSaid(host, tmp_path):
    one = host()
    one.end()
    done = assay("arm", "trace", cwd=tmp_path)
    assert done.returncode == 3 and "no recording is running" in done.stderr
    assert assay("arm", "nowhere", cwd=tmp_path).returncode == 3
    assert assay("arm", os.getpid(), cwd=tmp_path).returncode == 3
    assert assay("arm", "trace", "--steps", "x", cwd=tmp_path).returncode == 2
    assert assay("arm", "trace", "--requests", "zz", cwd=tmp_path).returncode == 2


def test_AKilledProcessIsSaidToHaveEnded(host, tmp_path):
    one = host()
    one.process.kill()
    one.process.wait()
    done = assay("arm", "trace", cwd=tmp_path)
    assert done.returncode == 3 and "has ended" in done.stderr


def test_AProgramThatIsAttachedIsArmedWhileItRuns(tmp_path):
    (tmp_path / "lib.py").write_text("def f(x):\n    return x * 2\n")
    (tmp_path / "main.py").write_text(
        "import sys, torch, lib\n"
        "for i, line in enumerate(sys.stdin):\n    lib.f(torch.full((2, 2), float(i + 1)))\n    print(i, flush=True)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "python")}
    process = subprocess.Popen(
        [BUILD / "assay", "run", "--armed", "off", "--probes", "call:lib.f", "--dir", "trace", "--", sys.executable,
         "main.py"], cwd=tmp_path, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )

    def step():
        process.stdin.write("\n")
        process.stdin.flush()
        process.stdout.readline()

    step()
    assert assay("arm", process.pid, cwd=tmp_path).returncode == 0
    step()
    assert assay("disarm", process.pid, cwd=tmp_path).returncode == 0
    step()
    process.stdin.close()
    assert process.wait(timeout=60) == 0
    process.stdout.close()
    import assay as package

    assert [e.norm for e in package.open(tmp_path / "trace")] == [4.0, 8.0]

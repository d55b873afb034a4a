"""How the attachment starts, in which processes, and that nothing that goes wrong with it reaches the host. The programs
use NumPy, which is quicker to import than torch."""

import os
import signal
import subprocess
import sys

import pytest
from conftest import BUILD, ROOT

LIBRARY = """
import numpy as np
def f(x, factor=2.0):
    return x * factor
"""
PLAIN = "import numpy as np, lib\nprint(lib.f(np.ones((3, 4), np.float32)).sum())\n"
PROBE = ("--probes", "call:lib.f")


def test_NothingIsLoadedBeforeItIsNeeded(run):
    main = """
import sys
print(sorted(name for name in sys.modules if "assay" in name), "ctypes" in sys.modules)
import json
print(sorted(name for name in sys.modules if "assay" in name), "ctypes" in sys.modules)
import lib
print("assay.attach" in sys.modules, "torch" in sys.modules)
"""
    outcome = run({"lib.py": "", "main.py": main}, *PROBE)
    assert outcome.out.splitlines() == ["['_assay_site'] False", "['_assay_site'] False", "True False"]


def test_TheUsersOwnSitecustomizeRunsBehindOurs(run, tmp_path):
    files = {"lib.py": LIBRARY, "main.py": "import sys\nprint(sys.modules['sitecustomize'].__file__, sys.mine)\n" + PLAIN}
    files["own/sitecustomize.py"] = "import sys\nsys.mine = 'ran'\n"
    outcome = run(files, *PROBE, env={"PYTHONPATH": f"{ROOT / 'python'}:{tmp_path / 'own'}"})
    assert outcome.out.splitlines()[0] == f"{tmp_path / 'own' / 'sitecustomize.py'} ran"
    assert len(outcome.events) == 2


def test_OnlyAssayBecomesImportable(run):
    outcome = run({"main.py": "import sys\nprint([p for p in sys.path if 'assay' in p])\nimport assay\nprint(assay.version())\n"},
                  env={"PYTHONPATH": ""})
    folders, version = outcome.out.splitlines()
    assert folders == str([str(ROOT / "python/assay/attach/site_hook")]) and version


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_ChildrenOfMultiprocessingRecordForThemselves(run, method):
    main = f"""
import multiprocessing as mp
import numpy as np, lib
def work(n):
    lib.f(np.full((2, 2), n, np.float32))
if __name__ == "__main__":
    work(1)
    context = mp.get_context({method!r})
    children = [context.Process(target=work, args=(n,)) for n in (2, 3)]
    for child in children: child.start()
    for child in children: child.join()
    print([child.exitcode for child in children])
"""
    outcome = run({"lib.py": LIBRARY, "main.py": main}, *PROBE)
    assert outcome.out == "[0, 0]\n", outcome.err
    processes = outcome.report["processes"]
    assert sorted(p["events"] for p in processes) == [2, 2, 2] and all(p["closed"] for p in processes)
    assert len({p["pid"] for p in processes}) == 3
    fired = [n["count"] for p in processes for n in p["coverage"] if n["reason"] == "fired"]
    assert fired == [1, 1, 1]


def test_ASubprocessIsAttachedToo(run):
    main = "import subprocess, sys\nsys.exit(subprocess.call([sys.executable, 'child.py']))\n"
    outcome = run({"lib.py": LIBRARY, "main.py": main, "child.py": PLAIN}, *PROBE)
    assert outcome.code == 0 and outcome.out == "24.0\n" and len(outcome.events) == 2


def test_AProbeThatAnotherProcessHasInPlaceIsNotReportedMissing(run):
    main = "import subprocess, sys, other\nother.g(1)\nsys.exit(subprocess.call([sys.executable, 'child.py']))\n"
    files = {"lib.py": LIBRARY, "other.py": "def g(x):\n    return x\n", "main.py": main, "child.py": PLAIN}
    outcome = run(files, "--probes", "call:lib.f,call:other.g,call:none.h", "--strict", "on")
    assert "call:none.h: not found" in outcome.err and outcome.code == 1
    assert "call:lib.f: not found" not in outcome.err and "call:other.g: not found" not in outcome.err
    assert run(files, "--probes", "call:lib.f,call:other.g", "--strict", "on", folder=outcome.folder.parent / "b").code == 0


def test_AProbeThatFiredInAnotherProcessIsNotReportedSilent(run):
    main = "import subprocess, sys, lib\nsys.exit(subprocess.call([sys.executable, 'child.py']))\n"
    files = {"lib.py": LIBRARY + "\ndef unused(x):\n    return x\n", "main.py": main, "child.py": PLAIN}
    outcome = run(files, "--probes", "call:lib.f,call:lib.unused")
    assert outcome.err.count("call:lib.unused: never fired") == 2 and "call:lib.f: never fired" not in outcome.err
    assert ("call:lib.f", "never fired") in outcome.notes  # the trace has it of each process


def test_AKilledWorkerLeavesWhatItRecordedAndWhatItAttachedTo(run):
    main = """
import os, signal
import numpy as np, lib
pid = os.fork()
if pid == 0:
    lib.f(np.ones((2, 2), np.float32))
    os.kill(os.getpid(), signal.SIGKILL)
os.waitpid(pid, 0)
lib.f(np.ones((2, 2), np.float32))
print("goes on")
"""
    outcome = run({"lib.py": LIBRARY, "main.py": main}, *PROBE)
    assert outcome.out == "goes on\n" and outcome.code == 0
    killed = [p for p in outcome.report["processes"] if not p["closed"]]
    assert len(killed) == 1 and killed[0]["events"] == 2
    assert [n["reason"] for n in killed[0]["coverage"]] == ["attached"]
    assert "not closed (killed, or still running)" in outcome.err


def test_AFolderThatCannotBeMadeIsSaidOnceAndTheProgramGoesOn(tmp_path):
    (tmp_path / "file").write_text("no folder")
    (tmp_path / "lib.py").write_text(LIBRARY)
    (tmp_path / "main.py").write_text(PLAIN + "lib.f(np.ones(3, np.float32))\n")
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "python/assay/attach/site_hook"), "ASSAY": "all",
                   "ASSAY_PROBES": "call:lib.f", "ASSAY_DIR": str(tmp_path / "file" / "trace")}
    done = subprocess.run([sys.executable, "main.py"], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout == "24.0\n"
    assert done.stderr.count("assay: cannot record") == 1 and "the program goes on without" in done.stderr


def test_ADiskThatIsFullIsCountedAndTheProgramGoesOn(run):
    main = """
import resource
import numpy as np, lib
for i in range(400):
    lib.f(np.full((64, 64), i, np.float32))
    if i == 3:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
print("goes on")
"""
    outcome = run({"lib.py": LIBRARY, "main.py": main}, *PROBE, "--level", "payload")
    assert outcome.code == 0 and outcome.out == "goes on\n"
    report = outcome.report["processes"][0]
    assert report["dropped"] > 0 and report["events"] > 0
    assert "dropped" in outcome.err


def test_AWrongSettingInTheEnvironmentIsSaidAndTheProgramGoesOn(tmp_path):
    (tmp_path / "lib.py").write_text(LIBRARY)
    (tmp_path / "main.py").write_text(PLAIN)
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "python/assay/attach/site_hook"), "ASSAY": "al",
                   "ASSAY_PROBES": "call:lib.f"}
    done = subprocess.run([sys.executable, "main.py"], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout == "24.0\n"
    assert "assay: cannot attach: ASSAY, column 1" in done.stderr and "did you mean all" in done.stderr


def test_AClosedStderrIsNoReasonToFail(tmp_path):
    (tmp_path / "lib.py").write_text(LIBRARY)
    (tmp_path / "main.py").write_text("import sys, os\nos.close(2)\nsys.stderr = None\n" + PLAIN)
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "python/assay/attach/site_hook"), "ASSAY_PROBES": "call:lib.f"}
    for wrong in ({"ASSAY": "al"}, {"ASSAY": "all", "ASSAY_DIR": "main.py/t"}):
        done = subprocess.run([sys.executable, "main.py"], cwd=tmp_path, env={**environment, **wrong}, stdout=subprocess.PIPE)
        assert done.returncode == 0 and done.stdout == b"24.0\n"


def test_OffLoadsNothingAndRecordsNothing(tmp_path):
    for value in (None, "", "0", "off"):
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "python/assay/attach/site_hook")}
        environment.pop("ASSAY", None)
        if value is not None:
            environment["ASSAY"] = value
        code = "import sys; print([n for n in sys.modules if 'assay' in n], len(sys.meta_path))"
        done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
        plain = subprocess.run([sys.executable, "-S", "-c", code], cwd=tmp_path, capture_output=True, text=True)
        assert done.stdout.startswith("[] ") and plain.stdout.startswith("[] ")


def test_AProfileOfTheUsersOwnIsLoadedAtItsTrigger(run):
    profile = """
from assay.attach import Rows
TRIGGERS = ("lib",)
def install(session):
    session.fact("engine", "mine")
    session.rank = lambda: (3, 4)
    def before(call):
        session.rows = Rows([(7, 0, 2, 5)], step=9, phase="decode")
        assert session.observed("attn.q") and not session.observed("layers.0.mlp.up")
        session.record("attn.q", call.bound["x"], layer=0, axes="T h")
        session.absent("attn.lse", "none is kept")
    session.wrap("lib:f", before=before, after=lambda call, result: 1 / 0)
    session.wrap("lib:gone", required=False)
    session.wrap("lib:moved", absent_reason="this version has none")
"""
    main = "import numpy as np, lib\nlib.f(np.ones((2, 4), np.float32))\nprint('on')\n"
    outcome = run({"lib.py": LIBRARY, "main.py": main, "my/__init__.py": "", "my/profile.py": profile},
                  "--attach", "my.profile", "--profile", "all", "--exclude", "layers.*.mlp.*")
    assert outcome.out == "on\n", outcome.err
    (event,) = outcome.events
    assert (event.site, event.step, event.phase, event.rank) == ("layers.0.attn.q", 9, "decode", 3)
    assert [(s.request, s.first_position, s.n_rows) for s in event.segments] == [(7, 5, 2)]
    assert outcome.notes["attn.lse", "absent on this path"] == (0, "none is kept")
    assert outcome.notes["call:lib:moved", "absent on this path"][1] == "this version has none"
    assert "lib has no gone" in outcome.notes["call:lib:gone", "absent on this path"][1]
    assert "ZeroDivisionError" in outcome.notes["lib:f", "failed"][1]
    (process,) = outcome.events.processes
    assert process.meta["engine"] == "mine" and (process.rank, process.world_size) == (3, 4)


def test_AProbeInMainIsFoundOnceItIsDefined(run):
    main = "import numpy as np\nimport lib\ndef g(x):\n    k = x + 1\n    return k\nimport later\ng(np.zeros(3, np.float32))\n"
    outcome = run({"lib.py": LIBRARY, "later.py": "", "main.py": main}, "--probes", "call:__main__.g,local:__main__:g:k")
    assert [e.site for e in outcome.events] == ["__main__.g.x", "__main__.g.k", "__main__.g.result"], outcome.err


def test_SigtermEndsTheProgramAsBefore(tmp_path):
    (tmp_path / "lib.py").write_text(LIBRARY)
    (tmp_path / "main.py").write_text("import time, numpy as np, lib\nlib.f(np.ones(2, np.float32))\nprint(1, flush=True)\ntime.sleep(60)\n")
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "python")}
    process = subprocess.Popen([BUILD / "assay", "run", "--dir", "t", *PROBE, "--", sys.executable, "main.py"], cwd=tmp_path,
                               env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM and "2 events" in err

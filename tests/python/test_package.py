"""The package itself: types, library discovery, and the wheel."""

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import assay
import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_types_are_complete():
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml")],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_structs_mirror_the_header():
    """Every field of the C structs, in order and of the same width, as the header spells them."""
    from assay import _library

    header = (ROOT / "include/assay/assay.h").read_text()
    header = re.sub(r"/\*.*?\*/", "", header, flags=re.S)
    mirrors = {
        "assay_pair": _library.CPair,
        "assay_row_run": _library.CRowRun,
        "assay_options": _library.COptions,
        "assay_site_info": _library.CSiteInfo,
        "assay_event": _library.CEvent,
        "assay_request": _library.CRequest,
        "assay_drop_counts": _library.CDropCounts,
    }
    for name, mirror in mirrors.items():
        body = re.search(rf"typedef struct {name} \{{(.*?)\}} {name};", header, re.S)
        assert body, name
        fields = re.findall(r"(\w+)\s*;", body.group(1))
        assert fields == [f[0] for f in mirror._fields_], name


def test_missing_library_says_where_it_looked(tmp_path):
    code = f"import sys; sys.path.insert(0, {str(ROOT / 'python')!r}); import assay; assay.version()"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "ASSAY_LIBRARY": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0
    said = f"libassay.so not found at {tmp_path}/libassay.so; ASSAY_LIBRARY={tmp_path} says to look there"
    assert said in done.stderr


def test_a_wrong_ASSAY_LIBRARY_is_named(tmp_path):
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/libassay.so").write_text("no library")
    (tmp_path / "other").mkdir()
    maps = Path("/proc/self/maps").read_text().splitlines()
    libc = next(line.split()[-1] for line in maps if "libc.so" in line)
    (tmp_path / "other/libassay.so").symlink_to(libc)
    for folder, problem in (("absent", "not found at"), ("broken", "cannot load"), ("other", "of another version")):
        named = tmp_path / folder
        environment = {**os.environ, "PYTHONPATH": str(Path(assay.__file__).parents[1]), "ASSAY_LIBRARY": str(named)}
        done = subprocess.run(
            [sys.executable, "-c", "import assay\nassay.version()"], capture_output=True, text=True, env=environment
        )
        last = done.stderr.splitlines()[-1]
        assert "MachineError" in last and problem in last, done.stderr
        assert f"ASSAY_LIBRARY={named} says to look there" in last


def test_version_is_the_projects():
    version = re.search(r'ASSAY_VERSION "(.*)"', (ROOT / "src/base/version.h").read_text())
    assert version and assay.version() == version.group(1)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel of this checkout, compiled as the build under test, so that the compiler cache has its objects."""
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(out), str(ROOT)]
    cache = Path(os.environ["ASSAY_LIBRARY"]) / "CMakeCache.txt"
    alike = re.findall(r"^(CMAKE_C_COMPILER|CMAKE_CXX_COMPILER|ASSAY_WERROR):\w+=(.*)$", cache.read_text(), re.M)
    for name, value in alike:
        command += ["-C", f"cmake.define.{name}={value}"]
    subprocess.run(command, check=True, timeout=1000)
    return next(out.glob("*.whl"))


def test_one_wheel_for_every_python(wheel, tmp_path):
    assert re.fullmatch(r"assay-[\d.]+-py3-none-\w*linux\w*\.whl", wheel.name), wheel.name
    names = zipfile.ZipFile(wheel).namelist()
    for needed in ("assay/__init__.py", "assay/py.typed", "assay/lib/libassay.so", "assay/lib/libassay_offline.so"):
        assert needed in names
    assert any(n.endswith("/scripts/assay") for n in names)
    assert not any(n.endswith((".cpp", ".h")) for n in names)

    # Installed elsewhere, without the checkout, the package finds its own libraries and the program runs.
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "env")],
        check=True,
    )
    python = tmp_path / "env/bin/python"
    subprocess.run([sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", str(wheel)], check=True)
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("ASSAY", "PYTHON"))}
    code = (
        "import array, assay\n"
        "with assay.trace('t') as t: t.record('logits', array.array('f', [1, 2]))\n"
        "print(len(assay.open('t')), assay.__file__)\n"
    )
    done = subprocess.run([python, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("1 " + str(tmp_path / "env"))
    program = subprocess.run([tmp_path / "env/bin/assay", "--version"], env=environment, capture_output=True, text=True)
    assert program.stdout == f"assay {assay.version()}\n"


def test_the_wheel_attaches_by_the_environment_alone_and_goes_without_a_trace(wheel, tmp_path):
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    python = tmp_path / "venv/bin/python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-deps", wheel], check=True)
    (tmp_path / "lib.py").write_text("def f(x):\n    k = x\n    return k\n")
    (tmp_path / "main.py").write_text("import sys, lib\nprint(lib.f(1), 'assay' in sys.modules, '_assay_site' in sys.modules)\n")
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("ASSAY", "PYTHON"))}
    off = subprocess.run([python, "main.py"], cwd=tmp_path, env=clean, capture_output=True, text=True)
    assert off.stdout == "1 False False\n", off.stderr
    settings = {"ASSAY": "all", "ASSAY_PROBES": "call:lib.f,call:lib.g", "ASSAY_DIR": "trace"}
    on = subprocess.run([python, "main.py"], cwd=tmp_path, env={**clean, **settings}, capture_output=True, text=True)
    assert on.stdout == "1 True True\n", on.stderr
    notes = {(n.site, n.reason) for p in assay.open(tmp_path / "trace").processes for n in p.coverage}
    assert {("call:lib.f", "fired"), ("call:lib.g", "not found")} <= notes
    # `assay run` of the environment finds the package beside itself.
    run = subprocess.run([tmp_path / "venv/bin/assay", "run", "--dir", "second", "--probes", "call:lib.f,call:lib.g", "--", python, "main.py"],
                         cwd=tmp_path, env=clean, capture_output=True, text=True)
    assert run.stdout == "1 True True\n" and (tmp_path / "second").is_dir(), run.stderr
    subprocess.run([python, "-m", "pip", "uninstall", "--quiet", "--yes", "assay"], check=True)
    left = [p.name for p in (tmp_path / "venv").rglob("*assay*")]
    assert left == []
    gone = subprocess.run([python, "main.py"], cwd=tmp_path, env={**clean, **settings}, capture_output=True, text=True)
    assert gone.stdout == "1 False False\n" and gone.stderr == ""


def test_without_the_variable_the_start_of_python_costs_a_look_at_the_environment():
    """What the .pth file runs at each start of an interpreter, in processor time: at most 1 ms."""
    import time

    line = (ROOT / "python/assay-attach.pth").read_text()
    assert line.startswith("import ") and line.count("\n") == 1
    environment = os.environ.pop("ASSAY", None)
    try:
        started = time.process_time()
        for _ in range(1000):
            exec(line, {})
        each = (time.process_time() - started) / 1000
    finally:
        if environment is not None:
            os.environ["ASSAY"] = environment
    assert each < 1e-3
    print(f"{each * 1e6:.1f} us")

"""Options and exit codes of `assay check` and `assay diagnose` on one recording."""

import os
import pathlib
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
ASSAY = os.environ.get("ASSAY_PROGRAM", str(ROOT / "build/assay"))
ENVIRONMENT = {k: v for k, v in os.environ.items() if not k.startswith("ASSAY")}


def assay(*arguments):
    command = [ASSAY, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=ENVIRONMENT)


@pytest.fixture
def trace(tmp_path):
    model = ROOT / "tests/parity/checkpoints/qwen3_moe"
    folder = tmp_path / "t"
    done = assay("reference", model, "--tokens", "5,9,3", "--max-tokens", "2", "--trace", folder, "--level", "payload")
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize("command", ["check", "diagnose"])
def test_a_damaged_payload_is_said_and_exits_with_3(trace, command):
    assert assay(command, trace).returncode == 0
    payload = max((trace / "payloads").iterdir(), key=lambda p: p.stat().st_size)
    values = bytearray(payload.read_bytes())
    payload.write_bytes(values[: len(values) // 2])
    done = assay(command, trace)
    assert done.returncode == 3, done.stdout
    assert "damaged" in done.stderr and payload.name in done.stderr


def test_names_of_checks_do_not_swallow_the_trace_behind_them(trace):
    for options in (["--only", "norms,linear"], ["--only", "norms", "--only", "linear"], ["--skip", "norms"]):
        done = assay("check", *options, trace)
        assert done.returncode == 0, done.stderr
    assert assay("show", "--rank", "0", trace).returncode == 0

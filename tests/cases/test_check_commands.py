"""Options and exit codes of `assay check` and `assay diagnose` on one recording."""

import json
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


@pytest.mark.parametrize(
    ("include", "why"), [("layers.*.attn.q", "it holds none"), ("*", "no whole payload")], ids=["no-weights", "no-values"]
)
def test_weights_that_could_not_be_compared_are_not_called_right(include, why, tmp_path):
    model = ROOT / "tests/parity/checkpoints/qwen3_moe"
    done = subprocess.run([ASSAY, "reference", str(model), "--tokens", "5,9", "--max-tokens", "1", "--level", "stats",
                           "--trace", str(tmp_path / "t")], env=ENVIRONMENT | {"ASSAY_INCLUDE": include}, timeout=60,
                          capture_output=True)  # fmt: skip
    assert done.returncode == 0, done.stderr
    done = assay("weights", model, "--trace", tmp_path / "t")
    assert done.returncode == 3
    assert "no weight in memory could be compared" in done.stderr and why in done.stderr


def test_two_traces_that_part_are_said_to_part_once(tmp_path):
    model = ROOT / "models/kjv-mla-10m"
    for name, fault in (("a", "none:lse-base-2"), ("b", "lse-base-2")):
        done = assay("reference", model, "--prompt", "And God said", "--max-tokens", "3", "--fault", fault,
                     "--trace", tmp_path / name)  # fmt: skip
        assert done.returncode == 0, done.stderr
    done = assay("diagnose", tmp_path / "a", tmp_path / "b")
    assert done.returncode == 1
    against = next(line for line in done.stdout.splitlines() if line.startswith("against"))
    assert against.count("fault") == 1 and "first wrong tensor layers." in against


def test_a_command_that_records_nothing_is_said_to_record_nothing(tmp_path):
    done = subprocess.run([ASSAY, "diagnose", "--", "true"], capture_output=True, text=True, cwd=tmp_path,
                          timeout=60, env=ENVIRONMENT)  # fmt: skip
    assert done.returncode == 3
    assert "nothing was recorded" in done.stderr and "no such trace" not in done.stderr


def test_checks_are_listed_as_json():
    listed = json.loads(assay("check", "--list", "--json").stdout)
    assert listed["schema"] == "assay.checks/1"
    names = [check["name"] for check in listed["checks"]]
    assert len(names) == len(set(names)) > 30
    assert all(name in assay("check", "--list").stdout for name in names)

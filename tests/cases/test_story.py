"""`assay diagnose` on the story of `assay demo`, from its traces and from the command that makes one."""

import json
import os
import pathlib
import re
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
ASSAY = os.environ.get("ASSAY_PROGRAM", str(ROOT / "build/assay"))
ENVIRONMENT = {k: v for k, v in os.environ.items() if not k.startswith("ASSAY")}
MODEL = ROOT / "models/kjv-mla-10m"


def run(arguments, **options):
    return subprocess.run([ASSAY, *map(str, arguments)], capture_output=True, text=True, timeout=120,
                          env=ENVIRONMENT, **options)  # fmt: skip


def story(fault, *more):
    """The run of the demo with two requests and all values."""
    return ["reference", MODEL, "--prompt", "And God said unto Moses", "--prompt", "In the beginning", "--max-tokens", "12",
            "--fault", fault, "--level", "payload", *more]  # fmt: skip


@pytest.fixture(scope="module")
def diagnosed(tmp_path_factory):
    """By name of the fault: exit code and document of `assay diagnose`."""
    out = {}
    for fault in ("decode-output-unwritten", "none:decode-output-unwritten"):
        folder = tmp_path_factory.mktemp("story") / "trace"
        done = run(story(fault, "--trace", folder))
        assert done.returncode == 0, done.stderr
        done = run(["diagnose", "--json", folder])
        out[fault] = done.returncode, json.loads(done.stdout)
    return out


def test_output_buffer_alone_is_confirmed(diagnosed):
    code, verdict = diagnosed["decode-output-unwritten"]
    assert code == 1 and verdict["verdict"] == "fault"
    assert [entry["hypothesis"] for entry in verdict["confirmed"]] == ["output buffer"]
    first = verdict["findings"][0]["first_bad"]
    assert first["class"] == "UNWRITTEN" and first["name"].endswith(".attn.out")


def test_ten_other_hypotheses_are_ruled_out_with_numbers(diagnosed):
    for _, verdict in diagnosed.values():
        told = [entry for entry in verdict["ruled_out"] if entry["judged"] > 0 and re.search(r"\d", entry["evidence"])]
        assert len({entry["hypothesis"] for entry in told} - {"output buffer"}) >= 10
        for entry in told:
            counts = map(int, re.findall(r"(\d+) not judged, because", entry["evidence"]))
            assert entry["not_judged"] == 0 or sum(counts) > 0


def test_clean_twin_has_no_finding(diagnosed):
    code, verdict = diagnosed["none:decode-output-unwritten"]
    assert (code, verdict["findings"], verdict["confirmed"]) == (0, [], [])


def test_command_is_recorded_and_its_fault_found(tmp_path):
    done = run(["diagnose", "--json", "--", ASSAY, *story("decode-output-unwritten")], cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    verdict = json.loads(done.stdout)
    assert [entry["hypothesis"] for entry in verdict["confirmed"]] == ["output buffer"]
    assert verdict["findings"][0]["first_bad"]["class"] == "UNWRITTEN"
    assert pathlib.Path(tmp_path / verdict["trace"]).exists()

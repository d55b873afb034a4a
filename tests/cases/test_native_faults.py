"""Faults planted into the native reference whose kind values alone tell: `assay diagnose` names place and class."""

import json
import os
import pathlib
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
ASSAY = os.environ.get("ASSAY_PROGRAM", str(ROOT / "build/assay"))
ENVIRONMENT = {k: v for k, v in os.environ.items() if not k.startswith("ASSAY")}
PROMPTS = (
    "Take ye the sum of all the congregation, every male by their polls",
    "Whosoever toucheth the dead body of any man shall be unclean",
)


@pytest.mark.parametrize(
    ("fault", "name", "fault_class"),
    [
        ("pad-row-overwrites-slot", "layers.2.attn.out", "PADREAD"),
        ("decode-output-unwritten", "layers.2.attn.out", "UNWRITTEN"),
        ("empty-chunk-unwritten", "layers.2.attn.out", "UNWRITTEN"),
        ("merge-suffix-stride", "layers.2.attn.out", "STRIDE"),
        ("lse-base-2", "layers.2.attn.chunk.0.lse", "LSE"),
    ],
)
def test_a_planted_fault_is_named_with_its_class(fault, name, fault_class, tmp_path):
    prompts = [word for prompt in PROMPTS for word in ("--prompt", prompt)]
    run = [ASSAY, "reference", str(ROOT / "models/kjv-mla-10m"), *prompts, "--max-tokens", "6", "--ignore-eos"]
    run += ["--fault", f"{fault}@2", "--level", "payload", "--trace", str(tmp_path / "t")]
    done = subprocess.run(run, capture_output=True, text=True, timeout=300, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    done = subprocess.run([ASSAY, "diagnose", "--json", str(tmp_path / "t")], capture_output=True, text=True, timeout=300)
    first = json.loads(done.stdout)["findings"][0]["first_bad"]
    assert (first["name"], first["class"]) == (name, fault_class), first["evidence"]

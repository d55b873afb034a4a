"""The native runtime against the transformers package that is installed here.

tests/model/test_parity.cpp holds the runtime against committed references; these tests make new ones: every family and
option with other weights and prompts, and the layer geometry of GLM-5.
"""

import json
import os
import pathlib
import subprocess
import sys

import make_checkpoints
import numpy as np
import pytest
import torch
import transformers
from parity_cases import CASES
from safetensors.numpy import load_file

COMMITTED = pathlib.Path(__file__).parent / "checkpoints"
SHIPPED = make_checkpoints.SHIPPED


def test_logits_of_fresh_checkpoints_agree_on_every_path(tmp_path, build):
    script = pathlib.Path(__file__).parent / "make_checkpoints.py"
    subprocess.run([sys.executable, script, tmp_path, "--large", "--seed-offset", "100"], check=True)
    run = subprocess.run(
        [build / "tests" / "test_model", "--gtest_filter=*Parity*", "--gtest_brief=1"],
        env={**os.environ, "ASSAY_PARITY_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr
    seen = {line.split()[1] for line in run.stdout.splitlines() if line.startswith("parity ")}
    assert seen == {c.name for c in CASES} | {SHIPPED}


# One of each kind of attention and routing: the whole set would take half a minute more.
@pytest.mark.parametrize("name", ["v3_groups_yarn", "v2_groups", "glm_moe_dsa", "glm4", "qwen2_moe", "mistral_window"])
def test_committed_references_are_what_transformers_says(name):
    path = COMMITTED / name
    reference = load_file(path / "reference.safetensors")
    logits = make_checkpoints.logits_of(path, torch.float64, torch.tensor(reference["tokens"]))
    scale = np.abs(reference["logits_f64"]).max()
    # Another BLAS may sum in another order: some tens of roundings of 2^-53.
    assert np.abs(logits - reference["logits_f64"]).max() <= 100 * 2**-53 * scale


def test_greedy_text_of_the_shipped_model_is_that_of_transformers(build, root):
    model_path = root / "models" / SHIPPED
    prompts = ["In the beginning", "And the LORD said unto Moses,", "Blessed are"]
    command = [build / "assay", "reference", model_path, "--max-tokens", "24", "--json"]
    for prompt in prompts:
        command += ["--prompt", prompt]
    run = subprocess.run([*command, "--path", "absorbed"], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    requests = json.loads(run.stdout)["requests"]

    tokenizer = transformers.AutoTokenizer.from_pretrained(model_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
    for prompt, request in zip(prompts, requests, strict=True):
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        assert request["prompt_tokens"] == ids[0].tolist()
        with torch.no_grad():
            out = model.generate(ids, max_new_tokens=24, do_sample=False, pad_token_id=2)
        expected = out[0, ids.shape[1] :].tolist()
        stop = expected.index(1) if 1 in expected else len(expected)  # the end token itself is no part of the text
        got = [t for t in request["tokens"] if t != 1]
        assert got == expected[:stop]
        assert request["text"] == tokenizer.decode(expected[:stop], skip_special_tokens=True)

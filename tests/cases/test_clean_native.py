"""Right runs of the native reference, all values recorded: `assay diagnose` finds nothing in them, and judges them."""

import json
import os
import pathlib
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
ASSAY = os.environ.get("ASSAY_PROGRAM", str(ROOT / "build/assay"))
SMALL = ROOT / "tests/parity/checkpoints"

LATENT = ("glm_moe_dsa", "kimi_k2", "v2_", "v3_")  # families with latent attention, which have two paths
FAMILIES = sorted({p.parent.name for p in SMALL.glob("*/model*.safetensors")})
PROMPTS = ("1,5,9,33,21,60,2,8,40,41,17,3", "7,8,9")
# One that is long enough for several chunks and one that decodes beside them; with equal beginnings for a prefix cache.
TEXTS = (
    "And the LORD spake unto Moses saying the king of Babylon came with a great host against the city and they cried",
    "And the LORD spake unto Moses in the wilderness",
)


def diagnosed(folder, model, arguments):
    run = [ASSAY, "reference", str(model), *arguments, "--ignore-eos", "--trace", str(folder), "--level", "payload"]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("ASSAY")}
    done = subprocess.run(run, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    done = subprocess.run([ASSAY, "diagnose", "--json", str(folder)], capture_output=True, text=True, timeout=120)
    result = json.loads(done.stdout)
    first = [(f["first_bad"]["name"], f["first_bad"]["class"], f["first_bad"]["evidence"]) for f in result["findings"]]
    assert done.returncode == 0 and first == []
    return {e["hypothesis"] for e in result["ruled_out"]}


@pytest.mark.parametrize("model", FAMILIES)
@pytest.mark.parametrize(
    "options",
    [
        "",
        "--chunk 5 --dtype bf16",
        "--shards 2 --kv-dtype fp8 --block-size 4",
        "--path absorbed --chunk 3 --kv-dtype bf16 --temperature 0.7 --seed 5",
    ],
    ids=["plain", "bf16-chunks", "shards-fp8", "absorbed-bf16-cache"],
)
def test_nothing_is_found_in_a_right_run_of_each_family(model, options, tmp_path):
    if "absorbed" in options and not model.startswith(LATENT):
        options = options.replace("--path absorbed", "")
    tokens = [word for prompt in PROMPTS for word in ("--tokens", prompt)]
    judged = diagnosed(tmp_path / "t", SMALL / model, [*tokens, "--max-tokens", "6", *options.split()])
    assert {"rope", "cache write", "linear layers"} & judged, judged


@pytest.mark.parametrize("fault", ["empty-chunk-unwritten", "lse-base-2", "pad-row-overwrites-slot", "kv-other-request"])
def test_nothing_is_found_in_the_clean_twin_of_a_fault(fault, tmp_path):
    """Chunks beside a decoding request; rows of earlier steps that are expanded from the cache once more."""
    prompts = [
        "--prompt",
        "Take ye the sum of all the congregation, every male by their polls",
        "--prompt",
        "Whosoever toucheth the dead body of any man shall be unclean",
    ]
    arguments = [*prompts, "--max-tokens", "6", "--fault", f"none:{fault}@2"]
    diagnosed(tmp_path / "t", ROOT / "models/kjv-mla-10m", arguments)


def test_the_one_key_of_a_chunk_is_the_value_of_every_head_on_every_rank(tmp_path):
    prompts = ["--tokens", "5,9,3,7", "--tokens", "8,2,6,4,7,1,3"]
    arguments = [*prompts, "--chunk", "3", "--path", "absorbed", "--shards", "2", "--max-tokens", "2"]
    diagnosed(tmp_path / "t", SMALL / "v3_no_q_latent", arguments)


@pytest.mark.parametrize(
    "options",
    [
        "",
        "--dtype f64 --sequential",
        "--dtype bf16 --path absorbed --block-size 4",
        "--chunk 7",
        "--chunk 3 --dtype bf16 --shards 2",
        "--chunk 16 --path absorbed --shards 4",
        "--chunk 5 --dtype f64 --path absorbed",
        "--kv-dtype fp8",
        "--kv-dtype fp8 --chunk 5",
        "--kv-dtype fp8 --chunk 16 --path absorbed --shards 2",
        "--kv-dtype bf16 --chunk 3 --path absorbed",
        "--kv-dtype f32 --dtype bf16 --max-batch-tokens 9",
        "--prefix-cache --block-size 4 --temperature 0.8 --seed 3",
    ],
)
def test_nothing_is_found_in_a_right_run_of_the_shipped_model(options, tmp_path):
    prompts = [word for text in TEXTS for word in ("--prompt", text)]
    arguments = [*prompts, "--max-tokens", "5", *options.split()]
    judged = diagnosed(tmp_path / "t", ROOT / "models/kjv-mla-10m", arguments)
    assert {"attention", "rope", "moe", "norm", "linear layers"} <= judged, judged

"""Models unlike the shipped one: sharper attention, larger and uneven weights. Right runs stay silent, faults are named.

The bounds of a comparison must follow from the traces, not from one model's weights."""

import shutil

import pytest
import safetensors.torch
import torch
from assay_cli import MODEL, REFERENCE, describe, diff, run

PROMPTS = [
    "Now there was a famine in the land of Judah, and the king sent messengers to the prophet, saying",
    "Blessed is he that keepeth the words of wisdom",
]
VARIANTS = {
    "plain": [],
    "absorbed": ["--path", "absorbed"],
    "f64": ["--dtype", "f64"],
    "chunks and shards": ["--chunk", "7", "--shards", "4"],
    "bf16": ["--dtype", "bf16"],
    "bf16 absorbed shards": ["--dtype", "bf16", "--path", "absorbed", "--shards", "2"],
}
PAIRS = [
    ("plain", "absorbed"),
    ("plain", "f64"),
    ("plain", "chunks and shards"),
    ("plain", "bf16"),
    ("f64", "bf16"),
    ("bf16", "bf16 absorbed shards"),
]


def queries_times(factor):
    return lambda name, weight: weight * factor if name.endswith("q_b_proj.weight") else weight


def norms_spread(name, weight):
    if "norm" not in name:
        return weight
    return weight * torch.exp(torch.randn(weight.shape, generator=torch.Generator().manual_seed(3)))


def ffn_times_4(name, weight):
    return weight * 4 if ".mlp." in name and weight.dim() == 2 and "gate.weight" not in name else weight


# The product of the elements' sizes of query and key is 1 to 4 in the shipped model.
MODELS = {
    "attention 30 times as sharp": queries_times(30),
    "attention 100 times as sharp": queries_times(100),
    "norms from 0.1 to 10": norms_spread,
    "FFN weights times 4": ffn_times_4,
}


def make_model(folder, change):
    shutil.copytree(MODEL, folder)
    for file in folder.glob("*.safetensors"):
        weights = safetensors.torch.load_file(file)
        changed = {k: change(k, v.float()).to(v.dtype).contiguous() for k, v in weights.items()}
        safetensors.torch.save_file(changed, file, metadata={"format": "pt"})


def reference(model, trace, *options):
    command = [REFERENCE, "reference", model, "--trace", trace, "--max-tokens", "6", "--ignore-eos"]
    for prompt in PROMPTS:
        command += ["--prompt", prompt]
    return run(command + list(options))


@pytest.mark.parametrize("name", MODELS)
def test_right_runs_of_a_scaled_model_give_no_finding(name, tmp_path):
    make_model(tmp_path / "model", MODELS[name])
    for variant, options in VARIANTS.items():
        reference(tmp_path / "model", tmp_path / variant, *options)
    for a, b in PAIRS:
        result = diff(tmp_path / a, tmp_path / b)
        assert result["verdict"] in ("same", "noise"), f"{a} - {b}: {describe(result)}"
        assert result["coverage"]["share"] >= 0.95


FAULTS = {
    "lse-base-2@1": "layers.1.attn.chunk.0.lse",
    "scale-nope-dim@2": "layers.2.attn.out",
    "causal-off-by-one@1": "layers.1.attn.out",
    "wuv-wrong-head@3": "layers.3.attn.out",
    "rope-query-pairing@0": "layers.0.attn.q_pe",
    "mlp-gate-up-swapped@1": "layers.1.mlp.act",
    "post-norm-weight-missing@2": "layers.2.post_norm",
}


@pytest.mark.parametrize("name", ["attention 30 times as sharp", "norms from 0.1 to 10"])
def test_faults_of_a_scaled_model_are_named(name, tmp_path):
    make_model(tmp_path / "model", MODELS[name])
    for fault, first_bad in FAULTS.items():
        reference(tmp_path / "model", tmp_path / "a", "--fault", f"none:{fault}")
        reference(tmp_path / "model", tmp_path / "b", "--fault", fault)
        result = diff(tmp_path / "a", tmp_path / "b")
        assert result["verdict"] == "fault", f"{fault}: {describe(result)}"
        assert result["first_bad"]["name"] == first_bad, f"{fault}: {describe(result)}"
        for side in ("a", "b"):
            shutil.rmtree(tmp_path / side)

"""Small random checkpoints of every family that the native reference knows, against it; Mixtral against itself."""

import json

import assay
import pytest
from safetensors.numpy import load_file
from transformers_runs import ROOT, Runs, covered, describe, reference, sites_of

CHECKPOINTS = ROOT / "tests" / "parity" / "checkpoints"
# checkpoint -> precision and attention of its run; the arithmetic of the family is the same in all four
CASES = {
    "v3_groups_yarn": ("float32", "sdpa"),
    "v3_plain_rope_half_pairs": ("bfloat16", "eager"),
    "v3_no_q_latent": ("float32", "eager"),
    "v3_all_dense": ("bfloat16", "sdpa"),
    "kimi_k2": ("float32", "sdpa"),
    "glm_moe_dsa": ("float32", "eager"),
    "v2_greedy": ("float32", "sdpa"),
    "v2_groups": ("bfloat16", "eager"),
    "glm4_moe": ("float32", "sdpa"),
    "glm4": ("bfloat16", "sdpa"),
    "llama_gqa_llama3": ("float32", "sdpa"),
    "llama_yarn_no_truncate": ("bfloat16", "eager"),
    "mistral_window": ("float32", "eager"),
    "qwen2_bias_window": ("bfloat16", "sdpa"),
    "qwen3_window_layers": ("float32", "sdpa"),
    "qwen2_moe": ("float32", "eager"),
    "qwen3_moe": ("bfloat16", "sdpa"),
}


def prompt_of(name):
    tokens = load_file(CHECKPOINTS / name / "reference.safetensors")["tokens"]
    return tokens[: json.loads((CHECKPOINTS / name / "parity.json").read_text())["prompt"]].tolist()


def make_mixtral(folder):
    import torch
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(1)
    config = MixtralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=8, num_experts_per_tok=2, max_position_embeddings=128,
        bos_token_id=None, eos_token_id=None, sliding_window=None,
    )  # fmt: skip
    model = MixtralForCausalLM(config)
    for name, tensor in model.named_parameters():
        scale = 0.3 if "norm" in name else 1.0 if "embed" in name else 1.5 / tensor.shape[-1] ** 0.5
        tensor.data.normal_(std=scale).add_(1.0 if "norm" in name else 0.0)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    runs = Runs(tmp_path_factory.mktemp("families"))
    for name, (dtype, attention) in CASES.items():
        more = {"model_type": "deepseek_v3"} if name == "kimi_k2" else {}
        model = str(CHECKPOINTS / name)
        runs.add(name, model=model, prompts=[prompt_of(name)], dtype=dtype, attention=attention, **more)
        reference(runs.folder / f"reference-{name}", [prompt_of(name)], model=CHECKPOINTS / name)
    mixtral = str(make_mixtral(runs.folder / "mixtral-checkpoint"))
    for dtype, attention in (("float32", "eager"), ("float32", "sdpa"), ("bfloat16", "sdpa")):
        runs.add(f"mixtral-{dtype}-{attention}", model=mixtral, prompts=[[5, 9, 33, 2, 17, 60, 41]], dtype=dtype,
                 attention=attention)  # fmt: skip
    runs.run()
    return runs


@pytest.mark.parametrize("name", CASES)
def test_family_is_noise_against_the_reference(runs, name):
    result = runs.diff(f"reference-{name}", name)
    assert result.verdict == "noise", describe(result)
    assert result.coverage.share >= 0.9
    assert covered(runs.folder / f"reference-{name}", runs.folder / name) == 1.0


@pytest.mark.parametrize("other", ("float32-sdpa", "bfloat16-sdpa"))
def test_mixtral_agrees_with_itself(runs, other):
    result = runs.diff("mixtral-float32-eager", f"mixtral-{other}")
    assert result.verdict == "noise", describe(result)
    seen = sites_of(runs.folder / f"mixtral-{other}")
    for name in ("router_logits", "topk_ids", "topk_ids.margin", "topk_weights", "routed", "out"):
        assert f"layers.1.moe.{name}" in seen


def test_facts_say_what_ran(runs):
    meta = assay.open(runs.folder / "v2_groups").processes[0].meta
    assert meta["engine"] == "transformers"
    assert meta["attention"] == "eager"
    assert meta["dtype"] == "bfloat16"
    assert meta["model.kv_lora_rank"] == "16"

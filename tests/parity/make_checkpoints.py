"""Generates the parity checkpoints and their reference logits with real transformers.

    python tests/parity/make_checkpoints.py OUT [--case NAME ...] [--large] [--seed-offset N]

OUT/NAME holds config.json, the weights, and reference.safetensors:
  tokens      i64 [T]     the sequence; parity.json says how many of them are the prompt
  logits_f32  f32 [T, V]  transformers in float32
  logits_f64  f64 [T, V]  the same code in float64: its inner casts to float32 are widened (see in_float64), and the
                          script stops if any operation still yields a narrower float
and parity.json: {"prompt": n, "noise_f32": x, "error_f32": y}
  noise_f32   conditioning, measured: the largest change of any logit of the float64 model when every weight is disturbed
              by an independent relative error of up to 2^-24, the largest of four draws, over the largest |logit|
  error_f32   largest |logits_f32 - logits_f64| over the largest |logit|: how far transformers itself is off in float32
Also OUT/kjv-mla-10m with the last two files alone: the reference of the shipped model.
Weights are random from the case's seed. Norms, biases and the routers' correction bias are random too: left at ones and
zeros they would hide a bug. Everything runs on the CPU with eager attention and eager experts.
"""

import argparse
import contextlib
import copy
import dataclasses
import json
import pathlib
import shutil
import sys

import numpy as np
import safetensors.torch
import tokenizers
import torch
import transformers
from parity_cases import CASES, Case
from safetensors.numpy import save_file
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

SHIPPED = "kjv-mla-10m"
NARROW = (torch.float32, torch.float16, torch.bfloat16)


class _WideTorch:
    """The torch module with float32 meaning float64."""

    def __getattr__(self, name):
        return torch.float64 if name in ("float", "float32") else getattr(torch, name)


@contextlib.contextmanager
def in_float64():
    """Runs transformers' own modelling code with its casts to float32 widened to float64."""
    wide = _WideTorch()
    patched = [
        module
        for name, module in list(sys.modules.items())
        if name.startswith("transformers.") and getattr(module, "torch", None) is torch
    ]
    to_float = torch.Tensor.float
    try:
        for module in patched:
            module.torch = wide
        torch.Tensor.float = torch.Tensor.double
        yield
    finally:
        torch.Tensor.float = to_float
        for module in patched:
            module.torch = torch


class NothingNarrow(TorchDispatchMode):
    """Fails on any operation whose result is a float narrower than float64."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor) and tensor.dtype in NARROW:
                raise AssertionError(f"{func} yields {tensor.dtype}: the reference would not be float64")
        return out


def randomise(model, seed):
    """Fan-in scaled weights of about unit gain, so that attention and routing are far from uniform."""
    generator = torch.Generator().manual_seed(seed)

    def normal(shape, scale):
        return torch.randn(shape, generator=generator, dtype=torch.float64) * scale

    tensors = [*model.named_parameters(), *((n, b) for n, b in model.named_buffers() if "e_score_correction_bias" in n)]
    for name, tensor in sorted(tensors, key=lambda item: item[0]):
        if "norm" in name:
            value = 1 + 0.3 * normal(tensor.shape, 1.0)
        elif "e_score_correction_bias" in name:
            value = normal(tensor.shape, 0.2)
        elif tensor.ndim == 1:
            value = normal(tensor.shape, 0.3)
        elif "embed_tokens" in name:
            value = normal(tensor.shape, 1.0)
        else:
            value = normal(tensor.shape, 1.5 / tensor.shape[-1] ** 0.5)
        tensor.data.copy_(value)


def disturb(model, seed):
    """Multiplies every weight by 1 + 2^-24 x, x uniform in [-1, 1)."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in [*model.parameters(), *model.buffers()]:
        if tensor.is_floating_point():
            tensor.mul_(1 + 2**-24 * (2 * torch.rand(tensor.shape, generator=generator, dtype=torch.float64) - 1))


def logits_of(path, dtype, tokens, disturb_seeds=()):
    """Logits [T, V] of the checkpoint under `path`; with seeds, a list: undisturbed, then disturbed by each."""
    wide = dtype == torch.float64
    config = AutoConfig.from_pretrained(path)
    AutoModelForCausalLM._model_mapping[type(config)]  # imports the modelling code, so that in_float64 finds it
    with in_float64() if wide else contextlib.nullcontext(), torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(
            path, config=config, dtype=dtype, attn_implementation="eager", experts_implementation="eager"
        ).eval()
        model.to(dtype)  # modules kept in float32 on loading hold exact values either way
        for module in model.modules():
            if wide and hasattr(module, "inv_freq"):
                kind = module.rope_type
                init = module.compute_default_rope_parameters if kind == "default" else ROPE_INIT_FUNCTIONS[kind]
                module.inv_freq, module.attention_scaling = init(module.config)
                assert module.inv_freq.dtype == torch.float64

        def forward(m):
            with NothingNarrow() if wide else contextlib.nullcontext():
                return m(input_ids=tokens[None], use_cache=False).logits[0].numpy()

        results = [forward(model)]
        for seed in disturb_seeds:
            other = copy.deepcopy(model)
            disturb(other, seed)
            results.append(forward(other))
        return results if disturb_seeds else results[0]


def to_old_keys(config):
    """config.json as transformers 4 wrote it: rope_scaling with "type", rope_theta beside it, torch_dtype."""
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    rope["type"] = rope.pop("rope_type")
    config["rope_scaling"] = rope
    config["torch_dtype"] = config.pop("dtype")


def fuse_experts(path):
    """Rewrites per-expert tensors into transformers' in-memory form."""
    file = path / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    layers = sorted({n.split(".")[2] for n in tensors if ".mlp.experts." in n})
    for layer in layers:
        prefix = f"model.layers.{layer}.mlp.experts."
        count = len({n for n in tensors if n.startswith(prefix) and n.endswith("gate_proj.weight")})
        take = [
            {k: tensors.pop(f"{prefix}{e}.{k}_proj.weight") for k in ("gate", "up", "down")} for e in range(count)
        ]
        tensors[prefix + "gate_up_proj"] = torch.stack([torch.cat([w["gate"], w["up"]]) for w in take])
        tensors[prefix + "down_proj"] = torch.stack([w["down"] for w in take])
    safetensors.torch.save_file(tensors, file, metadata={"format": "pt"})


def write_reference(name, model, out, tokens, prompt):
    """Writes reference.safetensors and parity.json of the checkpoint `model` into `out`; returns the latter."""
    f64, *disturbed = logits_of(model, torch.float64, tokens, disturb_seeds=(10, 11, 12, 13))
    f32 = logits_of(model, torch.float32, tokens)
    scale = np.abs(f64).max()
    noise = max(np.abs(d - f64).max() for d in disturbed) / scale
    error = np.abs(f32 - f64).max() / scale
    if not error < 1e-4:
        sys.exit(f"{name}: float32 and float64 differ by {error:.2e}: a router tie? choose another seed")
    save_file({"tokens": tokens.numpy(), "logits_f32": f32, "logits_f64": f64}, out / "reference.safetensors")
    facts = {
        "prompt": prompt,
        "noise_f32": float(noise),
        "error_f32": float(error),
        "transformers": transformers.__version__,
    }
    (out / "parity.json").write_text(json.dumps(facts, indent=1) + "\n")
    return facts


def build_shipped(out: pathlib.Path):
    """The reference of models/kjv-mla-10m, on text of its own kind; its weights stay where they are."""
    model = pathlib.Path(__file__).resolve().parents[2] / "models" / SHIPPED
    path = out / SHIPPED
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    text = "And God said, Let there be light: and there was light."
    tokens = torch.tensor(tokenizers.Tokenizer.from_file(str(model / "tokenizer.json")).encode(text).ids)
    report(SHIPPED, path, write_reference(SHIPPED, model, path, tokens, 8))


def report(name, path, facts):
    size = sum(f.stat().st_size for f in path.iterdir())
    noise, error = facts["noise_f32"], facts["error_f32"]
    print(f"{name:32s} {size / 1024:8.0f} KiB  noise {noise:.1e}  transformers f32 error {error:.1e}", flush=True)


def build(case: Case, out: pathlib.Path):
    path = out / case.name
    shutil.rmtree(path, ignore_errors=True)
    config = AutoConfig.for_model(case.model_type, **case.config)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    randomise(model, case.seed)
    model = model.to(getattr(torch, case.dtype))
    model.save_pretrained(path, **({"max_shard_size": case.shard_bytes} if case.shard_bytes else {}))
    (path / "generation_config.json").unlink(missing_ok=True)

    generator = torch.Generator().manual_seed(1000 + case.seed)
    tokens = torch.randint(0, case.config["vocab_size"], (case.total,), generator=generator)
    facts = write_reference(case.name, path, path, tokens, case.prompt)

    text = json.loads((path / "config.json").read_text())
    if case.old_keys:
        to_old_keys(text)
    if case.rename:
        text["model_type"] = case.rename
    (path / "config.json").write_text(json.dumps(text, indent=1) + "\n")
    if case.fuse_experts:
        fuse_experts(path)
    report(case.name, path, facts)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--case", action="append", help="only this one (repeatable)")
    parser.add_argument("--large", action="store_true", help="the large ones too")
    parser.add_argument("--seed-offset", type=int, default=0, help="added to every case's seed: other weights and tokens")
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    known = {c.name for c in CASES} | {SHIPPED}
    for name in args.case or []:
        if name not in known:
            parser.error(f"no case {name}; there are {', '.join(sorted(known))}")
    for case in CASES:
        if case.name in args.case if args.case else args.large or not case.large:
            build(dataclasses.replace(case, seed=case.seed + args.seed_offset), args.out)
    if not args.case or SHIPPED in args.case:
        build_shipped(args.out)


if __name__ == "__main__":
    main()

"""A program that uses transformers and knows nothing of assay: what the tests attach to.

    python transformers_host.py JOBS.json

JOBS.json is a list of jobs; each runs in a forked child, so that all of them share one import of torch and each is one
recorded process. A job:
  env       variables to set first ({"ASSAY_DIR": ...})
  model     checkpoint folder; model_type: in place of the one in its config.json
  dtype     "float32" or "bfloat16"; attention: "eager", "sdpa"; options: more arguments of generate()
  prompts   lists of token ids, one batch, padded on the left; batches: several such lists, one generate() after another
  tokens    to generate; loop: "generate" (default), "forward" (model called by hand with a cache), "uncached", "once"
            (one forward over prompts padded on the right)
  compile   {"how": ..., "backend": ...}: torch.compile of the model ("module"), its forward ("forward"), itself in place
            ("in-place"), its layers ("layers"), a function that holds it ("function") or is given it ("argument"), or by
            generate() itself ("generate"); always fullgraph
  fault     {"kind": "stale" | "pairing" | "shared-twice", "layer": N}, put into transformers' code before it runs
  result    file for {"tokens": [[...]], "logits": sha256 of all logits in order}
The faults are what the tests must see named, and are defined here alone.
"""

import hashlib
import importlib
import json
import os
import pathlib
import sys

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, CompileConfig

PAD = 0


def padded(prompts, right=False):
    width = max(len(p) for p in prompts)
    if right:
        mask = torch.tensor([[1] * len(p) + [0] * (width - len(p)) for p in prompts])
        return torch.tensor([p + [PAD] * (width - len(p)) for p in prompts]), mask
    ids = torch.tensor([[PAD] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    return ids, mask


class StaleLinear(torch.nn.Linear):
    """A projection whose last two rows are not written: they hold what the buffer had at the call before."""

    before = None

    def forward(self, x):
        out = super().forward(x)
        rows = out.view(-1, out.shape[-1])
        if self.before is not None and rows.shape[0] > 2:
            rows[-2:] = self.before
        if rows.shape[0] > 2:
            StaleLinear.before = rows[:2].clone()
        return out


def plant(model, kind, layer):
    """Puts a fault into transformers' own code (and into this model)."""
    modeling = sys.modules[type(model).__module__]
    attention = model.model.layers[layer].self_attn
    if kind == "stale":
        attention.o_proj.__class__ = StaleLinear
    elif kind == "pairing":
        right = modeling.apply_rotary_pos_emb_interleave
        current = []
        forward = type(attention).forward

        def attend(self, *args, **kwargs):
            current[:] = [self.layer_idx]
            return forward(self, *args, **kwargs)

        def rotate(q, k, cos, sin, **more):
            q_right, k_right = right(q, k, cos, sin, **more)
            if current != [layer]:
                return q_right, k_right
            half, _ = modeling.apply_rotary_pos_emb(q, k, cos, sin)
            return torch.cat((half[..., 0::2], half[..., 1::2]), dim=-1), k_right

        type(attention).forward = attend
        modeling.apply_rotary_pos_emb_interleave = rotate
    elif kind == "shared-twice":
        moe = model.model.layers[layer].mlp
        forward = type(moe).forward

        def twice(self, hidden_states):
            out = forward(self, hidden_states)
            return out + self.shared_experts(hidden_states) if self is moe else out

        type(moe).forward = twice
    else:
        raise ValueError(kind)


def model_type_of(job):
    return job.get("model_type") or json.loads((pathlib.Path(job["model"]) / "config.json").read_text())["model_type"]


def load(job):
    path = pathlib.Path(job["model"])
    config = None
    if "model_type" in job:
        text = json.loads((path / "config.json").read_text())
        config = AutoConfig.for_model(job["model_type"], **{k: v for k, v in text.items() if k != "model_type"})
    return AutoModelForCausalLM.from_pretrained(
        path, config=config, dtype=getattr(torch, job["dtype"]), attn_implementation=job.get("attention", "sdpa")
    ).eval()


def compiled(model, how, backend="eager"):
    """What to call in place of the model."""
    options = {"fullgraph": True, "backend": backend}
    if how == "module":
        return torch.compile(model, **options)
    if how == "function":
        return torch.compile(lambda *args, **given: model(*args, **given), **options)
    if how == "argument":
        step = torch.compile(lambda called, *args, **given: called(*args, **given), **options)
        return lambda *args, **given: step(model, *args, **given)
    if how == "forward":
        model.forward = torch.compile(model.forward, **options)
    elif how == "in-place":
        model.compile(**options)
    elif how == "layers":
        for layer in model.model.layers:
            layer.compile(**options)
    return model


def generate(model, job, ids, mask):
    options = dict(job.get("options", {}))
    if job.get("compile", {}).get("how") == "generate":
        options["compile_config"] = CompileConfig(fullgraph=True, backend=job["compile"].get("backend", "eager"))
        options["compile_config"]._compile_all_devices = True  # by itself it compiles for devices alone
    out = model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=job["tokens"],
        do_sample=False,
        pad_token_id=PAD,
        eos_token_id=None,
        return_dict_in_generate=True,
        output_logits=True,
        **options,
    )
    return out.sequences[:, ids.shape[1] :], list(out.logits)


@torch.no_grad()
def by_hand(model, called, job, ids, mask, cached):
    """The loop that people write: the model called by hand, the newest token alone with a cache, all without one."""
    logits, new, cache = [], [], None
    for _ in range(job["tokens"]):
        given = ids[:, -1:] if cached and cache is not None else ids
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -given.shape[1] :]
        more = {}
        name = "cache" if "cache" in type(model.model).forward.__code__.co_varnames else "past_key_values"
        if cached:
            more[name] = cache
        out = called(input_ids=given, attention_mask=mask, position_ids=positions, use_cache=cached, **more)
        cache = getattr(out, name, None) if cached else None
        logits.append(out.logits[:, -1])
        new.append(out.logits[:, -1].argmax(-1, keepdim=True))
        ids = torch.cat((ids, new[-1]), dim=1)
        mask = torch.cat((mask, torch.ones_like(new[-1])), dim=1)
    return torch.cat(new, dim=1), logits


def run(job):
    os.environ.update(job.get("env", {}))
    model = load(job)
    if "fault" in job:
        plant(model, **job["fault"])
    called = compiled(model, **job["compile"]) if "compile" in job else model
    digest, tokens = hashlib.sha256(), []
    for prompts in job.get("batches") or [job["prompts"]]:
        loop = job.get("loop", "generate")
        ids, mask = padded(prompts, right=loop == "once")
        if loop == "once":
            with torch.no_grad():
                logits = [called(ids, attention_mask=mask, use_cache=False).logits]
            new = logits[0].argmax(-1)
        elif loop == "generate":
            new, logits = generate(model, job, ids, mask)
        else:
            new, logits = by_hand(model, called, job, ids, mask, loop == "forward")
        tokens += new.tolist()
        for row in logits:
            digest.update(row.contiguous().view(torch.uint8).numpy().tobytes())
    if "result" in job:
        pathlib.Path(job["result"]).write_text(json.dumps({"tokens": tokens, "logits": digest.hexdigest()}))


def main():
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    jobs = json.loads(pathlib.Path(sys.argv[1]).read_text())
    for model_type in sorted({model_type_of(job) for job in jobs}):  # what a run imports, once for all children
        AutoModelForCausalLM._model_mapping[type(AutoConfig.for_model(model_type))]
    importlib.import_module("transformers.generation.candidate_generator")
    failed = 0
    for job in jobs:
        child = os.fork()
        if child == 0:
            run(job)
            sys.exit(0)  # atexit included: the recording is closed there
        _, status = os.waitpid(child, 0)
        if status:
            failed += 1
            print(f"job {jobs.index(job)} ended with status {status}", file=sys.stderr)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()

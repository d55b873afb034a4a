"""Cost of observing a transformers model while it decodes: the shipped model, bf16, one thread.

    bench_attach.py [--json FILE] [--rounds N] [--tokens N] [--model DIR]

Processor time a token of generate(), the prompt's forward included. Each way of observing has its own process; the
processes take turns, one generate() each a round, so that all of them meet the same machine. Reported is the median
over the rounds of the ratio to the unobserved process of the same round; beside it the fastest round against the fastest,
which other work on the machine disturbs less.

  modules    the output of every module (79) with statistics, sketch, grids and recording
  profile    what the transformers profile records: 103 canonical sites, the router's choice computed again
  disarmed   the same, with the recording paused: what finding the tensors costs
  empty hook for comparison: a forward hook a module that does nothing
  norm hook  for comparison: a forward hook that writes one norm a module into a list
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
WAYS = ("off", "modules", "disarmed", "profile", "empty hook", "norm hook")
ATTACHED = ("modules", "disarmed", "profile")


def attach(way: str, folder: str) -> None:
    """Before anything is imported."""
    sys.path.insert(0, str(ROOT / "python"))
    os.environ.update({"ASSAY": "all", "ASSAY_DIR": folder})
    os.environ["ASSAY_ATTACH"] = "transformers" if way == "profile" else "none"
    if way in ("modules", "disarmed"):
        os.environ["ASSAY_PROBES"] = "module:*:out"
    import assay.attach

    assay.attach.start()


def child(way: str, folder: str, model_path: str, tokens: int, pipe: Any) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    if way in ATTACHED:
        attach(way, folder)
    import torch
    import transformers
    from transformers import AutoModelForCausalLM

    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.bfloat16).eval()
    norms: list[float] = []
    if way in ("modules", "disarmed"):
        from assay.attach import session

        attached = session()
        assert attached is not None
        trace = attached.trace()
        assert trace is not None
        trace.arm(way == "modules")
    if way == "norm hook":

        def hook(module: Any, args: Any, output: Any) -> None:
            tensor = output[0] if isinstance(output, tuple) else output
            if isinstance(tensor, torch.Tensor):
                norms.append(tensor.float().norm().item())

        for module in model.modules():
            module.register_forward_hook(hook)
    if way == "empty hook":
        for module in model.modules():
            module.register_forward_hook(lambda module, args, output: None)
    ids = torch.arange(5, 21)[None]
    mask = torch.ones_like(ids)
    while pipe.recv():
        begin = time.process_time()
        model.generate(
            ids, attention_mask=mask, max_new_tokens=tokens, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        pipe.send((time.process_time() - begin) / tokens * 1e3)
        norms.clear()
    if way in ATTACHED:
        from assay import current

        trace = current()
        assert trace is not None
        pipe.send(trace.drops().recorded)
    pipe.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "kjv-mla-10m")
    options = parser.parse_args()
    spawn = multiprocessing.get_context("spawn")
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = {}, []
        for way in WAYS:
            pipes[way], other = spawn.Pipe()
            place = str(Path(folder) / way.replace(" ", "-"))
            processes.append(spawn.Process(target=child, args=(way, place, str(options.model), options.tokens, other)))
            processes[-1].start()
            other.close()
        for turn in range(options.rounds + 2):
            for way in WAYS:
                pipes[way].send(True)
                taken = pipes[way].recv()
                if turn >= 2:  # warm
                    times[way].append(taken)
        events = {}
        for way in WAYS:
            pipes[way].send(False)
            if way in ATTACHED:
                events[way] = pipes[way].recv() / (options.rounds + 2) / options.tokens
        for process in processes:
            process.join()
            assert process.exitcode == 0
    off = times["off"]
    results = []
    print(f"unobserved: {statistics.median(off):.2f} ms a token", file=sys.stderr)
    for way in WAYS[1:]:
        ratios = [a / b for a, b in zip(times[way], off)]
        more = f", {events[way]:.0f} events a token" if way in events else ""
        print(
            f"{way}: {statistics.median(ratios):.3f} x (quartiles {statistics.quantiles(ratios)[0]:.3f} to "
            f"{statistics.quantiles(ratios)[2]:.3f}; fastest against fastest {min(times[way]) / min(off):.3f}){more}",
            file=sys.stderr,
        )
        results.append(
            {
                "name": f"attach.decode.{way.replace(' ', '-')}",
                "value": statistics.median(times[way]),
                "unit": "ms/token",
                "baseline": "unobserved",
                "baseline_value": statistics.median(off),
            }
        )
    text = json.dumps({"schema": "assay.bench/1", "results": results}, indent=1)
    if options.json:
        options.json.write_text(text + "\n")
    else:
        print(text)


if __name__ == "__main__":
    main()

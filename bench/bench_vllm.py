"""What recording costs a decode step of vLLM: an engine without assay and one with it, armed and disarmed, in turns.

    ASSAY=mla ASSAY_DIR=/tmp/bench python bench/bench_vllm.py [--eager] [--lite] [--requests N ...] [--tokens N] [--rounds N]

Prints, a line for each number of requests at once, milliseconds a decode step, by the clock and in processor time of
the worker: medians over rounds, and the median of the ratios within a round. Each round generates the same tokens three
times. Processor time is the better figure on a machine that does other work. An engine has one thread, so that the two do
not wait for each other's.

--lite takes a model of the widths of DeepSeek-V2-Lite (deepseek-ai/DeepSeek-V2-Lite, config.json) with 4 of its 27 layers
and random weights (4 GB for each engine), in place of the one that comes with the project.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import pathlib
import shutil
import statistics
import tempfile
import time
from typing import Any

os.environ.setdefault("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # collective_rpc with a function
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("OMP_NUM_THREADS", "1")

MODEL = pathlib.Path(__file__).parents[1] / "models" / "kjv-mla-10m"

LITE = {
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "qk_head_dim": 192,
    "v_head_dim": 128,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "n_routed_experts": 64,
    "num_experts_per_tok": 6,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "num_hidden_layers": 4,
}

WAYS = ("unobserved", "disarmed", "armed")


def arm(worker: object, on: bool) -> tuple[int, float]:
    """In a worker: pauses or resumes its recording; events so far and the processor time of the process in seconds."""
    if os.environ.get("ASSAY", "off") in ("", "0", "off"):
        return 0, time.process_time()
    import assay.attach

    session = assay.attach.session()
    trace = session.trace() if session is not None else None
    if trace is None:
        return -1, time.process_time()
    trace.arm(on)
    return trace.drops().recorded, time.process_time()


def lite(folder: str) -> str:
    """A folder with a configuration of LITE's widths and our tokenizer, without weights."""
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(MODEL / name, folder)
    config = {**json.loads((MODEL / "config.json").read_text()), **LITE}
    (pathlib.Path(folder) / "config.json").write_text(json.dumps(config))
    return folder


def engine(options: argparse.Namespace, pipe: Any) -> None:
    """Generates each time that it is told to; sends milliseconds a step by the clock and the processor, and events."""
    from vllm import LLM, SamplingParams

    weights = "dummy" if options.lite else "auto"
    llm = LLM(
        model=options.model,
        load_format=weights,
        enforce_eager=options.eager,
        gpu_memory_utilization=0.2,
        max_model_len=512,
    )
    sampling = SamplingParams(temperature=0, max_tokens=options.tokens, ignore_eos=True)
    while (told := pipe.recv()) is not None:
        requests, on = told
        names = ("Noah", "Saul", "David", "Asa") * requests
        prompts = [f"And it came to pass in the days of {name}" for name in names[:requests]]
        recorded, used = llm.collective_rpc(arm, args=(on,))[0]
        start = time.perf_counter()
        llm.generate(prompts, sampling, use_tqdm=False)
        took = time.perf_counter() - start
        recorded_now, used_now = llm.collective_rpc(arm, args=(on,))[0]
        per_step = 1000 / options.tokens
        pipe.send((took * per_step, (used_now - used) * per_step, (recorded_now - recorded) / options.tokens))


def start(options: argparse.Namespace, profile: str) -> tuple[Any, Any]:
    """A process with an engine, and the pipe to it."""
    spawn = multiprocessing.get_context("spawn")
    pipe, others = spawn.Pipe()
    before = os.environ.get("ASSAY", "")
    os.environ["ASSAY"] = profile  # what attaches reads it as the process begins
    try:
        process = spawn.Process(target=engine, args=(options, others))
        process.start()
    finally:
        os.environ["ASSAY"] = before
    return process, pipe


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=15)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--model", default=str(MODEL))
    which.add_argument("--lite", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if options.lite:
            options.model = lite(folder)
        measure(options)


def measure(options: argparse.Namespace) -> None:
    profile = os.environ.get("ASSAY", "")
    plain, attached = start(options, "off"), start(options, profile)
    pipes = {"unobserved": plain[1], "disarmed": attached[1], "armed": attached[1]}
    for requests in options.requests:
        found: dict[str, list[tuple[float, float, float]]] = {way: [] for way in WAYS}
        for turn in range(options.rounds + 2):
            for way in WAYS:
                pipes[way].send((requests, way == "armed"))
                result = pipes[way].recv()
                if turn >= 2:  # warm
                    found[way].append(result)
        print(json.dumps(summary(options, profile, requests, found)), flush=True)
    for process, pipe in (plain, attached):
        pipe.send(None)
        process.join(timeout=60)
        process.kill()  # what its engine waits for at its end is not our business


def summary(
    options: argparse.Namespace, profile: str, requests: int, found: dict[str, list[tuple[float, float, float]]]
) -> dict[str, object]:
    results: dict[str, object] = {
        "schema": "assay.bench_vllm/1",
        "mode": "eager" if options.eager else "compiled",
        "profile": profile,
        "model": pathlib.Path(options.model).name if not options.lite else "lite",
        "requests": requests,
        "tokens": options.tokens,
        "rounds": options.rounds,
        "events_a_step": round(found["armed"][-1][2], 1),
    }
    for number, what in enumerate(("clock", "processor")):
        for way in WAYS:
            results[f"{way}_{what}_ms"] = round(statistics.median(times[number] for times in found[way]), 3)
        for way, base in (("armed", "disarmed"), ("armed", "unobserved"), ("disarmed", "unobserved")):
            ratios = [a[number] / b[number] for a, b in zip(found[way], found[base])]
            results[f"{way}_to_{base}_{what}"] = round(statistics.median(ratios), 4)
    return results


if __name__ == "__main__":
    main()

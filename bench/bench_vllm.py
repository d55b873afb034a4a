"""What recording costs a decode step of vLLM: an engine without assay and one with it, armed and disarmed, in turns.

    ASSAY=mla ASSAY_DIR=/tmp/bench python bench/bench_vllm.py [--eager] [--requests N ...] [--tokens N] [--rounds N]

Prints, a line for each number of requests at once, milliseconds a decode step, by the clock and in processor time of
the worker: medians over rounds, and the median of the ratios within a round. Each round generates the same tokens three times. Processor time is the better figure on a
machine that does other work.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import pathlib
import statistics
import time
from typing import Any

os.environ.setdefault("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # collective_rpc with a function

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


def engine(options: argparse.Namespace, pipe: Any) -> None:
    """Generates each time that it is told to; sends milliseconds a step by the clock and the processor, and events."""
    from vllm import LLM, SamplingParams

    llm = LLM(model=options.model, enforce_eager=options.eager, gpu_memory_utilization=0.2, max_model_len=512)
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
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=30)
    model = pathlib.Path(__file__).parents[1] / "models" / "kjv-mla-10m"
    parser.add_argument("--model", default=str(model))
    options = parser.parse_args()
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
        print(json.dumps(summary(options.eager, profile, requests, found)), flush=True)
    for process, pipe in (plain, attached):
        pipe.send(None)
        process.join()


def summary(
    eager: bool, profile: str, requests: int, found: dict[str, list[tuple[float, float, float]]]
) -> dict[str, object]:
    results: dict[str, object] = {
        "schema": "assay.bench_vllm/1",
        "mode": "eager" if eager else "compiled",
        "profile": profile,
        "requests": requests,
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

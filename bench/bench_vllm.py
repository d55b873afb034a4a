"""What recording costs a decode step of vLLM, armed and disarmed in turns within one engine.

    ASSAY=mla ASSAY_DIR=/tmp/bench python bench/bench_vllm.py [--eager] [--requests N] [--tokens N] [--rounds N]

Prints milliseconds a decode step, by the clock and in processor time of the worker: medians over rounds, and the median
ratio of neighbouring rounds. Each round generates the same tokens. Processor time is the better figure on a machine that
does other work.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import time

os.environ.setdefault("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # collective_rpc with a function


def arm(worker: object, on: bool) -> tuple[int, float]:
    """In a worker: pauses or resumes its recording; events so far and the processor time of the process in seconds."""
    import assay.attach

    session = assay.attach.session()
    trace = session.trace() if session is not None else None
    if trace is None:
        return -1, time.process_time()
    trace.arm(on)
    return trace.drops().recorded, time.process_time()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=8)
    model = pathlib.Path(__file__).parents[1] / "models" / "kjv-mla-10m"
    parser.add_argument("--model", default=str(model))
    options = parser.parse_args()

    from vllm import LLM, SamplingParams

    llm = LLM(model=options.model, enforce_eager=options.eager, gpu_memory_utilization=0.2, max_model_len=512)
    prompts = [f"And it came to pass in the days of {name}" for name in ("Noah", "Saul", "David", "Asa")] * options.requests
    prompts = prompts[: options.requests]
    sampling = SamplingParams(temperature=0, max_tokens=options.tokens, ignore_eos=True)
    clock: dict[bool, list[float]] = {True: [], False: []}
    processor: dict[bool, list[float]] = {True: [], False: []}
    events = 0
    for turn in range(2 * options.rounds + 2):
        on = turn % 2 == 0
        recorded, used = llm.collective_rpc(arm, args=(on,))[0]
        start = time.perf_counter()
        llm.generate(prompts, sampling, use_tqdm=False)
        took = time.perf_counter() - start
        recorded_now, used_now = llm.collective_rpc(arm, args=(on,))[0]
        if turn >= 2:  # the first of each warms up
            clock[on].append(1000 * took / options.tokens)
            processor[on].append(1000 * (used_now - used) / options.tokens)
            events = recorded_now - recorded if on else events
    print(
        json.dumps(
            {
                "schema": "assay.bench_vllm/1",
                "mode": "eager" if options.eager else "compiled",
                "profile": os.environ.get("ASSAY", ""),
                "requests": options.requests,
                "events_a_step": round(events / options.tokens, 1),
                **{
                    f"{state}_{what}_ms": round(statistics.median(times[on]), 3)
                    for what, times in (("clock", clock), ("processor", processor))
                    for state, on in (("armed", True), ("disarmed", False))
                },
                **{
                    f"{what}_ratio": round(statistics.median(a / b for a, b in zip(times[True], times[False])), 4)
                    for what, times in (("clock", clock), ("processor", processor))
                },
            }
        )
    )


if __name__ == "__main__":
    main()

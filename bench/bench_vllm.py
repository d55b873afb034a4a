"""What recording costs a decode step of vLLM, armed and disarmed in turns within one engine.

    ASSAY=mla ASSAY_DIR=/tmp/bench python bench/bench_vllm.py [--eager] [--requests N] [--tokens N] [--rounds N]

Prints milliseconds a decode step: the median over rounds, and the ratio of the two. Each round generates the same tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import time

os.environ.setdefault("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # collective_rpc with a function


def arm(worker: object, on: bool) -> int:
    """In a worker: pauses or resumes its recording; the number of events so far, -1 when nothing is attached."""
    import assay.attach

    session = assay.attach.session()
    trace = session.trace() if session is not None else None
    if trace is None:
        return -1
    trace.arm(on)
    return trace.drops().recorded


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
    times: dict[bool, list[float]] = {True: [], False: []}
    events = [0, 0]
    for turn in range(2 * options.rounds + 2):
        on = turn % 2 == 0
        before = llm.collective_rpc(arm, args=(on,))[0]
        start = time.perf_counter()
        llm.generate(prompts, sampling, use_tqdm=False)
        took = 1000 * (time.perf_counter() - start) / options.tokens
        if turn >= 2:  # the first of each warms up
            times[on].append(took)
            events[on] = llm.collective_rpc(arm, args=(on,))[0] - before
    pairs = [a / b for a, b in zip(times[True], times[False])]
    print(
        json.dumps(
            {
                "schema": "assay.bench_vllm/1",
                "mode": "eager" if options.eager else "compiled",
                "profile": os.environ.get("ASSAY", ""),
                "requests": options.requests,
                "events_a_step": round(events[True] / options.tokens, 1),
                "armed_ms": round(statistics.median(times[True]), 3),
                "disarmed_ms": round(statistics.median(times[False]), 3),
                "ratio": round(statistics.median(pairs), 4),
            }
        )
    )


if __name__ == "__main__":
    main()

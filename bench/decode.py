"""Native decode against transformers: the shipped model, CPU, float32, greedy, one request, in the same run.

Both decode the same number of tokens after the same prompt, with the end token ignored; both are timed over decode
alone, nine times, alternating, and the medians are reported: once with one thread each, once with all cores each. The
native runtime runs both attention paths. transformers runs DeepseekV3ForCausalLM with a dynamic cache.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import time

PROMPT = [0, 100, 200, 300, 400, 500, 600, 700]
NEW_TOKENS = 128
RUNS = 9


def native(program: str, model: pathlib.Path, path: str, threads: int) -> float:
    """Tokens per second of one run."""
    command = [program, "--model", str(model), "--path", path, "--threads", str(threads), "--runs", "1",
               "--new-tokens", str(NEW_TOKENS), "--prompt-tokens", ",".join(map(str, PROMPT))]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def transformers_decoder(model_dir: pathlib.Path):
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()

    @torch.inference_mode()
    def run(threads: int) -> float:
        torch.set_num_threads(threads)
        out = model(torch.tensor([PROMPT]), use_cache=True)
        token = out.logits[:, -1:].argmax(-1)
        start = time.perf_counter()
        # The prefill gave the first token; NEW_TOKENS - 1 decode steps give the others.
        for _ in range(NEW_TOKENS - 1):
            out = model(token, past_key_values=out.past_key_values, use_cache=True)
            token = out.logits[:, -1:].argmax(-1)
        return (NEW_TOKENS - 1) / (time.perf_counter() - start)

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--program", required=True)
    parser.add_argument("--json", type=pathlib.Path, required=True)
    parser.add_argument("--model", type=pathlib.Path,
                        default=pathlib.Path(__file__).resolve().parent.parent / "models" / "kjv-mla-10m")
    arguments = parser.parse_args()
    reference = transformers_decoder(arguments.model)

    results = []
    for threads in sorted({1, len(os.sched_getaffinity(0))}):
        reference(threads)  # warm-up
        rates: dict[str, list[float]] = {"materialised": [], "absorbed": [], "transformers": []}
        for _ in range(RUNS):
            for path in ("materialised", "absorbed"):
                rates[path].append(native(arguments.program, arguments.model, path, threads))
            rates["transformers"].append(reference(threads))
        for path in ("materialised", "absorbed"):
            results.append({"name": f"decode.f32.{path}.threads_{threads}", "value": statistics.median(rates[path]),
                            "unit": "tokens/s", "baseline": "transformers CPU f32, same threads",
                            "baseline_value": statistics.median(rates["transformers"])})
    arguments.json.write_text(json.dumps({"schema": "assay.bench/1", "results": results}))


if __name__ == "__main__":
    main()

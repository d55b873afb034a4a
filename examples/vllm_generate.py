"""A few words from the shipped model, in vLLM; it knows nothing of assay (docs/vllm.md).

    assay run --dir vllm.trace -- python examples/vllm_generate.py
"""

import os
import pathlib

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB; the model is small

MODEL = pathlib.Path(__file__).resolve().parents[1] / "models" / "kjv-mla-10m"


def main() -> None:
    from vllm import LLM, SamplingParams

    llm = LLM(model=str(MODEL), gpu_memory_utilization=0.2, max_model_len=512)
    prompts = ["In the beginning God created", "And Moses said unto the people"]
    for answer in llm.generate(prompts, SamplingParams(temperature=0, max_tokens=16)):
        print(answer.prompt + answer.outputs[0].text)


if __name__ == "__main__":
    main()

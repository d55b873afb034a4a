"""The same prompts in transformers, token ids from a file of generate.py: python transformers_generate.py ANSWERS.json"""

import json
import pathlib
import sys

import torch
from transformers import AutoModelForCausalLM

MODEL = pathlib.Path(__file__).resolve().parents[2] / "models" / "kjv-mla-10m"


def main() -> None:
    answers = json.loads(pathlib.Path(sys.argv[1]).read_text())
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.bfloat16).eval()
    for answer in answers:
        n = len(answer["tokens"])
        with torch.no_grad():
            model.generate(torch.tensor([answer["prompt"]]), max_new_tokens=n, min_new_tokens=n, do_sample=False)


if __name__ == "__main__":
    main()

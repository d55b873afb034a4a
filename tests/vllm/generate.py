"""A user's program: generates with vLLM and knows nothing of assay. python generate.py OUT.json '{"engine": {...}}'"""

import json
import pathlib
import sys

MODEL = pathlib.Path(__file__).resolve().parents[2] / "models" / "kjv-mla-10m"
PLACES = ["Egypt", "Canaan", "Moab", "Edom", "Gilead", "Hebron", "Shiloh", "Bethel", "Sodom", "Judah"]
OPENINGS = [
    "In the beginning God created {}",
    "And Moses said unto the men of {}",
    "Now it came to pass in the land of {}, that",
    "Then went the king down to {}",
    "And the LORD spake against {}, saying,",
    "Blessed be the people of {}",
    "Woe unto {}! for they have",
    "And they departed from {}, and",
    "The burden of {}. Behold,",
    "He dwelt by the river of {}, and there",
]
LONG = (
    "And it came to pass after these things, that God did tempt Abraham, and said unto him, Abraham: and he said, "
    "Behold, here I am. And he said, Take now thy son, thine only son Isaac, whom thou lovest, and get thee into the "
    "land of Moriah; and offer him there for a burnt offering upon one of the mountains which I will tell thee of. "
)


def prompts(n: int, long: bool) -> list[str]:
    """n different prompts, every length of step; with long, two more that share more than a block of tokens."""
    short = [opening.format(place) for place in PLACES for opening in OPENINGS][:n]
    return short + ([LONG, LONG + "And Abraham rose up early in the morning"] if long else [])


def main() -> None:
    out, options = sys.argv[1], json.loads(sys.argv[2])
    from vllm import LLM, SamplingParams

    engine = {"gpu_memory_utilization": 0.2, "max_model_len": 512, **options.get("engine", {})}
    llm = LLM(model=str(MODEL), **engine)
    sampling = SamplingParams(temperature=0, max_tokens=options.get("tokens", 8), ignore_eos=True, logprobs=20)
    texts = prompts(options.get("prompts", 8), options.get("long", False))
    answers = llm.generate(texts, sampling, use_tqdm=False)
    if options.get("long"):  # once more: the blocks are in the prefix cache now
        answers += llm.generate([LONG + "And Isaac spake unto Abraham"], sampling, use_tqdm=False)
    result = [
        {
            "prompt": list(a.prompt_token_ids),
            "tokens": list(a.outputs[0].token_ids),
            "text": a.outputs[0].text,
            "logprobs": [sorted((t, p.logprob) for t, p in step.items()) for step in a.outputs[0].logprobs],
        }
        for a in answers
    ]
    pathlib.Path(out).write_text(json.dumps(result))


if __name__ == "__main__":
    main()

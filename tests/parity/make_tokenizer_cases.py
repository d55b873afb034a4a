"""Writes strings and their ids by the real `tokenizers` package, for tests/model/test_tokenizer.cpp.

    python tests/parity/make_tokenizer_cases.py OUT.json [--count N] [--seed S]

Strings mix words of the model's own kind with contractions, white space of every kind, digits of several scripts,
combining marks, emoji, added tokens, and code points drawn from all of Unicode.
"""

import argparse
import json
import pathlib
import random

import tokenizers

TOKENIZER = pathlib.Path(__file__).resolve().parents[2] / "models" / "kjv-mla-10m" / "tokenizer.json"

FIXED = [
    "",
    " ",
    "\n",
    "In the beginning God created the heaven and the earth.",
    "don't he'll I'm you've 'Re 's'tx 're''ll",
    "a  b   c\t\td\r\n\r\ne \u00a0f\u3000\u3000g\u2028h\u0085i",
    "1234 5,678.90 \u0661\u0662\u0663 \u00bd \u2167 \u5341",
    "caf\u00e9 cafe\u0301 na\u00efve \u65e5\u672c\u8a9e \ud55c\uad6d\uc5b4 \u0939\u093f\u0928\u094d\u0926\u0940 \u0e44\u0e17\u0e22",
    "\U0001f4a9\U0001f469\u200d\U0001f4bb \U0001f1e9\U0001f1ea",
    "<|begin|>And<|end|> <|pad|><|begin|<|end|>",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "\x00\x01\x1c\x1f\x7f\x80\xad",
    "x = {'a': [1, 2]}; // comment\n\tif (x != y) { return -1; }",
]
WORDS = "In the beginning God created heaven and earth LORD said unto Moses shall not thou art begat Selah".split()
PIECES = [" ", " ", " ", "  ", "\n", "\t", "'s", "'ll", "'", ",", ".", "12", "7", "\u00e9", "\u3000", "<|end|>", "\u0301"]


def random_text(rng):
    parts = []
    for _ in range(rng.randint(1, 12)):
        kind = rng.random()
        if kind < 0.5:
            parts.append(rng.choice(WORDS))
        elif kind < 0.85:
            parts.append(rng.choice(PIECES))
        else:
            code = rng.choice([rng.randrange(0x20, 0x500), rng.randrange(0x500, 0x3100), rng.randrange(0x110000)])
            parts.append("" if 0xD800 <= code < 0xE000 else chr(code))
    return "".join(parts)


def cases(count, seed):
    rng = random.Random(seed)
    encode = tokenizers.Tokenizer.from_file(str(TOKENIZER)).encode
    texts = FIXED + [random_text(rng) for _ in range(count)]
    return [{"text": t, "ids": encode(t).ids} for t in texts]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--count", type=int, default=150, help="random strings")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    lines = ",\n".join(json.dumps(c) for c in cases(args.count, args.seed))
    args.out.write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main()

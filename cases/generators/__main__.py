"""Writes recordings of the cases as trace folders, through the Python package `assay`.

    python -m cases.generators --out build/cases [--case B014 ...] [--controls 25] [--seed 1] [--size 0] [--shuffle 7]

Each recording is a folder: `trace/`, and `checkpoint/` where the case has one. `index.json` says what is where. With
--shuffle the folders are numbered in a random order and the index goes to a file beside the folder, OUT.index.json, so
that nothing under OUT tells a clean recording from a faulty one.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys

import numpy as np

from . import registry, writer
from .recording import Recording
from .registry import Variant


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m cases.generators", description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=pathlib.Path, help="folder to write into; made when missing")
    parser.add_argument("--list", action="store_true", help="print the cases and controls, write nothing")
    parser.add_argument("--case", action="append", default=[], help="id of a case (repeatable); default all")
    parser.add_argument("--controls", type=int, default=0, metavar="N", help="pairs of each kind of benign control")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--size", type=int, default=0, help="0 is the default size, larger is longer")
    parser.add_argument("--first-layer", type=int, default=0, help="number of the first recorded layer")
    parser.add_argument("--fault-layer", type=int, default=0, help="recorded layers before this one are right")
    parser.add_argument("--shuffle", type=int, metavar="SEED", help="opaque folder names in a random order")
    given = parser.parse_args(arguments)
    if given.list:
        for identifier, answer in registry.expected().items():
            print(identifier, answer["class"], answer["first_bad"] or "-", answer["source"], sep="\t")
        for name in registry.controls():
            print("control", "noise", "-", name, sep="\t")
        return 0
    if given.out is None:
        parser.error("--out is needed")
    unknown = set(given.case) - set(registry.cases())
    if unknown:
        parser.error(f"no such case: {', '.join(sorted(unknown))}; --list has them")

    variant = Variant(given.seed, given.size, given.first_layer, given.fault_layer)
    answers = registry.expected(variant)
    jobs = [(i, twin, variant) for i in (given.case or registry.cases()) for twin in ("clean", "faulty")]
    for name in registry.controls():
        jobs += [(name, twin, Variant(given.seed + n, given.size)) for n in range(given.controls) for twin in "ab"]
    places = [f"{name.replace(' ', '-')}-{v.seed}-{twin}" for name, twin, v in jobs]
    if given.shuffle is not None:
        order = np.random.default_rng(given.shuffle).permutation(len(jobs))
        places = [f"{n:04d}" for n in order]
    index = []
    for (name, twin, v), place in sorted(zip(jobs, places), key=lambda job: job[1]):
        folder = given.out / place
        if name in answers:
            with writer.Writer(folder) as rec:
                registry.generate(name, v, twin == "faulty", rec)
        else:
            pair = {"a": Recording(), "b": Recording()}
            with writer.Writer(folder) as rec:
                pair[twin] = rec
                registry.controls()[name](pair["a"], pair["b"], v)
        entry = {"folder": place, "case": name, "twin": twin, "seed": v.seed, "size": v.size}
        entry |= {"first_layer": v.first_layer, "fault_layer": v.fault_layer, "checkpoint": bool(rec.files)}
        index.append(entry | {"expected": answers.get(name)})
    target = given.out / "index.json" if given.shuffle is None else given.out.with_name(given.out.name + ".index.json")
    target.write_text(json.dumps({"schema": "assay.cases.index/1", "version": 1, "recordings": index}, indent=1) + "\n")
    print(f"{len(index)} recordings in {given.out}, index in {target}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())

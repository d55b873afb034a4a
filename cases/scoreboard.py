"""Runs assay on every case, its clean twin and the benign controls, and compares the verdicts with expected.json.

    python -m cases.scoreboard --assay build/assay --out build/cases --json build/cases.json [--controls 20] [--seed 1]

Recordings are written under opaque names in a random order, so that no command is told an answer. The result has schema
`assay.cases/1`. Exit code: 0 when every mark is reached, 1 when one is missed, 4 when assay could not be run.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from .generators import __main__ as generate
from .generators import registry

MARKS = {"detected": 0.98, "first_bad": 0.95, "class": 0.90, "constant": 0.90}  # shares to be reached


@dataclass(frozen=True)
class Verdict:
    """What a command says: its first finding, or none."""

    found: bool = False
    first_bad: str | None = None
    fault_class: str | None = None
    constant: float | None = None
    error: str = ""


def read_verdict(exit_code: int, output: str) -> Verdict:
    """From the --json of diagnose, check or weights. A finding is {"first_bad": {name, class, constant, …}}."""
    if exit_code not in (0, 1):
        return Verdict(error=f"exit code {exit_code}")
    try:
        findings = json.loads(output)["findings"]
        if bool(findings) != (exit_code == 1):
            return Verdict(error=f"exit code {exit_code} with {len(findings)} findings")
        if not findings:
            return Verdict()
        bad = findings[0]["first_bad"]
        constant = bad.get("constant")
        if isinstance(constant, dict):
            constant = constant.get("value")
        return Verdict(True, bad["name"], bad.get("class"), None if constant is None else float(constant))
    except (ValueError, KeyError, TypeError, AttributeError) as problem:
        return Verdict(error=f"unreadable output: {problem!r}")


def same_name(name: str | None, answer: dict[str, Any]) -> bool:
    return name is not None and name in (answer["first_bad"], answer.get("checkpoint_name"))


def same_constant(value: float | None, wanted: dict[str, Any]) -> bool:
    allowed = [wanted["value"], *wanted.get("also", [])]
    return value is not None and any(abs(value - w) <= max(wanted["tolerance"] * abs(w), 1e-6) for w in allowed)


def score(answers: dict[str, dict[str, Any]], faulty: dict[str, Verdict], clean: dict[str, Verdict]) -> dict[str, Any]:
    """answers by case; faulty: the verdict on each case; clean: verdicts on what has no fault, by a name for the
    report. Gives the `assay.cases/1` object, with the shares reached and whether every mark is."""
    cases, shares = [], defaultdict(list)
    for identifier, verdict in sorted(faulty.items()):
        answer = answers[identifier]
        hit = {"detected": verdict.found, "first_bad": same_name(verdict.first_bad, answer)}
        hit["class"] = verdict.fault_class == answer["class"]
        if answer["constant"]:
            hit["constant"] = same_constant(verdict.constant, answer["constant"])
        for mark, value in hit.items():
            shares[mark].append(value)
        cases.append({
            "id": identifier,
            "detected": verdict.found,
            "first_bad": verdict.first_bad,
            "first_bad_expected": answer["first_bad"],
            "class": verdict.fault_class,
            "class_expected": answer["class"],
            "constant": verdict.constant,
            "constant_expected": answer["constant"] and answer["constant"]["value"],
            "right": hit,
            "error": verdict.error,
        })  # fmt: skip
    alarms = [{"recording": n, "first_bad": v.first_bad, "class": v.fault_class, "error": v.error}
              for n, v in sorted(clean.items()) if v.found or v.error]  # fmt: skip
    reached = {mark: sum(shares[mark]) / max(len(shares[mark]), 1) for mark in MARKS}
    return {
        "schema": "assay.cases/1",
        "version": 1,
        "cases": cases,
        "not_expressible": json.loads(registry.EXPECTED.read_text())["not_expressible"],
        "false_alarms": alarms,
        "clean_pairs": len(clean),
        "reached": reached,
        "passed": not alarms and all(reached[mark] >= least for mark, least in MARKS.items()),
    }


def table(result: dict[str, Any]) -> str:
    """Per class: cases, and how many were detected, named exactly, classed, and given the constant."""
    lines = [f"{'class':<11} cases detected tensor class constant"]
    classes = sorted({c["class_expected"] for c in result["cases"]})
    for name in [*classes, "all"]:
        rows = [c for c in result["cases"] if name in (c["class_expected"], "all")]
        constants = [c["right"]["constant"] for c in rows if "constant" in c["right"]]
        counts = [sum(c["right"][mark] for c in rows) for mark in ("detected", "first_bad", "class")]
        of = f"{sum(constants)}/{len(constants)}" if constants else "-"
        lines.append(f"{name:<11} {len(rows):5} {counts[0]:8} {counts[1]:6} {counts[2]:5} {of:>8}")
    lines.append(
        f"false alarms: {len(result['false_alarms'])} of {result['clean_pairs']} clean and benign recordings and pairs"
    )
    for case in result["cases"]:
        missed = [mark for mark, right in case["right"].items() if not right]
        if missed:
            got = case["error"] or f"{case['first_bad']}, {case['class']}, {case['constant']}"
            lines.append(f"{case['id']}: {', '.join(missed)} missed: {got}")
    lines += [f"false alarm: {a['recording']}: {a['error'] or a['first_bad']}" for a in result["false_alarms"]]
    return "\n".join(lines)


def commands(assay: str, root: pathlib.Path, index: list[dict[str, Any]]) -> list[tuple[str, str, list[str]]]:
    """(kind, key, argv): kind "faulty" with the case as key, or "clean" with a name for the report."""
    out, pairs = [], defaultdict(dict)
    for entry in index:
        trace, checkpoint = (str(root / entry["folder"] / part) for part in ("trace", "checkpoint"))
        answer = entry["expected"]
        label = f"{entry['case']} seed {entry['seed']} {entry['twin']}"
        if answer is None or answer["class"] == "noise":
            pairs[entry["case"], entry["seed"]][entry["twin"]] = trace
        alone = [assay, "diagnose", "--json", trace]
        if entry["checkpoint"]:
            alone = [assay, "weights", "--json", checkpoint, "--trace", trace]
        if answer is not None and answer["class"] != "noise" and entry["twin"] == "faulty":
            out.append(("faulty", entry["case"], alone))
        else:
            out.append(("clean", label, alone))
    for (case, seed), traces in pairs.items():
        first, second = (traces[t] for t in sorted(traces))
        out.append(("clean", f"{case} seed {seed} as a pair", [assay, "diagnose", "--json", first, second]))
    return out


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m cases.scoreboard", description=__doc__.split("\n")[0])
    parser.add_argument("--assay", default="build/assay", help="the program under test")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("build/cases"), help="recordings; replaced")
    parser.add_argument("--json", type=pathlib.Path, default=pathlib.Path("build/cases.json"), help="result")
    parser.add_argument("--controls", type=int, default=12, help="pairs of each kind of control")
    for name in ("seed", "size", "first-layer", "fault-layer"):
        parser.add_argument(f"--{name}", type=int, default=1 if name == "seed" else 0)
    given = parser.parse_args(arguments)

    if given.out.exists() and not re.fullmatch(r"[0-9]{4}", next((p.name for p in given.out.iterdir()), "0000")):
        parser.error(f"{given.out} holds something else than recordings; give another folder")
    shutil.rmtree(given.out, ignore_errors=True)
    options = [
        f"--{n}={getattr(given, n.replace('-', '_'))}"
        for n in ("seed", "size", "first-layer", "fault-layer", "controls")
    ]
    generate.main(["--out", str(given.out), f"--shuffle={given.seed}", *options])
    index = json.loads(given.out.with_name(given.out.name + ".index.json").read_text())["recordings"]
    verdicts: dict[str, dict[str, Verdict]] = {"faulty": {}, "clean": {}}
    try:
        for kind, key, argv in commands(given.assay, given.out, index):
            done = subprocess.run(argv, capture_output=True, text=True, timeout=120)
            verdicts[kind][key] = read_verdict(done.returncode, done.stdout)
    except OSError as problem:
        print(f"cannot run {given.assay}: {problem}; build it with `make build`", file=sys.stderr)
        return 4
    result = score({e["case"]: e["expected"] for e in index if e["expected"]}, verdicts["faulty"], verdicts["clean"])
    given.json.write_text(json.dumps(result, indent=1) + "\n")
    print(table(result))
    return 0 if result["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())

"""Runs every benchmark and merges the results into one file (schema assay.bench/1).

Each program `bench_<x>` of the build folder and each script of SCRIPTS takes `--json FILE` and writes
{"schema": "assay.bench/1", "results": [{"name", "value", "unit", "baseline", "baseline_value"}]}; values are medians
of 9 runs unless the name says otherwise, and a baseline was measured in the same run. A benchmark that fails makes the
whole fail, at the end. Use: python bench/run.py --build build --out build/bench.json [--only stats,decode]
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import platform
import subprocess
import sys
import tempfile

SCHEMA = "assay.bench/1"
KEYS = {"name", "value", "unit", "baseline", "baseline_value"}
HERE = pathlib.Path(__file__).resolve().parent
# Driven by a script, because the baseline or the subject runs in Python: name -> (script, its arguments, {} being the
# folder of the programs). A script replaces the program of its name.
SCRIPTS = {
    "decode": ("decode.py", ["--program", "{}/bench_decode"]),
    "numpy": ("numpy_baseline.py", ["--bench", "{}/bench_stats"]),
    "python": ("bench_python.py", []),
    "attach": ("bench_attach.py", []),
}


def host() -> dict:
    """Facts without which a number says little."""
    model = ""
    for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.split(": ", 1)[1]
            break
    return {"cpu": model, "cores": len(os.sched_getaffinity(0)), "machine": platform.machine(),
            "kernel": platform.release(), "libc": " ".join(platform.libc_ver())}


def run_one(name: str, command: list[str], folder: pathlib.Path) -> list[dict]:
    out = folder / f"{name}.json"
    print(f"bench: {name}", file=sys.stderr, flush=True)
    subprocess.run([*command, "--json", str(out)], check=True, stdout=sys.stderr)
    document = json.loads(out.read_text())
    if document.get("schema") != SCHEMA:
        raise ValueError(f"{name}: schema {document.get('schema')!r}, expected {SCHEMA!r}")
    for result in document["results"]:
        if missing := KEYS - result.keys():
            raise ValueError(f"{name}: result {result} lacks {sorted(missing)}")
    return document["results"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=pathlib.Path, default=pathlib.Path("build"))
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("build/bench.json"))
    parser.add_argument("--only", default="", help="comma-separated names, without bench_")
    arguments = parser.parse_args()

    programs = sorted(path for path in (arguments.build / "bench").glob("bench_*") if path.is_file() and os.access(path, os.X_OK))
    commands = {path.name.removeprefix("bench_"): [str(path)] for path in programs}
    for name, (script, options) in SCRIPTS.items():
        folder = str(arguments.build / "bench")
        commands[name] = [sys.executable, str(HERE / script), *(option.format(folder) for option in options)]
    os.environ.setdefault("ASSAY_LIBRARY", str(arguments.build.resolve()))
    commands["python"] = [sys.executable, str(HERE / "bench_python.py")]
    wanted = [name for name in arguments.only.split(",") if name] or list(commands)
    if unknown := set(wanted) - commands.keys():
        print(f"bench: no benchmark {', '.join(sorted(unknown))}; there are {', '.join(commands)}", file=sys.stderr)
        return 2

    results, failed = [], []
    with tempfile.TemporaryDirectory() as folder:
        for name in wanted:
            try:
                results += run_one(name, commands[name], pathlib.Path(folder))
            except (subprocess.CalledProcessError, OSError, ValueError) as error:
                print(f"bench: {name} failed: {error}", file=sys.stderr)
                failed.append(name)
    document = {"schema": SCHEMA, "host": host(), "failed": failed, "results": results}
    arguments.out.write_text(json.dumps(document, indent=1) + "\n")

    width = max((len(result["name"]) for result in results), default=0)
    for result in results:
        line = f"{result['name']:<{width}}  {result['value']:>12.4g} {result['unit']}"
        if result["baseline"] not in ("", "none", None):
            line += f"  ({result['baseline']}: {result['baseline_value']:.4g}"
            line += f", ratio {result['value'] / result['baseline_value']:.3g})" if result["baseline_value"] else ")"
        print(line)
    print(f"bench: {len(results)} results in {arguments.out}", file=sys.stderr)
    return 1 if failed or not results else 0


if __name__ == "__main__":
    sys.exit(main())

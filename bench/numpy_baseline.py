"""NumPy doing six statistics (minimum, maximum, mean, standard deviation, norm, count of non-finite values): the baseline
that assay's one pass is compared with.

    python bench/numpy_baseline.py [--json FILE] [--bench build/bench/bench_stats] [--max-mib N] [--repeats N]

With --bench, bench_stats runs right before (same machine, same minute) and the file holds the ratio as well: value is
assay's GB/s, baseline_value NumPy's, for float32 of each size. One thread; medians of --repeats (9).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import tempfile
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np  # noqa: E402  (after the thread settings)


def six(a: np.ndarray) -> tuple:
    return (a.min(), a.max(), a.mean(), a.std(), np.linalg.norm(a), np.count_nonzero(~np.isfinite(a)))


def time_of(a: np.ndarray) -> float:
    """Processor seconds of one call; short calls are repeated until 2 ms have passed."""
    loops = 1
    while True:
        begin = time.thread_time()
        for _ in range(loops):
            six(a)
        seconds = time.thread_time() - begin
        if seconds > 2e-3:
            return seconds / loops
        loops *= 10


def size_name(size: int) -> str:
    for unit, shift in (("GiB", 30), ("MiB", 20)):
        if size >= 1 << shift:
            return f"{size >> shift} {unit}"
    return f"{size >> 10} KiB"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", default="")
    parser.add_argument("--bench", default="")
    parser.add_argument("--max-mib", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=9)
    arguments = parser.parse_args()

    assay: dict[str, float] = {}
    if arguments.bench:
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "stats.json")
            subprocess.run([arguments.bench, "--dtype", "f32", "--max-mib", str(arguments.max_mib),
                            "--repeats", str(arguments.repeats), "--json", path], check=True)
            with open(path, encoding="utf-8") as file:
                for result in json.load(file)["results"]:
                    if "grids" not in result["name"]:
                        assay.setdefault(" ".join(result["name"].split()[1:4]), result["value"])

    largest = arguments.max_mib << 20
    sizes = []
    size = 1024
    while size < largest:
        sizes.append(size)
        size *= 16
    sizes.append(largest)
    rng = np.random.default_rng(1)
    data = rng.standard_normal(largest // 4, dtype=np.float32)
    results = []
    for size in sizes:
        a = data[: size // 4]
        six(a)
        rate = size / statistics.median(time_of(a) for _ in range(arguments.repeats)) * 1e-9
        key = f"f32 {size_name(size)}"
        if key in assay:
            results.append(dict(name=f"stats against numpy, {key}", value=assay[key], unit="GB/s",
                                baseline="numpy, six statistics", baseline_value=rate))
            print(f"{key:16} assay {assay[key]:8.2f} GB/s   numpy {rate:7.3f} GB/s   {assay[key] / rate:6.1f} times")
        else:
            results.append(dict(name=f"numpy six statistics {key}", value=rate, unit="GB/s", baseline="none",
                                baseline_value=rate))
            print(f"{key:16} numpy {rate:7.3f} GB/s")
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump({"schema": "assay.bench/1", "results": results}, file, indent=1)


if __name__ == "__main__":
    main()

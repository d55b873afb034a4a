"""Cost of a record call from Python, per kind of tensor, and of a call that records nothing.

    bench_python.py [--json FILE] [--calls N] [--repeats N]

Microseconds a call, the median of --repeats (9) timings of --calls (2000) calls each, in processor time of the process.
The baseline is the same record through the C interface with everything prepared: one ctypes call of assay_record.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from ctypes import byref
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "python"))

import assay  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
from assay import _library  # noqa: E402


def cost(call: Callable[[], object], calls: int, repeats: int) -> float:
    """Microseconds a call."""
    timings = []
    for _ in range(repeats + 1):
        begin = time.process_time()
        for _ in range(calls):
            call()
        timings.append((time.process_time() - begin) / calls * 1e6)
    return statistics.median(timings[1:])


class Dlpack:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.__dlpack_device__ = tensor.__dlpack_device__

    def __dlpack__(self) -> object:
        return self.tensor.__dlpack__()


def prepared(t: assay.Trace, array: np.ndarray) -> Callable[[], object]:
    """assay_record of the same tensor, with the event filled in once."""
    event = _library.CEvent.from_buffer_copy(_library.BLANK_EVENT)
    event.site = t._add_site("layers.0.out", None, None)
    event.data = array.ctypes.data
    event.dtype, event.ndim = 2, array.ndim
    event.shape = (_library.c_int64 * array.ndim)(*array.shape)
    record, handle = t._record, t._handle
    return lambda: record(handle, event, None)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json")
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    array = np.random.default_rng(1).normal(size=(4, 64)).astype(np.float32)
    tensors = {
        "torch f32 [4, 64]": torch.from_numpy(array),
        "torch bf16 [4, 64]": torch.from_numpy(array).bfloat16(),
        "numpy f32 [4, 64]": array,
        "dlpack f32 [4, 64]": Dlpack(torch.from_numpy(array)),
        "buffer f32 [4, 64]": memoryview(array),
    }
    results = []

    def report(name: str, value: float, baseline: str, baseline_value: float) -> None:
        results.append(
            {"name": name, "value": value, "unit": "us", "baseline": baseline, "baseline_value": baseline_value}
        )
        print(f"{name:44} {value:8.2f} us   {baseline} {baseline_value:.2f} us")

    with tempfile.TemporaryDirectory() as folder:
        for name, tensor in tensors.items():
            with assay.trace(Path(folder) / name.split()[0], environment=False) as t:
                bare = cost(prepared(t, array), options.calls, options.repeats)
                value = cost(lambda: t.record("layers.0.out", tensor, step=1), options.calls, options.repeats)
            report(f"python record {name}", value, "prepared ctypes call", bare)
        with assay.trace(Path(folder) / "off", environment=False) as t:
            t.arm(False)
            off = cost(lambda: t.record("layers.0.out", array), 20 * options.calls, options.repeats)
            empty = cost(lambda: None, 20 * options.calls, options.repeats)
        report("python record, disarmed", off, "empty call", empty)
    if options.json:
        Path(options.json).write_text(json.dumps({"schema": "assay.bench/1", "results": results}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

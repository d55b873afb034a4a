"""How a recording ends: at close() or with its block, under the calls of threads, and on a disk that takes no more."""

import array
import os
import subprocess
import sys
import threading
from pathlib import Path

import assay
import numpy as np
import pytest


def test_strict_close_raises(trace_dir, tmp_path):
    t = assay.trace(trace_dir, strict=True, include="layres.*")
    with pytest.raises(assay.UsageError, match="matched no site"):
        t.close()
    t.close()  # twice is fine
    with pytest.raises(assay.MachineError):
        assay.trace("/proc/nowhere/trace")


def test_the_exception_that_ends_the_block_is_the_hosts_own(trace_dir, monkeypatch):
    def refused(self):
        close(self)
        raise assay.MachineError("no space left on device")

    close = assay.Trace.close
    monkeypatch.setattr(assay.Trace, "close", refused)
    with pytest.raises(KeyError, match="of the host"), assay.trace(trace_dir) as t:
        t.record("a", array.array("d", [1.0]))
        raise KeyError("of the host")
    with pytest.raises(assay.MachineError), assay.trace(trace_dir / "second"):
        pass


def test_threads_record_while_the_trace_closes(trace_dir):
    t = assay.trace(trace_dir)
    stop = threading.Event()
    tensor = np.ones((4, 8), np.float32)

    def work():
        while not stop.is_set():
            t.record("layers.0.out", tensor)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    while t.drops().recorded < 200:
        pass
    t.close()
    stop.set()
    for thread in threads:
        thread.join()
    assert len(assay.open(trace_dir)) >= 200
    assert assay.open(trace_dir).processes[0].closed


FULL_DISK = """
import sys, warnings
import numpy as np
import assay

folder, errors, strict = sys.argv[1:]
trace = assay.trace(folder + "/trace", level="payload", errors=errors, strict=strict == "strict")
for i in range(400):
    trace.record("layers.0.out", np.full((64, 64), i, np.float32))
if errors == "count":  # not even notes can be written
    with open(folder + "/rest", "wb", buffering=0) as rest, __import__("contextlib").suppress(OSError):
        while True:
            rest.write(bytes(4096))
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    try:
        trace.close()
        print("closed", trace.drops().disk_full > 0, [w.category.__name__ for w in said])
    except assay.MachineError:
        print("MachineError")
assert assay.current() is None
"""


@pytest.mark.parametrize(
    ("errors", "strict", "outcome"),
    [
        ("raise", "", "closed True ['AssayWarning']"),
        ("count", "", "closed True []"),
        ("raise", "strict", "MachineError"),
    ],
)
def test_a_full_disk_is_an_exception_at_close_only_when_strict(tmp_path, errors, strict, outcome):
    command = ["unshare", "-rm", "sh", "-c", f'mount -t tmpfs -o size=1m none {tmp_path} && exec "$@"', "sh"]
    command += [sys.executable, "-c", FULL_DISK, str(tmp_path), errors, strict]
    environment = {**os.environ, "PYTHONPATH": str(Path(assay.__file__).parents[1])}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.stdout.strip() == outcome, done.stderr

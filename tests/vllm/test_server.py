"""The OpenAI-compatible server: it serves, it is recorded, and a worker that is killed leaves what it recorded."""

import json
import os
import signal
import socket
import subprocess
import time
import urllib.request

import pytest

from conftest import BUILD, MODEL, PYTHON, assay_program, environment


class Server:
    """`python -m vllm.entrypoints.openai.api_server` under `assay run`, in a process group of its own."""

    def __init__(self, bench, cores, name, serve_options, *assay_options):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.trace = bench.folder / f"{name}.trace"
        self.report = bench.folder / f"{name}.report"
        self.log = bench.folder / f"{name}.log"
        serve = [str(PYTHON), "-m", "vllm.entrypoints.openai.api_server", "--model", str(MODEL), "--port", str(self.port)]
        serve += ["--host", "127.0.0.1", "--max-model-len", "512", "--gpu-memory-utilization", "0.2", *serve_options]
        run = [str(BUILD / "assay"), "run", "--dir", str(self.trace), "--json", str(self.report), *assay_options, "--"]
        self.process = subprocess.Popen(
            run + serve,
            stdout=self.log.open("w"),
            stderr=subprocess.STDOUT,
            env=environment(bench.cache, cores),
            start_new_session=True,
        )

    def wait_until_it_serves(self, seconds=300):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            assert self.process.poll() is None, self.log.read_text()[-4000:]
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5) as answer:
                    if answer.status == 200:
                        return
            except OSError:
                time.sleep(0.5)
        raise AssertionError(f"not ready after {seconds} s:\n{self.log.read_text()[-4000:]}")

    def complete(self, prompt, tokens=8):
        body = {"model": str(MODEL), "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.load(answer)["choices"][0]["text"]

    def workers(self):
        """Pids of the processes that saw a request. Others have a file only to say that they did not find a probe."""
        import assay

        return [p.pid for p in assay.open(self.trace).processes if p.requests]

    def stop(self):
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGINT)
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait(30)


MODES = {"eager": ["--enforce-eager"], "compiled": []}  # the second is vLLM's default


@pytest.fixture(scope="module", params=MODES)
def server(bench, queue, request):
    probes = "call:vllm.model_executor.layers.attention.mla_attention:MLAAttention.foward_impl"
    with queue.cores.lend() as cores:
        options = ["--profile", "all", "--tokens", "on", "--probes", probes]
        started = Server(bench, cores, f"server-{request.param}", MODES[request.param], *options)
        started.mode = request.param
        try:
            started.wait_until_it_serves()
            started.texts = [started.complete(p) for p in ("In the beginning God created", "And Moses said unto the people")]
            yield started
        finally:
            started.stop()


def test_ServerIsRecordedInItsWorker(server):
    import assay

    events = assay.open(server.trace)
    assert all(server.texts)
    assert len(server.workers()) == 1 and len({e.rank for e in events}) == 1
    asked = {r.key for p in events.processes for r in p.requests}
    assert {e.segments[0].request for e in events if e.site == "logits"} == asked and len(asked) == 2
    # q is seen at the attention boundary, q_a inside the compiled graph.
    for site in ("layers.0.attn.q", "layers.0.attn.q_a"):
        assert {"prefill", "decode"} <= {e.phase for e in events if e.site == site}
    modes = {p.meta["compile.mode"] for p in events.processes if p.requests}
    assert modes == {"NONE" if server.mode == "eager" else "DYNAMO_TRACE_ONCE"}


def test_MisspeltProbeIsNamedWithItsNeighbours(server):
    _, out, _ = assay_program("show", server.trace, "--limit", "1")
    line = next(line for line in out.splitlines() if "foward_impl" in line)
    assert "not found" in line and "forward_impl" in line


def test_WorkerKilledLeavesAReadableTrace(server):
    """vLLM itself ends an engine that lost its worker; what was recorded before is there."""
    (worker,) = server.workers()
    os.kill(worker, signal.SIGKILL)
    time.sleep(1)
    code, out, err = assay_program("show", server.trace, "--site", "logits", "--json")
    assert code == 0, err
    shown = json.loads(out)
    assert shown["events_matching"] >= 16 and all(damage["benign"] for damage in shown["damages"])

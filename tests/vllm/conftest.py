"""Runs of the real vLLM, as a user would start them: `assay run -- python generate.py`. An engine takes half a minute to
start, so each run is made once and shared by the tests that look at it."""

import dataclasses
import json
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(os.environ.get("ASSAY_LIBRARY", ROOT / "build"))
PYTHON = pathlib.Path(os.environ.get("ASSAY_VLLM_PYTHON", ROOT / ".venv-vllm" / "bin" / "python"))
MODEL = ROOT / "models" / "kjv-mla-10m"
HERE = pathlib.Path(__file__).parent
for variable in [n for n in os.environ if n == "ASSAY" or (n.startswith("ASSAY_") and n != "ASSAY_LIBRARY")]:
    del os.environ[variable]  # no setting from outside
os.environ.setdefault("ASSAY_LIBRARY", str(BUILD))
sys.path.insert(0, str(ROOT / "python"))


def environment(cache, **more):
    """What vLLM needs on two cores; one thread a worker, so that two workers fit."""
    return {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CACHE_ROOT": str(cache),
        **more,
    }


@dataclasses.dataclass
class Run:
    """A finished run: what the program wrote, what it and assay printed, and the trace folder (None: not observed)."""

    name: str
    answers: list
    log: str
    trace: pathlib.Path | None

    def events(self):
        import assay

        return assay.open(self.trace)

    def notes(self):
        """(site, reason) -> detail."""
        return {(c.site, c.reason): c.detail for p in self.events().processes for c in p.coverage}


def assay_program(*arguments):
    """`assay ARGUMENTS`: (exit code, stdout, stderr)."""
    done = subprocess.run([BUILD / "assay", *map(str, arguments)], capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout, done.stderr


def diff(a, b):
    """`assay diff --json`."""
    code, out, err = assay_program("diff", a, b, "--json")
    assert code in (0, 1, 3) and out, err
    return json.loads(out)


class Bench:
    """Makes runs on demand and keeps them."""

    def __init__(self, folder):
        self.folder = folder
        self.cache = folder / "cache"
        self._runs = {}

    def run(self, name, options, *assay_options, observed=True, env=None, fresh=False):
        if name in self._runs and not fresh:
            return self._runs[name]
        out, trace = self.folder / f"{name}.json", self.folder / f"{name}.trace"
        command = [str(PYTHON), str(HERE / "generate.py"), str(out), json.dumps(options)]
        if observed:
            command = [str(BUILD / "assay"), "run", "--dir", str(trace), *assay_options, "--", *command]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=600, env=environment(self.cache, **(env or {})), cwd=self.folder
        )
        log = done.stdout + done.stderr
        (self.folder / f"{name}.log").write_text(log)
        assert done.returncode == 0 and out.exists(), f"{name} ended with {done.returncode}:\n{log[-4000:]}"
        self._runs[name] = Run(name, json.loads(out.read_text()), log, trace if observed else None)
        return self._runs[name]

    def reference(self, run, *options):
        """The native runtime's trace of the same prompts, following the run's tokens where it has them."""
        trace = self.folder / f"{run.name}.reference{len(options)}"
        if not trace.exists():
            prompts = [f for a in run.answers for f in ("--tokens", ",".join(map(str, a["prompt"])))]
            count = len(run.answers[0]["tokens"])
            code, _, err = assay_program(
                "reference", MODEL, *prompts, "--max-tokens", count, "--ignore-eos", "--trace", trace, *options
            )
            assert code == 0, err
        return trace


@pytest.fixture(scope="session")
def bench(tmp_path_factory):
    assert PYTHON.exists(), f"no {PYTHON}: run `scripts/setup.sh vllm`"
    return Bench(tmp_path_factory.mktemp("vllm"))


COMPILED = {"prompts": 100, "tokens": 8}
EAGER = {"prompts": 100, "tokens": 8, "engine": {"enforce_eager": True}}


@pytest.fixture(scope="session")
def compiled_off(bench):
    return bench.run("compiled-off", COMPILED, observed=False)


@pytest.fixture(scope="session")
def compiled_on(bench, compiled_off):
    """Behind compiled_off: its graphs are in the cache."""
    return bench.run("compiled-on", COMPILED, "--profile", "all")


@pytest.fixture(scope="session")
def mla(bench):
    """MLA in the default mode, the prompts of chunked."""
    return bench.run("mla", {"prompts": 8, "long": True}, "--profile", "all")


@pytest.fixture(scope="session")
def transformers(bench, mla):
    """Trace of the same prompts in transformers, bf16, one after the other."""
    trace = bench.folder / "transformers.trace"
    program = [str(PYTHON), str(HERE / "transformers_generate.py"), str(bench.folder / "mla.json")]
    done = subprocess.run(
        [str(BUILD / "assay"), "run", "--dir", str(trace), "--", *program],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment(bench.cache, OMP_NUM_THREADS="1"),
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return trace


@pytest.fixture(scope="session")
def chunked(bench):
    """MLA off, prompts in chunks of 64 tokens, prefix cache, in the default mode."""
    engine = {"max_num_batched_tokens": 64, "max_num_seqs": 16, "block_size": 32}
    engine |= {"enable_prefix_caching": True, "enable_chunked_prefill": True}
    options = {"prompts": 8, "long": True, "engine": engine}
    return bench.run("chunked", options, "--profile", "all", env={"VLLM_MLA_DISABLE": "1"})


@pytest.fixture(scope="session")
def parallel(bench):
    """Tensor parallel 2, in the default mode."""
    options = {"prompts": 8, "engine": {"tensor_parallel_size": 2}}
    return bench.run("parallel", options, "--profile", "all", env={"VLLM_CPU_OMP_THREADS_BIND": "0|1"})


EAGER_RIGHT = {"enforce_eager": True, "compilation_config": {"custom_ops": ["all", "-rotary_embedding"]}}
"""Eager, with the rotation in PyTorch's own operations (docs/wild-one.md)."""
AUDIT = "audit:vllm.model_executor.layers.attention.mla_attention:MLAAttention.forward_impl:output"


@pytest.fixture(scope="session")
def eager_right(bench):
    options = {"prompts": 4, "tokens": 24, "engine": EAGER_RIGHT}
    return bench.run("eager-right", options, "--level", "payload", "--probes", AUDIT)

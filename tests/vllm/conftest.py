"""Runs of the real vLLM, as a user would start them: `assay run -- python generate.py`. An engine takes half a minute to
start, so each run is made once and shared by the tests that look at it, and as many run at once as there are cores."""

import dataclasses
import json
import os
import pathlib
import subprocess
import sys

import pytest
from ahead import ahead, queue  # noqa: F401 (a fixture)

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(os.environ.get("ASSAY_LIBRARY", ROOT / "build"))
PYTHON = pathlib.Path(os.environ.get("ASSAY_VLLM_PYTHON", ROOT / ".venv-vllm" / "bin" / "python"))
MODEL = ROOT / "models" / "kjv-mla-10m"
HERE = pathlib.Path(__file__).parent
for variable in [n for n in os.environ if n == "ASSAY" or (n.startswith("ASSAY_") and n != "ASSAY_LIBRARY")]:
    del os.environ[variable]  # no setting from outside
os.environ.setdefault("ASSAY_LIBRARY", str(BUILD))
sys.path.insert(0, str(ROOT / "python"))


def environment(cache, cores, **more):
    """What vLLM needs on few cores: a core and a thread for each worker. The host's own threads are as few."""
    return {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "|".join(map(str, cores)),
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
    """Makes runs, all in one folder and with one cache of compiled code."""

    def __init__(self, folder):
        self.folder = folder
        self.cache = folder / "cache"

    def run(self, name, cores, options, *assay_options, observed=True, env=None):
        out, trace = self.folder / f"{name}.json", self.folder / f"{name}.trace"
        command = [str(PYTHON), str(HERE / "generate.py"), str(out), json.dumps(options)]
        if observed:
            command = [str(BUILD / "assay"), "run", "--dir", str(trace), *assay_options, "--", *command]
        variables = environment(self.cache, cores, **(env or {}))
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=variables, cwd=self.folder)
        log = done.stdout + done.stderr
        (self.folder / f"{name}.log").write_text(log)
        assert done.returncode == 0 and out.exists(), f"{name} ended with {done.returncode}:\n{log[-4000:]}"
        return Run(name, json.loads(out.read_text()), log, trace if observed else None)

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
ONE_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
"""All requests are there before the first step; else the batches depend on when each one arrives."""


@ahead()
def compiled_off(bench, cores):
    return bench.run("compiled-off", cores, COMPILED, observed=False)


@ahead()
def compiled_on(bench, cores, compiled_off):
    """Behind compiled_off: its graphs are in the cache."""
    return bench.run("compiled-on", cores, COMPILED, "--profile", "all")


@ahead()
def compiled_off_again(bench, cores, compiled_on):
    """Behind both: the cache has graphs with probes and without."""
    return bench.run("compiled-off-again", cores, COMPILED, observed=False)


# What eager mode computes depends on who shares a step (docs/wild-one.md): one process, so that both have the same batches.
@ahead()
def eager_off(bench, cores):
    return bench.run("eager-off", cores, EAGER, observed=False, env=ONE_PROCESS)


@ahead()
def eager_on(bench, cores):
    return bench.run("eager-on", cores, EAGER, "--profile", "all", env=ONE_PROCESS)


@ahead()
def mla(bench, cores, compiled_on):
    """MLA in the default mode, the prompts of chunked. Behind compiled_on, whose graphs are these."""
    return bench.run("mla", cores, {"prompts": 8, "long": True}, "--profile", "all")


@ahead()
def transformers(bench, cores, mla):
    """Trace of the same prompts in transformers, bf16, one after the other."""
    trace = bench.folder / "transformers.trace"
    program = [str(PYTHON), str(HERE / "transformers_generate.py"), str(bench.folder / "mla.json")]
    done = subprocess.run(
        [str(BUILD / "assay"), "run", "--dir", str(trace), "--", *program],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment(bench.cache, cores),
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return trace


@ahead()
def chunked(bench, cores):
    """MLA off, prompts in chunks of 64 tokens, prefix cache, in the default mode."""
    engine = {"max_num_batched_tokens": 64, "max_num_seqs": 16, "block_size": 32}
    engine |= {"enable_prefix_caching": True, "enable_chunked_prefill": True}
    options = {"prompts": 8, "long": True, "engine": engine}
    return bench.run("chunked", cores, options, "--profile", "all", env={"VLLM_MLA_DISABLE": "1"})


@ahead(cores=2)
def parallel(bench, cores):
    """Tensor parallel 2, in the default mode."""
    options = {"prompts": 8, "engine": {"tensor_parallel_size": 2}}
    return bench.run("parallel", cores, options, "--profile", "all")


EAGER_RIGHT = {"enforce_eager": True, "compilation_config": {"custom_ops": ["all", "-rotary_embedding"]}}
"""Eager, with the rotation in PyTorch's own operations (docs/wild-one.md)."""
AUDIT = "audit:vllm.model_executor.layers.attention.mla_attention:MLAAttention.forward_impl:output"


@ahead()
def eager_right(bench, cores):
    options = {"prompts": 4, "tokens": 24, "engine": EAGER_RIGHT}
    return bench.run("eager-right", cores, options, "--level", "payload", "--probes", AUDIT, env=ONE_PROCESS)

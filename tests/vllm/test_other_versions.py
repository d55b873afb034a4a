"""A vLLM that the profile does not know: it runs as it is, and the trace says what was not found. No engine is started."""

import subprocess

from ahead import ahead
from conftest import BUILD, PYTHON, environment
from stub_vllm import FILES


@ahead()
def stub(bench, cores):
    folder = bench.folder / "stub"
    for name, text in FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    done = subprocess.run(
        [BUILD / "assay", "run", "--profile", "all", "--dir", folder / "trace", "--", PYTHON, "main.py"],
        cwd=folder,
        env=environment(bench.cache, cores),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done, folder


def notes(folder):
    import assay

    return {(c.site, c.reason): c.detail for p in assay.open(folder / "trace").processes for c in p.coverage}


def test_HostRunsAsWithoutIt(stub):
    assert stub[0].stdout.split() == ["processed", "7", "24.0"]


def test_RenamedSymbolIsNotFoundAndItsNeighbourNamed(stub):
    target = "call:vllm.v1.worker.gpu_model_runner:GPUModelRunner._prepare_inputs"
    assert "_prepare_input" in notes(stub[1])[target, "not found"]
    assert "not found" in stub[0].stderr


def test_QuantisedLayerWithoutWeightIsDescribed(stub):
    import assay

    events = assay.open(stub[1] / "trace")
    meta = events.processes[0].meta
    assert meta["linear.model.layers.0.self_attn.o_proj"] == "RowParallelLinear:Int4LinearMethod"
    assert {"layers.0.attn.o_proj.weight_packed", "layers.0.attn.o_proj.weight_scale"} <= {e.site for e in events}
    assert "released" in notes(stub[1])["layers.0.attn.o_proj.weight_packed", "absent on this path"]
    assert "layers.0.attn.o_proj" in {e.site for e in events}, "its output is seen all the same"

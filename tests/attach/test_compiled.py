"""Probes inside torch.compile, fullgraph, with inductor on the CPU."""

import pytest

LIBRARY = """
import torch

def rotate(x, parts, *, scale=1.0):
    half = x * scale
    half = half + parts[0]
    return half, parts[1]

class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = torch.nn.Linear(16, 16)

    def forward(self, x, y=None):
        k = self.proj(x)
        k = torch.nn.functional.silu(k)
        if y is not None:
            k = k + y
        out, _ = rotate(k, (x, x), scale=2.0)
        return out

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([Block() for _ in range(3)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x, y=x)
        return x
"""
MAIN = """
import torch, lib
torch.manual_seed(1)
model = lib.Model().eval()
x = torch.randn(5, 16)
model, x = model.to(DTYPE), x.to(DTYPE)
step = model if COMPILE == "no" else torch.compile(model, fullgraph=True, dynamic=True)
with torch.no_grad():
    for rows in (5, 3):
        y = step(x[:rows])
        print(y.float().numpy().tobytes().hex())
"""
PROBES = (
    "module:layers.*,call:lib.rotate,local:lib:Block.forward:k#2,local:lib:Block.forward:k#last,local:lib:rotate:half#1"
)


def files(compile, dtype="torch.float32"):
    return {"lib.py": LIBRARY, "main.py": MAIN.replace("COMPILE", repr(compile)).replace("DTYPE", dtype)}


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """One for all tests: what was compiled with other probes, or with none, must not be taken for what is asked for."""
    return {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path_factory.mktemp("inductor"))}


@pytest.fixture(scope="module")
def unobserved(run_in, cache, tmp_path_factory):
    """The compiled program without probes."""
    return run_in(tmp_path_factory.mktemp("unobserved"), files("yes"), "--attach", "none", env=cache)


def test_ProbesFireInACompiledFullGraphAsInEager(run, cache, tmp_path):
    eager = run(files("no"), "--probes", PROBES, folder=tmp_path / "eager")
    compiled = run(files("yes"), "--probes", PROBES, folder=tmp_path / "compiled", env=cache)
    assert compiled.code == 0, compiled.err
    key = [(e.site, e.shape) for e in eager.events]
    assert sorted(key) == sorted((e.site, e.shape) for e in compiled.events)
    assert len(key) == 2 * 3 * (5 + 5 + 3)  # two steps, three layers: modules, the call, local variables
    for a, b in zip(sorted(eager.events, key=lambda e: (e.site, e.shape)), sorted(compiled.events, key=lambda e: (e.site, e.shape))):
        assert a.norm == pytest.approx(b.norm, rel=1e-5), a.site
    assert not [key for key in compiled.notes if key[1] in ("failed", "never fired", "not found")]


@pytest.mark.parametrize("probes", ["module:layers.*", "call:lib.rotate", "local:lib:Block.forward:k#2"])
def test_TheCompiledResultKeepsItsBits(run, cache, unobserved, probes):
    on = run(files("yes"), "--probes", probes, env=cache)
    assert on.out and on.out == unobserved.out
    assert len(on.events) > 0


def test_AGraphCompiledWithOtherProbesIsNotReused(run, cache, tmp_path):
    first = run(files("yes"), "--probes", "call:lib.rotate", folder=tmp_path / "a", env=cache)
    second = run(files("yes"), "--probes", "module:layers.1", folder=tmp_path / "b", env=cache)
    third = run(files("yes"), "--probes", "call:lib.rotate", folder=tmp_path / "c", env=cache)
    assert {e.site.split(".")[0] for e in second.events} == {"layers"}
    assert [e.site for e in third.events] == [e.site for e in first.events]


def test_AVariableThatIsNotBoundOnThePathTakenIsNotRead(run):
    """Dynamo refuses a function that reads one."""
    library = """
def step(x, deep):
    if deep and (k := x * 2).shape[0] > 1:
        late = k + 1
        return late
    return x
"""
    main = """
import torch, lib
step = torch.compile(lib.step, fullgraph=True, backend="aot_eager")
print(*[float(step(torch.ones(2, 2), deep).sum()) for deep in (False, True)])
"""
    names = ("k", "k#last", "late#last", "x#last")
    outcome = run({"lib.py": library, "main.py": main}, "--probes", ",".join(f"local:lib:step:{n}" for n in names))
    assert outcome.code == 0 and outcome.out == "4.0 12.0\n", outcome.err
    assert [e.site for e in outcome.events] == [f"lib.step.{n}" for n in ("x#last", *names)]


def test_CodeCompiledBeforeTheProbeIsTold(run, cache):
    main = """
import torch, lib
model = lib.Model().eval()
step = torch.compile(model, fullgraph=True, backend="aot_eager")
with torch.no_grad():
    step(torch.ones(2, 16))
    import assay.attach
    session = assay.attach.session()
    seen = []
    probe = session.wrap("lib:rotate", before=seen.append)
    print(probe.note)
"""
    outcome = run({"lib.py": LIBRARY, "main.py": main}, env=cache)
    assert "compiled before the probe was placed" in outcome.out, outcome.err


def test_ModulesThatAreCalledInCompiledCodeAloneAreFound(run):
    main = """
import torch, lib
model = lib.Model().eval()
def step(x):
    return model(x) + 1
def make():
    block = lib.Block().eval()
    return lambda x: block(x)
with torch.no_grad():
    for function in (step, make()):
        torch.compile(function, fullgraph=True, backend="aot_eager")(torch.ones(2, 16))
"""
    outcome = run({"lib.py": LIBRARY, "main.py": main}, "--probes", "module:layers.1.proj,module:proj")
    assert [e.site for e in outcome.events] == ["layers.1.proj.in", "layers.1.proj.out", "proj.in", "proj.out"], outcome.err

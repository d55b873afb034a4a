"""The selectors of ASSAY_PROBES in whole programs."""

import numpy as np

LIBRARY = """
import torch

def scale(x, y=1):
    k = x * y
    for i in range(2):
        k = k + i
    return k

class Attention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj = torch.nn.Linear(4, 4, bias=False)
        torch.nn.init.eye_(self.q_proj.weight)

    def forward(self, x):
        k = self.q_proj(x)
        k = k + 1
        return scale(k, 2)
"""
MAIN = """
import torch
import lib
model = lib.Attention().eval()
with torch.no_grad():
    print(model(torch.ones(3, 4)).sum().item())
"""
FILES = {"lib.py": LIBRARY, "main.py": MAIN}


def norms(outcome):
    return [(e.site, round(e.norm, 4)) for e in outcome.events]


def test_ModulesCallsAndLocalsFireWithTheirValues(run):
    probes = "module:q_proj,call:lib.scale,local:lib:Attention.forward:k#2,local:lib:scale:k#last"
    outcome = run(FILES, "--probes", probes)
    assert outcome.code == 0, outcome.err
    assert outcome.out == "60.0\n"
    root = 12**0.5
    assert norms(outcome) == [
        ("q_proj.in", round(root, 4)),
        ("q_proj.out", round(root, 4)),
        ("lib.Attention.forward.k#2", round(2 * root, 4)),
        ("lib.scale.x", round(2 * root, 4)),
        ("lib.scale.k#last", round(5 * root, 4)),
        ("lib.scale.result", round(5 * root, 4)),
    ]
    assert outcome.notes["call:lib.scale", "fired"][0] == 1


def test_MisspeltProbeIsNotFoundWithTheNearestNames(run):
    outcome = run(FILES, "--probes", "call:lib.scal,local:lib:Attention.forward:kk#1,call:other.f,module:*.v_proj")
    assert outcome.code == 0
    assert "nearest: scale" in outcome.notes["call:lib.scal", "not found"][1]
    assert "nearest: k" in outcome.notes["local:lib:Attention.forward:kk#1", "not found"][1]
    assert "never imported" in outcome.notes["call:other.f", "not found"][1]
    assert "nearest: q_proj" in outcome.notes["module:*.v_proj", "not found"][1]
    assert "call:lib.scal: not found" in outcome.err


def test_AThirdAssignmentThatIsNotThereIsNotFound(run):
    outcome = run(FILES, "--probes", "local:lib:Attention.forward:k#3")
    assert outcome.notes["local:lib:Attention.forward:k#3", "not found"][1] == "Attention.forward assigns k 2 time(s), not 3"


def test_ProbeThatNeverFiresAlthoughItsModuleRanIsAWarning(run):
    files = {**FILES, "lib.py": LIBRARY + "\ndef unused(x):\n    return x\n"}
    outcome = run(files, "--probes", "call:lib.unused,call:lib.scale")
    assert ("call:lib.unused", "never fired") in outcome.notes
    assert "call:lib.unused: never fired" in outcome.err


def test_ResultsAreTheSameWithAndWithout(run, tmp_path):
    with_probes = run(FILES, "--probes", "module:*,call:lib.scale,local:lib:scale:k")
    without = run(FILES, "--attach", "none")
    assert with_probes.out == without.out
    assert len(with_probes.events) > 5
    assert np.isfinite([e.norm for e in with_probes.events]).all()


PROFILE = """
TRIGGERS = ("lib",)

def install(session):
    for name in ("scale", "unused", "Attention.forward"):
        session.wrap(f"lib:{name}", after=lambda call, result: session.trace())
"""


def test_AProfileThatTheProgramDoesNotUseIsOneNoteAndNotOneForEachProbe(run):
    library = LIBRARY + "\ndef unused(x):\n    return x\n"
    files = {"my/__init__.py": "", "my/profile.py": PROFILE, "lib.py": library}
    probes = "--attach", "my.profile", "--probes", "call:torch.sum"
    idle = run({**files, "main.py": "import lib, torch\ntorch.sum(torch.ones(3))"}, *probes)
    assert idle.code == 0, idle.err
    assert idle.notes["profile:profile", "absent on this path"][1] == "none of its probes fired"
    assert not [site for site, reason in idle.notes if reason == "never fired"]
    used = run(files | {"main.py": "import lib, torch\nprint(lib.scale(torch.ones(3)))"}, *probes, folder=idle.folder / "used")
    assert ("call:lib:scale", "fired") in used.notes and ("call:lib:unused", "never fired") in used.notes
    assert not [site for site, _ in used.notes if site.startswith("profile:")]


def test_AnOperatorIsSaidNotToBeObservedAndWhatToNameInPlaceOfIt(run):
    outcome = run(FILES, "--probes", "call:torch.ops.aten.add,call:lib.scale")
    assert "operators are not observed: name the Python function" in outcome.notes["call:torch.ops.aten.add", "not found"][1]
    assert "never imported" not in outcome.err

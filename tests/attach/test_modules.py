"""Observing modules in one process: what is found, what fires, and what stays as it was."""

import copy
import io

import pytest
import torch

from assay.attach import modules, session as current
from assay.attach.session import Session


@pytest.fixture
def session(monkeypatch):
    monkeypatch.setenv("ASSAY", "all")
    made = Session()
    yield made
    made._finished = True


class Inner(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = torch.nn.Linear(3, 3, bias=False)

    def forward(self, x, *, scale=1.0):
        return self.proj(x) * scale, x


class Outer(Inner):
    def __init__(self):
        super().__init__()
        self.inner = Inner()
        self.shared = self.inner.proj

    def forward(self, x):
        y, _ = super().forward(x)
        return self.inner(y, scale=2.0)[0]


def observe(session, root, pattern):
    seen = []
    found = session.modules(
        root,
        pattern,
        before=lambda module, name, args, kwargs: seen.append(("in", name, sorted(kwargs))),
        then=lambda module, name, args, kwargs, result: seen.append(("out", name, type(result).__name__)),
    )
    return seen, found


def test_EachModuleFiresOnceACallInOrderWithItsKeywords(session):
    root = Outer()
    seen, found = observe(session, root, "*")
    assert found.names == ("", "proj", "inner", "inner.proj")  # one name for the shared one
    root(torch.ones(2, 3))
    assert [(when, name) for when, name, _ in seen] == [
        ("in", ""), ("in", "proj"), ("out", "proj"), ("in", "inner"), ("in", "inner.proj"), ("out", "inner.proj"),
        ("out", "inner"), ("out", ""),
    ]
    assert ("in", "inner", ["scale"]) in seen and ("out", "inner", "tuple") in seen
    assert found.probe.fired == 8


def test_OnlyWhatMatchesFiresAndOtherInstancesDoNot(session):
    first, second = Outer(), Outer()
    seen, found = observe(session, first, "*.proj")
    assert found.names == ("inner.proj",)
    first(torch.ones(1, 3)), second(torch.ones(1, 3))
    assert len(seen) == 2


def test_NothingMatchesIsNotFoundWithTheNearestNames(session):
    _, found = observe(session, Outer(), "inner.pro")
    assert found.probe.state == "not found" and "nearest: inner.proj" in found.probe.detail


def test_StateCopiesAndPicklesAreThoseOfTheModuleAlone(session):
    root = Outer()
    keys = list(root.state_dict())
    seen, _ = observe(session, root, "inner")
    assert list(root.state_dict()) == keys and root._forward_hooks == {} and root.inner._forward_hooks == {}
    twin = copy.deepcopy(root)
    with torch.no_grad():
        twin.inner.proj.weight.zero_()
    assert float(twin(torch.ones(1, 3)).detach().abs().sum()) == 0  # its own weights
    assert float(root(torch.ones(1, 3)).detach().abs().sum()) > 0
    stored = io.BytesIO()
    torch.save(root, stored)
    stored.seek(0)
    again = torch.load(stored, weights_only=False)
    assert torch.equal(again(torch.ones(1, 3)), root(torch.ones(1, 3)))


def test_ACopyIsNotRecordedUnderTheOriginalsName(session):
    root = Outer()
    seen, _ = observe(session, root, "*")
    twin = copy.deepcopy(root)
    twin(torch.ones(1, 3))
    assert seen == []
    again, found = observe(session, twin, "inner")
    twin(torch.ones(1, 3))
    assert seen == [] and len(again) == 2 and found.probe.state == "attached"


def test_ANumberOfAnotherProcessIsNobodys(session):
    root = Outer()
    seen, _ = observe(session, root, "*")
    for module in root.modules():
        object.__setattr__(module, "_assay_number", 10**6)  # as out of a pickle
    root(torch.ones(1, 3))
    assert seen == []


def test_ACopyLosesWhatItCarriesOfTheOriginalBeforeItRunsOrIsCompiled(session):
    """Compiled code goes by what a module carries."""
    root = Outer()
    observe(session, root, "*")
    session.roots.found(root)
    twin = copy.deepcopy(root)
    session.roots.found(twin)
    carried = {name for module in twin.modules() for name in vars(module) if name.startswith("_assay_")}
    assert carried == {"_assay_seen"}
    assert {"_assay_number", "_assay_label", "_assay_after"} <= set(vars(root.inner))


class Scripted(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = torch.nn.Linear(3, 3)

    def forward(self, x):
        return self.proj(x) + 1


def test_ScriptingAnObservedModuleWorksAndLeavesItObserved(session):
    root = Scripted()
    seen, _ = observe(session, root, "*")
    scripted = torch.jit.script(root)
    assert torch.equal(scripted(torch.ones(1, 3)), root(torch.ones(1, 3)))
    assert len(seen) == 4


ROOTS = """
import copy, io, torch
from assay import attach

found = []
attach.session().when_root(lambda root: found.append(root))

class Inner(torch.nn.Module):
    def forward(self, x):
        return x * 2

class Outer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.proj = Inner(), torch.nn.Linear(3, 3)

    def forward(self, x):
        return self.proj(self.inner(x))

x, model = torch.ones(1, 3), Outer()
y = model(x)
model(x)
assert found == [model], found
for stranger in (torch.jit.script(model), torch.jit.trace(model, x)):
    assert torch.equal(stranger(x), y)
stored = io.BytesIO()
torch.save(model, stored)
stored.seek(0)
for other in (Outer(), copy.copy(model), copy.deepcopy(model), torch.load(stored, weights_only=False)):
    n = len(found)
    dir(other), [getattr(other, name, None) for name in dir(other)]
    assert len(found) == n, "a look at a module is no call"
    other(x), other(x)
    assert found[n:] == [other], found[n:]
model = Outer()
model.compile(backend="eager")
assert torch.equal(model(x), model(x)) and found[-1] is model
assert torch.nn.Module._compiled_call_impl is None
"""


def test_ModulesAreFoundAtTheirFirstCallAndCopiesAtTheirs(run):
    done = run({"main.py": ROOTS}, "--probes", "module:none:out")
    assert done.code == 0, done.err


def test_WhatAModuleRaisesAndWhatACallbackRaises(session):
    root = Outer()
    session.modules(root, "inner", then=lambda *a: 1 / 0)
    root(torch.ones(1, 3))
    assert any("ZeroDivisionError" in problem for _, problem in session._failures)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        root(torch.ones(1, 4))
    assert not modules.inside.callback


def test_AForwardReplacedOnOneModuleIsSaidNotToBeObserved(session):
    root = Outer()
    root.inner.forward = lambda x, scale: (x, x)
    seen, found = observe(session, root, "inner")
    assert found.names == () and "replaced on the module itself" in found.probe.detail


def test_RootsAreFoundOnceBeforeTheyRunAndPartsOfThemAreNone(session):
    roots = []
    finder = session.roots
    finder._callbacks.append(roots.append)
    model, other = Outer(), Outer()
    finder.found(model)
    finder.found(model.inner)
    finder.found(other)
    twin = copy.deepcopy(model)
    finder.found(twin)
    assert roots == [model, other, twin]
    assert current() is None  # nothing of this is the process's own session

"""The import hook, and patching callables where they are consumed. No torch is needed here."""

import functools
import importlib
import pickle
import sys
import threading

import pytest

from assay.attach import calls, targets
from assay.attach.import_hook import ImportHook
from assay.attach.probes import NotFoundError, Probe


@pytest.fixture
def hook(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    problems = []

    def guard(what, function, *arguments):
        try:
            return function(*arguments)
        except Exception as problem:
            problems.append(problem)

    before = set(sys.modules)
    made = ImportHook(guard)
    made.problems = problems
    made.install()
    yield made
    sys.meta_path.remove(made)
    for name in set(sys.modules) - before:
        if name.startswith("hooked"):
            del sys.modules[name]


def test_AModuleIsSeenWhenItHasBeenExecutedAndKeepsItsLoader(hook, tmp_path):
    (tmp_path / "hooked_a.py").write_text("x = 1\n")
    seen = []
    hook.when_imported("hooked_a", lambda module: seen.append(module.x))
    module = importlib.import_module("hooked_a")
    assert seen == [1]
    assert type(module.__loader__).__name__ == "SourceFileLoader" and module.__spec__.loader is module.__loader__
    hook.when_imported("hooked_a", lambda module: seen.append("there"))
    assert seen == [1, "there"]


def test_AReloadIsSeenAgain(hook, tmp_path):
    (tmp_path / "hooked_b.py").write_text("x = 1\n")
    seen = []
    hook.when_imported("hooked_b", lambda module: seen.append(module.x))
    module = importlib.import_module("hooked_b")
    (tmp_path / "hooked_b.py").write_text("x = 22\n")
    importlib.invalidate_caches()
    importlib.reload(module)
    assert seen == [1, 22]


def test_AFailingImportFailsAsBeforeAndMayBeTriedAgain(hook, tmp_path):
    (tmp_path / "hooked_c.py").write_text("raise ValueError('mine')\n")
    seen = []
    hook.when_imported("hooked_c", seen.append)
    with pytest.raises(ValueError, match="mine"):
        importlib.import_module("hooked_c")
    assert seen == [] and "hooked_c" not in sys.modules
    (tmp_path / "hooked_c.py").write_text("x = 1  # mended\n")
    importlib.invalidate_caches()
    importlib.import_module("hooked_c")
    assert len(seen) == 1


def test_AModuleThatIsNotThereIsNotThere(hook):
    hook.when_imported("hooked_none", lambda module: None)
    with pytest.raises(ModuleNotFoundError, match="hooked_none"):
        importlib.import_module("hooked_none")


def test_ACallbackThatRaisesDoesNotHarmTheImport(hook, tmp_path):
    (tmp_path / "hooked_d.py").write_text("x = 1\n")
    hook.when_imported("hooked_d", lambda module: 1 / 0)
    assert importlib.import_module("hooked_d").x == 1
    assert [type(p) for p in hook.problems] == [ZeroDivisionError]


def test_SubmodulesOfPackagesAndThreadsAreSeenOnce(hook, tmp_path):
    (tmp_path / "hooked_p").mkdir()
    (tmp_path / "hooked_p" / "__init__.py").write_text("")
    (tmp_path / "hooked_p" / "sub.py").write_text("import time\ntime.sleep(0.05)\n")
    seen = []
    hook.when_imported("hooked_p.sub", seen.append)
    threads = [threading.Thread(target=importlib.import_module, args=("hooked_p.sub",)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 1


def test_ASubmoduleAskedForWhileItIsBeingExecutedIsSeenAtTheNextImport(hook, tmp_path):
    (tmp_path / "hooked_e.py").write_text("import hooked_ask\nx = 5\n")
    (tmp_path / "hooked_f.py").write_text("")
    (tmp_path / "hooked_ask.py").write_text("ASK()\n")
    seen = []
    import builtins

    builtins.ASK = lambda: hook.when_imported("hooked_e", lambda module: seen.append(module.x))
    try:
        importlib.import_module("hooked_e")
    finally:
        del builtins.ASK
    assert seen == []
    importlib.import_module("hooked_f")
    assert seen == [5]


# ---- patching


class Quiet:
    def __init__(self):
        self.problems = []

    def failed(self, what, problem):
        self.problems.append(problem)


LIB = """
import functools
def f(x, y=2):
    return x + y
class Base:
    def method(self, x):
        return ("base", x)
class Child(Base):
    @classmethod
    def build(cls, x):
        return (cls.__name__, x)
    @staticmethod
    def plain(x):
        return x
    @property
    def size(self):
        return 3
    async def later(self, x):
        return x * 2
    builtin = len
    @functools.lru_cache
    def kept(self, x):
        return x * 3
@functools.lru_cache
def cached(x):
    return x * 4
class Kernel:
    launches = 0
    def __call__(self, x):
        return x * 5
    def __getitem__(self, grid):
        return lambda x: (grid, x)
    def __len__(self):
        return 6
    def reset(self):
        self.launches = 7
kernel = Kernel()
partial = functools.partial(f, y=8)
number = 4
"""


@pytest.fixture
def lib(hook, tmp_path):
    (tmp_path / "hooked_lib.py").write_text(LIB)
    return importlib.import_module("hooked_lib")


def attach(session, module, path, **callbacks):
    probe = Probe(path)
    callbacks = {"before": None, "after": None, "around": None, **callbacks}
    calls.wrap(session, targets.resolve(module, path), f"{module.__name__}:{path}").listen(
        calls.Listener(probe, callbacks["before"], callbacks["after"], callbacks["around"])
    )
    return probe


def test_ArgumentsAreReadBeforeAndResultsAfterTheCall(lib):
    seen = []
    probe = attach(
        Quiet(), lib, "f", before=lambda call: seen.append(dict(call.bound)), after=lambda call, r: seen.append(r)
    )
    assert lib.f(1) == 3 and lib.f(1, y=5) == 6
    assert seen == [{"x": 1, "y": 2}, 3, {"x": 1, "y": 5}, 6]
    assert probe.fired == 2 and lib.f.__name__ == "f" and lib.f.__defaults__ is None and lib.f.__wrapped__.__defaults__


def test_NamesThatWereBoundBeforeArePatchedToo(lib, tmp_path):
    (tmp_path / "hooked_user.py").write_text("from hooked_lib import f as mine\ndef use():\n    return mine(1)\n")
    user = importlib.import_module("hooked_user")
    probe = attach(Quiet(), lib, "f")
    assert user.use() == 3 and probe.fired == 1


def test_MethodsOfEveryKindBindAsBefore(lib):
    session = Quiet()
    probes = [attach(session, lib, f"Child.{n}") for n in ("method", "build", "plain", "builtin")]
    child = lib.Child()
    assert child.method(1) == ("base", 1) and lib.Child.build(2) == ("Child", 2) and child.build(3) == ("Child", 3)
    assert child.plain(4) == 4 and lib.Child.plain(5) == 5 and child.builtin("ab") == 2
    assert [p.fired for p in probes] == [1, 2, 2, 1]
    assert lib.Base().method(1) == ("base", 1) and probes[0].fired == 1  # only where it was asked for


def test_AnObjectThatIsCalledStaysWhatItIs(lib):
    session = Quiet()
    names = ("Child.kept", "cached", "kernel", "partial")
    before = {n: getattr(lib, n) for n in names if "." not in n}
    probes = [attach(session, lib, n) for n in names]
    assert lib.Child().kept(2) == 6 and lib.cached(2) == 8 and lib.kernel(2) == 10 and lib.partial(2) == 10
    assert [p.fired for p in probes] == [1, 1, 1, 1]
    assert lib.cached.cache_info().misses == 1 and lib.cached.cache_clear() is None
    assert lib.Child.kept.cache_info().currsize == 1
    assert lib.partial.func is lib.f and lib.partial.keywords == {"y": 8}
    kernel = lib.kernel
    assert kernel[3](4) == (3, 4) and len(kernel) == 6 and isinstance(kernel, lib.Kernel)
    kernel.reset()
    kernel.tag = "x"
    assert kernel.launches == 7 and before["kernel"].tag == "x"
    del kernel.tag
    assert not hasattr(before["kernel"], "tag") and hash(kernel) == hash(before["kernel"]) and kernel in {kernel}
    assert pickle.loads(pickle.dumps(lib.cached)) is lib.cached
    assert [p.fired for p in probes] == [1, 1, 1, 1]


def test_AWrapperThatCarriesTheMarkOfAnotherIsWrappedToo(lib):
    session = Quiet()
    attach(session, lib, "f")
    lib.g = functools.wraps(lib.f)(lambda x: lib.f(x) + 1)
    probe = attach(session, lib, "g")
    assert lib.g(1) == 4 and probe.fired == 1


def test_ACoroutineIsSeenWhenItIsDone(lib):
    import asyncio

    seen = []
    attach(Quiet(), lib, "Child.later", after=lambda call, result: seen.append(result))
    assert asyncio.run(lib.Child().later(4)) == 8 and seen == [8]


def test_WhatIsRaisedPassesUnchangedAndWhatCallbacksRaiseDoesNot(lib):
    session = Quiet()

    def bad(*arguments):
        raise OSError("callback")

    attach(session, lib, "f", before=bad, after=bad)
    assert lib.f(1) == 3 and len(session.problems) == 2
    with pytest.raises(TypeError) as caught:
        lib.f("a")
    assert caught.traceback[-1].name == "f"


@pytest.mark.parametrize("misbehave", ["never runs", "raises before", "raises after", "runs twice", "returns another"])
def test_TheHostGetsItsOwnResultWhateverAroundDoes(lib, misbehave):
    session = Quiet()
    ran = []

    def around(call, run):
        ran.append(1)
        if misbehave == "never runs":
            return
        if misbehave == "raises before":
            raise KeyError("mine")
        result = run()
        if misbehave == "raises after":
            raise KeyError("mine")
        if misbehave == "runs twice":
            assert run() is result
        return "another"

    attach(session, lib, "f", around=around)
    assert lib.f(20) == 22 and ran == [1]
    assert len(session.problems) == (1 if misbehave.startswith("raises") else 0)
    with pytest.raises(TypeError):
        lib.f("a")


def test_SeveralAroundsNestAndAllRun(lib):
    order = []

    def around(name):
        def inner(call, run):
            order.append(f"{name} in")
            run()
            order.append(f"{name} out")

        return inner

    attach(Quiet(), lib, "f", around=around("a"))
    attach(Quiet(), lib, "f", around=around("b"), after=lambda call, result: order.append(result))
    assert lib.f(1) == 3 and order == ["a in", "b in", "b out", "a out", 3]
    order.clear()
    with pytest.raises(TypeError):
        lib.f("a")
    assert order == ["a in", "b in"]


def test_ACallableWhoseBodyRunsBehindItsCallIsTold(lib):
    def generator():
        yield 1

    assert calls.runs_later(lib.Child.later) == "asynchronous"
    assert calls.runs_later(generator) == "a generator"
    assert calls.runs_later(lib.f) == ""


def test_WhatACallbackCallsIsNotObserved(lib):
    probe = attach(Quiet(), lib, "f", before=lambda call: lib.f(9))
    lib.f(1)
    assert probe.fired == 1


def test_PatchingTwiceIsOneWrapper(lib):
    first, second = attach(Quiet(), lib, "f"), attach(Quiet(), lib, "f")
    lib.f(1)
    assert (first.fired, second.fired) == (1, 1) and not hasattr(lib.f.__wrapped__, "__wrapped__")


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("g", "hooked_lib has no g"),
        ("Child.metod", "Child has no metod; nearest: method"),
        ("Chld.method", "hooked_lib has no Chld; nearest: Child"),
        ("Child.size", "is a property"),
        ("Child", "Child in hooked_lib is a class; name one of its methods, such as Child.__init__"),
        ("number", "is a int, which cannot be called"),
    ],
)
def test_WhatIsNotThereIsNamed(lib, path, text):
    with pytest.raises(NotFoundError, match=text):
        targets.resolve(lib, path)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("a.b:C.m", ("a.b", "C.m")),
        ("a.b.C.m", ("a.b", "C.m")),
        ("a.b.f", ("a.b", "f")),
        ("a._C.D.m", ("a", "_C.D.m")),
        ("__main__:f", ("__main__", "f")),
    ],
)
def test_DottedTargetsAreSplit(text, parts):
    assert targets.split(text) == parts

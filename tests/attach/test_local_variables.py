"""Rewriting a function in memory: what it does and what it is stay, and the variables are seen."""

import asyncio
import functools
import importlib.util
import inspect
import linecache
import sys
import traceback

import pytest

from assay.attach import local_variables
from assay.attach.probes import NotFoundError, Probe

SOURCE = '''
import functools

def logged(function):
    @functools.wraps(function)
    def inner(*args, **kwargs):
        return "logged", function(*args, **kwargs)
    return inner

def make(step):
    def counter(x, *, times=2, tag: str = "t"):
        """Counts."""
        k = x
        for _ in range(times):
            k = k + step
        return k
    return counter

class Base:
    def run(self, x):
        return x + 100

class Child(Base):
    __secret = 5

    def run(self, x):
        k = super().run(x)
        k = k + self.__secret
        return k

    @classmethod
    def build(cls, x):
        k = (cls.__name__, x)
        return k

    @staticmethod
    def plain(x):
        k, (m, *rest) = x
        return k

    @logged
    def decorated(self, x):
        k = x * 2
        return k

async def later(x):
    k = x
    async with Lock() as m:
        k += m
    return k

class Lock:
    async def __aenter__(self):
        return 7
    async def __aexit__(self, *error):
        return False

def numbers(n):
    k = 0
    while k < n:
        got = yield k
        k = k + (got or 1)

async def stream(n):
    for k in range(n):
        yield k

def branches(x):
    if x > 0:
        k = "positive"
    else:
        k = "negative"
    try:
        if (w := x * 2) > 10:
            raise ValueError("too large")
        z = 1
    except ValueError as problem:
        k = "caught"
        return k
    with open("/dev/null") as f:
        k = [k for k in range(3)]
    return k

def unbound(x):
    if x:
        k = 1
    return x

def fails(x):
    k = x + 1
    k = k + 1
    raise RuntimeError(f"at {k}")

def nested(x):
    def inner(k):
        k = k + 1
        return k
    k = inner(x)
    return k

def chained(x):
    a = k = x
    k: int = k + 1
    return a, k

def maybe(x):
    k = 0
    y = x and (k := x + 1)
    if x > 5 or (k := 9):
        return max((k := k * 2), 1)

def every(n):
    return [(k := i) for i in range(n)]

def matched(x):
    match x:
        case (k, 1):
            return k
        case {"a": k} if k > 1:
            return k
        case [*k]:
            return k

def handled(x):
    try:
        k = int(x)
    except ValueError:
        k = -1
    else:
        k = 5
    finally:
        k = k + 1
    return k

def ways(x):
    n = x
    if x == 1:
        k = 1
        return sorted(locals())
    if x == 2:
        import math as m
        k = 5
        del k
        try:
            raise ValueError
        except ValueError as e:
            pass
    return x

def deleted(x):
    k = x
    del x
    k = k + 1
    return k

def recursive(x):
    k = x
    return recursive(x - 1) if x else k

def outer(x):
    k = x
    return k

class Named:
    def run(self, x):
        k = super(Named, self).__hash__() and x
        text = f"""
not indented"""
        return k + Named.more(x)

    @staticmethod
    def more(x):
        return x

def bare(function):
    def inner(*args):
        return function(*args)
    return inner

@bare
def hidden(x):
    k = x
    return k

partial = functools.partial(nested, 3)

one_line = lambda x: x
'''


class Quiet:
    def __init__(self):
        self.problems = []

    def failed(self, what, problem):
        self.problems.append((what, problem))

    def labelled(self, label):
        return None


@pytest.fixture
def lib(tmp_path, request):
    path = tmp_path / "rewritten.py"
    path.write_text(SOURCE)
    name = f"rewritten_{request.node.name}"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[name]


def see(function, *names):
    """Observes and gives the list that (name, value) go into."""
    seen = []
    probe = Probe("x")
    local_variables.observe(Quiet(), local_variables.plain(function), list(names), lambda values, call: seen.extend(values.items()), probe)
    return seen


def test_ClosureDefaultsAndKeywordsStay(lib):
    counter = lib.make(10)
    other = lib.make(1)
    seen = see(counter, "k")
    assert counter(1) == 21 and counter(1, times=1) == 11
    assert [v for _, v in seen] == [1, 11, 21, 1, 11]
    assert other(1) == 3 and len(seen) == 5  # another function object of the same source
    assert inspect.signature(counter).parameters["tag"].annotation is str
    assert counter.__doc__ == "Counts." and counter.__kwdefaults__ == {"times": 2, "tag": "t"}


def test_SuperPrivateNamesAndTheClassCellStay(lib):
    seen = see(lib.Child.run, "k#1", "k#2", "k#last")
    assert lib.Child().run(1) == 106
    assert seen == [("k#1", 101), ("k#2", 106), ("k#last", 106)]


def test_ClassMethodStaticMethodAndDecoratorStay(lib):
    built = see(vars(lib.Child)["build"].__func__, "k")
    assert lib.Child.build(3) == ("Child", 3) and built == [("k", ("Child", 3))]
    unpacked = see(lib.Child.plain, "k", "rest")
    assert lib.Child.plain((1, (2, 3, 4))) == 1
    assert unpacked == [("k", 1), ("rest", [3, 4])]
    decorated = see(lib.Child.decorated, "k")
    assert lib.Child().decorated(4) == ("logged", 8) and decorated == [("k", 8)]


def test_CoroutinesGeneratorsAndAsyncGeneratorsStay(lib):
    awaited = see(lib.later, "k#1", "k#2", "m", "k#last")
    assert asyncio.run(lib.later(1)) == 8
    assert awaited == [("k#1", 1), ("m", 7), ("k#2", 8), ("k#last", 8)]
    yielded = see(lib.numbers, "k", "got")
    generator = lib.numbers(4)
    assert next(generator) == 0 and generator.send(3) == 3
    assert list(generator) == []
    assert yielded == [("k", 0), ("got", 3), ("k", 3), ("got", None), ("k", 4)]
    streamed = see(lib.stream, "k", "k#last")

    async def collect():
        return [k async for k in lib.stream(2)]

    assert asyncio.run(collect()) == [0, 1]
    assert streamed == [("k", 0), ("k", 1), ("k#last", 1)]


def test_BranchesWalrusExceptionsAndComprehensions(lib):
    seen = see(lib.branches, "k#1", "k#2", "k#3", "k#4", "w", "f", "k#last")
    assert lib.branches(1) == [0, 1, 2]
    assert [n for n, _ in seen] == ["k#1", "w", "f", "k#4", "k#last"]
    seen.clear()
    assert lib.branches(-9) == [0, 1, 2] and seen[0] == ("k#2", "negative")
    seen.clear()
    assert lib.branches(9) == "caught"
    assert seen[-2:] == [("k#3", "caught"), ("k#last", "caught")]


def test_VariablesThatComeAndGoInOtherWaysAreReadWhenTheyAreThere(lib):
    seen = see(lib.ways, "k#last", "e#last", "m#last", "n#last")
    assert lib.ways(0) == 0 and lib.ways(1) == ["k", "n", "x"] and lib.ways(2) == 2
    assert [n for n, _ in seen] == ["n#last", "k#last", "n#last", "m#last", "n#last"]


def test_AVariableThatIsNotBoundAtTheReturnIsNotRead(lib):
    seen = see(lib.unbound, "k#last")
    assert lib.unbound(0) == 0 and seen == []
    assert lib.unbound(2) == 2 and seen == [("k#last", 1)]


def test_NestedFunctionsAndChainedAssignmentsCountForThemselves(lib):
    nested = see(lib.nested, "k#1")
    assert lib.nested(1) == 2 and nested == [("k#1", 2)]
    chained = see(lib.chained, "k#1", "k#2", "a")
    assert lib.chained(5) == (5, 6) and chained == [("a", 5), ("k#1", 5), ("k#2", 6)]


def test_WhatIsAssignedInAnExpressionIsSeenWhenItIsEvaluated(lib):
    seen = see(lib.maybe, "k#1", "k#2", "k#3", "k#4", "k#last")
    assert lib.maybe(0) == 18
    assert seen == [("k#1", 0), ("k#3", 9), ("k#4", 18), ("k#last", 18)]
    seen.clear()
    assert lib.maybe(6) == 14
    assert seen == [("k#1", 0), ("k#2", 7), ("k#4", 14), ("k#last", 14)]
    each = see(lib.every, "k")
    assert lib.every(2) == [0, 1] and each == [("k", 0), ("k", 1)]


def test_PatternsBindAndHandlersCountInTheOrderOfTheSource(lib):
    captured = see(lib.matched, "k#1", "k#2", "k#3")
    assert lib.matched((4, 1)) == 4 and lib.matched({"a": 2}) == 2 and lib.matched([3]) == [3]
    assert captured == [("k#1", 4), ("k#2", 2), ("k#3", [3])]
    handled = see(lib.handled, "k#2", "k#3", "k#4")
    assert lib.handled("x") == 0 and lib.handled("1") == 6
    assert handled == [("k#2", -1), ("k#4", 0), ("k#3", 5), ("k#4", 6)]


def test_AFunctionMayNameItselfItsClassAndDeleteItsArgument(lib):
    deeper = see(lib.recursive, "k")
    assert lib.recursive(1) == 0 and deeper == [("k", 1), ("k", 0)]
    named = see(lib.Named.run, "k", "text")
    assert lib.Named().run(2) == 4 and named == [("k", 2), ("text", "\nnot indented")]
    assert lib.deleted(1) == 2 and see(lib.deleted, "k#2") == [] and lib.deleted(1) == 2
    plain = see(lib.outer, "k")
    assert lib.outer(3) == 3 and plain == [("k", 3)]


def test_AnArgumentIsReadAtTheReturn(lib):
    seen = see(lib.nested, "x#last")
    assert lib.nested(1) == 2 and seen == [("x#last", 1)]
    with pytest.raises(NotFoundError, match="assigns nothing to it; x#last is there"):
        see(lib.nested, "x")


def test_WhatADecoratorHidesIsFoundByItsName(lib):
    function = local_variables.plain(lib.hidden, "hidden")
    assert function.__name__ == "hidden" and local_variables.plain(lib.hidden, "other").__name__ == "inner"
    assert local_variables.plain(lib.partial) is lib.nested


def test_ASourceThatHasChangedIsNotPutInItsPlace(lib):
    path = inspect.getsourcefile(lib.nested)
    with open(path) as file:
        text = file.read()
    with open(path, "w") as file:
        file.write(text.replace("k = inner(x)", "k = inner(-x)"))
    linecache.checkcache(path)
    with pytest.raises(NotFoundError, match="was it changed since"):
        see(lib.nested, "k")
    assert lib.nested(1) == 2


def test_TracebacksHaveTheLinesOfTheSource(lib):
    see(lib.fails, "k#1", "k#last")
    with pytest.raises(RuntimeError, match="at 3") as caught:
        lib.fails(1)
    frame = traceback.extract_tb(caught.value.__traceback__)[-1]
    assert frame.filename.endswith("rewritten.py") and frame.name == "fails"
    assert frame.line == 'raise RuntimeError(f"at {k}")'
    assert inspect.getsource(lib.fails).startswith("def fails")


def test_ACallbackThatRaisesNeverReachesTheHost(lib):
    session = Quiet()
    function = lib.nested

    def bad(values, call):
        raise KeyError("mine")

    local_variables.observe(session, function, ["k"], bad, Probe("x"))
    assert lib.nested(1) == 2
    assert [type(p) for _, p in session.problems] == [KeyError]


def test_SeveralObserversShareOneFunction(lib):
    first, second = see(lib.chained, "k#2"), see(lib.chained, "a", "k#1")
    lib.chained(3)
    assert first == [("k#2", 4)] and second == [("a", 3), ("k#1", 3)]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("kk", "nested has no local variable kk; nearest: k"),
        ("k#4", "nested assigns k 1 time"),
    ],
)
def test_WhatIsNotThereIsNamed(lib, name, text):
    with pytest.raises(NotFoundError, match=text):
        see(lib.nested, name)
    assert lib.nested(1) == 2


def test_WithoutSourceItIsSaid():
    space = {}
    exec(compile("def f(x):\n    k = x\n    return k\n", "<made up>", "exec"), space)
    with pytest.raises(NotFoundError, match="source of f is not available"):
        see(space["f"], "k")
    with pytest.raises(NotFoundError, match="no Python function"):
        see(len, "k")
    with pytest.raises(NotFoundError, match="not a plain function"):
        see(lambda x: x, "k")


def test_AWrappedFunctionIsRewrittenInside(lib):
    wrapper = functools.wraps(lib.nested)(lambda *a: lib.nested(*a))
    seen = see(wrapper, "k")
    assert wrapper(1) == 2 and seen == [("k", 2)]

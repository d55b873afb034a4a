"""Shortcuts: what is recorded without a callback must be what the callback records, and nothing else may go that way."""

import gc
import sys
from ctypes import c_void_p

import assay
import pytest
import torch
from assay import Run
from assay._fast_call import CCallable
from assay.attach import compiled, shortcuts
from assay.attach.groups import Group
from assay.attach.rows import Rows
from assay.attach.shortcuts import RESULT, Shortcut, Shortcuts
from two_ways import Meanwhile, check_segments

HERE = __name__


class Layer:
    """An implementation of attention, as vLLM has them: it writes into a buffer and may give a second result."""

    def forward(self, q, kv=None, output=None, lse=None):
        output.copy_(q * 2)
        return output, lse

    def split(self, pair):
        return pair[0] + pair[1]


class Watch:
    """Callbacks of Layer.forward that record its tensors and leave shortcuts behind."""

    def __init__(self, session):
        self.session, self.times = session, [0, 0]
        self.groups = {}
        self.probe = session.wrap(f"{HERE}:Layer.forward", before=self.before, after=self.after)

    def group(self, *key):
        return self.groups.setdefault(key, Group(self.session))

    def record(self, group, tensors, sites):
        rows = self.session.rows
        recorded = [(site, 0, tensor, {}) for site, tensor in zip(sites, tensors)]
        for name, layer, tensor, fields in recorded:
            self.session.record(name, tensor, layer=layer, rows=rows, **fields)
        group.learn(rows, tensors, recorded)

    def before(self, call):
        self.times[0] += 1
        q, kv = call.bound["q"], call.bound["kv"]
        group = self.group("in", id(call.self))
        self.record(group, (q, kv), ("attn.q", "attn.kv_a"))
        call.shorten(group, ((1, -1, "q"), (2, -1, "kv")))

    def after(self, call, result):
        self.times[1] += 1
        out, lse = result
        tensors = (out,) if lse is None else (out, lse)
        group = self.group("out", id(call.self), lse is None)
        self.record(group, tensors, ("attn.out", "attn.lse"))
        places = [(RESULT, member, None) for member in range(2)]
        call.shorten(group, places[: len(tensors)], places[len(tensors) :])


@pytest.fixture
def layers(session, monkeypatch):
    """layers(n) gives the callbacks and n layers."""
    monkeypatch.setattr(Layer, "forward", Layer.forward)  # put back what is wrapped
    monkeypatch.setattr(Layer, "split", Layer.split)
    return lambda n=1: (Watch(session), [Layer() for _ in range(n)])


def begin(session, step, n=3, phase="decode"):
    session.rows = Rows([Run(7, 0, n - 1, 10 + step), Run(2**63 + 1, n - 1, 1, step)], step=step, phase=phase)
    session.show_rows()


def tensors(seed, n=3, dtype=torch.bfloat16):
    torch.manual_seed(seed)
    q = torch.randn(n, 4, 16).to(dtype)
    return q, torch.randn(n, 2, 24).to(dtype)[:, 1], torch.empty_like(q)


def table(shortcuts):
    """First arguments that C finds shortcuts of, by their addresses."""
    c = CCallable.from_address(shortcuts.address)
    return list((c_void_p * c.n).from_address(c.owners)) if c.n else []


def sites(session):
    assert not session._failures
    session.finish()
    return [(e.site.removeprefix("layers.0.attn."), e.step) for e in assay.open(session.folder)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_ACallIsRecordedAsByItsCallbacks(session, layers, dtype):
    watch, (layer,) = layers()
    for step in range(4):
        begin(session, step)
        q, kv, output = tensors(step, dtype=dtype)
        # By place and by name.
        given = layer.forward(q, kv, output) if step % 2 else layer.forward(q, output=output, kv=kv)
        assert given[0] is output and torch.equal(output, q * 2)
    assert watch.times == [1, 1] and watch.probe.times == 4
    for step in range(4):
        begin(session, step)
        q, kv, output = tensors(step, dtype=dtype)
        for name, tensor in (("attn.q", q), ("attn.kv_a", kv), ("attn.out", q * 2)):
            session.record(name, tensor, layer=0, rows=session.rows)
    assert not session._failures
    session.finish()
    recorded = list(assay.open(session.folder))
    assert len(recorded) == 24
    for got, expected in zip(recorded[:12], recorded[12:]):
        assert (got.site, got.step, got.shape) == (expected.site, expected.step, expected.shape)
        check_segments(got, expected)


def test_EachLayerHasItsOwnAndOneThatIsGoneHasNone(session, layers):
    watch, (one, two) = layers(2)
    for step, layer in enumerate((one, two, one, two)):
        begin(session, step)
        layer.forward(*tensors(step))
    assert watch.times == [2, 2]
    site = Layer.forward._assay_site
    del one, two, layer
    gc.collect()
    assert table(site.shortcuts) == []
    begin(session, 4)
    Layer().forward(*tensors(4))
    assert watch.times == [3, 3]
    assert len(sites(session)) == 15


def test_WhatLooksOtherwiseGoesToTheCallbacks(session, layers):
    watch, (layer,) = layers()
    q, kv, output = tensors(1)
    begin(session, 0)
    layer.forward(q, kv, output)
    layer.forward(q, kv, output)
    assert watch.times == [1, 1]
    begin(session, 1, phase="mixed")
    layer.forward(q, kv, output)
    assert watch.times == [1, 1]
    begin(session, 2)
    wide = torch.randn(3, 4, 32).bfloat16()
    layer.forward(wide, kv, torch.empty_like(wide))
    assert watch.times == [2, 2]
    layer.forward(q, kv, output, lse=torch.randn(3, 4).bfloat16())  # there was None
    assert watch.times[1] == 3
    session.rows = None
    layer.forward(q, kv, output)
    assert watch.times[1] == 4


def after_a_call(session, layers):
    """A call that leaves shortcuts, and the next step with the same layer and tensors."""
    watch, (layer,) = layers()
    given = tensors(1)
    begin(session, 0)
    layer.forward(*given)
    begin(session, 1)
    return watch, layer, given


def test_AResultThatChangesIsRecordedByTheCallbackAlone(session, layers):
    """The beginning has a shortcut and the end has none: nothing is recorded twice, and nothing is lost."""
    watch, layer, given = after_a_call(session, layers)
    layer.forward(*given, lse=torch.randn(3, 4).bfloat16())
    assert watch.times == [1, 2] and watch.probe.times == 2
    assert sites(session) == [("q", 0), ("kv_a", 0), ("out", 0), ("q", 1), ("kv_a", 1), ("out", 1), ("lse", 1)]


def test_WhatTheCallRaisesPassesAndItsBeginningIsRecorded(session, layers):
    watch, layer, (q, kv, _) = after_a_call(session, layers)
    with pytest.raises(RuntimeError, match="size of tensor"):
        layer.forward(q, kv, torch.empty(5).bfloat16())
    assert watch.times == [1, 1]
    assert sites(session) == [("q", 0), ("kv_a", 0), ("out", 0), ("q", 1), ("kv_a", 1)]


def test_AnotherListenerHasEveryCallbackRun(session, layers):
    watch, (layer,) = layers()
    heard = []
    for step in range(4):
        begin(session, step)
        layer.forward(*tensors(step))
        if step == 1:
            session.wrap(f"{HERE}:Layer.forward", before=lambda call: heard.append(call.self))
    assert watch.times == [3, 3] and heard == [layer, layer]


def test_InsideACallbackNothingIsObserved(session, layers):
    watch, (layer,) = layers()
    begin(session, 0)
    layer.forward(*tensors(0))
    inner = []
    session.wrap(f"{HERE}:Layer.split", before=lambda call: inner.append(layer.forward(*tensors(1))))
    layer.split((1, 2))
    assert len(inner) == 1 and watch.times == [1, 1] and watch.probe.times == 1
    assert len(sites(session)) == 3


def test_DisarmedNothingIsRecordedAndAChildLearnsAnew(session, layers):
    watch, (layer,) = layers()
    for step in range(3):
        begin(session, step)
        session.trace().arm(step != 1)
        layer.forward(*tensors(step))
    assert watch.times == [1, 1] and watch.probe.times == 3
    session.finish()
    session._after_fork()  # as in a child, which opens a recording of its own
    assert table(Layer.forward._assay_site.shortcuts) == [] and not compiled._shortcuts
    begin(session, 3)
    layer.forward(*tensors(3))
    assert watch.times == [2, 2]


def test_MembersOfATupleAreTakenOnlyOutOfTuples(session, layers):
    layers(0)
    seen = []

    def before(call):
        seen.append(call.args[1])
        group = Group(session)
        q, rows = call.args[1][0], session.rows
        session.record("attn.q", q, layer=0, rows=rows)
        group.learn(rows, (q,), [("attn.q", 0, q, {})])
        call.shorten(group, ((1, 0, "pair"),))

    session.wrap(f"{HERE}:Layer.split", before=before)
    layer, (q, _, _) = Layer(), tensors(1)
    begin(session, 0)
    for pair in ((q, q), (q, q), [q, q], (q.float(), q.float()), (q, q)):
        layer.split(pair)
    # A group of its own each time: the list and the other type went to the callback, and the last one has a shortcut for
    # the other type.
    assert len(seen) == 4
    assert len(sites(session)) == 5


def test_RowsThatGoWhileATensorIsAskedAreNotRecorded(session, layers):
    """Another thread may begin another step while a float32 tensor is asked for its offset."""
    watch, (layer,) = layers()
    begin(session, 0)
    layer.forward(*tensors(0, dtype=torch.float32))

    def no_rows():
        session.rows = None

    begin(session, 1)
    with Meanwhile(no_rows):
        layer.forward(*tensors(1, dtype=torch.float32))
    assert watch.times == [2, 2]


# ---- compiled graphs


class Outer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = torch.nn.Linear(8, 8)


class Shortened:
    """A listener to a module whose results one group knows."""

    def __init__(self, session):
        self.session, self.known, self.long = session, Group(session), 0

    def __call__(self, module, name, args, kwargs, result):
        self.long += 1
        rows = self.session.rows
        self.session.record("attn.q_a", result, layer=0, rows=rows)
        if rows is not None:
            self.known.learn(rows, (result,), [("attn.q_a", 0, result, {})])

    def again(self, name, values, result):
        assert values[0] is result
        return self.known


def test_CompiledCodeGoesTheShortWayUntilItRefusesOrSomebodyElseListens(session):
    compiled._define(torch)
    root, listener, other = Outer(), Shortened(session), []
    found = session.modules(root, "proj", then=listener)
    text = compiled._text("after", "", "module", root.proj._assay_label)

    def deliver(step, width=8):
        begin(session, step)
        torch.ops.assay.observe([torch.randn(3, width).bfloat16()], text)

    for step in range(3):
        deliver(step)
    assert listener.long == 1 and found.probe.times == 3
    deliver(3, width=16)
    assert listener.long == 2 and found.probe.times == 4
    session.modules(root, "proj", then=lambda *a: other.append(a[4]))
    deliver(4, width=16)
    assert listener.long == 3 and len(other) == 1
    assert sites(session) == [("q_a", step) for step in range(5)]


def test_AGraphsUnknownProbeIsSaidOnce(session):
    compiled._define(torch)
    before, compiled._session = compiled._session, session
    compiled._unknown.clear()
    try:
        for _ in range(2):
            torch.ops.assay.observe([torch.ones(2)], compiled._text("after", "", "nobody's", "a\nlabel"))
    finally:
        compiled._session = before
    assert list(session._failures.values()) == [1] and "did not ask for" in str(session._failures)


class Pair(torch.nn.Module):
    def forward(self, x, second=None):
        return x * 2, second


class Grouped(Shortened):
    """The same outside of compiled code, for the first of two results."""

    def __call__(self, module, name, args, kwargs, result):
        super().__call__(module, name, args, kwargs, result[0])

    def group(self, name):
        return self.known


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_AModuleWhoseResultsOneGroupKnowsIsQuick(session, dtype):
    listener, pair = Grouped(session), Pair()
    found = session.modules(pair, "*", then=listener)
    inputs = [torch.randn(3, 8).to(dtype) for _ in range(4)]
    for step, x in enumerate(inputs):
        begin(session, step)
        pair(x)
    assert listener.long == 1 and found.probe.times == 4
    begin(session, 4)
    pair(inputs[0], "something else")
    assert listener.long == 2
    session.trace().arm(False)
    pair(inputs[0], "something else")
    session.trace().arm(True)
    for step, x in enumerate(inputs):
        begin(session, step)
        session.record("attn.q_a", x * 2, layer=0, rows=session.rows)
    assert not session._failures
    session.finish()
    recorded = list(assay.open(session.folder))
    assert [e.step for e in recorded] == [0, 1, 2, 3, 4, 0, 1, 2, 3]
    for got, expected in zip(recorded, recorded[5:]):
        check_segments(got, expected)


def test_AModuleThatIsLearnedAnewWhileItsTensorIsAskedHasEveryCallCounted(session):
    """Another thread may call it with other tensors while a float32 one is asked: C still has what was learned before."""
    listener, pair = Grouped(session), Pair()
    found = session.modules(pair, "*", then=listener)
    begin(session, 0)
    for _ in range(2):
        pair(torch.randn(3, 8))
    counted = found.probe._counts[0]
    with Meanwhile(lambda: pair(torch.randn(3, 16))):
        pair(torch.randn(3, 8))
    assert listener.long == 2 and found.probe.times == 4
    assert found.probe._counts[0] is counted and counted.fired == 2
    pair(torch.randn(3, 16))
    assert listener.long == 2 and found.probe.times == 5


def test_AnotherModuleOfTheLabelIsHeardInCompiledCode(session):
    compiled._define(torch)
    listeners, labels = [], set()
    for step in range(0, 4, 2):
        root, listener = Outer(), Shortened(session)
        listeners.append(listener)
        session.modules(root, "proj", then=listener)
        labels.add(root.proj._assay_label)
        for later in range(2):
            begin(session, step + later)
            text = compiled._text("after", "", "module", root.proj._assay_label)
            torch.ops.assay.observe([torch.randn(3, 8).bfloat16()], text)
        del root
        gc.collect()
    assert len(labels) == 1 and [listener.long for listener in listeners] == [1, 1]
    assert sites(session) == [("q_a", step) for step in range(4)]


class Owner:
    pass


def learned(session):
    """A group of tensors like these."""
    begin(session, 0)
    x, group = torch.randn(3, 8).bfloat16(), Group(session)
    session.record("attn.q_a", x, layer=0, rows=session.rows)
    group.learn(session.rows, (x,), [("attn.q_a", 0, x, {})])
    return group


def test_OwnersThatComeAndGoWhileTheTableIsMadeAreRight(session):
    """As another thread's do, or one that a garbage collection finds: at each line of it."""
    shortcut = Shortcut(session, None, learned(session), ((1, -1, "q"),))
    known, owners, code = Shortcuts(), [Owner(), Owner()], Shortcuts._show.__code__
    lines = sorted({line for _, _, line in code.co_lines() if line is not None})

    def at(wanted, then):
        def local(frame, event, _argument):
            if event == "line" and frame.f_lineno == wanted:
                sys.settrace(None)
                then()
            return local

        return lambda frame, event, argument: local if frame.f_code is code else None

    def come_and_go():
        owners[0] = Owner()
        known.put(owners[0], "before", shortcut, (True, False))

    for line in lines:
        known.put(owners[0], "before", shortcut, (True, False))
        sys.settrace(at(line, come_and_go))
        try:
            known.put(owners[1], "before", shortcut, (True, False))
        finally:
            sys.settrace(None)
        assert table(known) == sorted(id(owner) for owner in owners), line


def test_WhatIsAnotherEachTimeIsNotKeptForEver(session, layers, monkeypatch):
    monkeypatch.setattr(shortcuts, "MAX_TABLES", 20)
    watch, (layer,) = layers()
    for step in range(40):
        begin(session, step)
        Layer().forward(*tensors(step))
        layer.forward(*tensors(step))
    assert watch.times[0] < 80 and len(sites(session)) == 240
    site = Layer.forward._assay_site
    assert len(site.shortcuts._kept) < 30 and len(watch.probe._counts) < 20 and watch.probe.times == 80


def test_AListenerToResultsAloneCountsEachCallOnce(session, layers):
    layers(0)
    layer, group = Layer(), Group(session)

    def after(call, result):
        rows = session.rows
        session.record("attn.q_a", result, layer=0, rows=rows)
        group.learn(rows, (result,), [("attn.q_a", 0, result, {})])
        call.shorten(group, ((RESULT, -1, None),))

    probe = session.wrap(f"{HERE}:Layer.split", after=after)
    for step in range(6):
        begin(session, step)
        layer.split([torch.randn(3, 8).to(torch.bfloat16 if step % 3 else torch.float64)] * 2)
    assert probe.times == 6 and len(sites(session)) == 6


def test_ACompiledProbeThatGoesTheLongWayAgainKeepsNothingMore(session):
    compiled._define(torch)
    root, listener = Outer(), Shortened(session)
    session.modules(root, "proj", then=listener)
    text = compiled._text("after", "", "module", root.proj._assay_label)
    before = len(compiled._kept)
    for step in range(20):
        begin(session, step)
        torch.ops.assay.observe([torch.randn(3, 8 if step % 2 else 0).bfloat16()], text)
    assert listener.long > 10 and len(compiled._kept) == before + 1

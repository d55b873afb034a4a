"""Modules whose results go through the built-in function: what it records must be what the long way records."""

import copy
import gc
import weakref
from collections import OrderedDict

import assay
import numpy
import pytest
import torch
from assay import _fast_call
from assay.attach import defaults, selectors
from assay.attach import modules as attached_modules
from assay.attach.defaults import Outputs, observe_modules
from assay.attach.rows import Rows
from two_ways import Meanwhile, check_segments


class Gives(torch.nn.Module):
    """Gives what a function makes of its input."""

    def __init__(self, make):
        super().__init__()
        self.make = make

    def forward(self, x):
        return self.make(x)


class Named(OrderedDict):
    pass


RESULTS = {
    "tensor": lambda x: x * 2,
    "scalar": lambda x: x.sum(),
    "slice": lambda x: x[1:, 3:],
    "integers": lambda x: x.to(torch.int64),
    "bits": lambda x: x > 0,
    "imaginary": lambda x: torch.complex(x, x).conj().imag,
    "pair": lambda x: (x, None),
    "three": lambda x: (x, x.to(torch.bfloat16), x.argmax(-1)),
    "named": lambda x: Named(hidden=x, cache=object(), logits=x[:1]),
    "one of a dictionary": lambda x: {"a": x},
}


def inputs(n):
    torch.manual_seed(5)
    return [torch.randn(3, 16) for _ in range(n)]


def observed(session, module):
    found = session.modules(module, "*", then=Outputs(session))
    return found.probe, attached_modules._of(module)


def quick_calls(watched):
    return watched.learned.c.fired if watched.learned is not None else 0


def events(session):
    assert not session._failures
    session.finish()
    return list(assay.open(session.folder))


def check_like(got, expected):
    assert (got.site, got.shape, got.strides, got.dtype) == (expected.site, expected.shape, expected.strides, expected.dtype)
    assert got.storage_offset == expected.storage_offset
    assert (got.step, got.phase) == (expected.step, expected.phase)
    check_segments(got, expected)


@pytest.mark.parametrize("kind", RESULTS)
def test_every_kind_of_result_is_recorded_as_by_the_long_way(session, kind):
    module = Gives(RESULTS[kind])
    probe, watched = observed(session, module)
    values = inputs(4)
    for value in values:
        module(value)
    # What a tensor with the signs left to do is, no C function of torch can say without a copy.
    assert quick_calls(watched) == (0 if kind == "imaginary" else 3)
    watched.unlearn(module)
    for value in values:
        module(value)
    assert probe.times == 8
    found = events(session)
    assert len(found) % 8 == 0 and found
    for got, expected in zip(found[: len(found) // 2], found[len(found) // 2 :]):
        check_like(got, expected)


def test_a_shape_that_grows_stays_quick_and_a_large_tensor_goes_the_long_way(session):
    module = Gives(lambda x: x)
    _, watched = observed(session, module)
    for n in (1, 2, 3, 4):
        module(torch.ones(n, 16))
    assert quick_calls(watched) == 3
    module(torch.ones(_fast_call.LARGEST + 1))
    module(torch.ones(_fast_call.LARGEST))
    assert quick_calls(watched) == 1  # learned anew from the large one
    assert [e.shape for e in events(session)][-2:] == [(_fast_call.LARGEST + 1,), (_fast_call.LARGEST,)]


def test_results_of_other_kinds_are_recorded_too(session):
    given = [inputs(1)[0], (inputs(1)[0], inputs(1)[0]), [inputs(1)[0]], {"a": inputs(1)[0]}, None, inputs(1)[0]]
    results = iter(given * 3)
    module = Gives(lambda x: next(results))
    observed(session, module)
    for _ in given * 3:
        module(torch.zeros(1))
    names = ["model.out", "model.0.out", "model.1.out", "model.out", "model.a.out", "model.out"]
    assert [e.site for e in events(session)] == names * 3


def test_the_rows_of_a_step_reach_the_tensors_that_have_them(session):
    module = Gives(lambda x: x)
    _, watched = observed(session, module)
    for step in range(3):
        session.rows = Rows([assay.Run(7, 0, 3, step)], step=step, phase="decode")
        module(torch.ones(2, 4))  # other rows: the step alone
        module(torch.ones(2, 4))
    session.rows = None
    module(torch.ones(2, 4))
    module(torch.ones(2, 4))
    assert quick_calls(watched) >= 1
    assert [(e.step, e.phase) for e in events(session)] == [
        *[(step, "decode") for step in (0, 0, 1, 1, 2, 2)], (-1, "unknown"), (-1, "unknown"),
    ]


def test_rows_that_fit_are_kept_by_both_ways(session):
    module = Gives(lambda x: x)
    _, watched = observed(session, module)
    for step in range(2):
        session.rows = Rows([assay.Run(7, 0, 2, 10 + step), assay.Run(9, 2, 1, 4)], step=step, phase="decode")
        for _ in range(3):
            module(torch.ones(3, 4))
    assert quick_calls(watched) >= 2
    for k, event in enumerate(events(session)):
        found = [(s.request, s.first_position, s.n_rows) for s in event.segments]
        assert found == [(7, 10 + k // 3, 2), (9, 4, 1)]


@pytest.mark.parametrize("layer", [None, 2])
@pytest.mark.parametrize("make", [torch.ones, numpy.ones])
def test_names_of_the_hosts_own_have_the_rows_of_the_step_too(session, make, layer):
    """Arguments, results and local variables: their names say nothing of axes."""
    session.rows = Rows([assay.Run(7, 0, 2, 10), assay.Run(9, 2, 1, 4)], step=5, phase="decode")
    defaults.record_all(session, "lib.f", [make((3, 4)), make((2, 4)), make(())], layer)
    first, *others = events(session)
    assert [(s.request, s.first_position, s.n_rows) for s in first.segments] == [(7, 10, 2), (9, 4, 1)]
    assert [e.step for e in (first, *others)] == [5, 5, 5]
    assert [p.dropped for p in assay.open(session.folder).processes] == [0]


def test_two_selectors_share_the_rows_of_a_step(session):
    first, second = Gives(lambda x: x), Gives(lambda x: x)
    observed(session, first)
    observed(session, second)
    for step in range(3):
        session.rows = Rows([assay.Run(7, 0, 2, step)], step=step, phase="decode")
        first(torch.ones(2, 4))
        second(torch.ones(2, 4))
    found = [(e.step, e.segments[0].request, e.segments[0].first_position) for e in events(session)]
    assert found == [(step, 7, step) for step in range(3) for _ in range(2)]


@pytest.mark.parametrize("text, names", [("module:*:out", ["model.out"]), ("module:*", ["model.in", "model.out"])])
def test_a_selector_of_outputs_alone_is_quick(session, monkeypatch, text, names):
    roots = []
    monkeypatch.setattr(session, "when_root", roots.append)
    [selector] = selectors.parse(text)
    observe_modules(session, selector)
    module = Gives(lambda x: x * 2)
    for then in roots:
        then(module)
    for _ in range(3):
        module(torch.ones(2))
    assert quick_calls(attached_modules._of(module)) == (2 if text.endswith(":out") else 0)
    assert [e.site for e in events(session)] == names * 3


def test_what_a_callback_calls_is_not_observed(session):
    module, other = Gives(lambda x: x), Gives(lambda x: x)
    _, watched = observed(session, module)
    for _ in range(3):
        module(torch.ones(2))
    session.modules(other, "*", then=lambda *_: module(torch.ones(2)))
    other(torch.ones(2))
    module(torch.ones(2))
    assert len(events(session)) == 4 and quick_calls(watched) == 3


def test_a_member_that_is_taken_out_while_it_is_asked_is_not_recorded_quickly(session):
    kept = {}

    def make(x):
        kept["result"] = {"a": x * 2, "b": x * 3}
        return kept["result"]

    module = Gives(make)
    _, watched = observed(session, module)
    for _ in range(3):
        module(torch.ones(2))
    assert quick_calls(watched) == 2
    with Meanwhile(lambda: kept["result"].update(a=torch.full((2,), 7.0))):
        module(torch.ones(2))
    assert quick_calls(watched) == 0  # learned anew
    assert [e.segments[0].sum for e in events(session)] == [4, 6] * 3 + [14, 6]


def test_rows_that_change_while_a_tensor_is_asked_are_the_ones_in_use(session):
    module = Gives(lambda x: x)
    observed(session, module)
    session.rows = Rows([assay.Run(7, 0, 2, 10)], step=1, phase="decode")
    for _ in range(3):
        module(torch.ones(2, 4))

    def next_step():
        session.rows = Rows([assay.Run(8, 0, 2, 5)], step=2, phase="decode")

    with Meanwhile(next_step):
        module(torch.ones(2, 4))
    assert [(e.step, e.segments[0].request) for e in events(session)] == [(1, 7)] * 3 + [(2, 8)]


@pytest.mark.parametrize("kind", ["nothing in a tuple", "tensor"])
def test_without_the_built_in_function_all_goes_the_long_way(session, monkeypatch, kind):
    monkeypatch.setattr(_fast_call, "functions", lambda: None)  # torch before 2.10, a Python without its lock

    class Fresh(Gives):
        """Its forward is wrapped while there is no such function."""

    module = Fresh(lambda x: (None, 3) if kind != "tensor" else x)
    probe, watched = observed(session, module)
    for _ in range(3):
        module(torch.ones(2))
    assert probe.times == 3 and watched.learned is None
    assert len(events(session)) == (3 if kind == "tensor" else 0)


def test_a_copy_is_not_its_original(session):
    module = Gives(torch.abs)
    _, watched = observed(session, module)
    for _ in range(3):
        module(torch.ones(2))
    twin = copy.deepcopy(module)
    twin(torch.ones(2))
    assert quick_calls(watched) == 2 and len(events(session)) == 3


def test_a_module_that_is_gone_leaves_its_address_to_nobody(session):
    module = Gives(torch.abs)
    _, watched = observed(session, module)
    for _ in range(3):
        module(torch.ones(2))
    learned = watched.learned.c
    assert learned.module == id(module)
    del module
    gc.collect()
    assert learned.module is None and watched.learned is None


def test_what_a_module_gave_is_not_kept_alive(session):
    class Cache:
        pass

    module = Gives(lambda x: (x * 2, Cache()))
    _, watched = observed(session, module)
    given = []
    for _ in range(3):
        tensor, cache = module(torch.ones(2))
        given += [weakref.ref(tensor), weakref.ref(cache)]
    assert quick_calls(watched) == 2
    del tensor, cache
    gc.collect()
    assert [there() for there in given] == [None] * 6


def test_a_second_listener_is_heard(session):
    module, heard = Gives(lambda x: x), []
    probe, watched = observed(session, module)
    for _ in range(3):
        module(torch.ones(2))
    session.modules(module, "*", then=lambda module, name, args, kwargs, result: heard.append(result))
    module(torch.ones(2))
    session.modules(module, "*", before=lambda module, name, args, kwargs: heard.append(args))
    module(torch.ones(2))
    assert len(heard) == 3 and probe.times == 5 and len(events(session)) == 5


def test_a_disarmed_trace_gets_nothing_and_goes_on_later(session):
    module = Gives(lambda x: x)
    observed(session, module)
    for armed in (True, True, False, False, True):
        session.trace().arm(armed)
        module(torch.ones(2))
    assert len(events(session)) == 3

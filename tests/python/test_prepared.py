"""PreparedSite, whose calls take one of two ways: what both write must be what Trace.record() writes."""

import threading

import assay
import pytest
import torch
from assay._prepared import PreparedSite, Rows
from two_ways import Meanwhile, check_segments, needs_fast_call


def spied(site, calls):
    """Puts a spy in front of the site's built-in function."""
    fast = site.fast

    def spy(*arguments):
        done = fast(*arguments)
        calls.append(done)
        return done

    site.fast = spy


def tensors(dtype):
    """Of one layout."""
    torch.manual_seed(3)
    return [(torch.randn(3, 40) * 2).to(dtype) for _ in range(5)]


def check_like(got, expected):
    assert got.shape == expected.shape and got.strides == expected.strides and got.dtype == expected.dtype
    assert got.base_address == expected.base_address and got.storage_offset == expected.storage_offset
    check_segments(got, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_quick_way_writes_what_record_writes(trace_dir, dtype):
    needs_fast_call()
    values = tensors(dtype)
    rows = [Rows([assay.Run(7, 0, 2, 100 + k), assay.Run(9, 2, 1, 5)], step=k, phase="decode") for k in range(5)]
    calls = []
    with assay.trace(trace_dir) as trace:
        site = PreparedSite(trace, "a", axes="T d")
        for k, value in enumerate(values):
            assert site.record(value, rows[k])
            if k == 1:  # two of one layout: known now
                spied(site, calls)
        for k, value in enumerate(values):
            trace.record("b", value, axes="T d", runs=rows[k].runs, step=k, phase="decode")
    assert calls == [True] * 3
    events = list(assay.open(trace_dir))
    for got, expected in zip(events[:5], events[5:]):
        check_like(got, expected)
        assert got.step == expected.step and got.phase == expected.phase


def test_offsets_in_a_storage_are_kept(trace_dir):
    needs_fast_call()
    whole = torch.randn(8, 6, 16)
    calls = []
    with assay.trace(trace_dir) as trace:
        site = PreparedSite(trace, "a")
        for k in range(8):
            assert site.record(whole[k], None)
            if k == 1:
                spied(site, calls)
        for k in range(8):
            trace.record("b", whole[k])
    assert calls == [True] * 6
    events = list(assay.open(trace_dir))
    for got, expected in zip(events[:8], events[8:]):
        check_like(got, expected)


OTHERS = {
    "shape": lambda t: t[:2],
    "strides": lambda t: t.t().contiguous().t(),
    "dtype": lambda t: t.to(torch.float16),
    "integers": lambda t: t.to(torch.int64),
    "negated": lambda t: torch._neg_view(t),
    "parameter": lambda t: torch.nn.Parameter(t),
    "empty": lambda t: t[:0],
}


@pytest.mark.parametrize("other", OTHERS)
def test_another_layout_goes_the_long_way(trace_dir, other):
    needs_fast_call()
    values = tensors(torch.float32)
    value = OTHERS[other](values[0])
    with assay.trace(trace_dir) as trace:
        site = PreparedSite(trace, "a")
        for given in [*values, value, values[0]]:
            assert site.record(given, None)
        trace.record("b", value)
        trace.record("b", values[0])
    events = list(assay.open(trace_dir))
    assert len(events) == 9
    for got, expected in zip(events[5:7], events[7:]):
        if other in ("negated", "empty"):  # a copy with the signs is at another address; nothing has none
            assert got.segments[0].digest == expected.segments[0].digest
        else:
            check_like(got, expected)


ODD = {
    "meta": lambda: torch.zeros(3, 40, device="meta"),
    "sparse": lambda: torch.eye(40)[:3].to_sparse(),
    "mkldnn": lambda: torch.zeros(3, 40).to_mkldnn(),
}


@pytest.mark.parametrize("odd", ODD)
def test_tensors_without_plain_memory_are_refused_as_ever(trace_dir, odd):
    needs_fast_call()
    known, value = torch.zeros(3, 40), ODD[odd]()
    with assay.trace(trace_dir) as trace:
        fresh, site = PreparedSite(trace, "a"), PreparedSite(trace, "b")
        for _ in range(3):
            assert site.record(known, None)
        with pytest.raises(Exception) as expected:
            fresh.record(value, None)
        with pytest.raises(type(expected.value)):
            site.record(value, None)
        assert site.record(known, None)


def test_a_tensor_inside_a_transform_does_not_reach_the_library(trace_dir):
    needs_fast_call()
    with assay.trace(trace_dir) as trace:
        site = PreparedSite(trace, "a")
        for _ in range(3):
            assert site.record(torch.zeros(40), None)

        def inside(row):
            with pytest.raises(RuntimeError):
                site.record(row, None)
            return row + 1

        assert torch.func.vmap(inside)(torch.zeros(3, 40)).sum() == 120
        assert trace.drops().recorded == 3


def test_a_closed_trace_takes_nothing_more(trace_dir):
    value = torch.randn(1, 8)
    trace = assay.trace(trace_dir)
    site = PreparedSite(trace, "a")
    for _ in range(4):
        assert site.record(value, None)
    trace.close()
    assert not site.record(value, None)
    assert len(assay.open(trace_dir)) == 4


def same(shape, strides):
    """A fold that changes nothing: its site is prepared for one layout at a time."""
    return shape, strides


@pytest.mark.parametrize("fold", [None, same])
def test_threads_with_other_layouts_share_a_site(trace_dir, fold):
    trace = assay.trace(trace_dir)
    site = PreparedSite(trace, "a", fold=fold)

    def work(n):
        value = torch.full((n, 8), float(n))
        for k in range(300):
            if k % 5 == 0:
                site._layouts.pop(threading.get_ident(), None)  # learned anew
            assert site.record(value, None)

    threads = [threading.Thread(target=work, args=(n,)) for n in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    trace.close()
    events = list(assay.open(trace_dir))
    assert len(events) == 900
    for event in events:
        n = event.shape[0]
        assert sum(s.sum for s in event.segments) == n * n * 8


def test_a_layout_that_is_learned_while_a_tensor_is_asked_is_not_the_tensors(trace_dir):
    needs_fast_call()
    small, large = torch.ones(1, 8), torch.full((64, 8), 2.0)
    with assay.trace(trace_dir) as trace:
        site = PreparedSite(trace, "a", fold=same)
        for _ in range(3):
            assert site.record(small, None)

        def learn():
            for _ in range(3):
                assert site.record(large, None)

        with Meanwhile(learn):
            assert site.record(small, None)
    events = list(assay.open(trace_dir))
    assert [e.shape for e in events] == [(1, 8)] * 3 + [(64, 8)] * 3 + [(1, 8)]
    assert sum(s.sum for s in events[-1].segments) == 8


def test_a_trace_that_is_closed_while_a_tensor_is_asked_gets_nothing(trace_dir):
    needs_fast_call()
    value = torch.ones(1, 8)
    trace = assay.trace(trace_dir)
    site = PreparedSite(trace, "a")
    for _ in range(3):
        assert site.record(value, None)
    with Meanwhile(trace.close):
        assert not site.record(value, None)
    assert len(assay.open(trace_dir)) == 3


def test_unfit_rows_are_refused_in_words(trace_dir):
    value = torch.randn(2, 8)
    good, bad = Rows([assay.Run(7, 0, 2, 0)]), Rows([assay.Run(7, 0, 3, 0)])
    with assay.trace(trace_dir) as trace:
        site = PreparedSite(trace, "a", axes="T d")
        for _ in range(4):
            assert site.record(value, good)
        with pytest.raises(assay.UsageError, match="run of rows"):
            site.record(value, bad)
        assert trace.drops().internal == 1
        assert site.record(value, good)


def test_a_session_records_the_same_either_way(trace_dir, monkeypatch):
    from assay.attach.rows import Rows as StepRows
    from assay.attach.session import Session

    monkeypatch.setenv("ASSAY", "all")
    monkeypatch.setenv("ASSAY_DIR", str(trace_dir))
    session = Session()
    session.rows = StepRows([assay.Run(7, 0, 2, 100), assay.Run(9, 2, 1, 5)], step=4, phase="decode")
    for value in [*tensors(torch.bfloat16), torch.ones(4, 8, dtype=torch.bfloat16)]:  # the last has no such rows
        for fields in ({}, {"flags": 0}):  # one that no site has: the long way
            assert session.record("attn.out", value, layer=2, engine_name="m.attn", axes="T d", **fields)
    assert not session._failures
    session.finish()
    events = list(assay.open(trace_dir))
    assert len(events) == 12 and {e.site for e in events} == {"layers.2.attn.out"}
    for got, expected in zip(events[::2], events[1::2]):
        check_like(got, expected)
        assert (got.step, got.phase) == (expected.step, expected.phase) == (4, "decode")
    assert [s.request for s in events[0].segments] == [7, 9]
